"""Agents that come from PyPI, each in a virtual environment of its own. How they get into the cache is `install.py`'s."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from turnloom.errors import HarnessError
from turnloom.harness.install import INSTALL_TIME, ensure, place_of, run_host
from turnloom.sandbox.contract import Sandbox


@dataclass(frozen=True, slots=True)
class PipAgent:
    """A package of PyPI and what its Python is given to run: a module of it (`-m`), or a file."""

    name: str
    package: str
    version: str
    start: tuple[str, ...]

    async def install(self, sandbox: Sandbox) -> tuple[str, ...]:
        """Raises HarnessError without `venv`, when pip fails, or when the sandbox does not share this host's files."""
        await self.require()
        place = place_of(self.name, self.version)
        await ensure(place, self._fill, self.name, sandbox)
        python = place / "bin" / "python"
        if not python.exists():
            raise HarnessError(f"{place} holds no Python that starts: remove that directory to install it again")
        # -I: neither the task's files nor the user's own packages shadow a module. The environment's other programs
        # name the place where it was made, so the interpreter is what starts the agent.
        return (str(python), "-I", *self.start)

    async def require(self) -> None:
        """Raises HarnessError where the agent has yet to be installed and this Python makes no virtual environments."""
        if not place_of(self.name, self.version).is_dir() and importlib.util.find_spec("ensurepip") is None:
            raise HarnessError(f"{self.name} needs Python's venv module (Debian: python3-venv): install it, or use --agent sdk-agent")

    async def _fill(self, draft: Path) -> None:
        await self._step("make a virtual environment for", sys.executable, "-m", "venv", str(draft))
        options = ("--disable-pip-version-check", "--no-input", "--quiet")
        await self._step("install", str(draft / "bin" / "python"), "-m", "pip", "install", *options, f"{self.package}=={self.version}")

    async def _step(self, what: str, *argv: str) -> None:
        code, text = await run_host(*argv, timeout=INSTALL_TIME)
        if code != 0:
            lines = [line for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
            raise HarnessError(f"cannot {what} {self.package}=={self.version}: {' | '.join(lines[-3:]) or f'exit code {code}'}")
