"""What a pool makes of its members' failures: whom it leaves, for how long, and what it finds out about one that comes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.members import ABLE, STOP, Member, aborted, some
from tests.support.pool_turns import PROMPT, by_hand, first_of, sampled, tokens, two
from turnloom.engine.contract import Capabilities, Chunk, Engine
from turnloom.engine.http import error_for_status
from turnloom.engine.llama_server import LlamaServerEngine
from turnloom.engine.once import Once
from turnloom.engine.pool import Patience, Pool
from turnloom.engine.sglang import SGLangEngine
from turnloom.engine.vllm import VLLMEngine
from turnloom.errors import ConfigError, EngineError, EngineOverloaded, EngineRejected, EngineUnavailable

DEAD = EngineUnavailable("it broke off")
CLIENTS = [SGLangEngine, VLLMEngine, LlamaServerEngine]


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return by_hand(monkeypatch)


@pytest.mark.parametrize("count", [1, 2, 9, 16])
@pytest.mark.parametrize("error", [DEAD, EngineOverloaded("busy"), None], ids=["dead", "busy", "no end"])
async def test_patience_is_no_less_when_more_engines_are_down(count: int, error: EngineError | None, slept: list[float]) -> None:
    members = [Member(f"engine {i}", [[error] if error else []]) for i in range(count)]
    pool = Pool(members, Patience(attempts=8, seconds=120, pause=0.25, longest=5))
    if error:
        with pytest.raises(type(error)):
            await sampled(pool)
    else:
        assert tokens(await sampled(pool)) == []
    assert all(m.asked for m in members)
    assert 0.25 + 0.5 + 1 + 2 + 4 + 5 + 5 + 5 <= sum(slept) <= 120
    assert [wait for wait in slept if wait][-4:] == [4, 5, 5, 5]


@pytest.mark.parametrize("error", [DEAD, EngineOverloaded("busy"), aborted()], ids=["dead", "busy", "aborts"])
async def test_a_healthy_engine_of_many_is_found(error: EngineError | Chunk) -> None:
    for key in range(50):
        members = [Member(f"engine {i}", [[error]]) for i in range(15)]
        pool = Pool([*members, Member("healthy", [[some(5, finish=STOP)]])], Patience(attempts=0))
        assert tokens(await sampled(pool, key=str(key))) == [5]


async def test_one_that_only_aborts_is_left() -> None:
    """Once it is asked again; an abort that was wanted here says nothing of it."""
    pool, own, other = two()
    own.plan, other.plan = [[aborted()]], [[some(5, finish=STOP)]]
    assert [tokens(await sampled(pool)) for _ in range(2)] == [[5], [5]]
    assert len(own.asked) == 2, "it rests: the second turn does not ask it"


async def test_aborts_that_a_hold_made_do_not_count() -> None:
    never = asyncio.Event()
    pool, own, other = two()
    own.plan = [*[[never]] * 3, [some(5, finish=STOP)]]
    task = asyncio.create_task(sampled(pool))
    async with asyncio.timeout(30):
        for count in range(1, 4):
            while not (own.live and len(own.asked) == count):
                await asyncio.wait([task], timeout=0.001)
            await pool.hold("abort", 60)
            while not pool.gate.held:
                await asyncio.wait([task], timeout=0.001)
            pool.release()
    assert tokens(await task) == [5]
    assert other.asked == []


async def test_aborts_after_tokens_do_not_count() -> None:
    pool, own, other = two()
    own.plan = [*[[some(t), aborted()] for t in range(4, 8)], [some(8, finish=STOP)]]
    assert tokens(await sampled(pool)) == [4, 5, 6, 7, 8]
    assert other.asked == []


@pytest.mark.parametrize(("asked", "times"), [(60.0, 1), (86_400.0, 1), (0.5, 2)])
async def test_one_that_asks_for_long_is_left_for_one_that_is_free(asked: float, times: int, slept: list[float]) -> None:
    pool, own, other = two(Patience())
    own.plan, other.plan = [[EngineOverloaded("busy", asked)]], [[some(5, finish=STOP)]]
    assert tokens(await sampled(pool)) == [5]
    assert len(own.asked) == times
    assert sum(slept) == (asked if times > 1 else 0.0)


async def test_no_rest_is_longer_than_half_a_minute(slept: list[float]) -> None:
    pool, own, other = two(Patience())
    own.plan = [[EngineOverloaded("busy", 86_400.0)], [some(4, finish=STOP)]]
    other.plan = [[some(5, finish=STOP)]]
    assert tokens(await sampled(pool)) == [5]
    slept.append(29.0)
    assert tokens(await sampled(pool)) == [5]
    slept.append(1.1)
    assert tokens(await sampled(pool)) == [4]


async def test_one_that_asks_for_too_long_fails_no_turn_that_another_can_have() -> None:
    """The other broke off a moment ago, and is back."""
    pool, own, other = two(Patience())
    own.plan, other.plan = [[DEAD], [EngineOverloaded("busy", 86_400.0)]], [[EngineOverloaded("busy", 86_400.0)]]
    with pytest.raises(EngineOverloaded):
        await sampled(Pool([other], Patience()))
    own.plan = [[DEAD], [some(4, finish=STOP)]]
    assert tokens(await sampled(pool)) == [4]


@pytest.mark.parametrize("status", [501, 505])
def test_what_a_server_will_never_do_is_not_asked_again(status: int) -> None:
    assert isinstance(error_for_status(status, "no"), EngineRejected)
    assert isinstance(error_for_status(502, "no"), EngineUnavailable)


def back_as(able: Capabilities) -> tuple[Pool, Member, Member]:
    """The session's own engine breaks off after a token and comes back as something else."""
    pool, own, other = two(Patience())

    class Restarts(Member):
        def forget(self) -> None:
            super().forget()
            self.able = able

    restarts = Restarts(own.name, [[some(4), DEAD], [some(5, finish=STOP)]])
    pool._members = [m if m.engine is not own else replace(m, engine=restarts) for m in pool._members]
    return pool, restarts, other


