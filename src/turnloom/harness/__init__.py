"""Installs, configures and launches agents. One file per agent.

A harness says which program an agent is, how it is told where its model is, and
how it is kept quiet. It knows nothing of tokens, sessions or rewards: it gets a
base URL and a key (`AgentContext`), and gives back how the agent ended (`AgentRun`).
"""

from turnloom.harness.contract import AgentContext, AgentOutcome, AgentRun, Harness, Launch
from turnloom.harness.launch import run_agent
from turnloom.harness.registry import HARNESSES, load_harness

__all__ = ["HARNESSES", "AgentContext", "AgentOutcome", "AgentRun", "Harness", "Launch", "load_harness", "run_agent"]
