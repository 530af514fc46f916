"""Gemini CLI, headless, through the Gemini dialect."""

from __future__ import annotations

import json
from collections.abc import Sequence

from turnloom.harness.contract import AgentContext, Launch
from turnloom.harness.install import PackagedHarness
from turnloom.harness.npm import NpmAgent

VERSION = "0.61.0"


class GeminiCli(PackagedHarness):
    """`args` are added to its command line. `program` is an installation of your own.

    It takes no limits: it believes that any model holds a million tokens, and leaves the length of a reply to the server.
    """

    def __init__(self, *, version: str = VERSION, args: Sequence[str] = (), program: Sequence[str] = ()) -> None:
        super().__init__(NpmAgent("gemini-cli", "@google/gemini-cli", version, "gemini"), args, program)

    def command(self, context: AgentContext) -> Launch:
        argv = (*context.program, "--model", context.model, "--yolo", "--skip-trust", *self._args)
        env = {
            "GOOGLE_GEMINI_BASE_URL": context.base_url,
            "GEMINI_API_KEY": context.api_key,
            "GEMINI_CLI_NO_RELAUNCH": "1",  # Else a second process of its own outlives a kill of the first.
        }
        settings = {
            "security": {"auth": {"selectedType": "gemini-api-key"}},  # Without it: exit code 41.
            "privacy": {"usageStatisticsEnabled": False},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        }
        files = {f"{context.home}/.gemini/settings.json": json.dumps(settings, indent=2).encode()}
        return Launch(argv, env, files, context.prompt.encode())
