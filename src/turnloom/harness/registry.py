"""Harnesses by name. A name with a colon is an import path, `package.module:Name`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from turnloom.errors import ConfigError, TurnloomError
from turnloom.harness.contract import Harness, Needy
from turnloom.imports import described, load_object

HARNESSES = {
    "sdk-agent": "turnloom.harness.sdk:SdkAgent",
    "claude-code": "turnloom.harness.claude_code:ClaudeCode",
    "pi": "turnloom.harness.pi:Pi",
    "codex": "turnloom.harness.codex:Codex",
    "gemini-cli": "turnloom.harness.gemini_cli:GeminiCli",
    "qwen-code": "turnloom.harness.qwen_code:QwenCode",
    "opencode": "turnloom.harness.opencode:OpenCode",
    "continue-cn": "turnloom.harness.continue_cn:ContinueCn",
    "mini-swe-agent": "turnloom.harness.mini_swe_agent:MiniSweAgent",
    "openai-agents": "turnloom.harness.openai_agents:OpenAIAgents",
    "claude-agent-sdk": "turnloom.harness.claude_agent_sdk:ClaudeAgentSdk",
    "command": "turnloom.harness.command:Command",
}


def load_harness(name: str, **options: Any) -> Harness:
    """The harness of this name, made with its own options. Raises ConfigError when there is none or it refuses them."""
    path = name if ":" in name else HARNESSES.get(name)
    if path is None:
        raise ConfigError(f"there is no agent {name!r}: use one of {', '.join(HARNESSES)}, or package.module:Name")
    make = load_object(path, "agent")
    try:
        harness = cast(Callable[..., Harness], make)(**options)
    except TypeError as error:
        raise ConfigError(f"agent {name!r} does not take these options: {error}") from error
    except TurnloomError:
        raise
    except Exception as error:
        raise ConfigError(f"agent {name!r} cannot be made: {described(error)}") from error
    missing = [part for part in ("name", "install", "command") if not hasattr(harness, part)]
    if missing:
        raise ConfigError(f"agent {name!r} is not a Harness: it has no {', no '.join(missing)}")
    return harness


async def require(harness: Harness) -> None:
    """Before anything is started: whether this machine has what the agent needs. Raises HarnessError that says what to do."""
    if isinstance(harness, Needy):
        await harness.require()
