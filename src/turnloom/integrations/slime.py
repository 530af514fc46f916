"""slime's rollouts by Turnloom: `--custom-generate-function-path turnloom.integrations.slime.generate`.

slime calls `generate(args, sample, sampling_params)` once per sample, in one event
loop. The first call starts a gateway before slime's own engines
(`args.sglang_router_ip`, `args.sglang_router_port`, with the tokenizer
`args.hf_checkpoint`); it is ended by `close`, or with the process. Settings are the object `turnloom` of the
file of `--custom-config-path`, whose keys slime puts on `args`:

    turnloom:
      agent: claude-code
      sandbox: bubblewrap
      time_budget: 1800

It never imports slime: the sample that comes in is copied, and has the enum that it needs.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import secrets
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnloom.errors import ConfigError, TaskError
from turnloom.export.slime import aborted, to_slime
from turnloom.gateway.api import Gateway, SessionHandle
from turnloom.gateway.bind import loopback
from turnloom.harness.contract import Harness
from turnloom.harness.registry import load_harness, require
from turnloom.imports import described, load_object
from turnloom.rollout.attempt import RolloutSettings
from turnloom.rollout.boot import limited
from turnloom.rollout.contract import Rollout, RolloutStatus, Task
from turnloom.rollout.runner import rollout
from turnloom.rollout.task import load_task
from turnloom.sandbox.registry import load_sandbox
from turnloom.store.contract import Limits
from turnloom.types import Sampling

log = logging.getLogger("turnloom.integrations")


class Settings(BaseModel):
    """What `turnloom` may hold. Times are seconds.

    `task` names a function of slime's sample that returns a Task (`package.module:name`);
    without it the sample's metadata has the path of one under `task`. `gateway` are
    further arguments of `Gateway`. Without a `store` a session is forgotten once its
    samples are handed over.
    """

    model_config = ConfigDict(extra="forbid")
    agent: str
    agent_options: dict[str, Any] = {}
    sandbox: str = "local"
    sandbox_options: dict[str, Any] = {}
    task: str | None = None
    engine: str | None = None
    store: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    gateway: dict[str, Any] = {}
    time_budget: float = Field(1800.0, gt=0)
    guard: float | None = Field(None, gt=0)
    retries: int = Field(2, ge=0)
    boots: int = Field(16, ge=1)
    max_turns: int | None = Field(None, ge=1)


@dataclass(frozen=True, slots=True)
class _Running:
    """What all calls in one event loop share."""

    settings: Settings
    gateway: Gateway
    harness: Harness
    rollouts: RolloutSettings
    limits: Limits
    task_of: Callable[[Any], Task]


@dataclass(frozen=True, slots=True)
class _Pinned:
    """The gateway, with this call's sampling for the sessions that it opens."""

    gateway: Gateway
    sampling: Sampling
    limits: Limits

    async def open_session(self, *, id: str, group: str, rollout: str, metadata: dict[str, object]) -> SessionHandle:
        return await self.gateway.open_session(
            id=id, group=group, rollout=rollout, metadata=metadata, sampling=self.sampling, limits=self.limits
        )

    async def handle(self, session_id: str) -> SessionHandle:
        return await self.gateway.handle(session_id)


_running: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[_Running]] = WeakKeyDictionary()


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any]) -> list[Any]:
    """Run the agent on the sample's task; the rollout's samples, of slime's own type, in the order of their turns.

    They are copies of `sample` and share its `rollout_id` (its `index` where it has
    none), so that slime counts them as one. A rollout that was not graded is one row with
    the status ABORTED, marked for removal, with the reason under `abort_reason` in its
    metadata. Raises ConfigError for settings that no rollout could go well with.
    """
    running = await _started(args)
    try:
        task = running.task_of(sample)
    except TaskError as error:
        return [_row(sample, aborted(f"task: {error}"))]
    pinned = _Pinned(running.gateway, _sampling(sampling_params), running.limits)
    name = f"{task.id}-{getattr(sample, 'index', None)}-{uuid.uuid4().hex[:12]}"
    group = str(getattr(sample, "group_index", None) or 0)
    result = await rollout(pinned, task, running.harness, running.rollouts, rollout_id=name, group=f"{task.id}-{group}")
    try:
        return _rows(running, sample, result)
    finally:
        if running.settings.store is None and result.session_id:
            await (await running.gateway.handle(result.session_id)).drop()


async def close() -> None:
    """End the gateway of this event loop, if one was started."""
    starting = _running.pop(asyncio.get_running_loop(), None)
    if starting is not None and not _failed(starting):
        await (await starting).gateway.stop()


