"""What each harness says: pure, so the whole command line is compared."""

import json
import sys
import tomllib

import pytest

from turnloom.errors import ConfigError
from turnloom.harness import HARNESSES, AgentContext, load_harness

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


@pytest.mark.parametrize(
    ("api", "route"),
    [
        ("anthropic-messages", ""),
        ("openai-completions", "/v1"),
        ("openai-responses", "/v1"),
        ("google-generative-ai", "/v1beta"),
    ],
)
def test_pi_speaks_four_protocols(api, route):
    files = load_harness("pi", api=api).command(context(["pi"])).files
    provider = json.loads(files["/box/home/.pi/agent/models.json"])["providers"]["turnloom"]
    assert (provider["api"], provider["baseUrl"]) == (api, f"http://127.0.0.1:8800/s/KEY{route}")


def test_codex():
    launch = load_harness("codex").command(context(["codex"], model='loom "1" \u00e9'))
    assert launch.argv == (
        *("codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"),
        *("--color", "never", "-"),
    )
    assert (launch.env, launch.stdin) == ({"TURNLOOM_API_KEY": "secret-key"}, b"fix it")
    ((path, data),) = launch.files.items()
    assert path == "/box/home/.codex/config.toml"
    assert tomllib.loads(data.decode()) == {
        "model": 'loom "1" \u00e9',
        "model_provider": "turnloom",
        "model_context_window": 8192,
        "web_search": "disabled",
        "check_for_update_on_startup": False,
        "model_providers": {
            "turnloom": {
                "name": "turnloom",
                "base_url": "http://127.0.0.1:8800/s/KEY/v1",
                "env_key": "TURNLOOM_API_KEY",
                "wire_api": "responses",
            }
        },
        "analytics": {"enabled": False},
        "features": {"plugins": False, "apps": False, "goals": False, "remote_plugin": False, "multi_agent": False},
    }


def test_codex_with_sub_agents_and_arguments_of_ones_own():
    launch = load_harness("codex", sub_agents=True, args=["--json"]).command(context(["codex"]))
    assert launch.argv[-2:] == ("--json", "-")
    assert "multi_agent" not in tomllib.loads(next(iter(launch.files.values())).decode())["features"]


def test_gemini_cli():
    launch = load_harness("gemini-cli").command(context(["gemini"]))
    assert launch.argv == ("gemini", "--model", "loom-1", "--yolo", "--skip-trust")
    assert launch.env == {
        "GOOGLE_GEMINI_BASE_URL": "http://127.0.0.1:8800/s/KEY",
        "GEMINI_API_KEY": "secret-key",
        "GEMINI_CLI_NO_RELAUNCH": "1",
    }
    assert {path: json.loads(data) for path, data in launch.files.items()} == {
        "/box/home/.gemini/settings.json": {
            "security": {"auth": {"selectedType": "gemini-api-key"}},
            "privacy": {"usageStatisticsEnabled": False},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        }
    }
    assert launch.stdin == b"fix it"


def test_qwen_code():
    launch = load_harness("qwen-code").command(context(["qwen"]))
    assert launch.argv == ("qwen", "--model", "loom-1", "--auth-type", "openai", "--yolo")
    assert launch.env == {
        "OPENAI_BASE_URL": "http://127.0.0.1:8800/s/KEY/v1",
        "OPENAI_API_KEY": "secret-key",
        "OPENAI_MODEL": "loom-1",
    }
    assert {path: json.loads(data) for path, data in launch.files.items()} == {
        "/box/home/.qwen/settings.json": {
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
            "privacy": {"usageStatisticsEnabled": False},
            "general": {"enableAutoUpdate": False},
            "model": {"generationConfig": {"contextWindowSize": 8192, "samplingParams": {"max_tokens": 1024}}},
        }
    }
    assert launch.stdin == b"fix it"


