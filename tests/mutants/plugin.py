"""A pytest plugin for mutation runs: the tests that are quick, and nothing that one test process left behind for the next.

Workers are forked from a process that has run the tests once. Renderers that the
tests cache were made there, by code without the mutant; here they are forgotten.
What turnloom.testing caches (tokenizers, templates) holds no code under test and stays.
"""

from __future__ import annotations

import sys

import pytest
from hypothesis import Phase, settings

EXAMPLES = 60
"""The most examples of one property."""

SLOW = ("test_unrolling_is_linear_in_what_it_reads",)

# Of the corpus, the first template of each family, and those with a way of their own.
CORPUS = (
    "trl/cohere trl/deepseekv3 trl/gemma4 trl/glm4moe trl/llama3_1 trl/nemotron_3_nano trl/phi3 trl/qwen2_5_vl trl/qwen3"
    " llama.cpp/Kimi-K2-Instruct llama.cpp/MiniMax-M2 llama.cpp/mistralai-Mistral-Nemo-Instruct-2407"
).split()

# A failure is all there is to know: it is not made smaller, and the same examples come every time.
settings.register_profile("mutants", derandomize=True, database=None, report_multiple_bugs=False, phases=(Phase.explicit, Phase.generate))
settings.load_profile("mutants")


def pytest_sessionstart(session: pytest.Session) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("tests."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if not _quick(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _quick(item)]
    for item in items:
        _shorten(item)


def _quick(item: pytest.Item) -> bool:
    if item.path.name == "test_corpus.py":
        return any(f"[{name}]" in item.name for name in CORPUS)
    return item.name not in SLOW


def _shorten(item: pytest.Item) -> None:
    test = getattr(item, "obj", None)
    # Hypothesis has no public way to change the settings of a test that is already decorated.
    given = getattr(test, "_hypothesis_internal_use_settings", None)
    if given is not None and given.max_examples > EXAMPLES:
        test._hypothesis_internal_use_settings = settings(given, max_examples=EXAMPLES)  # type: ignore[union-attr]