@pytest.mark.parametrize(
    "able",
    [
        replace(ABLE, vocab_size=101),
        replace(ABLE, logprob_convention="temperature"),
        replace(ABLE, context_length=900),
    ],
    ids=["vocabulary", "logprobs", "context"],
)
async def test_one_that_comes_back_as_something_else_is_not_gone_on_with(able: Capabilities, slept: list[float]) -> None:
    pool, own, other = back_as(able)
    other.plan = [[some(6), DEAD], [some(7, finish=STOP)]]
    assert tokens(await sampled(pool)) == [4, 6, 7]
    slept.append(60.0)
    await sampled(pool)
    assert len(own.asked) == 1
    assert own.forgotten > 1, "it is looked at again each time: it may be itself again"


async def test_one_that_comes_back_as_itself_is_gone_on_with(slept: list[float]) -> None:
    pool, own, other = back_as(ABLE)
    other.plan = [[some(6, finish=STOP)]]
    assert tokens(await sampled(pool)) == [4, 6]
    assert own.forgotten == 1
    slept.append(1.0)
    assert tokens(await sampled(pool)) == [5]
    assert (own.forgotten, other.forgotten) == (1, 0)


async def test_one_that_comes_back_with_a_newer_checkpoint_is_gone_on_with(slept: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """Its tokenizer is in the checkpoint's folder, which has another name; a warning says so."""
    pool, own, other = back_as(replace(ABLE, model="ckpt/step_2", tokenizer="ckpt/step_2"))
    other.plan = [[some(6, finish=STOP)]]
    with caplog.at_level(logging.WARNING, "turnloom.engine"):
        await sampled(pool)
        slept.append(1.0)
        assert tokens(await sampled(pool)) == [5]
    assert len(own.asked) == 2
    assert any("ckpt/step_2" in line for line in caplog.messages)


async def test_forgetting_a_pool_is_forgetting_all_of_it() -> None:
    members = [Member("one"), Member("two")]
    pool = Pool(members)
    await pool.capabilities()
    for each in members:
        each.able = replace(ABLE, context_length=500)
    assert (await pool.capabilities()).context_length == 1000
    pool.forget()
    assert (await pool.capabilities()).context_length == 500
    assert [m.forgotten for m in members] == [1, 1]


async def test_one_that_does_not_say_what_it_is_keeps_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnloom.engine.pool.CHECK_SECONDS", 0.0)
    never = asyncio.Event()

    class Silent(Member):
        async def capabilities(self) -> Capabilities:
            if not isinstance(self.able, EngineError):
                await never.wait()
            return await super().capabilities()

    pool = Pool([Silent("one", able=DEAD), Member("two", [[some(5, finish=STOP)]])])
    await pool.capabilities()
    pool.members[0].able = ABLE  # type: ignore[attr-defined]
    keys = [key for key in map(str, range(50)) if first_of(pool, key).name == "one"][:6]
    async with asyncio.timeout(30):
        assert [tokens(c) for c in await asyncio.gather(*(sampled(pool, key=k, rid=f"{k:0>32}") for k in keys))] == [[5]] * 6


def named(**names: str | None) -> Member:
    return Member("two", able=replace(ABLE, **names))  # type: ignore[arg-type]


async def test_engines_of_two_tokenizers_are_refused() -> None:
    one = Member("one", able=replace(ABLE, tokenizer="Qwen/Qwen3-8B"))
    with pytest.raises(ConfigError, match="differ in tokenizer: Qwen/Qwen3-8B and other"):
        await Pool([one, named(tokenizer="other")]).capabilities()
    assert (await Pool([one, named(tokenizer="/models/Qwen3-8B/")]).capabilities()).tokenizer == "Qwen/Qwen3-8B", "the same elsewhere"
    assert (await Pool([named(tokenizer=None), one]).capabilities()).tokenizer == "Qwen/Qwen3-8B"


async def test_engines_of_two_models_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool([Member("one", [[some(5, finish=STOP)]]), named(model="other")])
    pool.members[1].plan = [[some(5, finish=STOP)]]  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "turnloom.engine"):
        await pool.capabilities()
        for key in range(9):
            await sampled(pool, key=str(key))
    (warning,) = caplog.messages
    assert "two has the model 'other', its pool has 'm'" in warning


