"""The Python API: a gateway in this process, in a running loop or on a background thread."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import date
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from aiohttp import web

from turnloom.core.credit import RewardRule
from turnloom.core.match import Matcher
from turnloom.core.unroll import DEFAULT_TRAINING, UNLIMITED, Longest, Training
from turnloom.engine.contract import PauseMode
from turnloom.engine.models import tokenizer_source
from turnloom.engine.pool import PATIENCE, Patience, Pool
from turnloom.errors import ConfigError
from turnloom.gateway.admin_answers import Damaged, Listed, PoolAnswer, PoolsAnswer, StoreAnswer, listed, store_answer
from turnloom.gateway.admin_engines import Engines, PauseBody, ResumeBody
from turnloom.gateway.app import GatewayApp
from turnloom.gateway.background import NOT_STARTED, BackgroundGateway
from turnloom.gateway.bind import check_bind, checked_key
from turnloom.gateway.handle import SessionHandle
from turnloom.gateway.http_log import server_log
from turnloom.gateway.janitor import Janitor
from turnloom.gateway.labels import Labeler, load_labeler
from turnloom.gateway.lag import watch_loop
from turnloom.gateway.logs import ACCESS, AccessLog
from turnloom.gateway.memory import IDLE_SECONDS, IDLE_SESSIONS
from turnloom.gateway.metrics import Metrics
from turnloom.gateway.observe import Observer, Spans
from turnloom.gateway.opening import check_defaults, checked
from turnloom.gateway.policy import History, load_matcher
from turnloom.gateway.pools import POLICY, Spec, check_pools, open_pool, read_routes
from turnloom.gateway.request_limits import DEFAULT_LIMITS, RequestLimits, guard, install, server_options
from turnloom.gateway.respond import KEEPALIVE_SECONDS
from turnloom.gateway.session import Session
from turnloom.gateway.sessions import Sessions
from turnloom.gateway.turn import Parts, Served
from turnloom.parse.formats import AUTO, parser_factory
from turnloom.render.choose import choose_renderer
from turnloom.render.contract import Tokenizer
from turnloom.render.profile import writes_calls_as_text
from turnloom.render.template import SpecialTokens
from turnloom.store.contract import Limits, Repeats, Store
from turnloom.store.memory import MemoryStore
from turnloom.store.sqlite import SQLiteStore
from turnloom.tokenizer import load_tokenizer
from turnloom.types import Sampling
from turnloom.wire.contract import Reading
from turnloom.wire.quirks import ALL as ALL_QUIRKS
from turnloom.wire.quirks import Quirk

__all__ = ["BackgroundGateway", "Gateway", "SessionHandle"]

TokenizerSpec = str | Path | Tokenizer | None

LAST_WORDS_SECONDS = 5.0
"""How long a connection may take, when all turns have ended, until its client has what it is told last."""


class Gateway:
    """Everything between an agent and an engine.

    `engine` is a URL (`engine.open`), several of one model with commas between
    them, an Engine, or these by the names of pools, of which `policy` is the model
    under training; `routes` say which requests go to the others (`gateway.pools`),
    `patience` how long a turn goes on with engines that fail. `tokenizer` is a path,
    a hub id, a Tokenizer, or None to take what the engine names; or these by pool. `store` is a SQLite file, a Store, or None for
    memory. `matching` says when an echoed reply is the recorded one (`canonical`,
    `strict`, `package.module:name`, or a Matcher), `history` and `realign` which
    tokens go on from it (`gateway.policy.History`), `longest` how long a handle's
    samples may be, `skip_labels` which turns are left out of them by what they were
    for; `labeler` says what a request is for (`gateway.labels`), `images` what becomes
    of one, `request_limits` what one may bring (`gateway.request_limits`),
    `quirks` which habits of clients are normalised. `renderer` is who writes prompts (`render.choose`), with
    `chat_template` in the place of the tokenizer's own, `template_kwargs` for every
    rendering, and `special_tokens` for what becomes of a control token's spelling
    in a message. `max_sessions` may be open at once; of those that nobody uses, `loaded_sessions` stay in memory, each for
    `loaded_seconds`, and the others come back from the store. `access_log` writes a line for each request (`gateway.logs`), and
    `spans` is who collects turns as spans (`gateway.observe`). Use as an async context manager, or `Gateway.background(...)`
    as a plain one from code that is not async.
    """

    def __init__(
        self,
        engine: Spec | Mapping[str, Spec] = "local:smollm2",
        tokenizer: TokenizerSpec | Mapping[str, TokenizerSpec] = None,
        *,
        routes: Sequence[str] = (),
        patience: Patience = PATIENCE,
        store: str | Path | Store | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        tool_format: str = "auto",
        matching: str | Matcher = "canonical",
        history: Literal["sampled", "template"] = "sampled",
        realign: int = 0,
        longest: Longest = UNLIMITED,
        skip_labels: Collection[str] = DEFAULT_TRAINING.skip,
        labeler: str | Labeler = "auto",
        images: Literal["refuse", "placeholder"] = "refuse",
        quirks: frozenset[Quirk] = ALL_QUIRKS,
        renderer: str = "auto",
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        special_tokens: SpecialTokens = "plain",
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        admin_key: str = "",
        open_sessions: bool = False,
        max_sessions: int | None = None,
        loaded_sessions: int = IDLE_SESSIONS,
        loaded_seconds: float = IDLE_SECONDS,
        keepalive: float = KEEPALIVE_SECONDS,
        request_limits: RequestLimits = DEFAULT_LIMITS,
        access_log: bool = False,
        spans: Spans | None = None,
    ) -> None:
        self._engines = dict(engine) if isinstance(engine, Mapping) else {POLICY: engine}
        self._tokenizers = dict(tokenizer) if isinstance(tokenizer, Mapping) else {POLICY: tokenizer}
        check_pools(self._engines)
        if unknown := self._tokenizers.keys() - self._engines.keys():
            raise ConfigError(f"a tokenizer is given for {', '.join(sorted(unknown))!r}, and no engine of that name")
        self._routes, self._patience = read_routes(routes, self._engines), patience
        self._store: Store = MemoryStore() if store is None else SQLiteStore(store) if isinstance(store, str | Path) else store
        admin_key = checked_key(admin_key)
        check_bind(host, admin_key)
        check_defaults(sampling, limits)
        self._host, self._port = host, port
        self._tool_format = tool_format
        self._matcher, self._history, self._longest = load_matcher(matching), History(history, realign), longest
        self._training = Training(frozenset(skip_labels))
        self._labeler, self._reading = load_labeler(labeler), Reading(quirks, images)
        self._renderer = partial(
            choose_renderer, renderer, template_kwargs=template_kwargs, today=date.today().isoformat(), special_tokens=special_tokens
        )
        self._chat_template = chat_template
        self._sampling, self._limits = sampling, limits
        self._admin_key = admin_key
        self._open_sessions = open_sessions
        self._max_sessions, self._loaded = max_sessions, (loaded_sessions, loaded_seconds)
        self._janitor: Janitor | None = None
        self._keepalive = keepalive
        self._request_limits = request_limits
        self._access_log = access_log
        self._observer = Observer(Metrics(), spans)
        self._lag: asyncio.Task[None] | None = None
        self._ending = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._sessions: Sessions | None = None
        self._pools: dict[str, Pool] = {}
        self.tokenizer: Tokenizer | None = None
        self.url = ""

    async def start(self) -> Self:
        """Open the engine, the tokenizer and the store, then listen. Raises ConfigError, EngineUnavailable or StoreError."""
        if self._runner is not None or self._pools:
            raise ConfigError("this gateway is started already")
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def _start(self) -> None:
        for name, spec in self._engines.items():
            self._pools[name] = await open_pool(spec, self._patience)
        models = {name: await self._serve(name, pool) for name, pool in self._pools.items()}
        policy = models.pop(POLICY)
        self.tokenizer = policy.tokenizer
        await self._store.open()
        self._sessions = Sessions(
            self._store,
            self._sampling,
            self._limits,
            time.time,
            open_unknown=self._open_sessions,
            matcher=self._matcher,
            max_sessions=self._max_sessions,
            loaded=self._loaded[0],
            keep=self._loaded[1],
            metrics=self._observer.metrics,
        )
        await self._sessions.start()
        self._janitor = Janitor(self._sessions, time.time)
        parts = Parts(
            policy=policy,
            observe=self._observer,
            clock=time.time,
            new_id=lambda: uuid.uuid4().hex,
            history=self._history,
            others=models,
        )
        app = GatewayApp(
            parts,
            self._sessions,
            self._pools,
            admin_key=self._admin_key,
            keepalive=self._keepalive,
            reading=self._reading,
            labeler=self._labeler,
            routes=self._routes,
            longest=self._longest,
            training=self._training,
        ).app()
        install(app, self._request_limits)
        served = server_options(self._request_limits)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=ACCESS if self._access_log else None,
            access_log_class=AccessLog,
            logger=server_log(),
            shutdown_timeout=LAST_WORDS_SECONDS,
            **served,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        guard(self._runner.server)
        self._lag = asyncio.create_task(watch_loop(self._observer.metrics.lag))
        self._janitor.start()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {self._host}:{self._port}: {error.strerror}; choose another --port") from error
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _serve(self, name: str, pool: Pool) -> Served:
        """One pool's model. What the gateway was told of templates and formats is the policy's; the others' are found out."""
        able = await pool.capabilities()
        own = name == POLICY
        tokenizer = await self._load_tokenizer(name, able.tokenizer, self._chat_template if own else None)
        renderer = await asyncio.to_thread(self._renderer if own else partial(choose_renderer, "auto"), tokenizer)
        tool_format = self._tool_format if own else AUTO
        parser = parser_factory(tool_format, tokenizer.chat_template, calls_as_text=writes_calls_as_text(renderer))
        return Served(pool, tokenizer, renderer, parser, able.model)

    async def _load_tokenizer(self, pool: str, named_by_engine: str | None, template: str | None) -> Tokenizer:
        spec = self._tokenizers.get(pool)
        spec = named_by_engine if spec is None else spec
        if spec is None:
            prefix = "" if pool == POLICY else f"{pool}="
            raise ConfigError(f"the engine names no tokenizer; give --tokenizer {prefix}PATH_OR_ID")
        if isinstance(spec, str | Path):
            source = await asyncio.to_thread(tokenizer_source, str(spec))
            return await asyncio.to_thread(load_tokenizer, source, chat_template=template)
        if template is not None:
            raise ConfigError("a chat template comes with the tokenizer that is given; load it with that template")
        return spec

    async def stop(self, drain: float = 0.0) -> None:
        """Take no new turn, let those in flight end for `drain` seconds, cancel the rest, keep all of it on record, close everything.

        Meanwhile new turns and `/healthz` are answered with 503. Stopping twice is no error: a second call waits for the first.
        """
        async with self._ending:
            if self._sessions is not None:
                await self._sessions.drain(drain)
            await self._end()

    async def _end(self) -> None:
        sessions, self._sessions = self._sessions, None
        runner, self._runner = self._runner, None
        pools, self._pools = self._pools, {}
        lag, self._lag = self._lag, None
        janitor, self._janitor = self._janitor, None
        async with AsyncExitStack() as closing:  # from the last to the first, whatever one of them raises
            if (spans := self._observer.spans) is not None:
                closing.push_async_callback(asyncio.to_thread, spans.close)
            closing.push_async_callback(self._store.close)
            if sessions is not None:
                closing.push_async_callback(sessions.settled)
            for pool in pools.values():
                closing.push_async_callback(pool.close)
            if runner is not None:
                closing.push_async_callback(runner.cleanup)
            if lag is not None:
                closing.callback(lag.cancel)
            if janitor is not None:
                await janitor.stop()
            if sessions is not None:
                await sessions.close()
            for pool in pools.values():
                pool.release()

    @property
    def in_flight(self) -> int:
        """Turns that are being made."""
        return 0 if self._sessions is None else self._sessions.in_flight

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    async def open_session(
        self,
        *,
        id: str | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        group: str = "",
        rollout: str = "",
        labels: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        reward_rule: RewardRule = "last",
        repeats: Repeats = "retry",
    ) -> SessionHandle:
        """A new session with a secret key of its own.

        A mapping for `sampling` or `limits` says what differs from the gateway's own; a `Sampling` or `Limits` is whole: what it
        leaves out is its own default. Raises BadRequest, LimitReached and StoreError.
        """
        sessions = self._running()
        session, key = await sessions.open(
            session_id=id,
            sampling=sampling,
            limits=limits,
            group=group,
            rollout=rollout,
            labels=labels,
            metadata=metadata,
            reward_rule=reward_rule,
            repeats=repeats,
        )
        return self._handle(session.row.id, key)

    async def handle(self, session_id: str) -> SessionHandle:
        """A session that is on record, to look at, reward, finish or drop. Its key is not known any more. Raises NotFound."""
        await self._running().by_id(session_id)
        return self._handle(session_id, "")

    def _handle(self, session_id: str, key: str) -> SessionHandle:
        return SessionHandle(self._running(), session_id, key, self.url, self._longest, self._training)

    async def drop(self, session_id: str) -> None:
        """Forget a session and its turns, also one that is damaged and cannot be looked at. Raises NotFound."""
        await self._running().drop(session_id)

    async def sessions(self, *, limit: int = 100, offset: int = 0, status: str | None = None) -> list[Listed | Damaged]:
        """Those on record, newest first; with `status` only the `open` or `closed` ones. Brings none into memory."""
        return [listed(entry) for entry in await self._running().entries(limit, offset, status)]

    async def store_stats(self) -> StoreAnswer:
        return store_answer(await self._running().store_stats())

    async def engines(self) -> PoolsAnswer:
        """Every pool's state."""
        return await self._control().list()

    async def pause(
        self, mode: PauseMode = "abort", *, pool: str = POLICY, seconds: float | None = None, engines: bool = False
    ) -> PoolAnswer:
        """As `hold`, and with `engines` the servers are told as well. Raises NotFound for a pool that is not there."""
        return await self._control().pause(checked(PauseBody, {"mode": mode, "pool": pool, "seconds": seconds, "engines": engines}))

    async def resume(self, *, pool: str = POLICY, engines: bool = False) -> PoolAnswer:
        return await self._control().resume(checked(ResumeBody, {"pool": pool, "engines": engines}))

    def _control(self) -> Engines:
        self._running()
        return Engines(self._pools)

    async def hold(self, mode: PauseMode = "abort", *, pool: str = POLICY, seconds: float | None = None) -> int:
        """Let no new request through to a pool's engines until `release`; how many still run. `Pool.hold` says what the modes are."""
        return await self._pool(pool).hold(mode, seconds)

    async def release(self, *, pool: str = POLICY) -> None:
        """Turns that wait go on, with whatever weights the engines have now."""
        self._pool(pool).release()

    async def session(self, session_id: str) -> Session:
        """The live session: its tree and its samples. Raises NotFound."""
        return await self._running().by_id(session_id)

    @property
    def engine(self) -> Pool:
        """The policy's engines, behind the started gateway."""
        return self._pool(POLICY)

    def _pool(self, name: str) -> Pool:
        if not self._pools:
            raise ConfigError(NOT_STARTED)
        if name not in self._pools:
            raise ConfigError(f"there is no pool {name!r}; there are: {', '.join(self._pools)}")
        return self._pools[name]

    def _running(self) -> Sessions:
        if self._sessions is None:
            raise ConfigError(NOT_STARTED)
        return self._sessions

    @staticmethod
    def background(*args: Any, **kwargs: Any) -> BackgroundGateway:
        """The same gateway on a thread with its own loop. Takes the constructor's arguments."""
        return BackgroundGateway(*args, **kwargs)
