"""What each harness says: pure, so the whole command line is compared."""

import json
import sys

import pytest

from turnloom.errors import ConfigError
from turnloom.harness import AgentContext, load_harness

UUID = "6f1f2d4e-7d0a-4c33-9a0e-2f9f4f8f7c11"


def context(program=("agent",), prompt="fix it", **changes):
    given = {
        "base_url": "http://127.0.0.1:8800/s/KEY",
        "api_key": "secret-key",
        "prompt": prompt,
        "workdir": "/box/work",
        "home": "/box/home",
        "session_uuid": UUID,
        "program": tuple(program),
        "model": "loom-1",
        "context_tokens": 8192,
        "output_tokens": 1024,
    }
    return AgentContext(**{**given, **changes})


def test_claude_code():
    launch = load_harness("claude-code").command(context(["claude"]))
    assert launch.argv == (
        *("claude", "-p", "--bare", "--dangerously-skip-permissions", "--model", "loom-1", "--session-id", UUID),
        *("--", "fix it"),
    )
    assert launch.env == {
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:8800/s/KEY",
        "ANTHROPIC_API_KEY": "secret-key",
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "DISABLE_PROMPT_CACHING": "1",
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "8192",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1024",
    }
    assert (launch.files, launch.stdin) == ({}, None)


def test_claude_code_with_its_full_prompt_and_arguments_of_ones_own():
    argv = load_harness("claude-code", bare=False, args=["--tools", "Bash"]).command(context(["claude"])).argv
    assert "--bare" not in argv
    assert argv[-4:] == ("--tools", "Bash", "--", "fix it")


def test_pi():
    launch = load_harness("pi").command(context(["pi"]))
    assert launch.argv == (
        *("pi", "-p", "--provider", "turnloom", "--model", "loom-1", "--no-session", "--offline"),
        *("--no-extensions", "--no-skills", "--no-prompt-templates", "--thinking", "off"),
    )
    assert launch.env == {"TURNLOOM_API_KEY": "secret-key", "PI_OFFLINE": "1", "PI_TELEMETRY": "0"}
    assert launch.stdin == b"fix it"
    files = {path: json.loads(data) for path, data in launch.files.items()}
    assert files == {
        "/box/home/.pi/agent/models.json": {
            "providers": {
                "turnloom": {
                    "baseUrl": "http://127.0.0.1:8800/s/KEY",
                    "api": "anthropic-messages",
                    "apiKey": "TURNLOOM_API_KEY",
                    "models": [{"id": "loom-1", "reasoning": False, "input": ["text"], "contextWindow": 8192, "maxTokens": 1024}],
                }
            }
        },
        "/box/home/.pi/agent/settings.json": {
            "enableInstallTelemetry": False,
            "quietStartup": True,
            "compaction": {"enabled": True, "reserveTokens": 1024, "keepRecentTokens": 4096},
        },
    }


def test_sdk_agent():
    launch = load_harness("sdk-agent", max_turns=3, stream=False).command(context(["agent"], prompt="--help"))
    assert launch.argv == (
        *("agent", "--model", "loom-1", "--max-turns", "3", "--max-tokens", "1024", "--no-stream"),
        *("--", "--help"),
    )
    assert launch.env == {"ANTHROPIC_BASE_URL": "http://127.0.0.1:8800/s/KEY", "ANTHROPIC_API_KEY": "secret-key"}


def test_command_fills_in_its_places_once_and_within_their_words():
    harness = load_harness("command", argv=["run", "--in={workdir}", "{prompt}", "{unknown}", "{model}"], env={"EXTRA": "1"})
    launch = harness.command(context(prompt="say {model}; rm -rf /"))
    assert launch.argv == ("run", "--in=/box/work", "say {model}; rm -rf /", "{unknown}", "loom-1")
    assert launch.env["ANTHROPIC_BASE_URL"] == launch.env["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:8800/s/KEY"
    assert launch.env["OPENAI_BASE_URL"] == "http://127.0.0.1:8800/s/KEY/v1"
    assert {launch.env[f"{name}_API_KEY"] for name in ("ANTHROPIC", "OPENAI", "GEMINI")} == {"secret-key"}
    assert launch.env["EXTRA"] == "1"
    assert launch.stdin is None
    assert load_harness("command", argv=["cat"], prompt_on_stdin=True).command(context()).stdin == b"fix it"


@pytest.mark.parametrize(("name", "options"), [("claude-code", {}), ("pi", {}), ("sdk-agent", {}), ("command", {"argv": ["x"]})])
def test_a_command_is_pure_and_its_repr_keeps_the_key(name, options):
    harness = load_harness(name, **options)
    assert harness.name == name
    assert harness.command(context()) == harness.command(context())
    shown = repr(context()) + repr(harness.command(context()))
    assert "secret-key" not in shown
    assert "/s/KEY" not in shown


def test_a_harness_can_be_named_by_its_import_path(monkeypatch, tmp_path):
    (tmp_path / "someones_agent.py").write_text(
        "class Theirs:\n    name = 'theirs'\n    install = command = None\n    def __init__(self, size=1): self.size = size\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    harness = load_harness("someones_agent:Theirs", size=3)
    assert (harness.name, harness.size) == ("theirs", 3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nobody", {}, "there is no agent 'nobody': use one of sdk-agent, claude-code, pi, command"),
        ("no.such.module:Name", {}, "cannot be imported"),
        ("turnloom.harness.pi:Name", {}, "cannot be imported"),
        (":", {}, "cannot be imported"),
        ("..x:y", {}, "cannot be imported"),
        ("json:dumps", {}, "does not take these options"),
        ("json:JSONDecoder", {}, "is not a Harness: it has no name, no install, no command"),
        ("pi", {"colour": "red"}, "does not take these options"),
        ("command", {}, "does not take these options"),
        ("command", {"argv": "ls -l"}, "as a list of words"),
        ("command", {"argv": []}, "as a list of words"),
    ],
)
def test_a_wrong_name_or_option_says_so(name, options, message):
    with pytest.raises(ConfigError, match=message):
        load_harness(name, **options)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise RuntimeError('at\\nimport')", "cannot be imported: RuntimeError: at import"),
        ("def broken(:", "cannot be imported: SyntaxError"),
        ("import sys; sys.exit(3)", "cannot be imported: SystemExit: 3"),
        ("class Theirs:\n    def __init__(self): raise KeyError('home')", "cannot be made: KeyError: 'home'"),
    ],
)
def test_whatever_another_module_raises_is_one_line(monkeypatch, tmp_path, body, message):
    (tmp_path / "theirs_in_pieces.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "theirs_in_pieces", raising=False)
    with pytest.raises(ConfigError, match=message) as caught:
        load_harness("theirs_in_pieces:Theirs")
    assert "\n" not in str(caught.value)
