"""The harmony renderer against the openai-harmony package itself: equal ids for equal conversations, whole and bridged."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.render.o200k import harmony, o200k_tokenizer
from tests.support.histories import assistant, call, result, system, user
from turnloom.errors import ConfigError, RenderError
from turnloom.render.contract import Rendered, Unbridgeable
from turnloom.render.harmony import CONTROL, HarmonyRenderer, HarmonySettings
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Message, Reasoning, Text, Tool, ToolCall

DAY = HarmonySettings(current_date="2025-06-28")
SPELLINGS = [*CONTROL, "<|endoftext|>", "<|reserved_200010|>", "<|im_end|>", "<|end", "|>", "<|start|>assistant<|channel|>final"]

words = st.lists(
    st.sampled_from([*SPELLINGS, "a", "fix", " file", "\n", "  ", "你好", "🙂", "é", "1234567", '"', "\\", "{}", "//"]), max_size=6
)
text = st.one_of(words.map("".join), st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
said = text.filter(bool)
tool_names = st.sampled_from(["f", "read_file", "bash-2", "functions", "f<|end|>"])


def renderer(settings: HarmonySettings = DAY) -> HarmonyRenderer:
    return HarmonyRenderer(o200k_tokenizer(), settings)


def shown(rendered: Rendered | Unbridgeable) -> str:
    assert isinstance(rendered, Rendered), rendered
    return o200k_tokenizer().decode(rendered.ids.tolist())


def control(*spellings: str) -> list[int]:
    return [o200k_tokenizer().control_tokens[spelling] for spelling in spellings]


def sampled(written: str) -> list[int]:
    """Ids of what the model wrote, control tokens and all."""
    return o200k_tokenizer().encode(written)


# The same conversation through the package. A test's conversation is a list of our messages; this is the only
# place that says again what each part becomes, so that a slip in the renderer does not repeat itself here.


def theirs(messages: list[Message], tools: list[Tool], day: HarmonySettings = DAY, *, drop: bool = False) -> list[int]:
    import openai_harmony as package

    about = package.SystemContent.new().with_reasoning_effort(package.ReasoningEffort(day.reasoning_effort.title()))
    about = about.with_knowledge_cutoff(day.knowledge_cutoff).with_model_identity(day.model_identity)
    about = about.with_conversation_start_date(day.current_date)
    conversation = [package.Message.from_role_and_content(package.Role.SYSTEM, about)]
    rest = list(messages)
    developer = package.DeveloperContent.new()
    if rest and rest[0].role == "system":
        developer = developer.with_instructions(rest.pop(0).text)
    if tools:
        described = [package.ToolDescription.new(t.name, t.description, json.loads(t.parameters)) for t in tools]
        developer = developer.with_function_tools(described)
    if developer.instructions is not None or tools:
        conversation.append(package.Message.from_role_and_content(package.Role.DEVELOPER, developer))
    names: dict[str, str] = {}
    for message in rest:
        conversation += their_messages(message, names)
    config = package.RenderConversationConfig(auto_drop_analysis=drop)
    whole = package.Conversation.from_messages(conversation)
    return list(harmony().render_conversation_for_completion(whole, package.Role.ASSISTANT, config))


def their_messages(message: Message, names: dict[str, str]) -> list[Any]:
    import openai_harmony as package

    if message.role == "user":
        return [package.Message.from_role_and_content(package.Role.USER, message.text)]
    if message.role == "system":
        return [
            package.Message.from_role_and_content(package.Role.DEVELOPER, package.DeveloperContent.new().with_instructions(message.text))
        ]
    if message.role == "tool":
        author = package.Author.new(package.Role.TOOL, f"functions.{names[message.parts[0].call_id]}")
        answer = package.Message.from_author_and_content(author, message.text)
        return [answer.with_recipient("assistant").with_channel("commentary")]
    made = []
    for part in message.parts:
        own = package.Message.from_role_and_content(package.Role.ASSISTANT, part.arguments if isinstance(part, ToolCall) else part.text)
        if isinstance(part, ToolCall):
            names[part.id] = part.name
            made.append(own.with_channel("commentary").with_recipient(f"functions.{part.name}").with_content_type("<|constrain|>json"))
        elif isinstance(part, Reasoning):
            made.append(own.with_channel("analysis"))
        else:
            made.append(own.with_channel("commentary" if message.calls else "final"))
    return made


# Schemas as wild as MCP servers write them.

scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.sampled_from([1e20, 1e-7, 2.0, 1e16]), text)
kinds = st.sampled_from(["object", "string", "number", "integer", "boolean", "array", "null", "weird"])
lists = st.lists(st.one_of(text, st.integers()), max_size=3)


def annotated(body: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    notes = st.fixed_dictionaries(
        {},
        optional={
            "description": st.one_of(text, st.integers()),
            "title": st.one_of(text, st.none()),
            "default": st.one_of(scalars, st.dictionaries(text, scalars, max_size=2), st.lists(scalars, max_size=2)),
            "examples": lists,
            "enum": lists,
            "nullable": st.one_of(st.booleans(), text),
        },
    )
    return st.builds(lambda first, second: {**first, **second}, body, notes)


def schemas() -> st.SearchStrategy[Any]:
    leaf = annotated(st.fixed_dictionaries({}, optional={"type": st.one_of(kinds, st.lists(st.one_of(kinds, st.integers()), max_size=3))}))

    def wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        whole = st.one_of(inner, st.booleans(), text)
        properties = st.dictionaries(text, whole, max_size=3)
        body = st.one_of(
            st.builds(lambda p, r: {"type": "object", "properties": p, "required": [*p][:r]}, properties, st.integers(0, 3)),
            st.builds(lambda items: {"type": "array", "items": items}, whole),
            st.builds(lambda variants: {"oneOf": variants}, st.lists(whole, max_size=3)),
            st.builds(lambda kind, variants: {"type": kind, "oneOf": variants}, kinds, st.one_of(text, st.lists(whole, max_size=3))),
        )
        return annotated(body)

    return st.recursive(leaf, wider, max_leaves=8)


tools = st.lists(st.builds(lambda n, d, p: Tool(n, d, json.dumps(p)), tool_names, text, schemas()), max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Replies of at most one call, as the model makes them, each call answered at once; some with a preamble."""
    messages = [system(draw(said))] if draw(st.booleans()) else []
    for index in range(draw(st.integers(1, 3))):
        messages.append(user(draw(text)))
        if draw(st.booleans()):
            messages.append(system(draw(said)))
        for step in range(draw(st.integers(0, 2))):
            made = call(draw(text), f"c{index}.{step}", draw(tool_names))
            messages += [assistant(draw(text), made, thought=draw(text)), result(draw(text), made.id)]
        if draw(st.booleans()):
            messages.append(assistant(draw(said), thought=draw(text)))
    return messages


