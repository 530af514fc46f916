"""One turn's output as it grows: every sampled id kept, text decoded and parsed as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from turnloom.engine.contract import Chunk
from turnloom.errors import EngineProtocol
from turnloom.parse.contract import Parser
from turnloom.parse.stops import StopTrimmer
from turnloom.render.contract import Tokenizer
from turnloom.render.detokenize import IncrementalDecoder
from turnloom.render.spans import TokenSpans
from turnloom.types import CallRecord, Finish, FinishReason, FloatArray, IntArray, Message, VersionSpan, floats, ids
from turnloom.wire.contract import ReplyEvent, SampledToken, SampledTokens
from turnloom.wire.reply import ReplyBuilder


class Output:
    """Ids and logprobs are kept exactly as the engine gave them, up to the one that ends the reply; only the text knows
    about end tokens and stop strings.

    What an engine samples after the stop token that it names, or after the token
    that completes a stop string, is `surplus`: it is counted and not kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: Parser,
        builder: ReplyBuilder,
        *,
        end_ids: frozenset[int],
        stop: Sequence[str] = (),
        show_tokens: bool = False,
    ) -> None:
        """`show_tokens`: every chunk gives its tokens too, as an event of their own."""
        self._decode = tokenizer.decode
        self._show_tokens = show_tokens
        self._decoder = IncrementalDecoder(tokenizer)
        self._spans = TokenSpans(tokenizer)
        self._parser = parser
        self._builder = builder
        self._end_ids = end_ids
        self._maybe_end = end_ids | tokenizer.special_ids
        self._stops = StopTrimmer(stop)
        self._ids: list[IntArray] = []
        self._logprobs: list[FloatArray] = []
        self._held: list[int] = []
        self._count = 0
        self._finish: Finish | None = None
        self._parsed = False
        self.surplus = 0
        self.cached_tokens = 0
        self._versions: tuple[VersionSpan, ...] = ()
        self.tokens: list[SampledToken] = []

    def feed(self, chunk: Chunk) -> list[ReplyEvent]:
        """Keep the chunk's tokens; what of their text can go out now. Special tokens are held: one that ends the turn is not text."""
        self._versions = chunk.versions or self._versions
        self._finish = chunk.finish or self._finish
        self.cached_tokens = self.cached_tokens or chunk.cached_tokens
        if self._stops.matched is not None:
            self.surplus += len(chunk.ids)
            return []
        chunk = self._to_the_end(chunk)
        self._keep(chunk)
        text_ids: list[int] = []
        for token in chunk.ids.tolist():
            if token in self._maybe_end:
                self._held.append(token)
            else:
                text_ids += [*self._held, token]
                self._held.clear()
        events = self._parse(self._decoded(text_ids)) if text_ids else []
        over = self._cut_at_stop()
        if over and len(chunk.ids):
            kept = max(len(chunk.ids) - over, 0)
            chunk = replace(chunk, ids=chunk.ids[:kept], logprobs=chunk.logprobs[:kept])
        return [*events, *self._tokens(chunk)] if self._show_tokens else events

    def _to_the_end(self, chunk: Chunk) -> Chunk:
        """The last chunk up to the stop token that it names."""
        finish = chunk.finish
        if finish is None or finish.reason is not FinishReason.STOP or not isinstance(finish.matched, int):
            return chunk
        found = np.flatnonzero(chunk.ids == finish.matched)
        if not found.size:
            if len(chunk.ids) or (self._count and self._ids_end() != finish.matched):
                self._check_not_passed(finish.matched)
            return chunk
        end = int(found[0]) + 1
        self.surplus += len(chunk.ids) - end
        return replace(chunk, ids=chunk.ids[:end], logprobs=chunk.logprobs[:end])

    def _ids_end(self) -> int:
        return next(int(part[-1]) for part in reversed(self._ids) if len(part))

    def _check_not_passed(self, stop: int) -> None:
        """Raises EngineProtocol where the token that the engine says it stopped at lies behind: what came after went out as text."""
        if any((part == stop).any() for part in self._ids):
            raise EngineProtocol(f"the engine went on after token {stop}, and then said that it had stopped there")

    def _keep(self, chunk: Chunk) -> None:
        self._ids.append(chunk.ids)
        self._logprobs.append(chunk.logprobs)
        self._count += len(chunk.ids)

    def _cut_at_stop(self) -> int:
        """Leave off what came after the token that completes the stop string; how many that were."""
        if self._stops.matched is None:
            return 0
        end = self._spans.of(self._stops.end - 1, self._stops.end)[1]
        over = self._count - end
        if over > 0:
            self._ids, self._logprobs = [self.ids[:end]], [self.logprobs[:end]]
            self._count = end
            self._held.clear()
            self.surplus += over
            del self.tokens[end:]
        return max(over, 0)

    def _tokens(self, chunk: Chunk) -> list[ReplyEvent]:
        pairs = zip(chunk.ids.tolist(), chunk.logprobs.tolist(), strict=True)
        new = [SampledToken(self._decode([token]), logprob) for token, logprob in pairs]
        self.tokens += new
        return [SampledTokens(tuple(new))] if new else []

    def close(self) -> list[ReplyEvent]:
        """The end of the output, whole or not: everything held back comes out. Closing twice gives nothing more."""
        if self._parsed:
            return []
        self._parsed = True
        if self._held and self._stopped_at(self._held[-1]):
            self._held.pop()
        while self._held and self._held[-1] in self._end_ids:
            self._held.pop()
        tail = self._parse(self._decoded(self._held, last=True))
        self._cut_at_stop()
        rest = self._stops.finish()
        events = list(chain(self._parser.feed(rest) if rest else [], self._parser.finish()))
        return tail + [self._builder.feed(e) for e in events]

    def _stopped_at(self, token: int) -> bool:
        """Whether the engine stopped at this last token: it names it, or names nothing. What stands before it is the model's own."""
        finish = self._finish
        return finish is not None and finish.reason is FinishReason.STOP and finish.matched in (None, token)

    def _decoded(self, token_ids: list[int], *, last: bool = False) -> str:
        text = self._decoder.feed(token_ids) + (self._decoder.finish() if last else "")
        self._spans.add(token_ids, text)
        return text

    def _parse(self, text: str) -> list[ReplyEvent]:
        visible = self._stops.feed(text)
        return [self._builder.feed(e) for e in self._parser.feed(visible)] if visible else []

    @property
    def stopped(self) -> bool:
        """A stop string is complete: what the engine samples from here on is surplus."""
        return self._stops.matched is not None

    @property
    def ids(self) -> IntArray:
        return ids(np.concatenate(self._ids)) if self._ids else ids()

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Those of the ids that are kept."""
        return tuple(replace(s, end=min(s.end, self._count)) for s in self._versions if s.start < self._count)

    @property
    def logprobs(self) -> FloatArray:
        return floats(np.concatenate(self._logprobs)) if self._logprobs else floats()

    @property
    def finish(self) -> Finish:
        """How it ended. A stop string found in the text counts as the stop, even where the engine went on past it."""
        if self._stops.matched is not None:
            return Finish(FinishReason.STOP, matched=self._stops.matched)
        if self._finish is None:
            return Finish(FinishReason.ABORT, message="the engine's stream ended early")
        return self._finish

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        return tuple(
            replace(record, first_token=first, end_token=end)
            for record in self._parser.records
            for first, end in [self._spans.of(record.start, record.end)]
        )

    def message(self) -> Message:
        return self._builder.message()
