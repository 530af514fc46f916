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
from typing import Any, Literal

from turnloom.errors import RenderError
from turnloom.parse.formats import REASONING
from turnloom.render.chat import ChatWriter
from turnloom.render.contract import Rendered, Tokenizer, Unbridgeable
from turnloom.render.ending import Control, common_length, find_ending, missing
from turnloom.render.quirks import Quirk, Traits, find_traits, with_blocks
from turnloom.render.shield import MARK_SET, Shield
from turnloom.types import Message, Text, Tool, ids

SpecialTokens = Literal["plain", "template"]

_REASONING_TAGS = tuple(tag for tags in REASONING for tag in (tags.opener, tags.closer))
"""A template that knows these cuts a reply's text at them, whether or not they are tokens."""

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
        self._control = _any_of(spellings)
        self._shielded, self._inner = None, dict[str, str]()
        if special_tokens == "plain":
            cut_at = {tag for tag in _REASONING_TAGS if tag in tokenizer.chat_template}
            self._shielded = _any_of(sorted(cut_at.union(spellings), key=len, reverse=True))
            self._inner = {s[1:-1]: s for s in spellings if s[0] in "<[" and len(s) > 2}
        self._spelling = {token: spelling for spelling, token in tokenizer.control_tokens.items()}
        self._own_marks = frozenset(tokenizer.chat_template) & MARK_SET
        self.traits = Traits(frozenset())
        self.traits = find_traits(self._apply)
        self.end_ids = tokenizer.eos_ids
        self._openings = self._generation_prompt()
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
        hidden = self._hidden(after, new, shield)
        if hidden is not None:
            return Unbridgeable(f"the template does not show a {new[hidden].role} message after the assistant's")
        closed = self._closed(reply, shield)
        if closed is None:
            return Unbridgeable("the template does not show an assistant message that ends the history")
        ending = find_ending(after, closed, self._controls, self.end_ids, self._openings)
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

        A template may put a name between the brackets of a control token
        (`<` + key + `>`). Where a text is such a name it is written a second time
        with the name shielded, and that one is taken if the brackets are there.
        """
        shield = Shield(self._shielded, self._inner, self._own_marks, messages, tools)
        text = write(shield)
        if shield.names:
            strict = Shield(self._shielded, self._inner, self._own_marks, messages, tools, shield_names=True)
            second = write(strict)
            if any(
                f"{self._inner[name][0]}{mark}{self._inner[name][-1]}" in second
                for mark, name in strict.spellings.items()
                if name in self._inner
            ):
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
        shield = Shield(None, {}, self._own_marks, (reply, _STAND_IN), ())
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
        if not shield.spellings:
            return self.tokenizer.encode(text, start=start), 0
        encoded: list[int] = []
        escaped = 0
        for i, piece in enumerate(shield.placeholders().split(text)):
            if not piece:
                continue
            if i % 2:
                spelling = shield.spellings[piece]
                escaped += spelling in self.tokenizer.control_tokens
                encoded += self.tokenizer.encode_plain(spelling)
            else:
                encoded += self.tokenizer.encode(piece, start=start and not i)
        return encoded, escaped


def _any_of(spellings: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, spellings))) if spellings else None


def _spellings(words: str) -> Iterator[str]:
    """As they are, or inside a JSON string."""
    yield words
    yield json.dumps(words, ensure_ascii=False)[1:-1]
    yield json.dumps(words)[1:-1]


def reasoning_open(text: str) -> bool:
    """Whether a prompt ends inside the model's reasoning."""
    return text.rstrip().endswith(tuple(tags.opener for tags in REASONING))
