"""A small coding agent on the official anthropic SDK: three tools and a loop.

    ANTHROPIC_BASE_URL=http://127.0.0.1:8800/s/KEY ANTHROPIC_API_KEY=KEY python -m turnloom.harness.sdk_agent "fix the test"

It knows nothing of Turnloom: it is the plain agent that the gateway serves, and
the shortest real example of one. Whatever the model writes, it answers with a
tool result; only a model that cannot be reached ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anthropic

from turnloom.sandbox.output import EndsBuffer

SYSTEM = "You are a coding agent in the current directory. Use the tools until the task is done, then say so in one sentence."
DESCRIPTION = """
Tools:
bash(command): run a shell command
read(path): show a file
edit(path, old, new): replace the text old, which must occur once, by new; an empty old makes a new file

To use a tool, write this and stop:
<tool_call>
{"name": "bash", "arguments": {"command": "ls"}}
</tool_call>
You then get its result. Use one tool at a time."""


def _tool(name: str, description: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    return {
        "name": name,
        "description": description,
        "input_schema": {"type": "object", "properties": properties, "required": [*parameters]},
    }


TOOLS = [
    _tool("bash", "Run a shell command in the working directory.", "command"),
    _tool("read", "Show a text file.", "path"),
    _tool(
        "edit", "Replace the text `old`, which must occur exactly once, by `new`; an empty `old` makes a new file.", "path", "old", "new"
    ),
]


def bash(command: str, timeout: float, limit: int) -> tuple[str, bool]:
    # The command gets no key: what the model runs should not reach its own session.
    env = {name: value for name, value in os.environ.items() if not name.startswith("ANTHROPIC_")}
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    output, end, timed_out = EndsBuffer(limit), time.monotonic() + timeout, False
    with process.stdout as pipe:
        while not timed_out:
            if select.select([pipe], [], [], 0.05)[0]:
                data = os.read(pipe.fileno(), 65536)
                if not data:
                    break
                output.feed(data)
            elif process.poll() is not None:
                break  # The shell is done; something it left behind holds the pipe.
            timed_out = time.monotonic() > end
    if not timed_out:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    text = output.value().decode("utf-8", "replace")
    note = f"[stopped after {timeout:g} s]" if timed_out else f"[exit code {code}]" if code else ""
    return "\n".join(part for part in (text.rstrip("\n"), note) if part) or "[no output]", timed_out or code != 0


def read(path: str, limit: int) -> str:
    if not Path(path).is_file():
        raise OSError(f"{path} is not a file")
    buffer = EndsBuffer(limit)
    with open(path, "rb") as source:
        while data := source.read(1 << 20):
            buffer.feed(data)
    return buffer.value().decode("utf-8", "replace") or "[empty file]"


def edit(path: str, old: str, new: str) -> str:
    target = Path(path)
    if not old:
        if target.exists():
            raise ValueError(f"{path} exists already: give the text to replace as old")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(new, encoding="utf-8")
        return f"made {path}"
    if not target.is_file():
        raise OSError(f"{path} is not a file")
    text = target.read_bytes().decode("utf-8")
    if text.count(old) != 1:
        raise ValueError(f"old occurs {text.count(old)} times in {path}; it must occur once")
    target.write_bytes(text.replace(old, new).encode())
    return f"changed {path}"


def clean(text: str) -> str:
    """Without lone surrogates, which JSON can spell and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def use_tool(name: str, arguments: object, options: argparse.Namespace) -> tuple[str, bool]:
    """The tool's answer and whether it is an error. Never raises for what the model wrote."""
    tool = next((tool for tool in TOOLS if tool["name"] == name), None)
    if tool is None:
        return f"there is no tool {name!r}; the tools are bash, read, edit", True
    wanted = tool["input_schema"]["required"]
    given = arguments if isinstance(arguments, dict) else {}
    wrong = [parameter for parameter in wanted if not isinstance(given.get(parameter), str)]
    if wrong:
        return f"{name} needs {', '.join(wrong)} as text", True
    values = [str(given[parameter]) for parameter in wanted]
    try:
        if name == "bash":
            return bash(values[0], options.bash_timeout, options.output_limit)
        return (read(values[0], options.output_limit) if name == "read" else edit(*values)), False
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return clean(f"{type(error).__name__}: {error}"), True


def ask(client: anthropic.Anthropic, messages: list[Any], options: argparse.Namespace) -> anthropic.types.Message:
    system = SYSTEM + DESCRIPTION if options.describe_tools else SYSTEM
    request: dict[str, Any] = {
        "model": options.model,
        "max_tokens": options.max_tokens,
        "system": system,
        "tools": TOOLS,
        "messages": messages,
    }
    if not options.stream:
        return client.messages.create(**request)  # type: ignore[no-any-return]
    with client.messages.stream(**request) as stream:
        return stream.get_final_message()


def run(client: anthropic.Anthropic, prompt: str, options: argparse.Namespace) -> int:
    messages: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(options.max_turns):
        reply = ask(client, messages, options)
        results = []
        for block in reply.content:
            if block.type == "text":
                sys.stdout.write(clean(block.text.rstrip("\n")) + "\n")
            elif block.type == "tool_use":
                sys.stdout.write(f"[{block.name}] {block.input}\n")
                text, is_error = use_tool(block.name, block.input, options)
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": text, "is_error": is_error})
        sys.stdout.flush()
        if not results:
            return 0
        messages += [{"role": "assistant", "content": [block.to_dict() for block in reply.content]}, {"role": "user", "content": results}]
    sys.stderr.write(f"stopped after {options.max_turns} turns\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sdk_agent", description="A small coding agent on the anthropic SDK.")
    parser.add_argument("prompt", nargs="?", help="the task; standard input when left out")
    parser.add_argument("--model", default=os.environ.get("ANTHROPIC_MODEL", "turnloom"))
    parser.add_argument("--max-turns", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--bash-timeout", type=float, default=60.0, help="seconds")
    parser.add_argument("--output-limit", type=int, default=8000, help="bytes of a tool result")
    parser.add_argument("--no-stream", dest="stream", action="store_false")
    parser.add_argument("--describe-tools", action="store_true", help="tell the model of the tools in the system text")
    options = parser.parse_args(argv)
    prompt = options.prompt if options.prompt is not None else sys.stdin.read()
    try:
        return run(anthropic.Anthropic(max_retries=4), prompt, options)
    except anthropic.BadRequestError as error:
        sys.stderr.write(f"{error}\n")
        return 0 if "prompt is too long" in str(error) else 1  # A full context is an ordinary end.
    except anthropic.AnthropicError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
