"""Real engines for tests, each started once a run, and set up first where the cache has none, which takes minutes and gigabytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.engines.cluster import Cluster, start_cluster
from tests.engines.servers import Server, StartFailed, llama, vllm
from tests.engines.setup import SetupFailed
from tests.engines.table import Table
from turnloom.errors import ConfigError


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    """What this run shows of each engine. It goes into docs/engines.md when every engine showed all there is to show."""
    shown = Table()
    yield shown
    if shown.whole:
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
    yield from _optional(vllm)


@pytest.fixture(scope="session")
def llama_server() -> Iterator[Server]:
    """llama.cpp's own HTTP server with SmolLM2."""
    yield from _optional(llama)


def _optional(make: Callable[[], Server]) -> Iterator[Server]:
    """Skips, and says why, where this machine cannot have the engine."""
    try:
        server = make()
        server.start()
    except (SetupFailed, StartFailed, ConfigError) as error:
        pytest.skip(f"no {make.__name__} here: {error}")
    yield server
    server.stop()
