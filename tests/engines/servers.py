"""Starts real engines as processes of their own, and ends them whatever happens. Knows no pytest and samples nothing.

Each server leads a process group. The group is killed when its server is
stopped, and by a watchdog when the process that started it ends in any way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.engines.checkpoint import CONTEXT, checkpoint
from tests.engines.setup import SGLANG, STUBS, VLLM, python_of

_TAIL = 6000
_STOP = 10.0


class StartFailed(Exception):
    """A server ended, or was not healthy in time. The words end with the tail of what it wrote."""


class Server:
    """One process group at one URL; may be killed and started again on the same port."""

    def __init__(self, name: str, argv: Sequence[str], *, port: int, health: str, patience: float, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._argv = list(argv)
        self._env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
        self._health = health
        self._patience = patience
        self._log = Path(tempfile.mkdtemp(prefix="turnloom-engine-")) / "log"
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
        self.stop()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._argv, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        # Reads until the other end of its input is closed, which the end of this process does too.
        kill = f"read -r _; kill -9 -- -{self._process.pid}"
        self._watchdog = subprocess.Popen(
            ["sh", "-c", kill], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + self._patience
        while not self.healthy():
            if not self.alive:
                raise StartFailed(f"{self.name} ended before it was healthy:\n{self.tail()}")
            if time.monotonic() > end:
                raise StartFailed(f"{self.name} was not healthy within {self._patience:.0f} s:\n{self.tail()}")
            time.sleep(0.1)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self._health, timeout=5) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.HTTPError):
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
        """As kill: these servers keep nothing that is worth a polite end, and some of their children outlive one."""
        self.kill()

    def tail(self) -> str:
        """The end of what it wrote."""
        return self._log.read_bytes()[-_TAIL:].decode("utf-8", "replace") if self._log.exists() else "it wrote nothing"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def sglang(*options: str, name: str = "sglang", model: Path | None = None, port: int | None = None) -> Server:
    """One SGLang worker; `options` are added to its command line and win over those here."""
    port = port or free_port()
    argv = [python_of(SGLANG), "-m", "sglang.launch_server", "--model-path", str(model or checkpoint()), "--port", str(port)]
    argv += "--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch --grammar-backend none".split()
    argv += "--disable-overlap-schedule --disable-cuda-graph --skip-server-warmup --sleep-on-idle --mem-fraction-static 0.2 --max-running-requests 32".split()
    argv += ["--max-total-tokens", "16384", "--context-length", "2048", *options]
    env = {"PYTHONPATH": str(STUBS), "SGLANG_USE_CPU_ENGINE": "1"}
    return Server(name, argv, port=port, health="/health", patience=180, env=env)


def router(workers: Sequence[str], *options: str, policy: str = "manual") -> Server:
    """sglang-router before the workers at these URLs."""
    port = free_port()
    argv = [python_of(SGLANG), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    argv += ["--prometheus-port", str(free_port()), "--worker-urls", *workers, *options]
    return Server("sglang-router", argv, port=port, health="/health", patience=60)


def vllm(*options: str, model: Path | None = None) -> Server:
    port = free_port()
    argv = [python_of(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model or checkpoint()), "--port", str(port)]
    argv += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", "--enable-scale-out", *options]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}
    return Server("vllm", argv, port=port, health="/health", patience=300, env=env)


def start_all(servers: Sequence[Server]) -> None:
    """At once. The first failure is raised after every server is stopped."""
    try:
        with ThreadPoolExecutor(max(1, len(servers))) as pool:
            list(pool.map(Server.start, servers))
    except BaseException:
        stop_all(servers)
        raise


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
