"""Recorded logprobs against an engine's own prefill, over HTTP."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.export.weave import TWO_LINEAGES, weave
from turnloom.engine.sglang import SGLangEngine
from turnloom.export.check import check_engine
from turnloom.export.report import format_engine_report
from turnloom.testing.scripted_engine import ScriptedEngine
from turnloom.types import Sample, floats, ids


@pytest.fixture
async def server():
    async with ScriptedEngine(vocab_size=10_000, context_length=1_000) as server:
        yield server


@pytest.fixture
async def engine(server):
    engine = SGLangEngine(server.url)
    yield engine
    await engine.close()


def off_by(sample: Sample, position: int, nats: float) -> Sample:
    logprobs = np.array(sample.logprobs)
    logprobs[position] -= nats
    return replace(sample, logprobs=floats(logprobs))


async def test_an_engine_that_agrees_is_asked_once_per_trained_run(engine, server):
    report = await check_engine(weave(TWO_LINEAGES), engine)
    assert report.ok
    assert (report.compared, report.max, report.mean) == (9, 0.0, 0.0)
    asked = [(len(r["input_ids"]), r["logprob_start_len"] + 1) for r in server.requests]
    assert asked == [(5, 3), (10, 7), (13, 11), (11, 9)]


async def test_a_logprob_of_another_policy_is_found_where_it_is(engine):
    first, second = weave(TWO_LINEAGES)
    report = await check_engine([first, off_by(second, 10, 0.5)], engine)
    assert not report.ok
    found = report.samples[1]
    assert (found.row, found.worst, found.compared) == (2, 10, 2)
    assert found.max == pytest.approx(0.5)
    assert found.mean == pytest.approx(0.25)
    assert report.mean == pytest.approx(0.5 / 9)
    assert "TOO FAR" in format_engine_report(report)[1]
    assert "NOT within" in format_engine_report(report)[-1]


async def test_the_tolerance_decides(engine):
    samples = [off_by(weave([(None, 1, 2)])[0], 1, 0.01)]
    assert not (await check_engine(samples, engine)).ok
    assert (await check_engine(samples, engine, tolerance=0.1)).ok


async def test_tokens_that_do_not_train_are_not_compared(engine):
    _, second = weave(TWO_LINEAGES)
    assert (await check_engine([off_by(second, 3, 5.0)], engine)).max == 0.0


@pytest.mark.parametrize(
    ("convention", "temperature", "comparable"),
    [
        ("raw", 0.5, True),
        ("temperature", 1.0, True),
        ("temperature", 0.5, False),
        ("raw+temperature", 0.5, False),
        (None, 1.0, True),
        (None, 0.5, False),
    ],
)
async def test_logprobs_after_a_temperature_are_not_comparable(engine, convention, temperature, comparable):
    (sample,) = weave([(None, 1, 2)])
    sample = replace(sample, temperature=temperature, metadata={"logprob_convention": convention} if convention else {})
    report = await check_engine([sample], engine)
    assert report.compared == (2 if comparable else 0)
    assert ("not comparable" in report.samples[0].reason) is not comparable
    assert report.ok is comparable


async def test_one_sample_that_is_not_comparable_does_not_fail_the_others(engine):
    first, second = weave(TWO_LINEAGES)
    report = await check_engine([replace(first, temperature=0.5, metadata={}), second], engine)
    assert report.ok
    assert report.compared == 2


async def test_a_missing_logprob_is_infinitely_wrong(engine):
    (sample,) = weave([(None, 1, 2)])
    report = await check_engine([replace(sample, logprobs=floats([np.nan, -0.5, np.nan]))], engine)
    assert report.max == float("inf")
    assert not report.ok


async def test_a_sequence_that_the_engine_refuses_is_not_ok(engine):
    (sample,) = weave([(None, 1, 2)])
    for tokens in (ids([1, 2, 99_999]), None):
        refused = replace(sample, token_ids=tokens) if tokens is not None else weave([(None, 2_000, 1)])[0]
        report = await check_engine([refused, *weave(TWO_LINEAGES, "s2")], engine)
        assert not report.ok
        assert report.samples[0].refused
        assert "refused" in format_engine_report(report)[0]


async def test_a_first_token_that_trains_cannot_be_compared(engine):
    (sample,) = weave([(None, 0, 2)])
    report = await check_engine([sample], engine)
    assert "first token" in report.samples[0].reason
    assert not report.ok


async def test_nothing_that_trains_is_nothing_wrong(engine):
    (sample,) = weave([(None, 1, 2)])
    report = await check_engine([replace(sample, loss_mask=np.zeros(3, np.uint8))], engine)
    assert report.ok
    assert "nothing trains" in format_engine_report(report)[-1]
    assert (await check_engine([], engine)).ok


async def test_a_trained_token_that_was_never_sampled_is_not_compared(engine):
    (sample,) = weave([(None, 2, 1)])
    report = await check_engine([replace(sample, loss_mask=np.array([0, 1, 0], np.uint8))], engine)
    assert not report.ok
    assert "no trained token was sampled" in report.samples[0].reason


async def test_the_report_is_json(engine):
    found = json.loads(json.dumps((await check_engine(weave(TWO_LINEAGES), engine)).to_dict()))
    assert found["ok"] is True
    assert found["compared"] == 9
    assert [s["trained"] for s in found["samples"]] == [7, 2]
