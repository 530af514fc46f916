"""Qwen Code, headless, through the chat dialect."""

from __future__ import annotations

import json
from collections.abc import Sequence

from turnloom.harness.contract import AgentContext, Launch
from turnloom.harness.install import PackagedHarness
from turnloom.harness.npm import NpmAgent

VERSION = "0.15.10"
"""The last minor version that runs on Node.js 20."""


class QwenCode(PackagedHarness):
    """`args` are added to its command line. `program` is an installation of your own."""

    def __init__(self, *, version: str = VERSION, args: Sequence[str] = (), program: Sequence[str] = ()) -> None:
        super().__init__(NpmAgent("qwen-code", "@qwen-code/qwen-code", version, "qwen"), args, program)

    def command(self, context: AgentContext) -> Launch:
        argv = (*context.program, "--model", context.model, "--auth-type", "openai", "--yolo", *self._args)
        env = {
            "OPENAI_BASE_URL": f"{context.base_url}/v1",
            "OPENAI_API_KEY": context.api_key,
            "OPENAI_MODEL": context.model,
        }
        settings = {
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
            "privacy": {"usageStatisticsEnabled": False},
            "general": {"enableAutoUpdate": False},
            "model": {
                "generationConfig": {
                    "contextWindowSize": context.context_tokens,
                    "samplingParams": {"max_tokens": context.output_tokens},
                }
            },
        }
        files = {f"{context.home}/.qwen/settings.json": json.dumps(settings, indent=2).encode()}
        return Launch(argv, env, files, context.prompt.encode())
