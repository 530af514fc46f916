"""Starts real engines as processes of their own, and ends them whatever happens. Knows no pytest and samples nothing.

Each server leads a process group. The group is killed when its server is
stopped, and by a watchdog when the process that started it ends in any way.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.engines.checkpoint import checkpoint
from tests.engines.setup import SGLANG, STUBS, VLLM, python_of
from turnloom.engine.models import cache_dir

_TAIL = 6000
_STOP = 10.0
_START = 600.0
"""Seconds. Alone on two processors an engine is up within half a minute; with others beside it this takes several times as long."""


_HELD: list[socket.socket] = []


class StartFailed(Exception):
    """A server ended, or was not healthy in time. The words end with the tail of what it wrote."""


class Server:
    """One process group at one URL; may be killed and started again on the same port. A `heavy` one keeps every processor busy to start."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        port: int,
        health: str = "/health",
        env: Mapping[str, str] | None = None,
        heavy: bool = False,
    ) -> None:
        self.name = name
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._argv = list(argv)
        self._env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
        self._health = health
        self.heavy = heavy
        self._log: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<{self.name} at {self.url}>"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process that leads the group."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process.pid

    def start(self) -> None:
        """Returns when it is healthy. Raises StartFailed."""
        start_all([self])

    def launch(self) -> None:
        """`start`, without waiting for other starts on this machine."""
        self.stop()
        descriptor, path = tempfile.mkstemp(prefix=f"turnloom-{self.name}-")
        self._log = Path(path)
        with open(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                self._argv, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        # Reads until the other end of its input is closed, which the end of this process does too.
        kill = f"read -r _; kill -s KILL -- -{self._process.pid}"
        self._watchdog = subprocess.Popen(
            ["sh", "-c", kill], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + _START
        while not self.healthy():
            if not self.alive:
                raise StartFailed(f"{self.name} ended before it was healthy:\n{self.tail()}")
            if time.monotonic() > end:
                raise StartFailed(f"{self.name} was not healthy within {_START:.0f} s:\n{self.tail()}")
            time.sleep(0.1)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self._health, timeout=5) as response:
                return int(response.status) == 200
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL to the whole group, as when a machine loses power."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.wait()
            self._watchdog = None

    def stop(self) -> None:
        """Ends it, politely first: what it has in shared memory outlives a SIGKILL. Its log goes too."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP)
        self.kill()
        if self._log is not None:
            self._log.unlink(missing_ok=True)
            self._log = None

    def tail(self) -> str:
        """The end of what it wrote."""
        return self._log.read_bytes()[-_TAIL:].decode("utf-8", "replace") if self._log else "it was not started"


def free_port() -> int:
    """One that nobody else is given while this process lives; a server may listen there, and listen there again.

    A server needs half a minute to come to its port, and meanwhile others ask the
    kernel for any. A bound socket that never listens keeps it from them; one who
    names the port and allows sharing it, as servers do, may have it all the same.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return int(held.getsockname()[1])


class Router(Server):
    """Healthy when all of its workers are: it answers before it knows any."""

    def __init__(self, argv: Sequence[str], *, port: int, workers: Sequence[str]) -> None:
        super().__init__("sglang-router", argv, port=port, health="/readiness")
        self._workers = sorted(workers)

    def healthy(self) -> bool:
        """It knows its own workers and no others, and finds each of them healthy."""
        if not super().healthy():
            return False
        try:
            listed = get(self.url, "/workers")["workers"]
        except OSError:
            return False
        return sorted(worker["url"] for worker in listed if worker["is_healthy"]) == self._workers and len(listed) == len(self._workers)


def sglang(*options: str, name: str = "sglang", model: Path | None = None) -> Server:
    """One SGLang worker; `options` are added to its command line and win over those here."""
    port = free_port()
    argv = [python_of(SGLANG), "-m", "sglang.launch_server", "--model-path", str(model or checkpoint()), "--port", str(port)]
    argv += "--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch --grammar-backend none".split()
    argv += (
        "--disable-overlap-schedule --disable-cuda-graph --skip-server-warmup --mem-fraction-static 0.2 --max-running-requests 32".split()
    )
    # Without --sleep-on-idle each idle worker takes a whole processor.
    argv += ["--sleep-on-idle", "--max-total-tokens", "16384", "--context-length", "2048", *options]
    return Server(name, argv, port=port, env={"PYTHONPATH": str(STUBS), "SGLANG_USE_CPU_ENGINE": "1"}, heavy=True)


def router(workers: Sequence[str], *options: str, policy: str = "manual") -> Router:
    """sglang-router before the workers at these URLs. It looks at their health often; `options` win over those here."""
    port = free_port()
    argv = [python_of(SGLANG), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    argv += ["--prometheus-port", str(free_port()), "--worker-urls", *workers]
    argv += "--health-check-interval-secs 2 --health-check-timeout-secs 2 --health-failure-threshold 1 --health-success-threshold 1".split()
    argv += ["--cb-failure-threshold", "1", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "3", *options]
    return Router(argv, port=port, workers=workers)


def vllm(*options: str, model: Path | None = None) -> Server:
    port = free_port()
    argv = [python_of(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model or checkpoint()), "--port", str(port)]
    argv += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", "--enable-scale-out", *options]
    return Server("vllm", argv, port=port, env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}, heavy=True)


def llama(*options: str, model: str = "smollm2") -> Server:
    """llama.cpp's own server, from the xllamacpp of this very Python."""
    port = free_port()
    return Server("llama.cpp", [sys.executable, str(Path(__file__).with_name("llama_server.py")), model, str(port), *options], port=port)


def get(url: str, path: str) -> Any:
    """The JSON at a path. Raises OSError."""
    with urllib.request.urlopen(url + path, timeout=10) as response:
        return json.loads(response.read())


def post(url: str, path: str, body: Mapping[str, Any], *, timeout: float = 300) -> Any:
    """The JSON that answers `body`, None for an empty answer. Raises OSError, which a status other than 200 is too."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        text = response.read()
        return json.loads(text) if text.strip() else None


def start_all(servers: Sequence[Server]) -> None:
    """At once; heavy ones when no other run of this machine starts any. The first failure is raised after every server is stopped."""
    try:
        turn = _turn() if any(server.heavy for server in servers) else contextlib.nullcontext()
        with turn, ThreadPoolExecutor(max(1, len(servers))) as pool:
            list(pool.map(Server.launch, servers))
    except BaseException:
        stop_all(servers)
        raise


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Held by one run of this machine at a time: several starts at once would all take too long."""
    path = cache_dir() / "engines" / ".start.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def stop_all(servers: Sequence[Server]) -> None:
    for server in servers:
        server.stop()


@contextlib.asynccontextmanager
async def running(*servers: Server) -> AsyncIterator[tuple[Server, ...]]:
    """These servers, started together and stopped in any case."""
    try:
        await asyncio.to_thread(start_all, servers)
        yield servers
    finally:
        stop_all(servers)
