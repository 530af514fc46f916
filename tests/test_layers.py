"""The pure packages import nothing that reaches the world: the import linter knows our packages, this knows the standard library."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "turnloom"
PURE = ("core", "render", "parse", "wire")
WORLD = frozenset(
    "asyncio aiohttp socket time random os secrets subprocess sqlite3 datetime threading multiprocessing concurrent uvloop select".split()
)
FILES = sorted(file for package in PURE for file in (SOURCE / package).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    """The top-level package of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(SOURCE).as_posix())
def test_a_pure_module_imports_nothing_of_the_world(file: Path) -> None:
    assert WORLD.isdisjoint(imported(ast.parse(file.read_text("utf-8"))))


def test_every_pure_package_is_there() -> None:
    assert {file.relative_to(SOURCE).parts[0] for file in FILES} == set(PURE)


def test_an_import_within_a_function_is_seen() -> None:
    assert "os" in set(imported(ast.parse("def f():\n    from os.path import join\n")))