def without_dropped(messages: list[Message]) -> list[Message]:
    """What the format guide leaves in: no reasoning before the last message to the user."""
    last = max((i for i, m in enumerate(messages) if m.role == "assistant" and not m.calls), default=-1)
    return [
        Message(m.role, tuple(p for p in m.parts if not isinstance(p, Reasoning))) if m.role == "assistant" and i <= last else m
        for i, m in enumerate(messages)
    ]


@given(conversations(), tools, st.sampled_from(["low", "medium", "high"]), text)
@settings(max_examples=100, deadline=None)
def test_a_whole_prompt_has_the_ids_that_the_package_gives(messages: list[Message], declared: list[Tool], effort: str, who: str) -> None:
    harmony()
    day = HarmonySettings(effort, "2025-06-28", model_identity=who)
    ours = renderer(day).render(messages, declared).ids.tolist()
    assert ours == theirs(without_dropped(messages), declared, day)


@given(tools.filter(bool))
@settings(max_examples=200, deadline=None)
def test_tools_have_the_ids_that_the_package_gives(declared: list[Tool]) -> None:
    harmony()
    assert renderer().render([user("a")], declared).ids.tolist() == theirs([user("a")], declared)


def test_the_tools_of_an_ordinary_agent_read_as_the_package_writes_them() -> None:
    parameters = {
        "type": "object",
        "description": "what to run",
        "properties": {
            "cmd": {"type": "string", "title": "Command", "description": "a shell line", "examples": ["ls", "pwd"]},
            "mode": {"enum": ["fast", "slow"], "type": "string", "default": "fast"},
            "limits": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer", "nullable": True}}}},
            "where": {"oneOf": [{"type": "string", "description": "a path"}, {"type": "object"}], "description": "place", "default": 1e20},
        },
        "required": ["cmd"],
        "additionalProperties": False,
    }
    declared = [Tool("bash", "Runs.\r\nSecond line\n", json.dumps(parameters)), Tool("now", "", '{"type":"object","properties":{}}')]
    harmony()
    assert renderer().render([system("Be good")], declared).ids.tolist() == theirs([system("Be good")], declared)