async def test_one_that_still_loads_is_not_there_yet() -> None:
    loads = EngineOverloaded("Loading model")
    pool = Pool([Member("one", able=loads), Member("two")])
    assert await pool.capabilities() == ABLE
    assert len(await pool.prompt_logprobs(PROMPT, 1)) == 2
    with pytest.raises(EngineOverloaded):
        await Pool([Member("one", able=loads)]).capabilities()


class Server:
    """Says of itself what all three clients ask for. Where it is `shut`, no answer comes until it opens, and then it breaks off."""

    def __init__(self) -> None:
        self.context, self.slots, self.asked = 100, 2, list[str]()
        self.shut: asyncio.Event | None = None

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if self.shut is not None:
            await self.shut.wait()
            return web.Response(status=500)
        props = {"default_generation_settings": {"n_ctx": self.context}, "total_slots": self.slots}
        answers: dict[str, object] = {
            "/model_info": {"model_path": "m"},
            "/server_info": {"context_length": self.context},
            "/v1/models": {"data": [{"id": "m", "max_model_len": self.context}]},
            "/props": props,
            "/tokenize": {"tokens": [1]},
        }
        if request.path == "/inference/v1/generate":
            return web.Response(status=422)
        found = answers.get(request.path)
        return web.Response(status=404) if found is None else web.json_response(found)


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    said, app = Server(), web.Application()
    app.router.add_route("*", "/{path:.*}", said.answer)
    async with TestServer(app) as running:
        yield said, str(running.make_url("")).rstrip("/")


@pytest.mark.parametrize("client", CLIENTS)
async def test_what_is_known_of_a_server_is_kept_until_it_is_forgotten(client: type, server: tuple[Server, str]) -> None:
    said, url = server
    engine: Engine = client(url)
    assert (await engine.capabilities()).context_length == 100
    asked, said.context = len(said.asked), 200
    assert (await engine.capabilities()).context_length == 100
    assert len(said.asked) == asked
    engine.forget()
    assert (await engine.capabilities()).context_length == 200
    await engine.close()


@pytest.mark.parametrize("client", CLIENTS)
async def test_all_who_wait_for_a_server_share_its_failure(client: type, server: tuple[Server, str]) -> None:
    said, url = server
    said.shut = asyncio.Event()
    engine: Engine = client(url)
    tasks = [asyncio.create_task(engine.capabilities()) for _ in range(6)]
    while not said.asked:
        await asyncio.wait(tasks, timeout=0.001)
    said.shut.set()
    told = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in told] == [EngineUnavailable] * 6
    assert len(said.asked) == len(set(said.asked)), "each path once"
    said.shut = None
    assert (await engine.capabilities()).context_length == 100, "a failure is not kept"
    await engine.close()


async def test_slots_that_are_taken_stay_taken(server: tuple[Server, str]) -> None:
    said, url = server
    engine = LlamaServerEngine(url)
    slots = (await engine._find())[2]
    engine.forget()
    assert (await engine._find())[2] is slots
    said.slots = 3
    engine.forget()
    assert (await engine._find())[2] is not slots
    await engine.close()


async def test_what_was_tried_for_before_is_not_kept() -> None:
    go, once = asyncio.Event(), Once[int]()

    async def before() -> int:
        await go.wait()
        return 1

    async def after() -> int:
        return 2

    waiting = asyncio.create_task(once.get(before))
    await asyncio.wait([waiting], timeout=0.001)
    once.forget()
    assert await once.get(after) == 2
    go.set()
    assert await waiting == 1
    assert await once.get(before) == 2


async def test_one_who_gives_up_takes_nothing_from_the_others_and_the_last_ends_it() -> None:
    go, given_up, once = asyncio.Event(), asyncio.Event(), Once[int]()

    async def ask() -> int:
        try:
            await go.wait()
        except asyncio.CancelledError:
            given_up.set()
            raise
        return 1

    first, second = (asyncio.create_task(once.get(ask)) for _ in range(2))
    await asyncio.wait([first], timeout=0.001)
    first.cancel()
    await asyncio.wait([first])
    assert not given_up.is_set()
    second.cancel()
    await asyncio.wait([second])
    async with asyncio.timeout(30):
        await given_up.wait()
    go.set()
    assert await once.get(ask) == 1
