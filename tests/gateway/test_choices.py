"""Several choices of one request: each a turn and a lineage of its own, and nothing hangs or lies when one of them fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.gateways import Answer, Bench, bench
from turnloom import Limits
from turnloom.export.check import check_samples
from turnloom.testing.scripted_engine import Fault, Reply
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Outcome, Turn

CHAT = "/v1/chat/completions"
PATIENCE = 60.0
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'


def asked(n: int = 3, *messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "n": n, "messages": [{"role": "user", "content": "hi"}, *messages], **more}


async def turns_of(b: Bench) -> list[Turn]:
    return list((await b.session()).tree.turns.values())


async def raw(b: Bench, body: dict[str, Any]) -> list[str]:
    """The data of every event of a stream."""
    async with b.http.post(b.handle.base_url + CHAT, json={**body, "stream": True}) as answer:
        text = (await answer.content.read()).decode()
    assert "HTTP/1.1" not in text
    return [line.removeprefix("data: ") for line in text.split("\n") if line]


def by_choice(events: list[str]) -> dict[int, str]:
    said: dict[int, str] = {}
    for event in events:
        for choice in json.loads(event).get("choices", ()) if event != "[DONE]" else ():
            said[choice["index"]] = said.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return said


def numbered(_: dict[str, Any], index: int) -> Reply:
    return Reply(f"reply number {index}", chunk=1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_three_choices_are_three_turns_three_lineages_and_three_samples(stream: bool) -> None:
    async with bench(numbered) as b, asyncio.timeout(PATIENCE):
        if stream:
            events = await raw(b, asked())
            assert events[-1] == "[DONE]"
            said = by_choice(events)
        else:
            answer = await b.post(asked(), CHAT)
            said = {choice["index"]: choice["message"]["content"] for choice in answer.body["choices"]}
            assert answer.body["usage"]["completion_tokens"] == sum(len(t.output) for t in await turns_of(b))
        assert sorted(said) == [0, 1, 2]
        assert sorted(said.values()) == [f"reply number {i}" for i in range(3)]
        turns = await turns_of(b)
        assert [t.outcome for t in turns] == [Outcome.DELIVERED] * 3
        assert [t.fork.kind if t.fork else None for t in turns] == [None, "resampled", "resampled"]
        assert len({t.prompt_crc for t in turns}) == 1
        samples = await b.handle.finish()
        assert check_samples(samples).ok
        assert len({s.lineage_id for s in samples}) == 3
        assert sum(s.weight for s in samples) == pytest.approx(1)
        assert sorted(b.tokenizer.decode(s.token_ids[s.loss_mask == 1].tolist()) for s in samples) == sorted(
            f"{text}<|im_end|>" for text in said.values()
        )


async def test_the_choice_that_the_client_goes_on_from_is_known_by_its_words() -> None:
    async with bench(numbered) as b:
        answer = await b.post(asked(), CHAT)
        chosen = answer.body["choices"][1]["message"]
        await b.post(asked(1, chosen, {"role": "user", "content": "on"}), CHAT)
        *choices, last = await turns_of(b)
        (base,) = [t for t in choices if b.tokenizer.decode(t.output.tolist()).startswith(chosen["content"])]
        assert (last.base, last.fork) == (base.id, None)


@pytest.mark.parametrize("picked", [0, 1, 2])
async def test_of_equal_choices_the_call_ids_say_which_it_is(picked: int) -> None:
    async with bench([CALL, CALL, CALL, "Done"]) as b:
        answer = await b.post(asked(tools=TOOLS), CHAT)
        chosen = answer.body["choices"][picked]["message"]
        call_id = chosen["tool_calls"][0]["id"]
        given = {"role": "tool", "tool_call_id": call_id, "content": "empty"}
        await b.post(asked(1, chosen, given, tools=TOOLS), CHAT)
        *choices, last = await turns_of(b)
        assert len(choices) == 3
        assert last.base == call_id.removeprefix("call_")[:32]
        assert last.base in {t.id for t in choices}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_logprobs_are_those_of_each_choice(stream: bool) -> None:
    async with bench(numbered) as b:
        if stream:
            found: dict[int, list[float]] = {}
            for event in await raw(b, asked(logprobs=True)):
                for choice in json.loads(event)["choices"] if event != "[DONE]" else ():
                    found.setdefault(choice["index"], []).extend(t["logprob"] for t in (choice["logprobs"] or {"content": []})["content"])
        else:
            answer = await b.post(asked(logprobs=True), CHAT)
            found = {c["index"]: [t["logprob"] for t in c["logprobs"]["content"]] for c in answer.body["choices"]}
        recorded = sorted(t.logprobs.tolist() for t in await turns_of(b))
        assert sorted(found.values()) == recorded


def failing(fault: Fault, which: int = 1) -> Any:
    def script(_: dict[str, Any], index: int) -> Reply:
        return Reply("one two three four five six", chunk=1, fault=fault if index == which else None)

    return script


CAUSES = [(Fault.HTTP_400, 400, "failed"), (Fault.CUT, 503, "failed"), (Fault.ABORT, 503, "aborted")]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(("fault", "status", "outcome"), CAUSES)
async def test_one_failure_of_a_whole_response_takes_all_back(fault: Fault, status: int, outcome: str, which: int) -> None:
    """No client got any of it, so nothing of it trains; the cause is told, not its consequence."""
    async with bench(failing(fault, which)) as b, asyncio.timeout(PATIENCE):
        answer = await b.post(asked(), CHAT)
        assert answer.status == status
        assert "another choice" not in answer.body["error"]["message"]
        turns = await turns_of(b)
        whole = [t for t in turns if b.tokenizer.decode(t.output.tolist()) == "one two three four five six<|im_end|>"]
        (failed,) = [t for t in turns if t not in whole]
        assert (len(whole), failed.outcome) == (2, outcome)
        assert {t.outcome for t in whole} == {Outcome.ABORTED}
        assert await b.handle.finish() == []
        session = await b.session()
        assert session.in_flight == 0


@pytest.mark.parametrize("fault", [Fault.HTTP_400, Fault.CUT, Fault.ABORT])
async def test_one_failure_within_a_stream_ends_it_with_the_error_once_the_others_are_whole(fault: Fault) -> None:
    async with bench(failing(fault)) as b, asyncio.timeout(PATIENCE):
        events = await raw(b, asked())
        assert [e for e in events if "[DONE]" in e] == []
        errors = [i for i, e in enumerate(events) if "error" in json.loads(e)]
        assert errors == [len(events) - 1]
        whole = [text for text in by_choice(events).values() if text == "one two three four five six"]
        assert len(whole) == 2
        turns = await turns_of(b)
        assert sorted(t.outcome for t in turns if t.outcome is Outcome.DELIVERED) == [Outcome.DELIVERED] * 2
        assert len(await b.handle.finish()) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_choices_that_do_not_all_fit_a_limit_are_refused_together(stream: bool) -> None:
    async with bench(numbered, session_limits=Limits(max_turns=2)) as b, asyncio.timeout(PATIENCE):
        if stream:
            error = json.loads((await raw(b, asked()))[-1])["error"]
        else:
            answer = await b.post(asked(), CHAT)
            assert (answer.status, answer.headers["x-should-retry"]) == (429, "false")
            error = answer.body["error"]
        assert error["code"] == "insufficient_quota"
        assert await turns_of(b) == []
        assert b.engine.requests == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_leaves_every_choice(stream: bool) -> None:
    """One choice is whole already, one is being sampled, one has not begun."""

    def script(_: dict[str, Any], index: int) -> Reply:
        fault = {0: None, 1: Fault.STALL, 2: Fault.HANG}[index]
        return Reply("one two three four five six", chunk=1, fault=fault)

    async with bench(script) as b, asyncio.timeout(PATIENCE):
        asking = asyncio.create_task(b.post(asked(stream=stream), CHAT))
        session = await b.session()
        while len(session.tree.turns) < 1:
            await asyncio.sleep(0.01)
        await b.engine.wait_running(2)
        asking.cancel()
        await b.engine.wait_running(0)
        while session.in_flight:
            await asyncio.sleep(0.01)
        outcomes = sorted((t.outcome, len(t.output) > 0) for t in session.tree.turns.values())
        first = (Outcome.DELIVERED, True) if stream else (Outcome.ORPHANED, True)
        assert outcomes == sorted([first, (Outcome.ORPHANED, True), (Outcome.ORPHANED, False)])
        assert len(await b.handle.finish()) == (1 if stream else 0)


async def test_a_session_that_is_finished_meanwhile_ends_every_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnloom.gateway.lifecycle.DRAIN_SECONDS", 0.2)

    def script(_: dict[str, Any], index: int) -> Reply:
        return Reply("one two three four", chunk=1, fault=[None, Fault.STALL, Fault.HANG][index])

    async with bench(script) as b, asyncio.timeout(PATIENCE):
        asking: asyncio.Task[Answer] = asyncio.create_task(b.post(asked(), CHAT))
        await b.engine.wait_running(2)
        assert await b.handle.finish() == []
        answer = await asking
        assert (answer.status, answer.headers["x-should-retry"]) == (503, "false")
        assert {t.outcome for t in await turns_of(b)} == {Outcome.ABORTED}
        assert len(await turns_of(b)) == 3


async def test_keepalives_of_several_silent_choices_name_none() -> None:
    async with bench(lambda *_: Reply("late", fault=Fault.HANG), keepalive=0.05) as b, asyncio.timeout(PATIENCE):
        async with b.http.post(b.handle.base_url + CHAT, json=asked(stream=True)) as answer:
            seen = b""
            while seen.count(b'"choices":[]}\n\n') < 2:
                seen += await answer.content.readany()
            assert seen.count(b'"role":"assistant"') == 3, "every choice is announced before the first keepalive"
            b.engine.release()
            assert b'{"error":' in await answer.content.read()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_choices_with_reasoning_come_back_without_it(stream: bool) -> None:
    def script(_: dict[str, Any], index: int) -> str:
        return f"<think>\nThought {index}\n</think>\n\nSame words" if index < 2 else "Next"

    async with bench(script, tokenizer=qwen_tokenizer("qwen3")) as b:
        if stream:
            await raw(b, asked(2))
        else:
            await b.post(asked(2), CHAT)
        for thought in ("Thought 0", "Thought 1"):
            came = {"role": "assistant", "content": "Same words", "reasoning_content": thought}
            await b.post(asked(1, came, {"role": "user", "content": thought}), CHAT)
        turns = await turns_of(b)
        bases = {b.tokenizer.decode(t.output.tolist()).split("\n")[1]: t.id for t in turns[:2]}
        assert [t.base for t in turns[2:]] == [bases["Thought 0"], bases["Thought 1"]]
