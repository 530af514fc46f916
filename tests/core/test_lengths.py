"""Samples that are too long, samples one at a time, and turns that were realigned."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.gateways import bench, follow
from tests.support.gateways import user as body
from tests.support.histories import Weaver, assistant, request, user
from turnloom.core.unroll import UNLIMITED, Longest, Origin, Overlong, Untrained, iter_samples, unroll
from turnloom.types import Finish, FinishReason, Fork, ForkKind, Outcome, Sample, Sampling, Turn, floats, ids


def talk(turns: int = 3) -> Weaver:
    """A conversation whose turns are 2 + 2 tokens each."""
    w, said = Weaver(), []
    for i in range(turns):
        said.append(user(f"u{i}"))
        w.say(request(*said), assistant(f"A{i}"))
        said.append(assistant(f"A{i}"))
    return w


def cut(w: Weaver, most: int, overlong: Overlong) -> tuple[list[list[int]], list[tuple[str, int, str]]]:
    found = unroll(w.tree, Origin("s"), longest=Longest(most, overlong))
    return [s.loss_mask.tolist() for s in found.samples], [(u.turn_id, u.tokens, u.reason) for u in found.untrained]


BEYOND = "beyond the maximum sample length"


def test_truncate_cuts_at_the_token_and_reports_the_rest() -> None:
    assert cut(talk(), 7, Overlong.TRUNCATE) == ([[0, 0, 1, 1, 0, 0, 1]], [("t1", 1, BEYOND), ("t2", 2, BEYOND)])
    assert cut(talk(), 6, Overlong.TRUNCATE) == ([[0, 0, 1, 1]], [("t1", 2, BEYOND), ("t2", 2, BEYOND)])
    assert cut(talk(), 2, Overlong.TRUNCATE) == ([], [(t, 2, BEYOND) for t in ("t0", "t1", "t2")])
    (sample,) = unroll(talk().tree, Origin("s"), longest=Longest(7)).samples
    assert sample.statuses["cut"] == 1
    assert sample.statuses["left_out"] == 1


def test_turn_cuts_after_the_last_whole_turn_that_fits() -> None:
    assert cut(talk(), 11, Overlong.TURN) == ([[0, 0, 1, 1, 0, 0, 1, 1]], [("t2", 2, BEYOND)])
    assert cut(talk(), 8, Overlong.TURN) == ([[0, 0, 1, 1, 0, 0, 1, 1]], [("t2", 2, BEYOND)])
    assert cut(talk(), 3, Overlong.TURN) == ([], [(t, 2, BEYOND) for t in ("t0", "t1", "t2")])


def test_drop_leaves_the_sample_out_but_not_what_another_one_holds() -> None:
    w = talk()
    w.say(request(user("u0"), assistant("A0"), user("other")), assistant("B"))
    masks, untrained = cut(w, 8, Overlong.DROP)
    assert masks == [[0, 0, 1, 1, 0, 0, 1, 1]]
    assert untrained == [("t1", 2, "its sample is longer than the maximum"), ("t2", 2, "its sample is longer than the maximum")]


@pytest.mark.parametrize("overlong", Overlong)
def test_what_fits_is_not_touched(overlong: Overlong) -> None:
    w = talk()
    assert unroll(w.tree, Origin("s"), longest=Longest(12, overlong)) == unroll(w.tree, Origin("s"))


def realigned(w: Weaver, *, kept: int, reply: str = "B", **fields: object) -> Turn:
    pending = w.tree.prepare(request(user("a"), assistant("A"), user("b")))
    return w.commit(pending, assistant(reply), kept=kept, fork=Fork(ForkKind.REALIGNED, 1), **fields)


def said() -> Weaver:
    w = Weaver()
    w.say(request(user("a")), assistant("A"), output=(200, 201, 202, 203))
    return w


def test_a_realigned_turn_goes_on_without_what_was_replaced() -> None:
    w = said()
    turn = realigned(w, kept=4)
    assert (turn.base, turn.kept) == ("t0", 4)
    assert w.tree.held(turn.id).tolist() == [100, 101, 200, 201, 101, 101, 200, 201]
    found = unroll(w.tree, Origin("s"))
    (sample,) = found.samples
    assert sample.token_ids.tolist() == [100, 101, 200, 201, 101, 101, 200, 201]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert sample.statuses["fork_realigned"] == 1
    assert found.untrained == (Untrained("t0", 2, "replaced by realignment"),)
    after = w.say(request(user("a"), assistant("A"), user("b"), assistant("B"), user("c")), assistant("C"))
    assert w.tree.held(after.id)[:8].tolist() == sample.token_ids.tolist()
    assert len(unroll(w.tree, Origin("s")).samples) == 1


def test_what_was_replaced_in_one_sample_trains_in_another_that_holds_it() -> None:
    w = said()
    realigned(w, kept=3)
    w.say(request(user("a"), assistant("A"), user("other")), assistant("C"))
    found = unroll(w.tree, Origin("s"))
    assert [s.loss_mask.tolist() for s in found.samples] == [[0, 0, 1, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]]
    assert found.untrained == ()


LOST = {Overlong.DROP: "its sample is longer than the maximum", Overlong.TURN: "beyond the maximum sample length"}


@pytest.mark.parametrize(("overlong", "reason"), [*LOST.items(), (Overlong.TRUNCATE, LOST[Overlong.TURN])])
def test_what_only_the_maximum_took_is_not_called_replaced(overlong: Overlong, reason: str) -> None:
    """The other branch, which held all of the reply, is too long."""
    w = said()
    realigned(w, kept=3)
    w.say(request(user("a"), assistant("A"), user("other")), assistant("C"), output=tuple(range(300, 310)), appended=ids(range(400, 410)))
    found = unroll(w.tree, Origin("s"), longest=Longest(8, overlong))
    reasons = {u.turn_id: u for u in found.untrained}
    assert reasons["t0"] == Untrained("t0", 3, reason)
    assert reasons["t2"] == Untrained("t2", 10, reason)
    w = said()
    realigned(w, kept=3, output=(9,))
    kept = unroll(w.tree, Origin("s"), longest=Longest(6, overlong))
    assert kept.untrained == (Untrained("t0", 3, "replaced by realignment"),), "no maximum took these"


@pytest.mark.parametrize("overlong", [Overlong.TRUNCATE, Overlong.TURN])
def test_what_was_replaced_is_not_called_too_long(overlong: Overlong) -> None:
    w = said()
    realigned(w, kept=2)
    found = unroll(w.tree, Origin("s"), longest=Longest(2, overlong))
    assert found.untrained == (
        Untrained("t0", 4, "replaced by realignment"),
        Untrained("t1", 2, "beyond the maximum sample length"),
    )


def test_a_base_whose_realigned_turn_was_not_delivered_trains_whole() -> None:
    w = said()
    realigned(w, kept=3, outcome=Outcome.ORPHANED)
    found = unroll(w.tree, Origin("s"))
    assert [s.loss_mask.tolist() for s in found.samples] == [[0, 0, 1, 1, 1, 1]]
    assert found.samples[0].statuses["left_out"] == 1


@pytest.mark.parametrize(("kept", "why"), [(1, "inside the base's prompt"), (4, "another length than was sent")])
def test_a_realigned_prompt_that_cannot_be_proved_is_not_exported(kept: int, why: str) -> None:
    w = said()
    turn = realigned(w, kept=kept, **({"prompt_crc": 1} if kept == 4 else {}))
    assert (turn.id, 2, "the prompt that was sent cannot be proved") in [
        (u.turn_id, u.tokens, u.reason) for u in unroll(w.tree, Origin("s")).untrained
    ], why


async def test_a_gateways_handles_keep_to_its_longest() -> None:
    async def finished(longest: Longest) -> Sample:
        async with bench(["One two three."] * 2, longest=longest) as b:
            asked = body("Begin.")
            first = await b.post(asked)
            await b.post(follow(asked, first.body, "Go on."))
            (sample,) = await b.handle.finish()
            return sample

    whole = await finished(UNLIMITED)
    cut = await finished(Longest(len(whole.token_ids) - 1))
    assert cut.token_ids.tolist() == whole.token_ids[:-1].tolist()
    assert (whole.statuses.get("cut"), cut.statuses["cut"]) == (None, 1)


class CountedTurns(dict):
    """Counts the turns that are looked up."""

    looked_up = 0

    def __getitem__(self, key: str) -> Turn:
        self.looked_up += 1
        return super().__getitem__(key)


def planted(turns: int, fork_every: int) -> Weaver:
    """Turns of one token each, put in directly: a long chain with a short branch at every `fork_every`th."""
    w = Weaver()
    w.tree.turns = CountedTurns()
    crc: dict[str | None, int] = {None: 0}
    from zlib import crc32

    spine: str | None = None
    length = 0
    for i in range(turns):
        side = i % fork_every == fork_every - 1
        token = ids([i])
        seen = crc32(token.astype("<i4").tobytes(), crc[spine])
        turn = Turn(
            id=f"t{i}",
            index=i,
            base=spine,
            fork=None,
            appended=token,
            prompt_len=length + 1,
            prompt_crc=seen,
            output=token,
            logprobs=floats([-0.5]),
            finish=Finish(FinishReason.STOP),
            outcome=Outcome.DELIVERED,
            sampling=Sampling(),
        )
        w.tree.turns[turn.id] = turn
        if not side:
            crc[turn.id] = crc32(token.astype("<i4").tobytes(), seen)
            spine, length = turn.id, length + 2
    return w


def test_unrolling_is_linear_in_what_it_reads() -> None:
    """A hundred thousand turns: what is looked up before the first sample grows with the turns, not with their chains."""

    def before_the_first(turns: int) -> int:
        w = planted(turns, fork_every=10)
        counted = w.tree.turns
        assert isinstance(counted, CountedTurns)
        assert next(iter_samples(w.tree, Origin("s"))).loss_mask.sum() > 0
        return counted.looked_up

    small, large = before_the_first(10_000), before_the_first(100_000)
    assert large < 12 * small
    assert large < 10 * 100_000


def test_one_sample_at_a_time_holds_one_sample() -> None:
    """Two hundred samples that share a prefix of 20,000 tokens: no more of them in memory than a few."""
    w = Weaver()
    w.say(request(user("a")), assistant("A"), output=tuple(range(20_000)))
    for i in range(200):
        w.say(request(user("a"), assistant("A"), user(f"{i}")), assistant("B"))
    tokens = trained = 0
    tracemalloc.start()
    for sample in iter_samples(w.tree, Origin("s")):
        tokens += len(sample.token_ids)
        trained += int(sample.loss_mask.sum())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tokens, trained) == (200 * 20_006, 20_000 + 200 * 2)
    one = 20_006 * (4 + 1 + 4 + 4 + 8)
    assert peak < 8 * one


def test_all_at_once_is_the_list_of_one_at_a_time() -> None:
    w = planted(50, fork_every=7)
    for longest in (UNLIMITED, Longest(31), Longest(31, Overlong.TURN), Longest(31, Overlong.DROP)):
        one_by_one = iter_samples(w.tree, Origin("s"), longest=longest)
        assert isinstance(one_by_one, Iterator)
        found = unroll(w.tree, Origin("s"), longest=longest)
        assert tuple(one_by_one) == found.samples
        trained = sum(int(s.loss_mask.sum()) for s in found.samples)
        assert trained + sum(u.tokens for u in found.untrained) == 50
        assert all(len(s.token_ids) <= (longest.max_tokens or np.inf) for s in found.samples)
