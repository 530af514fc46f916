"""The reference's behaviours, row by row: what a user moving over sees again, or sees better."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.support.gateways import bench, follow, user
from turnloom.core.unroll import Longest, Overlong
from turnloom.store.contract import Limits
from turnloom.testing.scripted_engine import Fault, Reply
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Outcome

TOOLS = [{"name": "ls", "description": "List", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}]


async def test_r01_one_turn_in_the_order_of_duties() -> None:
    """Durable before the client can know it is complete: the terminal event never comes before the store has the turn."""
    from turnloom.store.memory import MemoryStore

    class Slow(MemoryStore):
        stored = asyncio.Event()

        async def append(self, session_id, delta):
            await asyncio.sleep(0.2)
            await super().append(session_id, delta)
            self.stored.set()

    store = Slow()
    async with (
        bench(["Hello there"], store=store) as b,
        b.http.post(b.handle.base_url + "/v1/messages", json=user("hi", stream=True)) as answer,
    ):
        seen = b""
        async for data in answer.content.iter_any():
            seen += data
            if b"message_stop" in seen or b"message_delta" in seen:
                assert store.stored.is_set()
        assert b"message_stop" in seen
        assert b"Hello" in seen


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(text="done"), "end_turn"),
        (Reply(text="cut off", finish="length"), "max_tokens"),
        (Reply(text='<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'), "tool_use"),
        (Reply(text="one STOP", matched="STOP", end=-1), "stop_sequence"),
    ],
)
async def test_r02_two_forms_of_a_reply(reply: Reply, reason: str) -> None:
    """Blocks for the wire, a neutral message for the tree, and the engine's finish in the dialect's words."""
    async with bench([reply]) as b:
        answer = await b.post(user("hi", tools=TOOLS, stop_sequences=["STOP"]))
        assert answer.body["stop_reason"] == reason
        tree = (await b.session()).tree
        (turn_id,) = tree.turns
        message = tree.reply(turn_id)
        assert message.role == "assistant"
        shown = "".join(block.get("text", "") for block in answer.body["content"])
        assert shown == message.text
        assert "STOP" not in shown


async def test_r03_the_stop_token_stays_in_the_ids_and_never_in_the_text() -> None:
    async with bench(["Hi", "Again"], tool_format="none") as b:
        body = user("hello")
        first = await b.post(body)
        assert first.body["content"] == [{"type": "text", "text": "Hi"}]
        await b.post(follow(body, first.body, "more"))
        sent = b.engine.requests[1]["input_ids"]
        end = b.tokenizer.control_tokens["<|im_end|>"]
        assert sent.count(end) == 4, "system, user, assistant and user are each closed once"
        (turn, _) = (await b.session()).tree.turns.values()
        assert turn.output.tolist()[-1] == end


XML = "<tool_call><function={name}><parameter=path>a.py</parameter></function></tool_call>"


async def test_r04_xml_calls_are_recognised_for_declared_tools_only() -> None:
    async with bench([XML.format(name="ls"), XML.format(name="rm"), XML.format(name="ls")]) as b:
        assert (await b.post(user("x", tools=TOOLS))).body["content"][0]["input"] == {"path": "a.py"}
        undeclared = await b.post(user("y", tools=TOOLS))
        assert undeclared.body["content"] == [{"type": "text", "text": XML.format(name="rm")}]
        untold = await b.post(user("z"))
        assert untold.body["content"] == [{"type": "text", "text": XML.format(name="ls")}]


async def test_r05_malformed_arguments_are_a_status_with_the_raw_text_kept() -> None:
    raw = '<tool_call>\n{"name": "ls", "arguments": {"path": }}\n</tool_call>'
    async with bench([raw]) as b:
        answer = await b.post(user("x", tools=TOOLS))
        assert answer.body["content"] == [{"type": "text", "text": raw}]
        assert answer.body["stop_reason"] == "end_turn"
        (turn,) = (await b.session()).tree.turns.values()
        (call,) = turn.calls
        assert (call.status, call.raw) == ("invalid_json", raw)


async def test_r06_streaming_is_real_and_the_terminal_event_comes_after_the_record() -> None:
    """The client reads the first words while the engine is still holding the last ones."""
    async with bench([Reply(text="one two three four five six", chunk=2, fault=Fault.STALL)]) as b:
        async with b.http.post(b.handle.base_url + "/v1/messages", json=user("hi", stream=True)) as answer:
            seen = b""
            while b"one two" not in seen.replace(b'"}}\n\n', b""):
                seen += await asyncio.wait_for(answer.content.readany(), 10)
                if b"text_delta" in seen:
                    break
            assert b.engine.running == 1
            assert not (await b.session()).tree.turns, "nothing is recorded while it is being sampled"
            b.engine.release()
            rest = await answer.read()
        assert b"message_stop" not in rest, "an aborted turn never looks complete"


async def test_r07_disconnect_keeps_the_turn_as_orphaned() -> None:
    async with bench([Reply(text="a long answer that nobody reads", chunk=1, fault=Fault.STALL), "next"]) as b:
        answer = await b.http.post(b.handle.base_url + "/v1/messages", json=user("hi", stream=True))
        while b"text_delta" not in await answer.content.readany():
            pass
        answer.close()
        session = await b.session()
        await _until(lambda: session.in_flight == 0 and session.tree.turns)
        (turn,) = session.tree.turns.values()
        assert turn.outcome is Outcome.ORPHANED
        assert len(turn.output) > 0
        assert session.unroll().samples == ()
        assert [u.reason for u in session.unroll().untrained] == ["outcome orphaned"]
        await _until(lambda: not b.engine.running)
        assert b.engine.aborts == [{"rid": f"{turn.id}0001"}]
        assert b.engine.running == 0


async def test_r07_disconnect_of_a_request_that_is_not_streamed() -> None:
    async with bench([Reply(text="a long answer", fault=Fault.HANG)]) as b:
        asked = asyncio.create_task(b.post(user("hi")))
        await b.engine.wait_running(1)
        asked.cancel()
        session = await b.session()
        await _until(lambda: session.in_flight == 0 and session.tree.turns)
        assert [t.outcome for t in session.tree.turns.values()] == [Outcome.ORPHANED]
        await b.engine.wait_running(0)


async def test_r08_the_session_stays_open_after_a_cancellation() -> None:
    async with bench([Reply(text="never read", fault=Fault.HANG), "Hello"]) as b:
        asked = asyncio.create_task(b.post(user("hi", stream=True)))
        await b.engine.wait_running(1)
        asked.cancel()
        await b.engine.wait_running(0)
        assert (await b.post(user("hi"))).body["content"][0]["text"] == "Hello"


async def test_r09_usage_is_the_length_of_the_id_lists_and_the_model_is_echoed() -> None:
    async with bench(["Hello", "Hello"]) as b:
        answer = await b.post(user("hi"))
        (turn,) = (await b.session()).tree.turns.values()
        assert answer.body["usage"]["input_tokens"] == len(b.engine.requests[0]["input_ids"]) == turn.prompt_len
        assert answer.body["usage"]["output_tokens"] == len(turn.output)
        assert answer.body["model"] == "m"
        nameless = user("hi")
        del nameless["model"]
        assert (await b.post(nameless)).body["model"] == "scripted"


async def test_r10_streams_when_the_body_or_the_accept_header_asks() -> None:
    async with bench(["Hi"] * 5) as b:
        assert (await b.post(user("a", stream=True))).events
        assert (await b.post(user("b"), Accept="text/event-stream")).events
        assert not (await b.post(user("c", stream=False))).events
        assert not (await b.post(user("d"), Accept="*/*")).events
        assert not (await b.post(user("e", stream=False), Accept="application/json, text/event-stream")).events


async def test_r11_keys_bearer_before_x_api_key_and_no_shared_default() -> None:
    async with bench(["Hi"] * 4) as b:
        other = await b.gateway.open_session()
        url = b.gateway.url + "/v1/messages"

        async def ask(**headers: str) -> int:
            async with b.http.post(url, json=user("hi"), headers=headers) as answer:
                body = await answer.json()
                if answer.status == 401:
                    assert body["error"]["type"] == "authentication_error"
                return answer.status

        assert await ask(Authorization=f"Bearer {b.handle.key}", **{"x-api-key": other.key}) == 200
        assert len((await b.session()).tree.turns) == 1
        assert await ask(**{"x-api-key": other.key}) == 200
        assert len((await b.gateway.session(other.id)).tree.turns) == 1
        assert await ask() == 401
        assert await ask(Authorization="Bearer guess") == 401
        assert await ask(**{"x-api-key": "default"}) == 401


async def test_r11_open_sessions_gives_each_unknown_key_its_own() -> None:
    async with bench(["Hi"] * 3, open_sessions=True) as b:
        for key in ("one", "two", "one"):
            async with b.http.post(b.gateway.url + "/v1/messages", json=user("hi"), headers={"x-api-key": key}) as answer:
                assert answer.status == 200
        _, listed = await b.admin("GET", "/sessions")
        assert sorted(s["usage"]["turns"] for s in listed["sessions"]) == [0, 1, 2]


async def test_r12_closed_session_503_and_turn_limit_429() -> None:
    async with bench(["Hi"] * 3, session_limits=Limits(max_turns=2)) as b:
        assert (await b.post(user("a"))).status == 200
        assert (await b.post(user("b"))).status == 200
        limited = await b.post(user("c"))
        assert (limited.status, limited.body["error"]["type"]) == (429, "rate_limit_error")
        assert limited.body["type"] == "error"
        await b.handle.finish()
        closed = await b.post(user("d"))
        assert (closed.status, closed.body["error"]["type"]) == (503, "api_error")
        assert len((await b.session()).tree.turns) == 2


async def test_r13_finish_is_idempotent_and_readable_until_dropped() -> None:
    async with bench(["Hi"]) as b:
        await b.post(user("a"))
        first = await b.handle.finish(reward=1.0)
        assert await b.handle.finish() == first
        assert [s.reward for s in first] == [1.0]
        status, lines = await b.admin("GET", f"/sessions/{b.handle.id}/samples")
        assert status == 200
        assert len(lines.splitlines()) == 1
        assert (await b.admin("DELETE", f"/sessions/{b.handle.id}"))[0] == 204
        assert (await b.admin("GET", f"/sessions/{b.handle.id}"))[0] == 404


async def test_r14_only_generated_messages_carry_a_turn() -> None:
    async with bench(["Second", "Third"]) as b:
        body = user("a")
        body["messages"] += [{"role": "assistant", "content": "brought along"}, {"role": "user", "content": "b"}]
        first = await b.post(body)
        await b.post(follow(body, first.body, "c"))
        tree = (await b.session()).tree
        path = tree.path(tree.node_of[list(tree.turns)[-1]])[1:]
        shown = [(tree.nodes[n].message.role, tree.nodes[n].turn is not None) for n in path]
        assert shown == [
            ("user", False), ("assistant", False), ("user", False), ("assistant", True), ("user", False), ("assistant", True),
        ]  # fmt: skip


async def test_r25_a_shared_turn_trains_on_the_first_leaf_only() -> None:
    async with bench(["First", "Left", "Right"]) as b:
        body = user("a")
        first = await b.post(body)
        await b.post(follow(body, first.body, "left"))
        await b.post(follow(body, first.body, "right"))
        one, two = await b.handle.finish()
        shared = one.turn_index == 0
        assert one.loss_mask[shared].all()
        assert not two.loss_mask[two.turn_index == 0].any()
        np.testing.assert_array_equal(
            one.token_ids[: int(np.flatnonzero(shared)[-1]) + 1], two.token_ids[: int(np.flatnonzero(shared)[-1]) + 1]
        )
        assert two.loss_mask[two.turn_index == 2].all()
        assert one.weight == two.weight == 0.5


async def test_r23_a_message_tree_matched_by_what_was_said_and_forks_with_a_reason() -> None:
    """An echo in another spelling goes on; a changed word starts a new sequence that says which one and where."""
    async with bench(["One two", "More", "Other"]) as b:
        body = user("a")
        first = await b.post(body)
        await b.post(follow(body, {"content": "One two \n"}, "go on"))
        await b.post(follow(body, {"content": "One three"}, "go on"))
        tree = (await b.session()).tree
        one, two, three = tree.turns.values()
        assert first.body["content"] == [{"type": "text", "text": "One two"}]
        assert two.base == one.id
        assert two.fork is None
        assert three.base is None
        assert three.fork is not None
        assert (three.fork.kind, three.fork.message_index) == ("history_changed", 1)
        assert three.fork.recorded.startswith(" two")
        assert three.fork.came.startswith(" three")
        assert b.tokenizer.decode(tree.held(three.id)[: three.prompt_len].tolist()[three.fork.token_index :]).startswith(" three")


@pytest.mark.parametrize(
    ("policy", "samples", "trained"),
    [({}, 1, "all"), ({"history": "template"}, 2, "all"), ({"history": "template", "realign": 64}, 1, "replaced")],
    ids=["bridged", "re-rendered", "realigned"],
)
async def test_r24_drift_in_the_last_response_is_bridged_forked_or_realigned_and_never_silent(
    policy: dict, samples: int, trained: str
) -> None:
    """The model's own cuts are no encoder's. Only the explicit realignment leaves sampled tokens out, and says how many."""
    tokenizer = qwen_tokenizer("qwen2.5")
    split = tuple(t for piece in ("Same words, then tok", "eniz", "ation") for t in tokenizer.encode(piece))
    async with bench([Reply(ids=split, end=tokenizer.control_tokens["<|im_end|>"]), "Yes."], **policy) as b:
        body = user("a")
        await b.post(follow(body, (await b.post(body)).body, "go on"))
        session = await b.session()
        found = session.unroll()
        first, second = session.tree.turns.values()
    assert len(found.samples) == samples
    untrained = {u.turn_id: u for u in found.untrained}
    total = sum(int(s.loss_mask.sum()) for s in found.samples)
    if trained == "all":
        assert not untrained
        assert total == len(first.output) + len(second.output)
    else:
        assert second.fork is not None
        assert (second.fork.kind, untrained[first.id].reason) == ("realigned", "replaced by realignment")
        kept = second.kept - first.prompt_len
        assert 0 < kept < len(first.output)
        assert untrained[first.id].tokens == len(first.output) - kept
        assert total == kept + len(second.output)


async def test_r26_reward_statuses_and_weights_of_a_rollouts_samples() -> None:
    """The full reward on each sample, weights that make the rollout count once, statuses, and a cut at the longest length."""
    script = ["First", Reply(text="cut off", finish="length", end=-1), '<tool_call>\n{"name": "ls", "argu', "x " * 80]
    async with bench(script) as b:
        body = user("a", tools=TOOLS)
        first = await b.post(body)
        for text in ("left", "right", "long"):
            await b.post(follow(body, first.body, text) | {"max_tokens": 300})
        samples = await b.handle.finish(reward=0.5)
        longest = max(len(s.token_ids) for s in samples) - 20
        cut = (await b.session()).unroll(Longest(longest, Overlong.TRUNCATE))
    assert [s.reward for s in samples] == [0.5] * 3
    assert sum(s.weight for s in samples) == pytest.approx(1)
    assert [s.statuses.get("truncated", 0) for s in samples] == [1, 0, 0]
    assert [s.statuses.get("ill_formed_calls", 0) for s in samples] == [0, 1, 0]
    assert [len(s.token_ids) for s in cut.samples] == [min(len(s.token_ids), longest) for s in samples]
    assert [(u.tokens, u.reason) for u in cut.untrained] == [(20, "beyond the maximum sample length")]
    assert cut.samples[2].statuses["cut"] == 1


@pytest.mark.parametrize(("template", "folded"), [(None, False), ("qwen3_vl", True)], ids=["kept in place", "folded forward"])
async def test_r31_a_system_message_in_the_middle_never_moves_ahead_of_a_recorded_turn(template: str | None, folded: bool) -> None:
    tokenizer = qwen_tokenizer("qwen3", template)
    async with bench(["One", "Two"], tokenizer=tokenizer) as b:
        body = user("a")
        later = follow(body, (await b.post(body)).body, "go on")
        later["messages"].insert(2, {"role": "system", "content": "NOTE"})
        assert (await b.post(later)).status == 200
        tree = (await b.session()).tree
        one, two = tree.turns.values()
        appended = tokenizer.decode(two.appended.tolist())
    assert two.base == one.id
    assert two.fork is None
    assert ("<|im_start|>system\nNOTE<|im_end|>" in appended) is not folded
    assert ("<|im_start|>user\n<system-reminder>\nNOTE\n</system-reminder>\n\ngo on<|im_end|>" in appended) is folded


async def test_r32_count_tokens_is_the_true_count() -> None:
    async with bench(["Hi", "Ho"]) as b:
        body = user("how many?")
        counted = await b.post(body, "/v1/messages/count_tokens")
        first = await b.post(body)
        assert counted.body == {"input_tokens": first.body["usage"]["input_tokens"]}
        longer = follow(body, first.body, "and now?")
        counted = await b.post(longer, "/v1/messages/count_tokens")
        assert (await b.post(longer)).body["usage"]["input_tokens"] == counted.body["input_tokens"]
        assert len((await b.session()).tree.turns) == 2


async def _until(condition, seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
