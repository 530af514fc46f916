"""Agents that come from npm. How they get into the cache is `install.py`'s."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from turnloom.errors import HarnessError
from turnloom.harness.install import INSTALL_TIME, ensure, place_of, run_host
from turnloom.sandbox.contract import Sandbox


@dataclass(frozen=True, slots=True)
class NpmAgent:
    """An npm package, its program in `node_modules/.bin`, and the oldest Node.js that runs it.

    `scripts` lets its install scripts run, with this user's rights and outside any sandbox: only for packages that do not
    work without.
    """

    name: str
    package: str
    version: str
    program: str
    node: int = 20
    scripts: bool = False

    async def install(self, sandbox: Sandbox) -> tuple[str, ...]:
        """Raises HarnessError without Node.js, when npm fails, or when the sandbox does not share this host's files."""
        await self.require()
        place = place_of(self.name, self.version)
        await ensure(place, self._fill, self.name, sandbox)
        program = place / "node_modules" / ".bin" / self.program
        if not program.exists():
            raise HarnessError(f"{place} holds no {self.program}: remove that directory to install it again")
        return (str(program),)

    async def require(self) -> None:
        """Raises HarnessError unless a new enough Node.js is there and, where the agent has yet to be installed, npm."""
        advice = f"{self.name} needs Node.js {self.node} or newer: install it, or use --agent sdk-agent"
        try:
            code, text = await run_host("node", "--version", timeout=30.0)
        except OSError as error:
            raise HarnessError(advice) from error
        found = re.match(r"v(\d+)\.", text)
        if code != 0 or found is None or int(found[1]) < self.node:
            raise HarnessError(f"{advice} (found {text.strip()[:40] or 'one that does not start'})")
        if not place_of(self.name, self.version).is_dir() and shutil.which("npm") is None:
            raise HarnessError(f"{self.name} is installed with npm, which is not on PATH: install npm, or use --agent sdk-agent")

    async def _fill(self, draft: Path) -> None:
        code, text = await run_host(
            *("npm", "install", "--prefix", str(draft), f"--ignore-scripts={str(not self.scripts).lower()}"),
            *("--no-audit", "--no-fund", "--loglevel=error"),
            f"{self.package}@{self.version}",
            timeout=INSTALL_TIME,
        )
        if code != 0:
            lines = [line for line in text.splitlines() if line.strip()]
            raise HarnessError(f"npm cannot install {self.package}@{self.version}: {' | '.join(lines[:3]) or f'exit code {code}'}")
