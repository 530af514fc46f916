"""A small agent on the openai-agents SDK (`programs/openai_agents.py`), through the chat dialect or the Responses one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from turnloom.errors import ConfigError
from turnloom.harness.contract import AgentContext, Launch
from turnloom.harness.install import PackagedHarness
from turnloom.harness.pip import PipAgent

VERSION = "0.24.0"
APIS = {"openai-completions": "chat_completions", "openai-responses": "responses"}
PROGRAM = Path(__file__).with_name("programs") / "openai_agents.py"


class OpenAIAgents(PackagedHarness):
    """`api` is the protocol, one of `APIS`. `max_turns` bounds its loop. `program` is what starts another one in its place."""

    def __init__(
        self,
        *,
        api: str = "openai-responses",
        max_turns: int = 30,
        stream: bool = True,
        version: str = VERSION,
        args: Sequence[str] = (),
        program: Sequence[str] = (),
    ) -> None:
        if api not in APIS:
            raise ConfigError(f"openai-agents has no api {api!r}: use one of {', '.join(APIS)}")
        super().__init__(PipAgent("openai-agents", "openai-agents", version, (str(PROGRAM),)), args, program)
        self._api = APIS[api]
        self._max_turns = max_turns
        self._stream = stream

    def command(self, context: AgentContext) -> Launch:
        argv = (
            *(*context.program, "--model", context.model, "--api", self._api),
            *("--max-turns", str(self._max_turns), "--max-tokens", str(context.output_tokens)),
            *(() if self._stream else ("--no-stream",)),
            *(*self._args, "--", context.prompt),
        )
        return Launch(argv, {"OPENAI_BASE_URL": f"{context.base_url}/v1", "OPENAI_API_KEY": context.api_key})
