"""The harmony renderer: gpt-oss's own message format, written from its rules with the ids of our tokenizer.

The format is that of the `openai-harmony` package and its format guide
(github.com/openai/harmony, docs/format.md); `tests/render/test_harmony.py` holds
this renderer to that package id for id. The package itself is not needed to
render: it brings its own vocabulary, which it fetches from the network, and its
encoder takes seconds for a long run of one letter.

A conversation in harmony is a flat list of messages: one reply becomes several,
its reasoning in the channel `analysis`, each call in `commentary`, what the user
reads in `final`. A message is only ever appended, so every reply can be bridged.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from turnloom.errors import ConfigError, RenderError
from turnloom.render.contract import Rendered, Tokenizer, Unbridgeable
from turnloom.render.harmony_tools import tools_section
from turnloom.types import Message, Reasoning, Text, Tool, ToolCall, ToolResult, ids

CONTROL = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
EFFORTS = ("low", "medium", "high")


@dataclass(frozen=True, slots=True)
class HarmonySettings:
    """What the system message says. An empty `current_date` (ISO, `2025-06-28`) leaves its line out."""

    reasoning_effort: str = "medium"
    current_date: str = ""
    knowledge_cutoff: str = "2024-06"
    model_identity: str = "You are ChatGPT, a large language model trained by OpenAI."

    def __post_init__(self) -> None:
        if self.reasoning_effort not in EFFORTS:
            raise ConfigError(f"reasoning_effort is {self.reasoning_effort!r}; harmony knows {', '.join(EFFORTS)}")

    @classmethod
    def of(cls, template_kwargs: Mapping[str, object]) -> HarmonySettings:
        """From template kwargs of the same names. Raises ConfigError for any other name, and for what is not text."""
        known = [field.name for field in fields(cls)]
        for name, value in template_kwargs.items():
            if name not in known:
                raise ConfigError(
                    f"the harmony renderer has no {name!r}; it takes {', '.join(known)} (renderer `template` passes on anything)"
                )
            if not isinstance(value, str):
                raise ConfigError(f"{name} of the harmony renderer must be text, not {value!r}")
        return cls(**template_kwargs)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Said:
    """One harmony message. `author` is a role or a tool's full name; only calls are `constrained` (to JSON)."""

    author: str
    text: str
    recipient: str = ""
    channel: str = ""
    constrained: bool = False


class HarmonyRenderer:
    """Raises ConfigError when the tokenizer lacks one of harmony's control tokens. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, settings: HarmonySettings | None = None) -> None:
        lacking = [spelling for spelling in CONTROL if spelling not in tokenizer.control_tokens]
        if lacking:
            raise ConfigError(f"the tokenizer {tokenizer.name} has no {' '.join(lacking)}, so it is not gpt-oss's; use renderer `template`")
        self._tokenizer = tokenizer
        self._settings = settings or HarmonySettings()
        self._spelled = re.compile("|".join(map(re.escape, sorted(tokenizer.control_tokens, key=len, reverse=True))))
        self._start, self._end, self._message, self._channel, self._constrain, self._return, self._call = (
            tokenizer.control_tokens[spelling] for spelling in CONTROL
        )
        self._plain = {word: tuple(tokenizer.encode_plain(word)) for word in ("assistant", "final")}
        self.end_ids = (tokenizer.eos_ids - {self._end}) | {self._return, self._call}
        """Not `<|end|>`: it ends one message, and the reply goes on with the next."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Rendered:
        """Reasoning is left out once a `final` message follows it, as the format guide says; the rest is in order."""
        said = _flat(messages, ())
        own = next((m for m in messages if m.role != "system" or m.text), None)
        instructed = own is not None and own.role == "system"
        first = said.pop(0).text if instructed else ""
        prefix = [_Said("system", _system_text(self._settings, bool(tools)))]
        if first or tools:
            prefix.append(_Said("developer", "\n\n".join(filter(None, [first, tools_section(tools) if tools else ""]))))
        return self._written(prefix + said)

    def bridge(
        self, reply: Message, output: Sequence[int], new: Sequence[Message], tools: Sequence[Tool], *, calls_before: int = 0
    ) -> Rendered | Unbridgeable:
        """Closes what `output` left open, then appends the new messages. Sampled ids stay, a `<|return|>` too."""
        try:
            said = _flat(new, reply.calls)
        except RenderError as error:
            return Unbridgeable(str(error))
        return self._written(said, self._closing(output, called=bool(reply.calls)))

    def _written(self, said: Sequence[_Said], before: Sequence[int] = ()) -> Rendered:
        encoded, escaped = list(before), 0
        for message in said:
            encoded += self._encode(message)
            escaped += sum(len(self._spelled.findall(text)) for text in (message.author, message.recipient, message.text))
        return Rendered(ids([*encoded, self._start, *self._plain["assistant"]]), escaped=escaped)

    def _encode(self, said: _Said) -> Iterator[int]:
        """Every stretch between two control tokens is encoded on its own and as plain text, so no text can become one."""
        plain = self._tokenizer.encode_plain
        yield self._start
        yield from plain(said.author)
        if said.recipient:
            yield from plain(f" to={said.recipient}")
        if said.channel:
            yield self._channel
            yield from plain(said.channel)
        if said.constrained:
            yield from (*plain(" "), self._constrain, *plain("json"))
        yield self._message
        if said.text:
            yield from plain(said.text)
        yield self._call if said.constrained else self._end

    def _closing(self, output: Sequence[int], *, called: bool) -> list[int]:
        """What makes a whole message of the one that the sampled ids end in; nothing where that is closed.

        The prompt has begun a header: `<|start|>assistant`. A header that was cut
        off is completed as an empty message. Text after a closed message that begins
        no new one is closed like a message, and an open message to a recipient like a
        call where the reply made calls (`called`); a special token there (`<|endoftext|>`) needs nothing.
        """
        state, header, role = "header", list[int](), True
        for token in output:
            if token == self._start:
                state, header, role = "header", [], False
            elif token in (self._end, self._return, self._call):
                state = "closed"
            elif token == self._message:
                state = "content"
            elif state == "header":
                header.append(token)
            elif state == "closed" and token not in self._tokenizer.special_ids:
                state, header = "content", []
        if state == "content":
            return [self._call if called and "to=" in self._tokenizer.decode(header) else self._end]
        if state == "closed":
            return []
        closing = [] if role or header else list(self._plain["assistant"])
        if self._channel not in header:
            closing.append(self._channel)
        if self._channel not in header or header[-1] == self._channel:
            closing += self._plain["final"]
        return [*closing, self._message, self._end]


