"""Any reply, written whole or streamed, is one reply to the official SDK; and what the SDK holds, sent back, is that reply again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as SdkMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.support.sse import read_sse
from turnloom.core.match import message_key
from turnloom.parse.contract import CallEvent, ParseEvent, ReasoningDelta, TextDelta
from turnloom.types import Finish, FinishReason, Message, Request
from turnloom.wire.anthropic import AnthropicDialect
from turnloom.wire.anthropic.read import THOUGHTS
from turnloom.wire.contract import Head, Reply
from turnloom.wire.reply import ReplyBuilder

DIALECT = AnthropicDialect()
TURN = "0123456789abcdef" * 2
HEADS = [Head(TURN, "m", 0, 7, Request((), wire={THOUGHTS: asked})) for asked in (True, False)]
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

words = st.text(st.sampled_from('ab é\n"{}世🙂'), max_size=6)
said = words.filter(bool)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
arguments = st.dictionaries(words, values, max_size=3).map(json.dumps)
events: st.SearchStrategy[list[ParseEvent]] = st.lists(
    said.map(TextDelta) | said.map(ReasoningDelta) | st.builds(CallEvent, st.sampled_from(["ls", "cat"]), arguments), max_size=8
)
finishes = st.sampled_from([Finish(FinishReason.STOP), Finish(FinishReason.STOP, "END"), Finish(FinishReason.LENGTH)])


def spoken(plan: Iterable[ParseEvent], finish: Finish, head: Head) -> tuple[Reply, bytes]:
    builder, writer = ReplyBuilder(TURN, DIALECT.call_prefix), DIALECT.stream(head)
    sent = writer.begin()
    for event in plan:
        sent += writer.event(builder.feed(event)) + writer.ping()
    reply = Reply(head, builder.message(), finish, 3)
    return reply, sent + writer.finish(reply)


def streamed(sent: bytes) -> SdkMessage:
    """As the SDK adds the events up."""
    message: Any = None
    buffers: dict[int, bytes] = {}
    for name, data in read_sse(sent.decode()):
        if name != "ping":
            message = accumulate_event(event=STREAM_EVENT.validate_python(data), current_snapshot=message, json_bufs=buffers)
    return message


@settings(max_examples=100, deadline=None)
@given(events, finishes, st.sampled_from(HEADS))
def test_a_stream_adds_up_to_the_reply_as_a_whole(plan: list[ParseEvent], finish: Finish, head: Head) -> None:
    reply, sent = spoken(plan, finish, head)
    whole = SdkMessage.model_validate_json(DIALECT.write([reply]), strict=True)
    added = streamed(sent)

    def shown(message: SdkMessage) -> list[list[Any]]:
        """The blocks, those of one kind that meet as one: white space between two of them is sent by neither way."""
        found: list[list[Any]] = []
        for block in message.content:
            if block.type == "tool_use":
                found.append([block.id, block.name, block.input])
            else:
                said = "".join((block.text if block.type == "text" else block.thinking).split())
                if found and found[-1][0] == block.type:
                    found[-1][1] += said
                else:
                    found.append([block.type, said])
        return found

    assert shown(added) == shown(whole)
    assert (added.id, added.stop_reason, added.stop_sequence) == (whole.id, whole.stop_reason, whole.stop_sequence)
    assert (added.usage.input_tokens, added.usage.output_tokens) == (whole.usage.input_tokens, whole.usage.output_tokens)


@settings(max_examples=100, deadline=None)
@given(events, finishes, st.booleans(), st.sampled_from(HEADS))
def test_a_reply_sent_back_is_that_reply_and_names_its_turn(plan: list[ParseEvent], finish: Finish, stream: bool, head: Head) -> None:
    reply, sent = spoken(plan, finish, head)
    message = streamed(sent) if stream else SdkMessage.model_validate_json(DIALECT.write([reply]))
    content = [block.model_dump(exclude_none=True) for block in message.content]
    told = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}, {"role": "user", "content": "b"}]
    came: Message = DIALECT.read(json.dumps({"messages": told}).encode()).messages[1]
    assert message_key(came) == message_key(reply.message)
    signed = any(block.type in ("thinking", "tool_use") for block in message.content)
    assert came.ref == (TURN if signed else "")
