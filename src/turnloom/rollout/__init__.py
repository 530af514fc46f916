"""Tasks, and rollouts of an agent on them.

A task is a workspace, a prompt and a way to grade. A rollout is one agent, in one
sandbox, on one task, talking to one session of the gateway; what it changed is
taken as a patch and graded in a second sandbox that the agent never saw.
"""

from turnloom.rollout.attempt import RolloutSettings
from turnloom.rollout.contract import (
    Cause,
    Gateway,
    Grade,
    Grader,
    MakeSandbox,
    Rollout,
    RolloutEvent,
    RolloutStatus,
    SessionHandle,
    Task,
    Work,
)
from turnloom.rollout.demo_task import demo_task
from turnloom.rollout.grade import grade_patch
from turnloom.rollout.graders import CommandGrader
from turnloom.rollout.runner import Job, jobs, rollout, run_jobs, run_rollouts
from turnloom.rollout.task import RepositoryTask, load_task

__all__ = [
    "Cause",
    "CommandGrader",
    "Gateway",
    "Grade",
    "Grader",
    "Job",
    "MakeSandbox",
    "RepositoryTask",
    "Rollout",
    "RolloutEvent",
    "RolloutSettings",
    "RolloutStatus",
    "SessionHandle",
    "Task",
    "Work",
    "demo_task",
    "grade_patch",
    "jobs",
    "load_task",
    "rollout",
    "run_jobs",
    "run_rollouts",
]
