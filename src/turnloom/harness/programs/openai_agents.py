"""An agent on the openai-agents SDK with one tool, a shell. Nothing in it is about the gateway."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

from openai import OpenAIError

from agents import Agent, MaxTurnsExceeded, ModelSettings, RunConfig, Runner, function_tool, set_default_openai_api, set_tracing_disabled

INSTRUCTIONS = "You are a coding agent in the current directory. Use the shell until the task is done, then say so in one sentence."
SHELL_SECONDS = 60.0
RESULT_CHARS = 8000


async def bash(command: str) -> str:
    """Run a shell command in the working directory."""
    # The command gets no key: what the model runs should not reach its own session.
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = await asyncio.create_subprocess_exec("/bin/sh", "-c", command, env=env, start_new_session=True, **pipes)
    try:
        output, _ = await asyncio.wait_for(process.communicate(), SHELL_SECONDS)
    except TimeoutError:
        return f"[stopped after {SHELL_SECONDS:g} s]"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    text = output.decode("utf-8", "replace")
    if len(text) > RESULT_CHARS:
        text = f"{text[: RESULT_CHARS // 2]}\n[cut]\n{text[-RESULT_CHARS // 2 :]}"
    return text + (f"\n[exit code {process.returncode}]" if process.returncode else "") or "[no output]"


async def run(options: argparse.Namespace) -> None:
    settings = ModelSettings(max_tokens=options.max_tokens)
    agent = Agent[Any](name="coder", instructions=INSTRUCTIONS, model=options.model, model_settings=settings, tools=[function_tool(bash)])
    config = RunConfig(tracing_disabled=True)
    if options.stream:
        streamed = Runner.run_streamed(agent, options.prompt, max_turns=options.max_turns, run_config=config)
        async for _ in streamed.stream_events():
            pass
        sys.stdout.write(f"{streamed.final_output}\n")
    else:
        result = await Runner.run(agent, options.prompt, max_turns=options.max_turns, run_config=config)
        sys.stdout.write(f"{result.final_output}\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompt")
    parser.add_argument("--model", required=True)
    parser.add_argument("--api", choices=["chat_completions", "responses"], required=True)
    parser.add_argument("--max-turns", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--no-stream", dest="stream", action="store_false")
    options = parser.parse_args()
    set_tracing_disabled(True)
    set_default_openai_api(options.api)
    try:
        asyncio.run(run(options))
    except MaxTurnsExceeded as error:
        sys.stderr.write(f"{error}\n")
    except OpenAIError as error:
        sys.stderr.write(f"{error}\n")
        return int(getattr(error, "code", None) != "context_length_exceeded")  # A full context is an ordinary end.
    return 0


if __name__ == "__main__":
    sys.exit(main())
