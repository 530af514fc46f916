"""slime's calling convention with a stand-in for its `Sample`: slime itself needs a GPU stack and is not installed here.

The stand-in has the fields of `slime/utils/types.py` that a rollout reads or writes, with their defaults. Gateway, sandbox and
agent are real, the engine is scripted.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turnloom.errors import ConfigError, TaskError
from turnloom.integrations import slime
from turnloom.rollout import demo_task
from turnloom.testing.scripted_engine import Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_directory, qwen_tokenizer
from turnloom.types import Sampling

TALK = """
import json, os, sys, urllib.request
def ask(text):
    body = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode())
    return urllib.request.urlopen(request).read()
def fix():
    text = open("stats.py").read()
    open("stats.py", "w").write(text.replace(" (len(values) + 1)", " len(values)"))
"""


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None


def make_task(sample: Sample) -> Any:
    if sample.metadata.get("bad"):
        raise TaskError("this row is of no use")
    return demo_task()


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    def reply(body: dict[str, Any], index: int) -> Reply:
        cut = "ask-cut" in qwen_tokenizer().decode(body["input_ids"])
        return Reply(text="It goes on", finish="length") if cut else Reply(text="It is done.")

    async with ScriptedEngine(reply, tokenizer=qwen_tokenizer(), end_id=151645) as engine:
        yield engine
        await slime.close()


def args(engine: ScriptedEngine, tmp_path: Path, body: str, **more: Any) -> Any:
    host, _, port = engine.url.removeprefix("http://").partition(":")
    settings = {
        "agent": "command",
        "agent_options": {"argv": [sys.executable, "-c", TALK + body]},
        "sandbox_options": {"parent": tmp_path, "grace": 0.1},
        "task": "tests.integrations.test_slime:make_task",
        **more,
    }
    return SimpleNamespace(
        sglang_router_ip=host,
        sglang_router_port=int(port),
        hf_checkpoint=str(qwen_directory()),
        rollout_max_context_len=4096,
        turnloom=settings,
    )


SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_new_tokens": 64, "stop": None, "skip_special_tokens": False}


def whole(row: Sample) -> None:
    """What slime asserts of every row before it trains."""
    assert row.loss_mask is not None
    assert row.rollout_log_probs is not None
    assert len(row.loss_mask) == len(row.rollout_log_probs) == row.response_length <= len(row.tokens) - 1
    assert isinstance(row.reward, float)
    assert row.rollout_id is not None


async def test_a_rollout_of_several_samples_comes_back_as_rows_that_count_once(engine: ScriptedEngine, tmp_path: Path) -> None:
    asked = Sample(group_index=3, index=17, prompt="p", label="l", metadata={"mine": 1})
    rows = await slime.generate(args(engine, tmp_path, "ask('one'); ask('two'); fix()"), asked, SAMPLING)
    assert len(rows) == 2
    for row in rows:
        whole(row)
        assert isinstance(row, Sample)
        assert (row.index, row.group_index, row.rollout_id, row.prompt, row.label) == (17, 3, 17, "p", "l")
        assert (row.reward, row.status, row.remove_sample) == (1.0, Sample.Status.COMPLETED, False)
        assert row.loss_mask == [1] * row.response_length
        assert row.response == "It is done.<|im_end|>"
        assert all(p < 0 for p in row.rollout_log_probs)
        assert qwen_tokenizer().decode(row.tokens[-row.response_length :]) == row.response
        assert row.metadata["mine"] == 1
        assert row.metadata["turnloom"]["agent_outcome"] == "completed"
    assert rows[0].tokens != rows[1].tokens
    assert asked == Sample(group_index=3, index=17, prompt="p", label="l", metadata={"mine": 1}), "the sample that came in is left alone"
    assert engine.requests[0]["sampling_params"]["temperature"] == 0.7
    assert list(tmp_path.iterdir()) == []


async def test_a_reply_that_was_cut_off_is_truncated(engine: ScriptedEngine, tmp_path: Path) -> None:
    (row,) = await slime.generate(args(engine, tmp_path, "ask('ask-cut')"), Sample(index=1), SAMPLING)
    whole(row)
    assert (row.status, row.reward) == (Sample.Status.TRUNCATED, 0.0)


@pytest.mark.parametrize(
    ("body", "metadata", "more", "reason"),
    [
        ("sys.exit('wrong key')", {}, {"retries": 0}, "no_model_call: the agent made no model call"),
        ("ask('one'); import time; time.sleep(1000)", {}, {"guard": 3}, "guard: the guard time of 3 s was up while the agent ran"),
        ("ask('one')", {"bad": True}, {}, "task: this row is of no use"),
    ],
)
async def test_a_rollout_without_a_grade_is_marked_and_removed(
    engine: ScriptedEngine, tmp_path: Path, body: str, metadata: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    rows = await slime.generate(args(engine, tmp_path, body, **more), Sample(index=2, rollout_id=9, metadata=metadata), SAMPLING)
    (row,) = rows
    whole(row)
    assert (row.status, row.remove_sample, row.loss_mask, row.rollout_id) == (Sample.Status.ABORTED, True, [0], 9)
    assert row.metadata["abort_reason"].startswith(reason)
    assert list(tmp_path.iterdir()) == []


async def test_calls_at_once_share_one_gateway_and_leave_no_session(engine: ScriptedEngine, tmp_path: Path) -> None:
    asked = args(engine, tmp_path, "ask('one')")
    rows = await asyncio.gather(*(slime.generate(asked, Sample(index=i), SAMPLING) for i in range(3)))
    assert [row.rollout_id for (row,) in rows] == [0, 1, 2]
    (running,) = [task.result() for loop, task in slime._running.items() if loop is asyncio.get_running_loop()]
    assert await running.gateway.sessions() == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "turnloom.agent: Field required"),
        ({"agent": "command", "typo": 1}, "turnloom.typo: Extra inputs are not permitted"),
        ({"agent": "command", "agent_options": {"argv": ["x"]}, "gateway": {"typo": 1}}, "turnloom.gateway: .*typo"),
    ],
)
async def test_settings_that_are_wrong_are_said(engine: ScriptedEngine, tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    asked = args(engine, tmp_path, "")
    asked.turnloom = settings
    with pytest.raises(ConfigError, match=told):
        await slime.generate(asked, Sample(), SAMPLING)


def test_slimes_parameters_are_the_sessions() -> None:
    given = {**SAMPLING, "stop": ["END"], "top_k": 5, "sampling_seed": 3}
    assert slime._sampling(given) == Sampling(0.7, 1.0, 5, 64, ("END",), 3)
