"""pi, in print mode, through the Anthropic dialect."""

from __future__ import annotations

import json
from collections.abc import Sequence

from turnloom.harness.contract import AgentContext, Launch
from turnloom.harness.npm import NpmAgent, ensure_installed, require_tools
from turnloom.sandbox.contract import Sandbox

VERSION = "0.73.1"
PROVIDER = "turnloom"
KEY_VARIABLE = "TURNLOOM_API_KEY"


class Pi:
    """`args` are added to its command line. `program` is an installation of your own."""

    name = "pi"

    def __init__(self, *, version: str = VERSION, args: Sequence[str] = (), program: Sequence[str] = ()) -> None:
        self._agent = NpmAgent(self.name, "@mariozechner/pi-coding-agent", version, "pi")
        self._args = tuple(args)
        self._program = tuple(program)

    async def require(self) -> None:
        if not self._program:
            await require_tools(self._agent)

    async def install(self, sandbox: Sandbox) -> tuple[str, ...]:
        return self._program or (str(await ensure_installed(self._agent, sandbox)),)

    def command(self, context: AgentContext) -> Launch:
        argv = (
            *(*context.program, "-p", "--provider", PROVIDER, "--model", context.model),
            *("--no-session", "--offline", "--no-extensions", "--no-skills", "--no-prompt-templates", "--thinking", "off"),
            *self._args,
        )
        env = {KEY_VARIABLE: context.api_key, "PI_OFFLINE": "1", "PI_TELEMETRY": "0"}
        files = {
            f"{context.home}/.pi/agent/models.json": _json(_models(context)),
            f"{context.home}/.pi/agent/settings.json": _json(_settings(context)),
        }
        # The prompt goes in as input: as an argument, one that starts with "@" or "-" would be read as a file or a flag.
        return Launch(argv, env, files, context.prompt.encode())


def _models(context: AgentContext) -> object:
    model = {
        "id": context.model,
        "reasoning": False,
        "input": ["text"],
        "contextWindow": context.context_tokens,
        "maxTokens": context.output_tokens,
    }
    # `apiKey` names the variable that holds it, so the key is in no file.
    provider = {"baseUrl": context.base_url, "api": "anthropic-messages", "apiKey": KEY_VARIABLE, "models": [model]}
    return {"providers": {PROVIDER: provider}}


def _settings(context: AgentContext) -> object:
    """pi compacts `reserveTokens` before the end of the context; its own 16384 would leave a small context no room at all."""
    reserve = min(16384, context.output_tokens, context.context_tokens // 4)
    compaction = {"enabled": True, "reserveTokens": reserve, "keepRecentTokens": min(20000, context.context_tokens // 2)}
    return {"enableInstallTelemetry": False, "quietStartup": True, "compaction": compaction}


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2).encode()
