"""Tasks, and rollouts of an agent on them.

A task is a workspace, a prompt and a way to grade. A rollout is one agent, in one
sandbox, on one task, talking to one session of the gateway; what it changed is
taken as a patch and graded in a second sandbox that the agent never saw.
"""

from turnloom.rollout.contract import (
    Gateway,
    Grade,
    Grader,
    MakeSandbox,
    RolloutEvent,
    RolloutResult,
    RolloutStatus,
    SessionHandle,
    Task,
    Work,
)
from turnloom.rollout.demo_task import demo_task
from turnloom.rollout.grade import grade_patch
from turnloom.rollout.graders import CommandGrader
from turnloom.rollout.runner import RolloutSettings, run_rollouts
from turnloom.rollout.task import RepositoryTask, load_task

__all__ = [
    "CommandGrader",
    "Gateway",
    "Grade",
    "Grader",
    "MakeSandbox",
    "RepositoryTask",
    "RolloutEvent",
    "RolloutResult",
    "RolloutSettings",
    "RolloutStatus",
    "SessionHandle",
    "Task",
    "Work",
    "demo_task",
    "grade_patch",
    "load_task",
    "run_rollouts",
]