def _system_text(settings: HarmonySettings, tools: bool) -> str:
    date = f"\nCurrent date: {settings.current_date}" if settings.current_date else ""
    routing = "\nCalls to these tools must go to the commentary channel: 'functions'." if tools else ""
    return (
        f"{settings.model_identity}\nKnowledge cutoff: {settings.knowledge_cutoff}{date}\n\n"
        f"Reasoning: {settings.reasoning_effort}\n\n"
        f"# Valid channels: analysis, commentary, final. Channel must be included for every message.{routing}"
    )


def _flat(messages: Sequence[Message], asked: Sequence[ToolCall]) -> list[_Said]:
    """Messages in harmony's form, after a reply that made the calls `asked`. Raises RenderError for a result of no call.

    A harmony result names its tool but not its call, so the results of several
    calls are put in the order of the calls, and each right after its own where that is here.
    """
    names = {call.id: call.name for call in asked}
    answers: dict[str, list[_Said]] = {call_id: [] for call_id in names}
    groups = list(answers.values())
    for message in messages:
        result = next((part for part in message.parts if isinstance(part, ToolResult)), None)
        if result is None:
            answers = {}
            for said, call in _said(message):
                groups.append([said])
                if call is not None:
                    names[call.id], answers[call.id] = call.name, groups[-1]
            continue
        if result.call_id not in names:
            raise RenderError(f"a tool result answers the call {result.call_id!r}, which no message before it makes")
        if result.call_id not in answers:
            groups.append(answers.setdefault(result.call_id, []))
        answers[result.call_id].append(_Said(f"functions.{names[result.call_id]}", result.text, "assistant", "commentary"))
    flat = [said for group in groups for said in group]
    last_final = max((i for i, said in enumerate(flat) if said.channel == "final"), default=-1)
    return [said for i, said in enumerate(flat) if i > last_final or said.channel != "analysis"]


def _said(message: Message) -> list[tuple[_Said, ToolCall | None]]:
    """One message in harmony's form, in the order of its parts; text beside calls is a preamble, in `commentary`."""
    if message.role == "system":
        return [(_Said("developer", f"# Instructions\n\n{message.text}"), None)] if message.text else []
    if message.role != "assistant":
        return [(_Said(message.role, message.text), None)]
    said: list[tuple[_Said, ToolCall | None]] = []
    channel = "commentary" if message.calls else "final"
    for _, run in itertools.groupby(message.parts, type):
        parts = list(run)
        if text := "\n".join(part.text for part in parts if isinstance(part, Text)):
            said.append((_Said("assistant", text, channel=channel), None))
        for part in parts:
            if isinstance(part, Reasoning) and part.text:
                said.append((_Said("assistant", part.text, channel="analysis"), None))
            elif isinstance(part, ToolCall):
                said.append((_Said("assistant", part.arguments, f"functions.{part.name}", "commentary", constrained=True), part))
    return said or [(_Said("assistant", "", channel="final"), None)]
