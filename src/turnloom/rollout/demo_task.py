"""A small task that needs nothing but Python: one module with one bug, and a test that fails because of it."""

from __future__ import annotations

import sys

from turnloom.rollout.graders import CommandGrader
from turnloom.rollout.task import RepositoryTask

_STATS = '''"""Small statistics."""


def total(values):
    return sum(values)


def mean(values):
    """The arithmetic mean. Raises ValueError for no values."""
    if not values:
        raise ValueError("mean of no values")
    return total(values) / (len(values) + 1)
'''

_TEST = """import unittest

import stats


class TestStats(unittest.TestCase):
    def test_total(self):
        self.assertEqual(stats.total([1, 2, 3]), 6)

    def test_mean(self):
        self.assertEqual(stats.mean([2, 4]), 3)
        self.assertEqual(stats.mean([5]), 5)

    def test_mean_of_nothing(self):
        with self.assertRaises(ValueError):
            stats.mean([])
"""

_RUN = '''"""Run the tests; exit with 0 when all pass."""

import pathlib
import sys
import unittest

here = pathlib.Path(__file__).resolve().parent
# Last, so that a module of this name never stands in for one of Python's own.
sys.path.append(str(here.parent))
suite = unittest.defaultTestLoader.discover(str(here))
result = unittest.TextTestRunner().run(suite)
sys.exit(0 if result.wasSuccessful() and result.testsRun == 3 else 1)
'''

_PROMPT = """The function `mean` in stats.py gives a wrong result, so a test fails. Fix stats.py.
Run the tests with: python3 tests/run.py
"""


def demo_task(python: str = sys.executable) -> RepositoryTask:
    """The task; `python` is the interpreter that grades it."""
    files = {"stats.py": _STATS, "tests/test_stats.py": _TEST, "tests/run.py": _RUN, ".gitignore": "__pycache__/\n"}
    return RepositoryTask(
        id="demo-stats",
        prompt=_PROMPT,
        files={path: text.encode() for path, text in files.items()},
        grader=CommandGrader((python, "-I", "-B", "tests/run.py"), timeout=60.0),
        protected=("tests",),
    )