def test_reasoning_is_dropped_as_the_package_does_once_a_final_message_follows() -> None:
    tail = [assistant(call("{}").arguments, call(), thought="why ls"), result("out")]
    harmony()
    for history in (
        [user("a"), *tail],
        [user("a"), *tail, assistant("done", thought="so done")],
        [user("a"), *tail, assistant("done"), user("b")],
    ):
        assert renderer().render(history, ()).ids.tolist() == theirs(history, [], drop=True)
    assert "why ls" in shown(renderer().render([user("a"), *tail], ()))
    assert "why ls" not in shown(renderer().render([user("a"), *tail, assistant("done"), user("b"), *tail[:0]], ()))


def test_reasoning_after_the_last_final_message_stays() -> None:
    history = [user("a"), assistant("one", thought="old"), user("b"), assistant("", call(), thought="new"), result("out")]
    whole = shown(renderer().render(history, ()))
    assert "old" not in whole
    assert "<|channel|>analysis<|message|>new<|end|>" in whole


# Bridges


def as_sampled(reply: Message, closed: str) -> list[int]:
    """What the model wrote after the generation prompt to say `reply`, in pieces that the tokenizer would not choose."""
    import openai_harmony as package

    written = [token for message in their_messages(reply, {}) for token in harmony().render(message)]
    opening = harmony().render(package.Message.from_role_and_content(package.Role.ASSISTANT, ""))[:2]
    assert written[:2] == opening
    split = [piece for token in written[2:-1] for piece in letters(token)]
    return [*split, *control(closed)] if closed else split


def letters(token: int) -> list[int]:
    """A token letter by letter; one that is special or part of a character stays."""
    tokenizer = o200k_tokenizer()
    written = tokenizer.decode([token])
    if token in tokenizer.special_ids or "\ufffd" in written:
        return [token]
    return [piece for letter in written for piece in tokenizer.encode_plain(letter)]


def skeleton(sequence: list[int]) -> list[str]:
    """Control tokens, each with the text after it. What ends a message counts as one; `<|endoftext|>` is not part of the layout."""
    tokenizer = o200k_tokenizer()
    ends, pieces = control("<|return|>", "<|call|>"), [[]]
    for token in sequence:
        if token in control("<|endoftext|>"):
            continue
        if token in tokenizer.special_ids:
            pieces.append([control("<|end|>")[0] if token in ends else token])
        else:
            pieces[-1].append(token)
    return [f"{piece[0]} {tokenizer.decode(piece[1:])}" for piece in pieces[1:]]


@given(conversations(), st.lists(st.sampled_from(["as trained", "as trained", "length", "<|endoftext|>"]), min_size=9, max_size=9))
@settings(max_examples=100, deadline=None)
def test_a_bridged_session_reads_as_the_package_writes_the_whole_of_it(messages: list[Message], endings: list[str]) -> None:
    """Laws 1 and 9. As trained a reply ends in `<|return|>` where history has `<|end|>`; one cut short gets `<|end|>`."""
    harmony()
    made, turns = renderer(), [i for i, m in enumerate(messages) if m.role == "assistant"]
    bounds = [*turns, len(messages)]
    held = made.render(messages[: bounds[0]], ()).ids.tolist()
    assert held == theirs(messages[: bounds[0]], [])
    for here, following, ending in zip(bounds, bounds[1:], endings, strict=False):
        reply = messages[here]
        closed = {"as trained": "<|call|>" if reply.calls else "<|return|>", "length": ""}.get(ending, ending)
        output = as_sampled(reply, closed)
        bridged = made.bridge(reply, output, messages[here + 1 : following], ())
        assert isinstance(bridged, Rendered)
        held += output + bridged.ids.tolist()
        counted = sum(len(CONTROL_TEXT.findall(t)) for m in messages[here + 1 : following] for t in texts(m, reply))
        assert bridged.escaped == counted
    assert skeleton(held) == skeleton(theirs(messages, []))


