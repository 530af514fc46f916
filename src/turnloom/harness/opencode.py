"""opencode, headless, through any of the four dialects."""

from __future__ import annotations

import json
from collections.abc import Sequence

from turnloom.errors import ConfigError
from turnloom.harness.contract import AgentContext, Launch
from turnloom.harness.install import PackagedHarness
from turnloom.harness.npm import NpmAgent

VERSION = "1.18.33"
PROVIDER = "turnloom"
KEY_VARIABLE = "TURNLOOM_API_KEY"
APIS = {
    "openai-completions": ("@ai-sdk/openai-compatible", "/v1"),
    "openai-responses": ("@ai-sdk/openai", "/v1"),
    "anthropic-messages": ("@ai-sdk/anthropic", "/v1"),
    "google-generative-ai": ("@ai-sdk/google", "/v1beta"),
}
"""The SDK that speaks each protocol, all within its program, and what it expects at the end of a base URL."""


class OpenCode(PackagedHarness):
    """`api` is the protocol, one of `APIS`. `args` are added to its command line. `program` is an installation of your own."""

    def __init__(
        self, *, api: str = "openai-completions", version: str = VERSION, args: Sequence[str] = (), program: Sequence[str] = ()
    ) -> None:
        if api not in APIS:
            raise ConfigError(f"opencode has no api {api!r}: use one of {', '.join(APIS)}")
        # Its install script puts the native binary in place of a stub.
        super().__init__(NpmAgent("opencode", "opencode-ai", version, "opencode", scripts=True), args, program)
        self._api = api

    def command(self, context: AgentContext) -> Launch:
        # A title of our own keeps it from asking the model for one.
        argv = (*context.program, "run", "--model", f"{PROVIDER}/{context.model}", "--title", "task", *self._args)
        env = {
            KEY_VARIABLE: context.api_key,
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }
        files = {f"{context.home}/.config/opencode/opencode.json": json.dumps(self._config(context), indent=2).encode()}
        return Launch(argv, env, files, context.prompt.encode())

    def _config(self, context: AgentContext) -> object:
        sdk, route = APIS[self._api]
        model = {"name": context.model, "tool_call": True, "limit": {"context": context.context_tokens, "output": context.output_tokens}}
        provider = {
            "npm": sdk,
            "name": PROVIDER,
            "options": {"baseURL": context.base_url + route, "apiKey": f"{{env:{KEY_VARIABLE}}}"},
            "models": {context.model: model},
        }
        return {
            "provider": {PROVIDER: provider},
            "enabled_providers": [PROVIDER],
            "permission": {"*": "allow"},
            "share": "disabled",
            "autoupdate": False,
        }
