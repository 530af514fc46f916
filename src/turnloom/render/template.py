"""The chat-template renderer: whole prompts, and bridges found from the template itself.

A bridge renders a short stand-in history twice, closed and continued, with an
anchor as the last word of the assistant message. What the template writes after
the anchor, from the end of the turn on, is what has to be appended to the tokens
already held (`ending` finds where); it does not matter how the template rewrites
earlier history.

Text in a message never becomes a control token: each spelling of a control
token is replaced by a placeholder before rendering and encoded as plain text
after it, so that the template's own control tokens are the only ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from turnloom.errors import RenderError
from turnloom.parse.formats import REASONING
from turnloom.render.chat import ChatWriter
from turnloom.render.contract import Rendered, Tokenizer, Unbridgeable
from turnloom.render.ending import Control, common_length, find_ending, missing
from turnloom.render.quirks import Quirk, Traits, find_traits, probe_id, with_blocks
from turnloom.render.shield import MARK_SET, Edges, Shield, any_of
from turnloom.types import Message, Text, Tool, ToolCall, ToolResult, ids

SpecialTokens = Literal["plain", "template"]

_REASONING_TAGS = tuple(tag for tags in REASONING for tag in (tags.opener, tags.closer))
"""A template that knows these cuts a reply's text at them, whether or not they are tokens."""

_SWITCHES = ("/no_think", "/think")
"""A template that names these looks for them in text, and may take them out. They are data: what sets thinking is `template_kwargs`."""

_STAND_IN = Message("user", (Text("."),))


