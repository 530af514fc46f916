"""One query of the claude-agent-sdk with Claude Code's own prompt and tools. Nothing in it is about the gateway."""

from __future__ import annotations

import argparse
import asyncio
import sys

from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKError, ResultMessage, query


async def run(options: argparse.Namespace) -> int:
    settings = ClaudeAgentOptions(
        model=options.model,
        max_turns=options.max_turns,
        session_id=options.session_id,
        permission_mode="bypassPermissions",
        system_prompt={"type": "preset", "preset": "claude_code"},
        setting_sources=[],
    )
    code = 1
    async for message in query(prompt=options.prompt, options=settings):
        if isinstance(message, ResultMessage):
            code = int(message.is_error)
            sys.stdout.write(f"{message.result}\n")
    return code


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompt")
    parser.add_argument("--model", required=True)
    parser.add_argument("--session-id")
    parser.add_argument("--max-turns", type=int, default=30)
    try:
        return asyncio.run(run(parser.parse_args()))
    except ClaudeSDKError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
