"""Continue's `cn`, in print mode, through the chat dialect."""

from __future__ import annotations

import json
from collections.abc import Sequence

from turnloom.harness.contract import AgentContext, Launch
from turnloom.harness.install import PackagedHarness
from turnloom.harness.npm import NpmAgent

VERSION = "1.5.47"


class ContinueCn(PackagedHarness):
    """`args` are added to its command line. `program` is an installation of your own."""

    def __init__(self, *, version: str = VERSION, args: Sequence[str] = (), program: Sequence[str] = ()) -> None:
        super().__init__(NpmAgent("continue-cn", "@continuedev/cli", version, "cn"), args, program)

    def command(self, context: AgentContext) -> Launch:
        path = f"{context.home}/.continue/turnloom.yaml"
        argv = (*context.program, "--config", path, "--print", "--auto", *self._args)
        model = {
            "name": context.model,
            "provider": "openai",
            "model": context.model,
            "apiBase": f"{context.base_url}/v1",
            "apiKey": context.api_key,
            "roles": ["chat"],
            "capabilities": ["tool_use"],
            "defaultCompletionOptions": {"contextLength": context.context_tokens, "maxTokens": context.output_tokens},
        }
        config = {"name": "turnloom", "version": "1.0.0", "schema": "v1", "models": [model]}
        env = {"CONTINUE_TELEMETRY_ENABLED": "0"}
        # JSON is YAML.
        return Launch(argv, env, {path: json.dumps(config, indent=2).encode()}, context.prompt.encode())
