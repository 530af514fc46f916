"""Samples: what trains, where, once, and why the rest does not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.histories import Weaver, assistant, request, user
from turnloom.core.dump import dump_samples
from turnloom.core.unroll import CONSTRAINED, DEFAULT_TRAINING, Origin, Training, Unrolled, prompt_crc, unroll
from turnloom.types import (
    COMPACTION,
    MAIN,
    SIDE,
    CallRecord,
    CallStatus,
    Finish,
    FinishReason,
    Outcome,
    Sample,
    Sampling,
    VersionSpan,
    floats,
    ids,
)


def samples(w: Weaver) -> tuple[Sample, ...]:
    return unroll(w.tree, Origin("s")).samples


def test_one_lineage_is_one_sample_with_each_output_trained() -> None:
    w = Weaver()
    w.say(request(user("a")), assistant("A"))
    w.say(request(user("a"), assistant("A"), user("b")), assistant("B"), output=(210, 211, 212))
    (sample,) = samples(w)
    assert sample.token_ids.tolist() == [100, 101, 200, 201, 101, 101, 210, 211, 212]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert sample.turn_index.tolist() == [-1, -1, 0, 0, -1, -1, 1, 1, 1]
    assert np.isnan(sample.logprobs).tolist() == [True, True, False, False, True, True, False, False, False]
    assert (sample.prompt_len, sample.weight, sample.rollout_id) == (2, 1.0, "s")


def test_a_shared_turn_trains_once_and_weights_count_the_rollout_once() -> None:
    w = Weaver()
    w.say(request(user("a")), assistant("A"))
    for letter in "bcd":
        w.say(request(user("a"), assistant("A"), user(letter)), assistant(letter.upper()))
    found = samples(w)
    assert [int(s.loss_mask[2:4].sum()) for s in found] == [2, 0, 0]
    assert all(s.loss_mask[6:].all() for s in found)
    assert sum(s.weight for s in found) == pytest.approx(1.0)


@pytest.mark.parametrize("outcome", [Outcome.ORPHANED, Outcome.ABORTED, Outcome.FAILED])
def test_what_was_not_delivered_is_context_at_most(outcome: Outcome) -> None:
    w = Weaver()
    w.say(request(user("a")), assistant("A"), outcome=outcome)
    assert samples(w) == ()
    w.say(request(user("a"), assistant("A"), user("b")), assistant("B"))
    (sample,) = samples(w)
    assert sample.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert [u.reason for u in unroll(w.tree, Origin("s")).untrained] == [f"outcome {outcome}"]


def test_an_untrained_end_is_cut_off() -> None:
    w = Weaver()
    w.say(request(user("a")), assistant("A"))
    w.say(request(user("a"), assistant("A"), user("b")), assistant("B"), outcome=Outcome.ORPHANED)
    (sample,) = samples(w)
    assert len(sample.token_ids) == 4


def test_a_prompt_that_cannot_be_proved_is_not_exported_nor_what_follows() -> None:
    w = Weaver()
    w.say(request(user("a")), assistant("A"))
    w.say(request(user("a"), assistant("A"), user("b")), assistant("B"), prompt_crc=12345)
    w.say(request(user("a"), assistant("A"), user("b"), assistant("B"), user("c")), assistant("C"))
    found = unroll(w.tree, Origin("s"))
    assert [len(s.token_ids) for s in found.samples] == [4]
    assert [(u.turn_id, u.reason) for u in found.untrained] == [
        ("t1", "the prompt that was sent cannot be proved"),
        ("t2", "the prompt that was sent cannot be proved"),
    ]


def test_tampered_tokens_are_not_exported() -> None:
    w = Weaver()
    pending = w.tree.prepare(request(user("a")))
    w.commit(pending, assistant("A"), appended=ids([1, 2]), prompt_len=2, prompt_crc=prompt_crc(ids([1, 3])))
    assert samples(w) == ()


def test_missing_logprobs_and_empty_outputs_have_reasons() -> None:
    w = Weaver()
    w.say(request(user("a")), assistant(""), output=())
    w.say(request(user("b")), assistant("B"), logprobs=floats([-0.5, float("nan")]))
    w.say(request(user("c")), assistant("C"), logprobs=floats())
    found = unroll(w.tree, Origin("s"))
    assert found.samples == ()
    assert [u.reason for u in found.untrained] == ["nothing was sampled", "logprobs are missing", "logprobs are missing"]


def test_statuses_versions_and_origin_are_carried() -> None:
    w = Weaver()
    bad = CallRecord(CallStatus.INVALID_JSON, "ls", "raw", 0, 3)
    w.say(
        request(user("a")),
        assistant("A"),
        output=(1, 2, 3),
        calls=(bad,),
        versions=(VersionSpan("v1", 0, 1), VersionSpan("v2", 1, 9)),
        finish=Finish(FinishReason.LENGTH),
        escaped=2,
    )
    (sample,) = unroll(w.tree, Origin("s", "r", "g", 0.5, {"task": "t"})).samples
    assert sample.weight_version == (None, None, "v1", "v2", "v2")
    assert sample.statuses == {"call_invalid_json": 1, "escaped_control_tokens": 2, "ill_formed_calls": 1, "truncated": 1, "turns": 1}
    assert (sample.session_id, sample.rollout_id, sample.group_id, sample.reward) == ("s", "r", "g", 0.5)
    assert sample.metadata == {"task": "t", "logprob_convention": "raw"}
    assert (sample.outcome, sample.finish_reason) == ("delivered", "length")


def test_a_custom_policy_chooses_what_trains() -> None:
    w = Weaver()
    w.say(request(user("a")), assistant("A"), outcome=Outcome.ORPHANED)
    (sample,) = unroll(w.tree, Origin("s"), lambda turn: None).samples
    assert sample.loss_mask.sum() == 2


def test_dump_shows_runs_and_reasons() -> None:
    w = Weaver()
    w.say(request(user("a")), assistant("A"))
    w.say(request(user("z")), assistant("Z"), outcome=Outcome.FAILED)
    lines = dump_samples(unroll(w.tree, Origin("s")), lambda found: f"<{len(found)}>")
    assert lines == [
        "sample 0: 4 tokens, 2 trained, weight 1",
        "   context [0, 2) <2>",
        "   train   [2, 4) <2>",
        "untrained: 2 tokens of turn t1: outcome failed",
    ]


def of_labels(policy: Training) -> Unrolled:
    """main, main that a compaction goes on from, and beside them a side request."""
    w = Weaver()
    w.say(request(user("a")), assistant("A"), label=MAIN)
    w.say(request(user("a"), assistant("A"), user("b")), assistant("B"), label=MAIN)
    w.say(request(user("a"), assistant("A"), user("b"), assistant("B"), user("sum up")), assistant("S"), label=COMPACTION)
    w.say(request(user("title?")), assistant("T"), label=SIDE)
    return unroll(w.tree, Origin("s"), policy)


def test_labels_that_are_skipped_are_context_at_most_and_their_reason_is_told() -> None:
    found = of_labels(DEFAULT_TRAINING)
    assert [(s.label, int(s.loss_mask.sum()), s.weight) for s in found.samples] == [(MAIN, 6, 1.0)]
    assert [(u.turn_id, u.tokens, u.reason) for u in found.untrained] == [("t3", 2, "label side")]

    found = of_labels(Training(skip=frozenset()))
    assert [(s.label, int(s.loss_mask.sum()), s.weight) for s in found.samples] == [(MAIN, 6, 0.5), (SIDE, 2, 0.5)]
    assert found.untrained == ()

    found = of_labels(Training(skip=frozenset({COMPACTION, SIDE})))
    assert [(s.label, len(s.token_ids)) for s in found.samples] == [(MAIN, 8)]
    assert [u.reason for u in found.untrained] == ["label compaction", "label side"]

    found = of_labels(Training(skip=frozenset({MAIN})))
    assert [(s.label, s.loss_mask.tolist()) for s in found.samples] == [(COMPACTION, [0] * 10 + [1, 1]), (SIDE, [0, 0, 1, 1])]
    assert [u.reason for u in found.untrained] == ["label main", "label main"]


def test_what_a_schema_held_does_not_train_unless_that_is_wanted() -> None:
    w = Weaver()
    w.say(request(user("a")), assistant("{}"), sampling=Sampling(json_schema="{}"))
    w.say(request(user("a"), assistant("{}"), user("b")), assistant("B"))
    found = unroll(w.tree, Origin("s"))
    assert [s.loss_mask.tolist() for s in found.samples] == [[0] * 6 + [1, 1]]
    assert [(u.turn_id, u.tokens, u.reason) for u in found.untrained] == [("t0", 2, CONSTRAINED)]
    assert unroll(w.tree, Origin("s"), Training(constrained=True)).untrained == ()


def test_an_outcome_is_told_before_a_label() -> None:
    w = Weaver()
    w.say(request(user("a")), assistant("A"), outcome=Outcome.ABORTED, label=SIDE, sampling=Sampling(json_schema="{}"))
    assert [u.reason for u in unroll(w.tree, Origin("s")).untrained] == ["outcome aborted"]
