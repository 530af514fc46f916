"""Our own agent, end to end as a process in a sandbox, and its answers to nonsense."""

import json
import os
import signal
import time
import uuid
from pathlib import Path

import pytest

from turnloom.harness import AgentContext, AgentOutcome, load_harness, run_agent, sdk_agent
from turnloom.harness.sdk_agent import use_tool
from turnloom.sandbox import LocalSandbox


@pytest.fixture
async def sandbox():
    sandbox = LocalSandbox(grace=0.5)
    await sandbox.start()
    yield sandbox
    await sandbox.stop()


async def launch(harness, sandbox, server, prompt="do it", **changes):
    program = await harness.install(sandbox)
    given = {"base_url": server.base_url, "api_key": "secret-key", "prompt": prompt, "workdir": sandbox.workdir, "home": sandbox.home}
    context = AgentContext(**{**given, "session_uuid": str(uuid.uuid4()), "program": program, "time_budget": 120.0, **changes})
    return await run_agent(harness, sandbox, context)


@pytest.mark.parametrize("stream", [True, False])
async def test_it_works_until_no_tool_is_used(sandbox, scripted, stream):
    s = scripted
    s.replies = [
        [s.text("I make it."), s.call(1, "edit", {"path": "a/b.txt", "old": "", "new": "one\r\ntwo"})],
        [s.call(2, "edit", {"path": "a/b.txt", "old": "two", "new": "2"}), s.call(3, "bash", {"command": "cat a/b.txt; env"})],
        [s.call(4, "read", {"path": "a/b.txt"})],
        [s.text("Made.")],
    ]
    run = await launch(load_harness("sdk-agent", stream=stream), sandbox, s, prompt="--make it $(x)")
    assert (run.outcome, run.exit_code, run.stderr) == (AgentOutcome.COMPLETED, 0, "")
    assert run.stdout.startswith("I make it.\n")
    assert run.stdout.endswith("Made.\n")
    assert await sandbox.read_file("a/b.txt") == b"one\r\n2"
    first, *_, last = s.requests
    assert first["messages"] == [{"role": "user", "content": "--make it $(x)"}]
    assert {tool["name"] for tool in first["tools"]} == {"bash", "read", "edit"}
    assert bool(first.get("stream")) is stream
    assert "<tool_call>" not in first["system"]
    assert [message["role"] for message in last["messages"]] == ["user", "assistant"] * 3 + ["user"]
    results = [block for message in last["messages"][2::2] for block in message["content"]]
    assert [result["tool_use_id"] for result in results] == ["toolu_0001", "toolu_0002", "toolu_0003", "toolu_0004"]
    assert not any(result["is_error"] for result in results)
    assert results[2]["content"].startswith("one\r\n2")
    assert "secret-key" not in results[2]["content"], "a command of the model must not see the key"
    assert "/s/KEY" not in results[2]["content"]
    assert results[3]["content"] == "one\r\n2"
    for before, after in zip(s.requests, s.requests[1:], strict=False):
        assert after["messages"][: len(before["messages"])] == before["messages"], "a history only grows"


def test_examples_open_the_conversation_with_calls_and_end_with_the_task():
    from turnloom.wire.anthropic import AnthropicDialect

    messages = sdk_agent.opening("the task", examples=True)
    request = AnthropicDialect().read(json.dumps({"messages": messages}).encode())
    assert [m.role for m in request.messages] == ["user", "assistant", "tool"] * 3 + ["user"]
    assert request.messages[-1].text == "the task"
    assert sdk_agent.opening("the task", examples=False) == [{"role": "user", "content": "the task"}]


async def test_nonsense_gets_an_error_result_and_the_run_goes_on(sandbox, scripted):
    s = scripted
    s.replies = [
        [s.call(1, "fly", {}), s.call(2, "bash", {"cmd": "ls"}), s.call(3, "edit", {"path": 3, "old": None, "new": []})],
        [s.call(4, "bash", {"command": "printf '\\377\\000'; exit 4"}), s.call(5, "read", {"path": "/dev/zero"})],
        [],
    ]
    run = await launch(load_harness("sdk-agent"), sandbox, s)
    assert run.outcome == AgentOutcome.COMPLETED, run
    results = [block for message in s.requests[-1]["messages"][2::2] for block in message["content"]]
    assert [result["is_error"] for result in results] == [True] * 5
    assert "no tool 'fly'" in results[0]["content"]
    assert "bash needs command" in results[1]["content"]
    assert results[3]["content"] == "\ufffd\0\n[exit code 4]"


async def test_it_stops_after_its_turns(sandbox, scripted):
    s = scripted
    s.replies = [[s.call(n, "bash", {"command": "true"})] for n in range(9)]
    run = await launch(load_harness("sdk-agent", max_turns=2), sandbox, s)
    assert (run.outcome, len(s.requests)) == (AgentOutcome.COMPLETED, 2)
    assert "stopped after 2 turns" in run.stderr


