"""Any program as an agent: a command line with places for the prompt and the model, and the usual variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from turnloom.errors import ConfigError
from turnloom.harness.contract import AgentContext, Launch
from turnloom.sandbox.contract import Sandbox

_PLACE = re.compile(r"\{(prompt|model|workdir|home|base_url|session_uuid)\}")


class Command:
    """`argv` may hold `{prompt}`, `{model}`, `{workdir}`, `{home}`, `{base_url}` and `{session_uuid}`.

    Each stays within its argument: nothing passes through a shell. With
    `prompt_on_stdin` the prompt is the standard input too. The program is
    expected to be in the sandbox already.
    """

    name = "command"

    def __init__(self, *, argv: Sequence[str], env: Mapping[str, str] | None = None, prompt_on_stdin: bool = False) -> None:
        if isinstance(argv, str) or not argv:
            raise ConfigError("the command agent needs its command as a list of words")
        self._argv = tuple(argv)
        self._env = dict(env or {})
        self._prompt_on_stdin = prompt_on_stdin

    async def install(self, sandbox: Sandbox) -> tuple[str, ...]:
        return ()

    def command(self, context: AgentContext) -> Launch:
        argv = tuple(_PLACE.sub(lambda place: str(getattr(context, place[1])), word) for word in self._argv)
        env = {**model_environment(context), **self._env}
        return Launch(argv, env, stdin=context.prompt.encode() if self._prompt_on_stdin else None)


def model_environment(context: AgentContext) -> dict[str, str]:
    """Where the model is, as the official SDKs of the three protocols read it."""
    return {
        "ANTHROPIC_BASE_URL": context.base_url,
        "ANTHROPIC_API_KEY": context.api_key,
        "ANTHROPIC_MODEL": context.model,
        "OPENAI_BASE_URL": f"{context.base_url}/v1",
        "OPENAI_API_KEY": context.api_key,
        "OPENAI_MODEL": context.model,
        "GOOGLE_GEMINI_BASE_URL": context.base_url,
        "GEMINI_API_KEY": context.api_key,
        "GEMINI_MODEL": context.model,
    }
