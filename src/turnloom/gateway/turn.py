"""The main path: one model call from the neutral request to the recorded turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from turnloom.engine.contract import Engine, Trace
from turnloom.errors import EngineAborted
from turnloom.gateway.metrics import Metrics
from turnloom.gateway.output import Output
from turnloom.gateway.policy import SAMPLED, History
from turnloom.gateway.prompt import build_prompt, continued, prepare
from turnloom.gateway.respond import Choice
from turnloom.gateway.session import Session, TurnRecorder
from turnloom.parse.contract import ParserFactory
from turnloom.render.contract import Renderer, Tokenizer
from turnloom.types import FinishReason, Outcome, Request, Turn
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
    metrics: Metrics
    clock: Callable[[], float]
    new_id: Callable[[], str]
    history: History = SAMPLED
    others: Mapping[str, Served] = field(default_factory=dict)

    def served(self, pool: str) -> Served:
        return self.others[pool] if pool else self.policy


async def take_turn(parts: Parts, session: Session, dialect: Dialect, request: Request, out: Choice) -> Turn:
    """Resolve, build the prompt, sample and stream, commit, finish.

    Raises a TurnloomError that the client should see; whatever was sampled until
    then is on record with its outcome.
    """
    with session.turn_slot():
        turn_id, started, model = parts.new_id(), parts.clock(), parts.served(request.pool)
        head = Head(turn_id, request.model or model.name, int(started), 0, request)
        out.open(head)
        engine = await model.engine.capabilities()
        pending = await prepare(session.tree, continued(session.tree, request))
        prompt = await build_prompt(model.renderer, session.tree, pending, parts.history)
        sampling = session.sampling_for(request, prompt, engine, out.number)
        parser = model.parser(request.tools if request.call_tools else (), prompt.reasoning_open)
        builder = ReplyBuilder(turn_id, dialect.call_prefix)
        ends, stop = model.renderer.end_ids, sampling.stop
        output = Output(model.tokenizer, parser, builder, end_ids=ends, stop=stop, show_tokens=request.logprobs)
        trace = Trace(end_ids=ends)
        decode = model.tokenizer.decode
        record = TurnRecorder(session, turn_id, pending, prompt, output, sampling, engine, decode, started, parts.clock, trace)
        head = replace(head, prompt_tokens=len(prompt.ids))
        out.open(head)
        try:
            async with asyncio.timeout(session.row.limits.turn_timeout) as trace.timer:
                stream = model.engine.sample(prompt.ids, sampling, rid=turn_id, routing_key=session.row.id, trace=trace)
                async with aclosing(stream) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        for event in output.feed(chunk):
                            await out.event(event)
                        trace.complete = output.stopped
                        if output.surplus and output.stopped:
                            break
            for event in output.close():
                await out.event(event)
            if output.finish.reason is FinishReason.ABORT:
                raise EngineAborted(f"the engine ended this reply early: {output.finish.message or 'aborted'}")
            turn = await record(Outcome.DELIVERED)
            await out.finish(Reply(head, output.message(), output.finish, len(output.ids), tuple(output.tokens)))
        except asyncio.CancelledError:
            closed = session.closing
            await record(Outcome.ABORTED if closed else Outcome.ORPHANED, "the session was closed" if closed else "the client left")
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
            parts.metrics.turn(record.turn)
        return turn


async def count_tokens(parts: Parts, session: Session, request: Request) -> int:
    """The tokens that this request's prompt would have. Records nothing."""
    pending = await prepare(session.tree, continued(session.tree, request))
    prompt = await build_prompt(parts.served(request.pool).renderer, session.tree, pending, parts.history)
    return len(prompt.ids)
