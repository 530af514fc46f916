"""The main path: one model call from the neutral request to the recorded turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from turnloom.core.retry import whole
from turnloom.engine.contract import Chunk, Engine, Trace
from turnloom.engine.seam import Seam
from turnloom.errors import EngineAborted
from turnloom.gateway.live import Live
from turnloom.gateway.metrics import Metrics
from turnloom.gateway.observe import Observer, Stage, TurnWatch
from turnloom.gateway.output import Output
from turnloom.gateway.policy import SAMPLED, History
from turnloom.gateway.prompt import Prompt, build_prompt, continued, prepare
from turnloom.gateway.record import Plan, TurnRecorder
from turnloom.gateway.session import Session
from turnloom.parse.contract import ParserFactory
from turnloom.render.contract import Renderer, Tokenizer
from turnloom.types import FinishReason, Outcome, Request, Turn, ids
from turnloom.wire.contract import Dialect, Head, Reply
from turnloom.wire.reply import ReplyBuilder


@dataclass(frozen=True, slots=True)
class Served:
    """One model: the engine that samples it, and what writes and reads its tokens. `name` is what clients are told."""

    engine: Engine
    tokenizer: Tokenizer
    renderer: Renderer
    parser: ParserFactory
    name: str


@dataclass(frozen=True, slots=True)
class Parts:
    """What the main path is made of. Clock and ids are injected, so that a session can be replayed.

    `policy` is the model under training; `others` answer the requests that are sent to their pool, by its name.
    """

    policy: Served
    observe: Observer
    clock: Callable[[], float]
    new_id: Callable[[], str]
    history: History = SAMPLED
    others: Mapping[str, Served] = field(default_factory=dict)

    @property
    def metrics(self) -> Metrics:
        return self.observe.metrics

    def served(self, pool: str) -> Served:
        return self.others[pool] if pool else self.policy


async def take_turn(parts: Parts, session: Session, dialect: Dialect, request: Request, out: Live, before: Turn | None = None) -> Turn:
    """Resolve, build the prompt, sample and stream, commit, finish.

    `before` is what is on record of the reply that is asked for again: a whole
    reply is written once more, a beginning is gone on with. Raises a TurnloomError
    that the client should see; whatever was sampled until then is on record with
    its outcome.
    """
    model = parts.served(request.pool)
    started, turn_id = (parts.clock(), parts.new_id()) if before is None else (before.started, before.id)
    observed = parts.observe.turn(dialect=dialect.name, session=session.row.id, turn_id=turn_id, before=before)
    with session.turn_slot(new=before is None), observed as watch:
        head = Head(turn_id, request.model or model.name, int(started), 0 if before is None else before.prompt_len, request)
        out.open(head)
        plan = await (
            _plan(parts, model, session, request, out.number, head, watch) if before is None else _planned(session, request, before)
        )
        head = replace(head, prompt_tokens=len(plan.prompt.ids))
        out.open(head)
        output = _output(model, dialect, request, plan)
        trace = Trace(end_ids=model.renderer.end_ids)
        record = TurnRecorder(session, plan, output, model.tokenizer.decode, parts.clock, trace, parts.new_id)
        record.turn = before if before is not None and whole(before) else None
        try:
            await _speak(parts, model, session, plan, output, trace, out, watch)
            turn = await record(Outcome.DELIVERED)
            watch.mark(Stage.RECORDED)
            await out.finish(Reply(head, output.message(), output.finish, len(output.ids), tuple(output.tokens)))
            session.acknowledge(turn.id)
            watch.mark(Stage.ANSWERED)
        except asyncio.CancelledError as error:
            closed = session.closing
            why = "the session was closed" if closed else f"the client left{f': {error}' if str(error) else ''}"
            await record(Outcome.ABORTED if closed else Outcome.ORPHANED, why)
            raise
        except ConnectionError as error:
            await record(Outcome.ORPHANED, f"the client left: {error}")
            raise
        except TimeoutError as error:
            await record(Outcome.ABORTED, "the turn's time was up")
            raise EngineAborted(f"the reply took longer than {session.row.limits.turn_timeout} s") from error
        except Exception as error:
            await record(Outcome.ABORTED if isinstance(error, EngineAborted) else Outcome.FAILED, str(error))
            raise
        finally:
            watch.ended(record.turn, trace)
        return turn


async def _speak(
    parts: Parts, model: Served, session: Session, plan: Plan, output: Output, trace: Trace, out: Live, watch: TurnWatch
) -> None:
    """Sample and say what is sampled, to its end. Raises EngineAborted where that is not the reply's end, and TimeoutError."""
    async with asyncio.timeout(session.row.limits.turn_timeout) as trace.timer:
        async with aclosing(_chunks(parts, model, session, plan, trace, watch)) as chunks:
            async for chunk in chunks:
                for event in output.feed(chunk):
                    await out.event(event)
                trace.complete = output.stopped
                if output.surplus and output.stopped:
                    break
    watch.mark(Stage.SAMPLED)
    for event in output.close():
        await out.event(event)
    if output.finish.reason is FinishReason.ABORT:
        raise EngineAborted(f"the engine ended this reply early: {output.finish.message or 'aborted'}")