class ChatTemplateRenderer:
    """Renders with one tokenizer's chat template. `template_kwargs` go to every rendering (`enable_thinking`, ...).

    `special_tokens`: "plain", a control token's spelling in message text is
    encoded as plain text; "template", it becomes the control token, as
    `apply_chat_template` does, and law 9 is the caller's to keep.
    """

    def __init__(
        self, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None, *, special_tokens: SpecialTokens = "plain"
    ) -> None:
        self.tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        spellings = sorted(tokenizer.control_tokens, key=len, reverse=True)
        self._control = any_of(spellings)
        self._shielded, self._edges = None, None
        if special_tokens == "plain":
            cut_at = {tag for tag in _REASONING_TAGS if tag in tokenizer.chat_template}
            cut_at.update(word for word in _SWITCHES if re.search(rf"(?<![<\w]){word}\b", tokenizer.chat_template))
            self._shielded = any_of(sorted(cut_at.union(spellings), key=len, reverse=True))
            self._edges = Edges(spellings)
        self._spelling = {token: spelling for spelling, token in tokenizer.control_tokens.items()}
        self._own_marks = frozenset(tokenizer.chat_template + repr(self._kwargs)) & MARK_SET
        self.traits = Traits(frozenset())
        self.traits = find_traits(self._apply)
        self.end_ids = tokenizer.eos_ids
        self._openings = self._generation_prompt()
        self._depends = self._depends_on_history()
        self.end_ids = tokenizer.eos_ids | self._plain_ends()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Rendered:
        text, shield = self._written(messages, tools, lambda shield: self._whole(messages, shield))
        hidden = self._hidden(text, messages, shield)
        if hidden is not None:
            raise RenderError(
                f"the chat template does not show message {hidden} ({messages[hidden].role}); send it in another role or place"
            )
        encoded, escaped = self._encode(text, shield)
        return Rendered(ids(encoded), reasoning_open(text), escaped)

    def bridge(
        self, reply: Message, output: Sequence[int], new: Sequence[Message], tools: Sequence[Tool], *, calls_before: int = 0
    ) -> Rendered | Unbridgeable:
        text, shield = self._written((reply, *new), tools, lambda shield: self._continued(reply, new, shield, calls_before))
        _, found, after = text.partition(shield.anchor)
        if not found:
            return Unbridgeable("the template does not show the assistant message it is given")
        if self._depends:
            return Unbridgeable("what the template writes after a reply depends on what came before it")
        if shield.anchor in after:
            return Unbridgeable("the template shows an assistant message more than once")
        names = {call.name for call in reply.calls}
        if len(names) > 1 and Quirk.ONE_CALL in self.traits and shield(reply.calls[-1].name) in after:
            return Unbridgeable("the template shows one call a message, and names it in the results")
        hidden = self._hidden(after, new, shield)
        if hidden is not None:
            return Unbridgeable(f"the template does not show a {new[hidden].role} message after the assistant's")
        closed = self._closed(reply, shield)
        if closed is None:
            return Unbridgeable("the template does not show an assistant message that ends the history")
        said = partial(self._said, output)
        ending = find_ending(after, closed, self._controls, self.end_ids, self._openings, said, bool(reply.calls))
        if ending is None:
            return Unbridgeable("the template ends an assistant message differently once more follows")
        encoded, escaped = self._encode(after[ending.at :], shield, start=False)
        skip = missing(ending, output, encoded, self._spelling.__contains__, self.end_ids)
        return Rendered(ids(encoded[skip:]), reasoning_open(after), escaped)

    def _whole(self, messages: Sequence[Message], shield: Shield) -> str:
        return self._apply(ChatWriter(self.traits, shield).whole(messages), self._tools(shield), True)

    def _continued(self, reply: Message, new: Sequence[Message], shield: Shield, calls_before: int = 0) -> str:
        """A stand-in history whose last reply ends in the anchor, and what follows it."""
        writer = ChatWriter(self.traits, shield, reply, calls_before)
        return self._apply([*writer.stand_in(shield.anchor), *writer.after(new)], self._tools(shield), True)

    def _closed(self, reply: Message, shield: Shield) -> str | None:
        """What the template writes after the anchor when nothing follows; None when it does not show the anchor."""
        chat = ChatWriter(self.traits, shield, reply).stand_in(shield.anchor)
        try:
            _, found, after = self._apply(chat, self._tools(shield), False).partition(shield.anchor)
        except RenderError:
            return None
        return after if found else None

    def _tools(self, shield: Shield) -> list[dict[str, Any]] | None:
        return None if Quirk.TOOLS_AS_TEXT in self.traits else shield.tools

    def _written(self, messages: Sequence[Message], tools: Sequence[Tool], write: Callable[[Shield], str]) -> tuple[str, Shield]:
        """The rendered text and what was shielded in it.

        A template's own text may complete a control token that message text holds
        only a part of (`<` + key + `>`). Where a text has such a part it is written
        a second time with the part shielded, and that one is taken if that happens.
        """
        shield = Shield(self._shielded, self._edges, self._own_marks, messages, tools)
        text = write(shield)
        if shield.edged:
            strict = Shield(self._shielded, self._edges, self._own_marks, messages, tools, shield_edges=True)
            second = write(strict)
            if strict.completed(second):
                return second, strict
        return text, shield

    def _hidden(self, text: str, messages: Sequence[Message], shield: Shield) -> int | None:
        """The first message whose words the template left out, None where it shows all of them.

        Users' messages and tool results must stand in their order; a system
        message anywhere, since templates move it. A reply with calls may lose its
        words: some templates were trained without them.
        """
        at = 0
        for i, message in enumerate(messages):
            words = shield(message.text).strip()
            if not words or message.calls:
                continue
            start = 0 if message.role == "system" else at
            found = next(((p, len(w)) for w in _spellings(words) if (p := text.find(w, start)) >= 0), None)
            if found is None:
                return i
            if message.role != "system":
                at = found[0] + found[1]
        return None

    def _plain_ends(self) -> frozenset[int]:
        """The ids that end a reply without calls."""
        reply = Message("assistant", ())
        shield = Shield(None, None, self._own_marks, (reply, _STAND_IN), ())
        try:
            after = self._continued(reply, (_STAND_IN,), shield).partition(shield.anchor)[2]
        except RenderError:
            return frozenset()
        closed = self._closed(reply, shield)
        ending = find_ending(after, closed, self._controls, self.end_ids, self._openings) if closed is not None else None
        if ending is None or ending.count <= ending.opens:
            return frozenset()
        last = ending.end if ending.end is not None else ending.count - 1 - ending.opens
        found = {self._controls(after[ending.at :])[last].id}
        return frozenset(found if ending.closed_as is None else {*found, ending.closed_as})

    def _said(self, output: Sequence[int]) -> str:
        """The end of the sampled text, without end tokens."""
        tail = list(output[-64:])
        while tail and tail[-1] in self.end_ids:
            tail.pop()
        return self.tokenizer.decode(tail)

    def _depends_on_history(self) -> bool:
        """Whether what follows a reply is another after a longer history of other words."""
        shield = Shield(None, None, self._own_marks, (_STAND_IN,), ())
        longer = [("user", "Tell me more of it."), ("assistant", "It is a long answer, longer than others."), ("user", "Go on then.")]
        earlier = [{"role": role, "content": text} for role, text in longer]
        for calls in ((), (ToolCall(probe_id(self.traits.quirks), "probe_tool", "{}"),)):
            reply = Message("assistant", calls)
            writer = ChatWriter(self.traits, shield, reply)
            *_, anchored = writer.stand_in(shield.anchor)
            wordy = anchored if anchored.get("tool_calls") else {**anchored, "content": f"A reply of many words. {shield.anchor}"}
            new = writer.after([Message("tool", (ToolResult(calls[0].id, "more"),)) if calls else Message("user", (Text("more"),))])
            try:
                found = [self._apply([*chat, *new], None, True) for chat in ([*earlier[-1:], anchored], [*earlier, wordy])]
            except RenderError:
                continue
            if len({text.partition(shield.anchor)[2] for text in found}) > 1:
                return True
        return False

    def _generation_prompt(self) -> frozenset[int]:
        """The control tokens of the generation prompt."""
        try:
            without, with_it = (self._apply([{"role": "user", "content": "."}], None, prompt) for prompt in (False, True))
        except RenderError:
            return frozenset()
        return frozenset(token.id for token in self._controls(with_it[common_length(without, with_it) :]))

    def _controls(self, text: str) -> list[Control]:
        found = self._control.finditer(text) if self._control else ()
        return [Control(m.start(), m.end(), self.tokenizer.control_tokens[m.group()]) for m in found]

    def _apply(self, chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, prompt: bool) -> str:
        if Quirk.CONTENT_BLOCKS in self.traits:
            chat = [with_blocks(message) for message in chat]
        if not tools and Quirk.EMPTY_TOOLS in self.traits:
            tools = ()
        return self.tokenizer.apply_template(chat, tools, generation_prompt=prompt, **self._kwargs)

    def _encode(self, text: str, shield: Shield, *, start: bool = True) -> tuple[list[int], int]:
        """Ids of rendered text, and how many control-token spellings of the messages it holds as plain text.

        `start` False: the text goes on from other text, so that a tokenizer which
        opens every text with a space of its own must not.
        """
        encoded: list[int] = []
        escaped = 0
        for i, (piece, plain) in enumerate(shield.pieces(text)):
            if plain:
                escaped += piece in self.tokenizer.control_tokens or shield.is_part(piece)
                encoded += self.tokenizer.encode_plain(piece)
            else:
                encoded += self.tokenizer.encode(piece, start=start and not i)
        return encoded, escaped


def _spellings(words: str) -> Iterator[str]:
    """As they are, or inside a JSON string."""
    yield words
    yield json.dumps(words, ensure_ascii=False)[1:-1]
    yield json.dumps(words)[1:-1]


def reasoning_open(text: str) -> bool:
    """Whether a prompt ends inside the model's reasoning."""
    return text.rstrip().endswith(tuple(tags.opener for tags in REASONING))