def _rows(running: _Running, sample: Any, result: Rollout) -> list[Any]:
    if result.status is not RolloutStatus.GRADED or not result.samples:
        reason = f"{result.cause}: {result.error}" if result.cause else "no turn of it trains"
        log.warning("rollout %s is aborted: %s", result.rollout_id, reason)
        return [_row(sample, aborted(reason))]
    decode = running.gateway.tokenizer.decode if running.gateway.tokenizer is not None else None
    rows = [to_slime(each, decode) for each in result.samples]
    for fields in rows:
        fields["metadata"] |= {"agent_outcome": str(result.outcome), "turns": result.turns, "grade": result.detail}
    return [_row(sample, fields) for fields in rows]


def _row(sample: Any, fields: Mapping[str, Any]) -> Any:
    """A copy of slime's sample with these fields; what the trainer noted in its metadata stays beside ours."""
    row = copy.copy(sample)
    for name, value in fields.items():
        setattr(row, name, value)
    row.status = type(sample).Status(fields["status"])
    row.metadata = {**(sample.metadata or {}), "turnloom": fields["metadata"]}
    if "abort_reason" in fields["metadata"]:
        row.metadata["abort_reason"] = fields["metadata"]["abort_reason"]
    own = getattr(sample, "rollout_id", None)
    row.rollout_id = own if own is not None else sample.index
    return row


async def _started(args: Any) -> _Running:
    """The first call of an event loop starts it, and the others wait for that; one that failed is tried again."""
    loop = asyncio.get_running_loop()
    starting = _running.get(loop)
    if starting is None or _failed(starting):
        starting = _running[loop] = loop.create_task(_start(args))
    return await asyncio.shield(starting)


def _failed(starting: asyncio.Task[_Running]) -> bool:
    return starting.done() and (starting.cancelled() or starting.exception() is not None)


async def _start(args: Any) -> _Running:
    try:
        settings = Settings.model_validate(getattr(args, "turnloom", None) or {})
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(("turnloom", *(str(part) for part in problem["loc"])))
        raise ConfigError(f"the file of --custom-config-path: {place}: {problem['msg']}") from error
    harness = load_harness(settings.agent, **settings.agent_options)
    backend = load_sandbox(settings.sandbox, **settings.sandbox_options)
    await require(harness)
    await backend.require()
    gateway, task_of = _gateway(args, settings), _task_function(settings)
    rollouts = RolloutSettings(
        limited(backend.make, asyncio.Semaphore(settings.boots)),
        time_budget=settings.time_budget,
        guard=settings.guard,
        retries=settings.retries,
    )
    await gateway.start()
    context = _context(args) or (await gateway.engine.capabilities()).context_length
    limits = Limits(max_turns=settings.max_turns, max_context=_context(args))
    return _Running(settings, gateway, harness, replace(rollouts, context_tokens=context), limits, task_of)


def _gateway(args: Any, settings: Settings) -> Gateway:
    options = {
        "engine": settings.engine or f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
        "tokenizer": args.hf_checkpoint,
        "store": settings.store,
        "host": settings.host,
        "port": settings.port,
        # Nobody is told it: all that changes sessions is in this process.
        "admin_key": "" if loopback(settings.host) else secrets.token_urlsafe(32),
        **settings.gateway,
    }
    try:
        return Gateway(**options)
    except TypeError as error:
        raise ConfigError(f"turnloom.gateway: {error}") from error


def _context(args: Any) -> int | None:
    return int(getattr(args, "rollout_max_context_len", None) or 0) or None


def _task_function(settings: Settings) -> Callable[[Any], Task]:
    if settings.task is None:
        return _named_task
    function = load_object(settings.task, "task")

    def task_of(sample: Any) -> Task:
        try:
            task: Task = function(sample)
        except TaskError:
            raise
        except Exception as error:
            raise TaskError(described(error)) from error
        return task

    return task_of


def _named_task(sample: Any) -> Task:
    path = (sample.metadata or {}).get("task")
    if not isinstance(path, str):
        raise TaskError("the sample's metadata has no path under 'task'; or set turnloom.task to a function that makes one")
    return load_task(Path(path))


def _sampling(given: Mapping[str, Any]) -> Sampling:
    """slime's parameters are SGLang's. What says how text is shown (`skip_special_tokens`, …) is not the policy's."""
    stop = given.get("stop") or ()
    return Sampling(
        temperature=float(given.get("temperature", 1.0)),
        top_p=float(given.get("top_p", 1.0)),
        top_k=int(given.get("top_k", -1)),
        max_tokens=given.get("max_new_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=given.get("sampling_seed"),
    )
