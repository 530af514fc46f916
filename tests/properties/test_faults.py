"""The laws can fail: with a fault put into the product, the sessions of `make laws` name the law that it breaks."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.properties.agreement import Faithful
from tests.properties.replies import Replies
from tests.properties.subjects import Subject, subject_of
from tests.properties.trials import session_of
from tests.properties.violations import by_law, violations
from turnloom.core import unroll as unrolling
from turnloom.core.unroll import Unrolled
from turnloom.gateway import prompt as prompts
from turnloom.gateway.output import Output
from turnloom.gateway.prompt import Prompt
from turnloom.gateway.record import TurnRecorder
from turnloom.gateway.session import Session
from turnloom.render.contract import Rendered
from turnloom.render.template import ChatTemplateRenderer
from turnloom.types import Fork, ForkKind, floats, ids

NAME = "qwen2.5"
SESSIONS = 12


def broken(subject: Subject | None = None) -> Counter[str]:
    subject = subject or subject_of(NAME)
    replies = Replies(subject)
    found: Counter[str] = Counter()
    for number in range(SESSIONS):
        found += by_law(violations(asyncio.run(session_of(subject, replies, number))))
    return found


def test_without_a_fault_nothing_is_found() -> None:
    assert not broken()


def test_law1_a_held_id_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    build = prompts._build

    def fault(*args: object) -> Prompt:
        made = build(*args)  # type: ignore[arg-type]
        if made.base is None or made.fork is not None:
            return made
        at = len(made.ids) - len(made.appended) - 1
        return replace(made, ids=ids(np.delete(made.ids, at)))

    monkeypatch.setattr(prompts, "_build", fault)
    assert broken()["law 1"]


def test_law2_the_engine_gets_another_prompt_than_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    build = prompts._build

    def fault(*args: object) -> Prompt:
        made = build(*args)  # type: ignore[arg-type]
        return replace(made, ids=ids([*made.ids[:-1], 0]))

    monkeypatch.setattr(prompts, "_build", fault)
    assert broken()["law 2"]


def test_law3_a_turn_trains_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Session.unroll

    def fault(session: Session) -> Unrolled:
        found = whole(session)
        return replace(
            found, samples=found.samples + tuple(replace(s, sample_index=len(found.samples) + i) for i, s in enumerate(found.samples))
        )

    monkeypatch.setattr(Session, "unroll", fault)
    assert broken()["law 3"]


def test_law3_a_turn_gives_no_reason_not_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrolling, "_untrained", lambda *given: ())
    assert broken()["law 3"]


def test_law4_a_wrong_logprob(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Output, "logprobs", property(lambda self: floats(np.concatenate([*self._logprobs, []])[::-1])))
    assert broken()["law 4"]


def test_law4_a_prompt_id_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Session.unroll

    def fault(session: Session) -> Unrolled:
        found = whole(session)
        return replace(found, samples=tuple(replace(s, loss_mask=np.roll(s.loss_mask, -1)) for s in found.samples))

    monkeypatch.setattr(Session, "unroll", fault)
    assert broken()["law 4"]


def test_law5_unrolling_counts_up(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, times = Session.unroll, iter(range(10**6))

    def fault(session: Session) -> Unrolled:
        found = whole(session)
        return replace(found, samples=tuple(replace(s, label=str(next(times))) for s in found.samples))

    monkeypatch.setattr(Session, "unroll", fault)
    assert broken()["law 5"]


def test_law9_text_becomes_a_control_token() -> None:
    subject = subject_of(NAME)
    unsafe = ChatTemplateRenderer(subject.tokenizer, special_tokens="template")
    assert broken(replace(subject, renderer=unsafe))["law 9"]


def test_forks_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TurnRecorder, "_fork", lambda recorder: None)
    assert broken()["forks"]


def test_forks_with_a_false_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    explained = TurnRecorder._fork

    def fault(recorder: TurnRecorder) -> Fork | None:
        fork = explained(recorder)
        return fork and replace(fork, kind=ForkKind.TEMPLATE)

    monkeypatch.setattr(TurnRecorder, "_fork", fault)
    assert broken()["forks"]


def test_agreement_a_bridge_lacks_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = ChatTemplateRenderer.bridge

    def fault(renderer: ChatTemplateRenderer, *args: object, **more: object) -> object:
        found = bridge(renderer, *args, **more)  # type: ignore[arg-type]
        return replace(found, ids=found.ids[1:]) if isinstance(found, Rendered) else found

    subject = subject_of(NAME)
    monkeypatch.setattr(ChatTemplateRenderer, "bridge", fault)
    assert asyncio.run(Faithful(subject, Replies(subject), 0, cut=False).run(4)).wrong
