"""Edges between engines and turns: what a reply that ends in the middle keeps, what is another pool's, and how a gateway stops."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.support.gateways import bench, follow, user
from tests.support.pools import Story, pooled
from turnloom.engine.contract import Chunk
from turnloom.engine.sglang import SGLangEngine
from turnloom.errors import EngineProtocol
from turnloom.gateway.output import Output
from turnloom.parse.formats import parser_factory
from turnloom.store.sqlite import SQLiteStore
from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer, smollm2_tokenizer
from turnloom.types import Finish, FinishReason, Outcome, floats, ids
from turnloom.wire.reply import ReplyBuilder

QWEN, SMOL = qwen_tokenizer("qwen2.5"), smollm2_tokenizer()
END = QWEN.control_tokens["<|im_end|>"]


@pytest.mark.parametrize("breaks", [[(3, Fault.ABORT)], []], ids=["across a seam", "in one request"])
async def test_a_reply_that_is_stopped_by_its_reader_keeps_its_weight_versions(breaks: list[tuple[int, Fault]]) -> None:
    """The engine's own list of versions comes with a last chunk that nobody waits for."""
    engine = ScriptedEngine(
        Story(QWEN, "One two STOP HERE now five six seven", *breaks, chunk=1).of("0"), tokenizer=QWEN, weight_version="v1"
    )
    async with pooled([engine]) as b:
        answer = await b.post(user("hi", stop_sequences=["STOP HERE"]))
        assert (answer.status, answer.body["stop_reason"]) == (200, "stop_sequence")
        (turn,) = (await b.session()).tree.turns.values()
        assert turn.surplus == 1
        assert [(span.version, span.start, span.end) for span in turn.versions] == [("v1", 0, len(turn.output))]
        (sample,) = await b.handle.finish()
        assert {v for v, m in zip(sample.weight_version, sample.loss_mask, strict=True) if m} == {"v1"}


@pytest.mark.parametrize("chunk", [1, 2, 64])
async def test_tokens_past_a_stop_never_train(chunk: int) -> None:
    """In the chunk that names the stop they are left off; where they came before, the engine contradicts itself."""
    ghost = tuple(QWEN.encode(" ghost text", start=False))
    async with bench([Reply("Hello there", past=ghost, chunk=chunk, style="incremental")]) as b:
        answer = await b.post(user("hi"))
        (turn,) = (await b.session()).tree.turns.values()
        samples = await b.handle.finish()
    if chunk == 64:
        assert (answer.status, answer.body["content"][0]["text"], turn.surplus) == (200, "Hello there", len(ghost))
        assert turn.output.tolist()[-1] == END
        assert int(samples[0].loss_mask.sum()) == len(turn.output)
    else:
        assert (answer.status, turn.outcome, samples) == (502, Outcome.FAILED, [])


def test_a_stop_that_was_named_late_is_refused() -> None:
    parser = parser_factory("none", QWEN.chat_template)((), False)
    output = Output(QWEN, parser, ReplyBuilder("t", "c"), end_ids=frozenset({END}))
    output.feed(Chunk(ids([END, 5]), floats([-0.1, -0.1])))
    with pytest.raises(EngineProtocol, match="went on after"):
        output.feed(Chunk(ids(), floats(), Finish(FinishReason.STOP, END)))


def test_a_stop_string_found_at_the_very_end_cuts_there_too() -> None:
    """Special tokens are held back as text until the end, and may spell a stop string then."""
    box = QWEN.control_tokens["<|box_end|>"]
    parser = parser_factory("none", QWEN.chat_template)((), False)
    output = Output(QWEN, parser, ReplyBuilder("t", "c"), end_ids=frozenset({END}), stop=["<|box_end|>"], show_tokens=True)
    said = QWEN.encode("Done.", start=False)
    output.feed(Chunk(ids([*said, box, box]), floats([-0.1] * (len(said) + 2)), Finish(FinishReason.LENGTH)))
    output.close()
    assert output.message().text == "Done."
    assert output.ids.tolist() == [*said, box]
    assert (output.surplus, len(output.tokens), output.finish.matched) == (1, len(said) + 1, "<|box_end|>")


async def test_of_equal_replies_the_one_of_the_pool_that_is_asked_is_gone_on_from() -> None:
    policy = ScriptedEngine(lambda body, index: "Yes", tokenizer=QWEN, end_id=END)
    side = ScriptedEngine(lambda body, index: "Yes", tokenizer=SMOL, end_id=SMOL.control_tokens["<|im_end|>"])
    async with pooled({"policy": policy, "side": side}, {"policy": QWEN, "side": SMOL}) as b:
        first = await b.post(user("is it so?"))
        await b.post(user("is it so?"), **{"x-turnloom-label": "side"})
        await b.post(follow(user("is it so?"), first.body, "go on"))
        await b.post(user("quite another matter"))
        own, other, later, new = (await b.session()).tree.turns.values()
    assert (later.base, later.fork) == (own.id, None)
    for turn in (other, new):
        assert turn.fork is not None
        assert (turn.fork.token_index, turn.fork.recorded) == (-1, ""), "another vocabulary's ids are not compared"


async def test_a_gateway_that_stops_while_it_holds_takes_no_new_turn() -> None:
    engine = ScriptedEngine(lambda body, index: "Yes", tokenizer=QWEN, end_id=END)
    async with pooled([engine]) as b, aiohttp.ClientSession() as http:
        await b.gateway.hold("abort")
        url = b.handle.base_url + "/v1/messages"
        statuses: list[int] = []

        async def insist() -> None:
            while True:
                async with http.post(url, json=user("hi")) as answer:
                    statuses.append(answer.status)
                    if answer.status == 200:
                        return

        asking = asyncio.create_task(insist())
        while not b.gateway.engine.gate.held:
            await asyncio.sleep(0.01)
        session = await b.session()
        await b.gateway.stop()
        with pytest.raises(aiohttp.ClientError):
            await asking
    assert statuses[0] == 503
    assert 200 not in statuses
    assert session.in_flight == 0


async def test_an_engine_that_cannot_be_closed_leaves_nothing_else_open(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: SGLangEngine) -> None:
        raise RuntimeError("cannot")

    async with bench(["Yes"], store=tmp_path / "t.db") as b:
        await b.post(user("hi"))
        client = b.gateway.engine.members[0]
        with monkeypatch.context() as patch:
            patch.setattr(SGLangEngine, "close", broken)
            with pytest.raises(RuntimeError, match="cannot"):
                await b.gateway.stop()
        await client.close()
    again = SQLiteStore(tmp_path / "t.db")
    await again.open()
    assert len(await again.sessions()) == 1
    await again.close()
