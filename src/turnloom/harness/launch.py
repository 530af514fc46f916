"""Runs one agent in a sandbox. It never judges what the agent did."""

from __future__ import annotations

from turnloom.harness.contract import AgentContext, AgentOutcome, AgentRun, Harness
from turnloom.sandbox.contract import ExecResult, Sandbox


async def run_agent(harness: Harness, sandbox: Sandbox, context: AgentContext) -> AgentRun:
    """Write the agent's files, start it in `context.workdir`, wait no longer than its time budget.

    Raises SandboxError when it cannot be started. What it started has been ended, as `Sandbox.exec` promises.
    """
    launch = harness.command(context)
    for path, data in launch.files.items():
        await sandbox.write_file(path, data)
    result = await sandbox.exec(launch.argv, cwd=context.workdir, env=launch.env, stdin=launch.stdin, timeout=context.time_budget)
    return AgentRun(result.exit_code, _outcome(result), result.out, result.err, result.duration)


def _outcome(result: ExecResult) -> AgentOutcome:
    if result.timed_out:
        return AgentOutcome.TIMED_OUT
    return AgentOutcome.COMPLETED if result.exit_code == 0 else AgentOutcome.CRASHED
