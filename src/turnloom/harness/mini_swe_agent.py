"""mini-swe-agent through the chat dialect or the Anthropic one, not streamed."""

from __future__ import annotations

from collections.abc import Sequence

from turnloom.errors import ConfigError
from turnloom.harness.contract import AgentContext, Launch
from turnloom.harness.install import PackagedHarness
from turnloom.harness.pip import PipAgent

VERSION = "2.4.6"
APIS = {"openai-completions": "openai", "anthropic-messages": "anthropic"}


class MiniSweAgent(PackagedHarness):
    """`api` is the protocol, one of `APIS`. `args` are added to its command line. `program` is an installation of your own."""

    def __init__(
        self, *, api: str = "openai-completions", version: str = VERSION, args: Sequence[str] = (), program: Sequence[str] = ()
    ) -> None:
        if api not in APIS:
            raise ConfigError(f"mini-swe-agent has no api {api!r}: use one of {', '.join(APIS)}")
        super().__init__(PipAgent("mini-swe-agent", "mini-swe-agent", version, ("-m", "minisweagent.run.mini")), args, program)
        self._provider = APIS[api]

    def command(self, context: AgentContext) -> Launch:
        argv = (
            *(*context.program, "--yolo", "--exit-immediately", "--model", f"{self._provider}/{context.model}"),
            *("--config", "mini.yaml", "--config", f"model.model_kwargs.max_tokens={context.output_tokens}"),
            *("--output", f"{context.home}/trajectory.json", *self._args, f"--task={context.prompt}"),
        )
        env = {
            "OPENAI_BASE_URL": f"{context.base_url}/v1",
            "OPENAI_API_KEY": context.api_key,
            "ANTHROPIC_BASE_URL": context.base_url,
            "ANTHROPIC_API_KEY": context.api_key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # Else it fetches a price list before it starts.
        }
        return Launch(argv, env)