@pytest.mark.parametrize(
    ("api", "sdk", "route"),
    [
        ("openai-completions", "@ai-sdk/openai-compatible", "/v1"),
        ("openai-responses", "@ai-sdk/openai", "/v1"),
        ("anthropic-messages", "@ai-sdk/anthropic", "/v1"),
        ("google-generative-ai", "@ai-sdk/google", "/v1beta"),
    ],
)
def test_opencode(api, sdk, route):
    launch = load_harness("opencode", api=api).command(context(["opencode"]))
    assert launch.argv == ("opencode", "run", "--model", "turnloom/loom-1", "--title", "task")
    assert launch.env == {
        "TURNLOOM_API_KEY": "secret-key",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    assert {path: json.loads(data) for path, data in launch.files.items()} == {
        "/box/home/.config/opencode/opencode.json": {
            "provider": {
                "turnloom": {
                    "npm": sdk,
                    "name": "turnloom",
                    "options": {"baseURL": f"http://127.0.0.1:8800/s/KEY{route}", "apiKey": "{env:TURNLOOM_API_KEY}"},
                    "models": {"loom-1": {"name": "loom-1", "tool_call": True, "limit": {"context": 8192, "output": 1024}}},
                }
            },
            "enabled_providers": ["turnloom"],
            "permission": {"*": "allow"},
            "share": "disabled",
            "autoupdate": False,
        }
    }
    assert launch.stdin == b"fix it"


def test_continue_cn():
    launch = load_harness("continue-cn").command(context(["cn"]))
    path = "/box/home/.continue/turnloom.yaml"
    assert launch.argv == ("cn", "--config", path, "--print", "--auto")
    assert launch.env == {"CONTINUE_TELEMETRY_ENABLED": "0"}
    (model,) = json.loads(launch.files[path])["models"]
    assert model == {
        "name": "loom-1",
        "provider": "openai",
        "model": "loom-1",
        "apiBase": "http://127.0.0.1:8800/s/KEY/v1",
        "apiKey": "secret-key",
        "roles": ["chat"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": 8192, "maxTokens": 1024},
    }
    assert launch.stdin == b"fix it"


@pytest.mark.parametrize(("api", "provider"), [("openai-completions", "openai"), ("anthropic-messages", "anthropic")])
def test_mini_swe_agent(api, provider):
    launch = load_harness("mini-swe-agent", api=api).command(context(["mini"], prompt="--help"))
    assert launch.argv == (
        *("mini", "--yolo", "--exit-immediately", "--model", f"{provider}/loom-1"),
        *("--config", "mini.yaml", "--config", "model.model_kwargs.max_tokens=1024"),
        *("--output", "/box/home/trajectory.json", "--task=--help"),
    )
    assert launch.env == {
        "OPENAI_BASE_URL": "http://127.0.0.1:8800/s/KEY/v1",
        "OPENAI_API_KEY": "secret-key",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:8800/s/KEY",
        "ANTHROPIC_API_KEY": "secret-key",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


@pytest.mark.parametrize(("api", "spelled"), [("openai-completions", "chat_completions"), ("openai-responses", "responses")])
def test_openai_agents(api, spelled):
    launch = load_harness("openai-agents", api=api, max_turns=3, stream=False).command(context(["agent"], prompt="--help"))
    assert launch.argv == (
        *("agent", "--model", "loom-1", "--api", spelled, "--max-turns", "3", "--max-tokens", "1024", "--no-stream"),
        *("--", "--help"),
    )
    assert launch.env == {"OPENAI_BASE_URL": "http://127.0.0.1:8800/s/KEY/v1", "OPENAI_API_KEY": "secret-key"}


def test_claude_agent_sdk():
    launch = load_harness("claude-agent-sdk", max_turns=3).command(context(["agent"], prompt="--help"))
    assert launch.argv == ("agent", "--model", "loom-1", "--session-id", UUID, "--max-turns", "3", "--", "--help")
    assert launch.env == load_harness("claude-code").command(context(["claude"])).env


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


@pytest.mark.parametrize(("name", "options"), [(name, {"argv": ["x"]} if name == "command" else {}) for name in HARNESSES])
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
        (
            "nobody",
            {},
            "there is no agent 'nobody': use one of sdk-agent, claude-code, pi, codex, gemini-cli, .*, command, or package.module:Name",
        ),
        ("no.such.module:Name", {}, "cannot be imported"),
        ("turnloom.harness.pi:Name", {}, "cannot be imported"),
        (":", {}, "cannot be imported"),
        ("..x:y", {}, "cannot be imported"),
        ("json:dumps", {}, "does not take these options"),
        ("json:JSONDecoder", {}, "is not a Harness: it has no name, no install, no command"),
        *(
            (name, {"api": "telegraph"}, "has no api 'telegraph': use one of ")
            for name in ("pi", "opencode", "mini-swe-agent", "openai-agents")
        ),
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