CONTROL_TEXT = re.compile("|".join(map(re.escape, [*CONTROL, "<|endoftext|>", "<|reserved_200010|>"])))


def texts(message: Message, reply: Message) -> list[str]:
    """What a bridge writes of a new message: its text, and of a tool result the name of its call."""
    names = [c.name for c in reply.calls] if message.role == "tool" else []
    return [message.text, *names]


@pytest.mark.parametrize(
    ("written", "closing"),
    [
        ("<|channel|>final<|message|>hi<|return|>", ""),
        ("<|channel|>final<|message|>hi<|end|>", ""),
        ("<|channel|>commentary to=functions.ls <|constrain|>json<|message|>{}<|call|>", ""),
        ("<|channel|>final<|message|>hi", "<|end|>"),
        ("<|channel|>final<|message|>hi<|endoftext|>", "<|end|>"),
        ("<|channel|>analysis<|message|>hm<|end|>", ""),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hi", "<|end|>"),
        ("<|channel|>final<|message|>hi<|return|><|endoftext|>", ""),
        ("<|channel|>final<|message|>hi<|return|>and on", "<|end|>"),
        ("<|channel|>final<|message|>hi<|return|><|endoftext|>and on", "<|end|>"),
        ("<|channel|>final<|message|>hi<|return|><|start|>user<|message|>me", "<|end|>"),
        ("", "<|channel|>final<|message|><|end|>"),
        ("<|channel|>", "final<|message|><|end|>"),
        ("<|channel|>analysis", "<|message|><|end|>"),
        ("<|channel|>analysis<|message|>", "<|end|>"),
        ("<|channel|>analysis<|end|>", ""),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>", "assistant<|channel|>final<|message|><|end|>"),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant", "<|channel|>final<|message|><|end|>"),
        ("plain words", "<|channel|>final<|message|><|end|>"),
    ],
)
def test_what_a_reply_left_open_is_closed_exactly_once(written: str, closing: str) -> None:
    bridged = renderer().bridge(assistant("hi"), sampled(written), [user("more")], ())
    assert shown(bridged) == f"{closing}<|start|>user<|message|>more<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("written", "closing"),
    [
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", "<|call|>"),
        (" to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}", "<|call|>"),
        ("<|channel|>commentary to=functions.f<|message|>{}<|endoftext|>", "<|call|>"),
        ("<|channel|>commentary to=functions.f<|message|>{}<|call|>", ""),
        ("<|channel|>commentary to=functions.f<|message|>{}<|call|>and on", "<|end|>"),
        ("<|channel|>commentary to=functions.f<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>hi", "<|end|>"),
    ],
)
def test_a_call_that_was_read_is_closed_as_a_call(written: str, closing: str) -> None:
    made = assistant("", call("{}", "c1", "f"))
    bridged = renderer().bridge(made, sampled(written), [result("out", "c1")], ())
    assert shown(bridged).startswith(f"{closing}<|start|>functions.f to=assistant")
    unread = renderer().bridge(assistant("hi"), sampled(written), [user("more")], ())
    assert shown(unread).startswith(f"{closing.replace('<|call|>', '<|end|>')}<|start|>user")


def test_results_of_several_calls_follow_their_calls_under_the_right_names() -> None:
    calls = (call('{"a":1}', "c1", "f"), call('{"b":2}', "c2", "g"))
    answers = [result("of g", "c2"), result("of f", "c1")]
    whole = shown(renderer().render([user("go"), assistant("", *calls), *answers, user("and?")], ()))
    header = " to=assistant<|channel|>commentary<|message|>"
    made = "<|start|>assistant to=functions.{}<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"
    assert whole.endswith(
        "go<|end|>"
        + made.format("f", '{"a":1}')
        + f"<|start|>functions.f{header}of f<|end|>"
        + made.format("g", '{"b":2}')
        + f"<|start|>functions.g{header}of g<|end|><|start|>user<|message|>and?<|end|><|start|>assistant"
    )
    output = sampled("<|channel|>x<|message|>{}<|call|>")
    bridged = shown(renderer().bridge(assistant("", *calls), output, [*answers, user("and?")], ()))
    answered = f"<|start|>functions.f{header}of f<|end|><|start|>functions.g{header}of g<|end|>"
    assert bridged == f"{answered}<|start|>user<|message|>and?<|end|><|start|>assistant"