def _output(model: Served, dialect: Dialect, request: Request, plan: Plan) -> Output:
    parser = model.parser(request.tools if request.call_tools else (), plan.prompt.reasoning_open)
    builder = ReplyBuilder(plan.turn_id, dialect.call_prefix)
    ends, stop = model.renderer.end_ids, plan.sampling.stop
    return Output(model.tokenizer, parser, builder, end_ids=ends, stop=stop, show_tokens=request.logprobs)


async def _plan(parts: Parts, model: Served, session: Session, request: Request, choice: int, head: Head, watch: TurnWatch) -> Plan:
    """Where the request attaches, and what the engine is to be asked. From here on the turn is known to have begun."""
    engine = await model.engine.capabilities()
    pending = await prepare(session.tree, continued(session.tree, request))
    watch.mark(Stage.PREPARED)
    prompt = await build_prompt(model.renderer, session.tree, pending, parts.history)
    sampling = session.sampling_for(request, prompt, engine, choice)
    started = parts.clock()
    session.begin(head.turn_id, started)
    watch.mark(Stage.PROMPTED)
    return Plan(head.turn_id, started, pending, prompt, sampling, engine.model, engine.logprob_convention, choice)


async def _planned(session: Session, request: Request, before: Turn) -> Plan:
    """What the turn on record was made from: the very ids that the engine had."""
    pending = await prepare(session.tree, continued(session.tree, request))
    held = session.tree.held(before.base)[: before.kept]
    prompt = Prompt(ids([*held, *before.appended]), before.appended, before.base, before.fork, before.reasoning_open, before.escaped)
    return Plan(before.id, before.started, pending, prompt, before.sampling, before.model, before.logprob_convention, before.choice, before)


async def _chunks(parts: Parts, model: Served, session: Session, plan: Plan, trace: Trace, watch: TurnWatch) -> AsyncGenerator[Chunk]:
    """What is on record, then what is sampled after it."""
    before, prompt, sampling, seam = plan.before, plan.prompt.ids, plan.sampling, None
    if before is not None:
        held = Chunk(before.output, before.logprobs, before.finish if whole(before) else None, before.versions)
        yield held
        if whole(before):
            return
        seam = Seam(prompt, sampling)
        seam.add(held)
        seam.open()
        if (over := seam.over(trace)) is not None:
            yield over
            return
        prompt, sampling = seam.prompt, seam.sampling
    # An engine may still be getting rid of what was asked under the turn's own id.
    rid = plan.turn_id if before is None else parts.new_id()
    stream = model.engine.sample(prompt, sampling, rid=rid, routing_key=session.row.id, trace=trace)
    async with aclosing(stream) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            watch.chunk(len(chunk.ids))
            yield chunk if seam is None else seam.add(chunk)


async def count_tokens(parts: Parts, session: Session, request: Request) -> int:
    """The tokens that this request's prompt would have. Records nothing."""
    pending = await prepare(session.tree, continued(session.tree, request))
    prompt = await build_prompt(parts.served(request.pool).renderer, session.tree, pending, parts.history)
    return len(prompt.ids)
