"""pi, in print mode, through any of the four dialects."""

from __future__ import annotations

import json
from collections.abc import Sequence

from turnloom.errors import ConfigError
from turnloom.harness.contract import AgentContext, Launch
from turnloom.harness.install import PackagedHarness
from turnloom.harness.npm import NpmAgent

VERSION = "0.73.1"
PROVIDER = "turnloom"
KEY_VARIABLE = "TURNLOOM_API_KEY"
ROUTES = {"anthropic-messages": "", "openai-completions": "/v1", "openai-responses": "/v1", "google-generative-ai": "/v1beta"}
"""What each protocol's SDK expects at the end of a base URL."""


class Pi(PackagedHarness):
    """`api` is the protocol, one of `ROUTES`. `args` are added to its command line. `program` is an installation of your own."""

    def __init__(
        self, *, api: str = "anthropic-messages", version: str = VERSION, args: Sequence[str] = (), program: Sequence[str] = ()
    ) -> None:
        if api not in ROUTES:
            raise ConfigError(f"pi has no api {api!r}: use one of {', '.join(ROUTES)}")
        super().__init__(NpmAgent("pi", "@mariozechner/pi-coding-agent", version, "pi"), args, program)
        self._api = api

    def command(self, context: AgentContext) -> Launch:
        argv = (
            *(*context.program, "-p", "--provider", PROVIDER, "--model", context.model),
            *("--no-session", "--offline", "--no-extensions", "--no-skills", "--no-prompt-templates", "--thinking", "off"),
            *self._args,
        )
        env = {KEY_VARIABLE: context.api_key, "PI_OFFLINE": "1", "PI_TELEMETRY": "0"}
        files = {
            f"{context.home}/.pi/agent/models.json": _json(self._models(context)),
            f"{context.home}/.pi/agent/settings.json": _json(_settings(context)),
        }
        # The prompt goes in as input: as an argument, one that starts with "@" or "-" would be read as a file or a flag.
        return Launch(argv, env, files, context.prompt.encode())

    def _models(self, context: AgentContext) -> object:
        model = {
            "id": context.model,
            "reasoning": False,
            "input": ["text"],
            "contextWindow": context.context_tokens,
            "maxTokens": context.output_tokens,
        }
        # `apiKey` names the variable that holds it, so the key is in no file.
        place = {"baseUrl": context.base_url + ROUTES[self._api], "api": self._api, "apiKey": KEY_VARIABLE}
        return {"providers": {PROVIDER: {**place, "models": [model]}}}


def _settings(context: AgentContext) -> object:
    """pi compacts `reserveTokens` before the end of the context; its own 16384 would leave a small context no room at all."""
    reserve = min(16384, context.output_tokens, context.context_tokens // 4)
    compaction = {"enabled": True, "reserveTokens": reserve, "keepRecentTokens": min(20000, context.context_tokens // 2)}
    return {"enableInstallTelemetry": False, "quietStartup": True, "compaction": compaction}


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2).encode()
