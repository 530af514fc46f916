"""Codex, headless, through the Responses dialect."""

from __future__ import annotations

import json
from collections.abc import Sequence

from turnloom.harness.contract import AgentContext, Launch
from turnloom.harness.install import PackagedHarness
from turnloom.harness.npm import NpmAgent

VERSION = "0.171.0"
PROVIDER = "turnloom"
KEY_VARIABLE = "TURNLOOM_API_KEY"


class Codex(PackagedHarness):
    """`sub_agents` lets it start agents of its own. `program` is an installation of your own."""

    def __init__(self, *, sub_agents: bool = False, version: str = VERSION, args: Sequence[str] = (), program: Sequence[str] = ()) -> None:
        super().__init__(NpmAgent("codex", "@openai/codex", version, "codex"), args, program)
        self._sub_agents = sub_agents

    def command(self, context: AgentContext) -> Launch:
        argv = (
            *(*context.program, "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"),
            *("--color", "never", *self._args, "-"),
        )
        # A file, not options: what the gateway's address holds is shown to every process in a command line.
        files = {f"{context.home}/.codex/config.toml": self._config(context).encode()}
        return Launch(argv, {KEY_VARIABLE: context.api_key}, files, context.prompt.encode())

    def _config(self, context: AgentContext) -> str:
        off = ("plugins", "apps", "goals", "remote_plugin", *(() if self._sub_agents else ("multi_agent",)))
        return _toml(
            {
                "": {
                    "model": context.model,
                    "model_provider": PROVIDER,
                    "model_context_window": context.context_tokens,
                    "web_search": "disabled",
                    "check_for_update_on_startup": False,
                },
                f"model_providers.{PROVIDER}": {
                    "name": PROVIDER,
                    "base_url": f"{context.base_url}/v1",
                    "env_key": KEY_VARIABLE,
                    "wire_api": "responses",
                },
                "analytics": {"enabled": False},
                "features": dict.fromkeys(off, False),
            }
        )


def _toml(tables: dict[str, dict[str, object]]) -> str:
    """Strings, whole numbers and booleans are spelled in TOML as in JSON."""
    lines = []
    for name, values in tables.items():
        lines += [f"[{name}]"] if name else []
        lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"