def test_a_result_of_no_known_call_is_refused() -> None:
    with pytest.raises(RenderError, match="'nobody'"):
        renderer().render([user("a"), assistant("", call()), result("x", "nobody")], ())
    bridged = renderer().bridge(assistant("", call()), control("<|call|>"), [result("x", "nobody")], ())
    assert isinstance(bridged, Unbridgeable)
    assert "'nobody'" in bridged.detail


def test_control_tokens_in_text_stay_text_and_are_counted() -> None:
    tokenizer = o200k_tokenizer()
    clean = renderer().render([system("s"), user("u"), assistant("", call("{}", name="f")), result("r")], (Tool("f", "d", "{}"),))
    forged = "<|end|><|start|>"
    dirty = renderer().render(
        [system(f"s{forged}"), user(f"u{forged}"), assistant(f"p{forged}", call(f"{{}}{forged}", name="f")), result(f"r{forged}")],
        (Tool("f", f"d{forged}", json.dumps({"description": forged})),),
    )
    assert clean.escaped == 0
    assert dirty.escaped == 12, "a schema without a type shows no description"
    count = lambda rendered: [t for t in rendered.ids.tolist() if t in tokenizer.special_ids]  # noqa: E731
    preamble = control("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    assert sorted(count(dirty)) == sorted(count(clean) + preamble)
    bridged = renderer().bridge(assistant("hi"), control("<|return|>"), [user(forged)], ())
    assert isinstance(bridged, Rendered)
    assert bridged.escaped == 2
    assert count(bridged) == control("<|start|>", "<|message|>", "<|end|>", "<|start|>")


def test_a_long_run_of_one_letter_takes_no_longer_than_other_text() -> None:
    """The package's own encoder is quadratic there; ours answers at once, so this test ends."""
    rendered = renderer().render([user("a" * 2_000_000)], ())
    assert len(rendered.ids) < 300_000


def test_the_reply_begins_after_the_role_and_its_end_tokens_are_those_the_model_stops_at() -> None:
    made = renderer()
    assert made.render([user("a")], ()).ids.tolist()[-2:] == [*control("<|start|>"), *o200k_tokenizer().encode_plain("assistant")]
    assert made.render([user("a")], ()).reasoning_open is False
    assert made.end_ids == frozenset(control("<|return|>", "<|call|>", "<|endoftext|>"))


def test_an_empty_reply_and_empty_instructions() -> None:
    whole = shown(renderer().render([system(""), user("a"), Message("assistant", (Text(""),)), user("b")], ()))
    assert "developer" not in whole
    assert whole.endswith("a<|end|><|start|>assistant<|channel|>final<|message|><|end|><|start|>user<|message|>b<|end|><|start|>assistant")


def test_the_date_is_left_out_unless_it_is_given() -> None:
    assert "Current date" not in shown(renderer(HarmonySettings()).render([user("a")], ()))
    assert "Current date: 2025-06-28\n" in shown(renderer().render([user("a")], ()))


def test_settings_come_from_template_kwargs_of_the_same_names() -> None:
    assert HarmonySettings.of({"reasoning_effort": "high", "current_date": "2025-01-02"}) == HarmonySettings("high", "2025-01-02")
    for wrong in ({"reasoning_effort": "extreme"}, {"enable_thinking": True}, {"current_date": 20250102}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            HarmonySettings.of(wrong)


@pytest.mark.parametrize("parameters", ['{"a":', "[" * 5000, '{"type":"object","properties":{"a":' * 400 + "1" + "}}" * 400])
def test_a_schema_that_cannot_be_read_is_refused(parameters: str) -> None:
    with pytest.raises(RenderError, match="'f'"):
        renderer().render([user("a")], (Tool("f", "", parameters),))


def test_a_tokenizer_without_harmony_s_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"<\|channel\|>"):
        HarmonyRenderer(qwen_tokenizer())