@pytest.mark.parametrize(
    ("message", "outcome"),
    [("prompt is too long: 9000 tokens > 8192 maximum", AgentOutcome.COMPLETED), ("messages: wrong", AgentOutcome.CRASHED)],
)
async def test_a_full_context_is_an_end_and_a_refusal_is_a_crash(sandbox, scripted, message, outcome):
    scripted.replies = [(400, {"type": "error", "error": {"type": "invalid_request_error", "message": message}})]
    run = await launch(load_harness("sdk-agent"), sandbox, scripted)
    assert run.outcome == outcome
    assert message in run.stderr
    assert "Traceback" not in run.stderr


async def test_the_time_budget_ends_a_run(sandbox, scripted):
    scripted.replies = [[scripted.call(1, "bash", {"command": "sleep 1000"})]]
    run = await launch(load_harness("command", argv=["sleep", "1000"]), sandbox, scripted, time_budget=0.2)
    assert run.outcome == AgentOutcome.TIMED_OUT


async def test_a_command_that_fails_crashed(sandbox, scripted):
    run = await launch(load_harness("command", argv=["sh", "-c", "echo why >&2; exit 9"]), sandbox, scripted)
    assert (run.outcome, run.exit_code, run.stderr) == (AgentOutcome.CRASHED, 9, "why\n")


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sdk_agent, "BASH_SECONDS", 20.0)
    monkeypatch.setattr(sdk_agent, "RESULT_BYTES", 200)


NONSENSE = [
    *(None, "text", [], 3, {}, {"command": None}, {"path": {}}),
    {"command": "a\0b", "path": "a\0b", "old": "x", "new": "y"},
    {"command": "\ud800", "path": "\ud800", "old": "", "new": "\udfff"},
    *({"path": path, "old": "", "new": ""} for path in ("x" * 5000, ".", "")),
    {"path": "missing", "old": "x", "new": ""},
]


@pytest.mark.parametrize("name", ["bash", "read", "edit", "", "no\0such", "BASH"])
@pytest.mark.parametrize("arguments", NONSENSE)
def test_no_tool_call_raises(name, arguments):
    text, is_error = use_tool(name, arguments)
    assert is_error
    assert text
    text.encode()


def test_an_edit_needs_the_text_once(tmp_path):
    (tmp_path / "f").write_text("a b a")
    assert use_tool("edit", {"path": "f", "old": "a", "new": "c"}) == (
        "old occurs 2 times in 'f'; it must occur once",
        True,
    )
    assert use_tool("edit", {"path": "f", "old": "z", "new": "c"})[1]
    assert use_tool("edit", {"path": "f", "old": "", "new": "c"})[1]
    assert use_tool("edit", {"path": "f", "old": "b", "new": "c"}) == ("wrote f", False)
    assert (tmp_path / "f").read_text() == "a c a"


def test_long_output_and_long_files_keep_their_ends(tmp_path):
    (tmp_path / "f").write_text("start" + "x" * 10000 + "end")
    for name, arguments in (("read", {"path": "f"}), ("bash", {"command": "cat f"})):
        text, is_error = use_tool(name, arguments)
        assert not is_error
        assert text.startswith("start")
        assert text.endswith("end")
        assert len(text) < 300


def has_ended(pid):
    """True as soon as it has, waited for or not; a signal that was sent takes its time."""
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_a_slow_command_is_stopped_with_all_it_started(monkeypatch):
    monkeypatch.setattr(sdk_agent, "BASH_SECONDS", 0.5)
    text, is_error = use_tool("bash", {"command": "echo early; sleep 1000 & echo $! > pid; wait"})
    assert (text, is_error) == ("early\n[stopped after 0.5 s]", True)
    assert has_ended(int(Path("pid").read_text()))
    text, is_error = use_tool("bash", {"command": "exec >/dev/null 2>&1; sleep 1000"})
    assert (text, is_error) == ("[stopped after 0.5 s]", True)


def test_what_a_command_leaves_in_the_background_does_not_hold_it():
    assert use_tool("bash", {"command": "sleep 1000 & echo started"}) == ("started", False)


def test_a_process_that_left_the_group_and_holds_the_pipe_does_not_hold_the_agent():
    text, is_error = use_tool(
        "bash", {"command": "setsid sh -c 'echo $$ > pid; exec sleep 1000' & while [ ! -s pid ]; do :; done; echo started"}
    )
    os.kill(int(Path("pid").read_text()), signal.SIGKILL)
    assert (text, is_error) == ("started", False)


def test_endless_output_is_bounded(monkeypatch):
    monkeypatch.setattr(sdk_agent, "BASH_SECONDS", 0.5)
    text, is_error = use_tool("bash", {"command": "yes"})
    assert is_error
    assert text.startswith("y\ny\n")
    assert text.endswith("[stopped after 0.5 s]")
    assert len(text) < 300
