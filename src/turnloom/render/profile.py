"""What a renderer can do with its template, found by trying it: what `turnloom doctor` prints. Knows no template itself."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from turnloom.errors import RenderError
from turnloom.render.contract import Renderer, Tokenizer, Unbridgeable
from turnloom.render.ending import common_length
from turnloom.render.quirks import Quirk, probe_id
from turnloom.types import Message, Part, Reasoning, Text, Tool, ToolCall, ToolResult

TOOL = Tool("probe_tool", "probed", '{"type": "object", "properties": {"a": {"type": "string"}}}')
_IDS = tuple(probe_id({Quirk.NINE_LETTER_IDS}, i) for i in range(2))


@dataclass(frozen=True, slots=True)
class Shape:
    """One way for a conversation to go on: after a reply with so many calls come these messages."""

    name: str
    calls: int
    new: tuple[Message, ...]


def _user(text: str) -> Message:
    return Message("user", (Text(text),))


def _result(i: int) -> Message:
    return Message("tool", (ToolResult(_IDS[i], f"result {i}"),))


SHAPES = (
    Shape("user", 0, (_user("more"),)),
    Shape("user+user", 0, (_user("one"), _user("two"))),
    Shape("system+user", 0, (Message("system", (Text("note"),)), _user("more"))),
    Shape("tool", 1, (_result(0),)),
    Shape("tool+user", 1, (_result(0), _user("more"))),
    Shape("tool+tool", 2, (_result(0), _result(1))),
)


@dataclass(frozen=True, slots=True)
class Profile:
    """`bridges` maps each shape to "yes" or to why it cannot be bridged; `whole` to "yes" or why it
    cannot be rendered whole after a system message, and an empty reply too.

    `reasoning` says what becomes of earlier reasoning when a history is rendered
    whole (a bridge keeps the tokens): `kept`, `dropped` or `kept until the next user message`.
    `appends`: a history rendered whole begins with the prompt that its last reply answered and that reply, where it has no reasoning.
    """

    quirks: tuple[Quirk, ...]
    end_tokens: tuple[str, ...]
    opens_reasoning: bool
    reasoning: str
    appends: bool
    bridges: dict[str, str]
    whole: dict[str, str]

    @property
    def bridgeable(self) -> bool:
        return all(answer == "yes" for answer in self.bridges.values())


def find_profile(renderer: Renderer, tokenizer: Tokenizer) -> Profile:
    """Try every shape. Raises RenderError when the template shows not even one user message."""
    first = renderer.render([_user("first")], [])
    traits = getattr(renderer, "traits", None)
    return Profile(
        quirks=tuple(sorted(traits.quirks)) if traits is not None else (),
        end_tokens=tuple(sorted(tokenizer.decode([token]) for token in renderer.end_ids)),
        opens_reasoning=first.reasoning_open,
        reasoning=_reasoning(renderer, tokenizer),
        appends=_appends(renderer, tokenizer),
        bridges={shape.name: _bridges(renderer, shape) for shape in SHAPES},
        whole={shape.name: _renders(renderer, reply(shape.calls), shape.new) for shape in SHAPES}
        | {"empty reply": _renders(renderer, Message("assistant", ()), SHAPES[0].new)},
    )


CALLED = ToolCall(_IDS[0], TOOL.name, '{"a": "pondered"}')


def shown_call(renderer: Renderer, tokenizer: Tokenizer) -> tuple[str, bool]:
    """A reply that makes the call `CALLED`, as the template writes it, and whether the prompt had opened its reasoning.

    It goes from where the prompt ends to the first end token after the call. A
    template that opens reasoning in the prompt and leaves it out of history shows
    the reply without it. Empty where the template refuses the history.
    """

    def text(*messages: Message) -> str:
        return tokenizer.decode(renderer.render([_user("first"), *messages], [TOOL]).ids.tolist())

    try:
        prompt = renderer.render([_user("first")], [TOOL])
        whole = text(Message("assistant", (CALLED,)), _result(0))
        plain = text(reply(0), _user("more"))
    except RenderError:
        return "", False
    before = tokenizer.decode(prompt.ids.tolist())
    at = common_length(before, whole)
    if at < len(before):
        # The opening tags of reasoning and of a call may begin alike.
        at = min(at, common_length(before, plain))
        tag = whole.rfind("<", 0, at)
        at = tag if tag >= 0 and ">" not in whole[tag:at] else at
    shown = whole[at:].partition("result 0")[0]
    call, word, after = shown.partition("pondered")
    ends = [re.escape(tokenizer.decode([token])) for token in renderer.end_ids]
    if ends:
        after = re.split("|".join(ends), after, maxsplit=1)[0]
    return call + word + after, prompt.reasoning_open and at == len(before)


def writes_calls_as_text(renderer: Renderer) -> bool:
    """Whether prompts teach or show calls in the hermes spelling, the template having no place for tools or for calls."""
    traits = getattr(renderer, "traits", ())
    return Quirk.TOOLS_AS_TEXT in traits or Quirk.CALLS_AS_TEXT in traits


def reply(calls: int, *before: Part) -> Message:
    made = tuple(ToolCall(_IDS[i], TOOL.name, '{"a": "b"}') for i in range(calls))
    return Message("assistant", (*before, *(made or (Text("answer"),))))


def _bridges(renderer: Renderer, shape: Shape) -> str:
    try:
        found = renderer.bridge(reply(shape.calls), (), shape.new, [TOOL] if shape.calls else [])
    except RenderError as error:
        return str(error)
    return found.detail if isinstance(found, Unbridgeable) else "yes"


def _renders(renderer: Renderer, said: Message, new: Sequence[Message]) -> str:
    history = [Message("system", (Text("be brief"),)), _user("first"), said, *new]
    try:
        renderer.render(history, [TOOL] if said.calls else [])
    except RenderError as error:
        return str(error)
    return "yes"


def _reasoning(renderer: Renderer, tokenizer: Tokenizer) -> str:
    def shown(calls: int, new: Sequence[Message]) -> bool:
        history = [_user("first"), reply(calls, Reasoning("pondered")), *new]
        try:
            return "pondered" in tokenizer.decode(renderer.render(history, [TOOL] if calls else []).ids.tolist())
        except RenderError:
            return False

    if shown(0, [_user("more")]):
        return "kept"
    return "kept until the next user message" if shown(1, [_result(0)]) else "dropped"


def _appends(renderer: Renderer, tokenizer: Tokenizer) -> bool:
    """Whether each prompt begins with the last one and the plain reply to it."""
    history = [_user("first"), reply(0), _user("second"), reply(0), _user("third")]
    try:
        texts = [tokenizer.decode(renderer.render(history[:n], []).ids.tolist()) for n in (1, 3, 5)]
    except RenderError:
        return False
    return all(after.startswith(before + "answer") for before, after in itertools.pairwise(texts))
