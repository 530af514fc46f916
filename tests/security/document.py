"""The table of attacks in docs/security.md, made from the tests' docstrings.

python -m tests.security.document
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs/security.md"
_TITLES = {"keys": "On keys", "paths": "By the address", "http": "On framing and headers", "bodies": "By what a body holds"}
_BEGIN, _END = "<!-- attacks: python -m tests.security.document -->\n", "<!-- end of attacks -->\n"


def attacks(path: Path) -> list[tuple[str, str, str]]:
    """(the test's name, the attack, the answer) of each test. Raises ValueError where a docstring has not these two paragraphs."""
    found = []
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            paragraphs = [" ".join(each.split()) for each in re.split(r"\n\s*\n", ast.get_docstring(node) or "")]
            if len(paragraphs) != 2 or not all(paragraphs) or any("|" in each for each in paragraphs):
                raise ValueError(f"{path.name}::{node.name}: the docstring must have two paragraphs, the attack and its answer")
            found.append((node.name, *paragraphs))
    return found


def files() -> list[Path]:
    return [HERE / f"test_attacks_on_{kind}.py" for kind in _TITLES]


def table() -> str:
    sections = []
    for kind, path in zip(_TITLES, files(), strict=True):
        rows = "".join(
            f"| {attack.replace('|', chr(92) + '|')} | {answer.replace('|', chr(92) + '|')} |\n" for _, attack, answer in attacks(path)
        )
        sections.append(f"### {_TITLES[kind]}\n\n`tests/security/{path.name}`\n\n| attack | answer |\n|---|---|\n{rows}")
    return "\n".join(sections)


def written(page: str) -> str:
    """What the page has between the marks."""
    return page.partition(_BEGIN)[2].partition(_END)[0].strip() + "\n"


def main() -> int:
    before, _, rest = PAGE.read_text("utf-8").partition(_BEGIN)
    PAGE.write_text(f"{before}{_BEGIN}\n{table()}\n{_END}{rest.partition(_END)[2]}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
