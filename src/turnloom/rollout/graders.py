"""Graders that every task can use. What they get was prepared by `grade.py`; none sees the sandbox the agent worked in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turnloom.rollout.contract import Grade, Work


def pass_or_fail(exit_code: int | None) -> float:
    """1.0 when the grading command ended with 0, else 0.0. None: it did not run to its end."""
    return 1.0 if exit_code == 0 else 0.0


@dataclass(frozen=True, slots=True)
class CommandGrader:
    """Runs a command; what it exits with goes to `score`, None where it did not end in `timeout` seconds.

    The agent's code runs inside the command, so one that only looks at its own exit
    code can be fooled by code that ends the process early.
    """

    argv: tuple[str, ...]
    timeout: float = 300.0
    score: Callable[[int | None], float] = pass_or_fail

    async def grade(self, work: Work) -> Grade:
        result = await work.sandbox.exec(self.argv, timeout=self.timeout)
        output = "\n".join(text for text in (result.out, result.err) if text)
        if result.timed_out:
            return Grade(self.score(None), None, f"the grading command did not end within {self.timeout:g} s", output)
        return Grade(self.score(result.exit_code), result.exit_code, f"the grading command ended with {result.exit_code}", output)
