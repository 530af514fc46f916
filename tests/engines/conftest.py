"""Real engines for tests, each started once a run, and set up first where the cache has none, which takes minutes and gigabytes."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator

import pytest

from tests.engines.agents import Talker
from tests.engines.cluster import Cluster, start_cluster
from tests.engines.servers import Server, llama, vllm
from tests.engines.setup import SetupFailed
from tests.engines.table import Table
from tests.support.gateways import bench


@pytest.fixture(scope="session", autouse=True)
def _agents_have_their_types() -> None:
    """The SDK builds its types at its first reply, which takes seconds on a busy machine, and everything here shares its event loop."""

    async def talk() -> None:
        async with bench(["hello"]) as b:
            await Talker(b.handle).talk(1)

    asyncio.run(talk())


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """What this run shows of each engine. It goes into docs/engines.md when all passed and every engine showed all there is to show."""
    shown = Table()
    yield shown
    if missing := shown.missing():
        warnings.warn(f"docs/engines.md is as it was, this run did not show {', '.join(missing)}", stacklevel=1)
    elif not request.session.testsfailed:
        shown.write()


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Cluster]:
    """A set-up or a start that fails is an error of each test that wanted it: SGLang and its router are what must be there."""
    cluster = start_cluster()
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(_cluster: Cluster) -> Cluster:
    """Two SGLang workers behind their router, as if just started. A test may kill, pause and update them as it likes."""
    _cluster.restore()
    return _cluster


@pytest.fixture
def router(cluster: Cluster) -> Server:
    return cluster.router


@pytest.fixture
def workers(cluster: Cluster) -> list[Server]:
    """Those behind `router`."""
    return list(cluster.workers)


@pytest.fixture(scope="session")
def vllm_server() -> Iterator[Server]:
    """Skips, and says why, where vLLM cannot be set up. One that is set up must start."""
    try:
        server = vllm()
    except SetupFailed as error:
        pytest.skip(f"no vLLM here: {error}")
    yield from _running(server)


@pytest.fixture(scope="session")
def llama_server() -> Iterator[Server]:
    """llama.cpp's own HTTP server with SmolLM2."""
    yield from _running(llama())


def _running(server: Server) -> Iterator[Server]:
    server.start()
    yield server
    server.stop()
