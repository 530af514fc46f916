"""Turnloom's own small agent (`sdk_agent`), which needs nothing but Python and the anthropic SDK."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from turnloom.errors import HarnessError
from turnloom.harness.contract import AgentContext, Launch
from turnloom.sandbox.contract import Sandbox


class SdkAgent:
    """`max_turns` bounds its loop. `program` is what starts another one in its place, such as a Python inside a container."""

    name = "sdk-agent"

    def __init__(
        self,
        *,
        max_turns: int = 20,
        stream: bool = True,
        args: Sequence[str] = (),
        program: Sequence[str] = (),
    ) -> None:
        self._max_turns = max_turns
        self._stream = stream
        self._args = tuple(args)
        self._program = tuple(program)

    async def require(self) -> None:
        if not self._program and importlib.util.find_spec("anthropic") is None:
            raise HarnessError("sdk-agent needs the anthropic SDK: pip install 'turnloom[agent]'")

    async def install(self, sandbox: Sandbox) -> tuple[str, ...]:
        await self.require()
        if self._program:
            return self._program
        if not sandbox.host_files:
            raise HarnessError("sdk-agent runs with this machine's Python and cannot be reached from this sandbox")
        # -P: what the task or the agent puts into the working directory never shadows a module.
        return (sys.executable, "-P", "-m", "turnloom.harness.sdk_agent")

    def command(self, context: AgentContext) -> Launch:
        argv = (
            *context.program,
            *("--model", context.model, "--max-turns", str(self._max_turns), "--max-tokens", str(context.output_tokens)),
            *(() if self._stream else ("--no-stream",)),
            *self._args,
            *("--", context.prompt),
        )
        return Launch(argv, {"ANTHROPIC_BASE_URL": context.base_url, "ANTHROPIC_API_KEY": context.api_key})
