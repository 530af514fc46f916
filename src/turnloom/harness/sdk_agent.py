# ruff: noqa: T201
"""A small coding agent on the official anthropic SDK: three tools and a loop. Nothing in it is about the gateway.

Whatever the model writes gets a tool result. Only a model that cannot be reached, or refuses, ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import anthropic

from turnloom.sandbox.output import EndsBuffer

SYSTEM = "You are a coding agent in the current directory. Use the tools until the task is done, then say so in one sentence."
EXAMPLES = [
    ("List the files.", "ls", "notes.py tests"),
    ("Show notes.py.", "cat notes.py", "def first(notes):\n    return notes[1]"),
    ("Run the tests.", "python3 tests/run.py", "FAILED"),
]
"""What is asked, the command that answers it, its result: a very small model writes a call only when it has seen some."""
BASH_SECONDS = 60.0
RESULT_BYTES = 8000


def bash(command: str) -> str:
    """Run a shell command in the working directory."""
    # The command gets no key: what the model runs should not reach its own session.
    env = {name: value for name, value in os.environ.items() if not name.startswith("ANTHROPIC_")}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(["/bin/sh", "-c", command], env=env, start_new_session=True, **pipes)
    output = EndsBuffer(RESULT_BYTES)
    reader = threading.Thread(target=drain, args=(process.stdout, output), daemon=True)
    reader.start()
    try:
        note = f"[exit code {code}]" if (code := process.wait(BASH_SECONDS)) else ""
    except subprocess.TimeoutExpired:
        note = f"[stopped after {BASH_SECONDS:g} s]"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join(1.0)  # A process that left the group may hold the pipe; it is not waited for.
    result = "\n".join(filter(None, (output.value().decode("utf-8", "replace").rstrip("\n"), note)))
    if note:
        raise ChildProcessError(result)
    return result or "[no output]"


def read(path: str) -> str:
    """Show a text file."""
    if not Path(path).is_file():
        raise ValueError(f"{path!r} is not a file")
    output = EndsBuffer(RESULT_BYTES)
    drain(open(path, "rb"), output)  # noqa: SIM115 - drain closes it
    return output.value().decode("utf-8", "replace") or "[empty file]"


def edit(path: str, old: str, new: str) -> str:
    """Replace the text `old`, which must occur exactly once, by `new`; an empty `old` makes a new file."""
    file = Path(path)
    if not old and file.exists():
        raise ValueError(f"{path!r} exists already: give the text to replace as old")
    text = file.read_bytes().decode() if file.is_file() else ""
    if old and text.count(old) != 1:
        raise ValueError(f"old occurs {text.count(old)} times in {path!r}; it must occur once")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes((text.replace(old, new) if old else new).encode())
    return f"wrote {path}"


def declared(tool: Callable[..., str]) -> dict[str, Any]:
    """The tool as the API takes it: every parameter is a text that must be given."""
    properties = {parameter: {"type": "string"} for parameter in inspect.signature(tool).parameters}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return {"name": tool.__name__, "description": tool.__doc__, "input_schema": schema}


TOOLS = {tool.__name__: tool for tool in (bash, read, edit)}


def drain(source: IO[bytes], output: EndsBuffer) -> None:
    with source:
        while data := os.read(source.fileno(), 65536):
            output.feed(data)


def use_tool(name: str, arguments: object) -> tuple[str, bool]:
    """The result's text, and whether it is an error. It never raises for what the model wrote."""
    if name not in TOOLS:
        return f"there is no tool {name!r}; the tools are {', '.join(TOOLS)}", True
    wanted = inspect.signature(TOOLS[name]).parameters
    given: list[Any] = [arguments.get(parameter) if isinstance(arguments, dict) else None for parameter in wanted]
    if not all(isinstance(value, str) for value in given):
        return f"{name} needs {', '.join(wanted)} as text", True
    try:
        return TOOLS[name](*given), False
    except (OSError, ValueError) as error:
        return str(error), True


def opening(prompt: str, examples: bool) -> list[Any]:
    messages: list[Any] = []
    before: list[Any] = []
    for i, (ask, command, result) in enumerate(EXAMPLES if examples else ()):
        call = {"type": "tool_use", "id": f"example_{i}", "name": "bash", "input": {"command": command}}
        messages += [{"role": "user", "content": [*before, {"type": "text", "text": ask}]}, {"role": "assistant", "content": [call]}]
        before = [{"type": "tool_result", "tool_use_id": call["id"], "content": result}]
    return [*messages, {"role": "user", "content": [*before, {"type": "text", "text": prompt}] if before else prompt}]


def run(client: anthropic.Anthropic, options: argparse.Namespace) -> None:
    messages = opening(options.prompt, options.examples)
    request: dict[str, Any] = {"model": options.model, "max_tokens": options.max_tokens, "system": SYSTEM, "messages": messages}
    request["tools"] = [declared(tool) for tool in TOOLS.values()]
    for _ in range(options.max_turns):
        if options.stream:
            with client.messages.stream(**request) as stream:
                reply = stream.get_final_message()
        else:
            reply = client.messages.create(**request)
        results = []
        for block in reply.content:
            if block.type == "text":
                print(block.text, flush=True)
            elif block.type == "tool_use":
                print(f"[{block.name}] {block.input}", flush=True)
                text, is_error = use_tool(block.name, block.input)
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": text, "is_error": is_error})
        if not results:
            return
        messages += [{"role": "assistant", "content": [block.to_dict() for block in reply.content]}, {"role": "user", "content": results}]
    print(f"stopped after {options.max_turns} turns", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sdk_agent", description="A small coding agent on the anthropic SDK.")
    parser.add_argument("prompt")
    parser.add_argument("--model", default=os.environ.get("ANTHROPIC_MODEL", "turnloom"))
    parser.add_argument("--max-turns", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--no-stream", dest="stream", action="store_false")
    parser.add_argument("--examples", action="store_true", help="show the model three calls before the task")
    try:
        run(anthropic.Anthropic(max_retries=4), parser.parse_args(argv))
    except anthropic.AnthropicError as error:
        print(error, file=sys.stderr)
        return 0 if "prompt is too long" in str(error) else 1  # A full context is an ordinary end.
    return 0


if __name__ == "__main__":
    sys.exit(main())
