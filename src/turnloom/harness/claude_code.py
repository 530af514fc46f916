"""Claude Code, headless, through the Anthropic dialect."""

from __future__ import annotations

from collections.abc import Sequence

from turnloom.harness.contract import AgentContext, Launch
from turnloom.harness.install import PackagedHarness
from turnloom.harness.npm import NpmAgent

VERSION = "2.1.332"
NO_BETAS = "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS"


class ClaudeCode(PackagedHarness):
    """`bare` asks for the short prompt and three tools, which small models need; the full prompt brings twenty.

    With `tool_search` most of those are only named, and come as the model asks for
    them. `program` is an installation of your own.
    """

    def __init__(
        self,
        *,
        version: str = VERSION,
        bare: bool = True,
        tool_search: bool = False,
        args: Sequence[str] = (),
        program: Sequence[str] = (),
    ) -> None:
        # Its install script puts the native binary in place of a stub.
        super().__init__(NpmAgent("claude-code", "@anthropic-ai/claude-code", version, "claude", scripts=True), args, program)
        self._bare = bare
        self._tool_search = tool_search

    def command(self, context: AgentContext) -> Launch:
        argv = (
            *context.program,
            "-p",
            *(("--bare",) if self._bare else ()),
            "--dangerously-skip-permissions",
            *("--model", context.model),
            *("--session-id", context.session_uuid),
            *self._args,
            *("--", context.prompt),
        )
        env = quiet_environment(context)
        if self._tool_search:
            del env[NO_BETAS]  # Loading a tool late is one of them.
            env["ENABLE_TOOL_SEARCH"] = "true"
        return Launch(argv, env)


def quiet_environment(context: AgentContext) -> dict[str, str]:
    """Where its model is, and what keeps it from asking for anything but the task."""
    return {
        "ANTHROPIC_BASE_URL": context.base_url,
        "ANTHROPIC_API_KEY": context.api_key,
        "IS_SANDBOX": "1",  # Without it root is refused.
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # Else a header in the system text changes during the session.
        "DISABLE_PROMPT_CACHING": "1",
        NO_BETAS: "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context.context_tokens),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(context.output_tokens),
    }
