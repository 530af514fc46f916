"""The documents cannot rot: what they name exists, and what exists is named."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import typer

import turnloom
from turnloom import counters, errors
from turnloom.cli.main import app
from turnloom.export.canonical import COLUMNS
from turnloom.export.parquet import SCHEMA
from turnloom.export.report import LAWS
from turnloom.gateway.metrics import Metrics
from turnloom.gateway.policy import MATCHERS
from turnloom.harness.contract import AgentOutcome
from turnloom.harness.registry import HARNESSES
from turnloom.parse.formats import FORMATS
from turnloom.render import choose
from turnloom.render.quirks import Quirk as TemplateQuirk
from turnloom.rollout.contract import RolloutStatus
from turnloom.types import CallStatus, FinishReason, Fork, ForkKind, Outcome
from turnloom.wire.quirks import Quirk

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")])
TEXT = {page: page.read_text("utf-8") for page in PAGES}
ALL = "\n".join(TEXT.values())

GROUP = typer.main.get_command(app)
VERBS = GROUP.commands  # type: ignore[attr-defined]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def page(name: str) -> str:
    return TEXT[ROOT / name]


def blocks(text: str, *languages: str) -> list[str]:
    return [code for language, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if language in languages]


def table_rows(text: str) -> Iterator[list[str]]:
    """The cells of every table row, headings and rulers left out."""
    lines = text.splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("|") and before.startswith("|") and not set(line) <= set("|- "):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def first_cells(text: str) -> dict[str, list[str]]:
    """Rows by each name in backticks of the first cell."""
    return {name: row for row in table_rows(text) for name in re.findall(r"`([^`]+)`", row[0])}


def options(command: object) -> set[str]:
    """Every spelling of a command's options."""
    return {spelling for p in command.params for spelling in (*p.opts, *p.secondary_opts) if spelling.startswith("-")}  # type: ignore[attr-defined]


# What exists is named


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_has_a_section_with_its_options_and_an_example(verb: str) -> None:
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page("docs/cli.md"), re.M | re.S))
    named = first_cells(sections[verb].partition("\n### ")[0])
    assert set(named) == options(VERBS[verb]) - {"--help", "-v"}
    assert any(f"turnloom {verb}" in code for code in blocks(sections[verb], "bash"))


def test_the_options_before_a_verb_are_named() -> None:
    assert all(f"`{option}`" in ALL or f"turnloom {option}" in ALL for option in options(GROUP))


def test_every_error_has_its_row_with_status_and_parent() -> None:
    known = {c.__name__: c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.TurnloomError)}
    rows = first_cells(page("docs/errors.md"))
    assert set(rows) == set(known)
    for name, row in rows.items():
        parent = known[name].__mro__[1].__name__
        assert row[1:3] == ["" if parent == "Exception" else f"`{parent}`", str(known[name].status)], name


@pytest.mark.parametrize("kind", [ForkKind, Outcome, CallStatus, FinishReason, AgentOutcome, RolloutStatus])
def test_every_member_is_in_the_glossary(kind: type) -> None:
    for member in kind:  # type: ignore[attr-defined]
        assert f"`{member.value}`" in page("docs/glossary.md"), member


def test_every_metric_is_named() -> None:
    families = [*Metrics().registry.collect(), *counters.REGISTRY.collect()]
    names = {f"{f.name}_total" if f.type == "counter" else f.name for f in families}
    rows = {name for name in first_cells(page("docs/gateway.md")) if name.startswith("turnloom_")}
    assert {"turnloom_engine_aborts_total", "turnloom_store_commit_seconds", "turnloom_turns_total"} <= names
    assert rows == {name for name in names if not name.startswith("process_")}


def test_every_column_of_a_sample_has_its_type() -> None:
    def spelled(kind: pa.DataType) -> str:
        return f"list<{kind.value_type}>" if pa.types.is_list(kind) else str(kind)

    table = first_cells(page("docs/samples.md").partition("\n## ")[0])
    assert set(table) == COLUMNS
    for field in SCHEMA:
        assert table[field.name][2] == f"`{spelled(field.type)}`", field.name


def test_every_law_of_check_is_explained() -> None:
    assert set(first_cells(page("docs/samples.md").partition("\n## ")[2])) == set(LAWS)


def test_every_format_agent_quirk_and_public_name_is_named() -> None:
    for name in (*FORMATS, *HARNESSES, *Quirk):
        assert f"`{name}`" in ALL, name
    for name in turnloom.__all__:
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", ALL), name


def test_every_quirk_of_a_template_is_explained_under_doctor() -> None:
    doctor = page("docs/cli.md").partition("\n## doctor\n")[2].partition("\n## ")[0]
    table = first_cells(doctor.partition("\n### Quirks of a template\n")[2])
    assert set(table) == {str(quirk) for quirk in TemplateQuirk}
    for name, row in table.items():
        assert len(row) == 3, name
        assert all(len(cell.split()) > 2 for cell in row[1:]), name


def test_every_file_of_a_format_and_of_rendering_is_in_the_architecture() -> None:
    source = ROOT / "src/turnloom"
    formats = [path for path in (source / "parse").glob("*.py") if re.search(r"^\w+ = Format\(", path.read_text("utf-8"), re.M)]
    files = [path for path in (*formats, *(source / "render").glob("*.py"), *(source / "core").glob("*.py")) if path.stem != "__init__"]
    assert len(files) > 30
    for path in files:
        assert f"`{path.relative_to(source)}`" in page("docs/architecture.md"), path


def test_every_matcher_renderer_and_field_of_a_fork_is_named() -> None:
    for name in (*MATCHERS, *choose.NAMES):
        assert f"`{name}`" in page("docs/cli.md"), name
    assert {field.name for field in dataclasses.fields(Fork)} <= set(first_cells(page("docs/gateway.md")))


# What is named exists


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page(name)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (ROOT / name).parent / path if path else ROOT / name
        assert place.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", place.read_text("utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}, target


@pytest.mark.parametrize("name", NAMES)
def test_paths_and_tests_in_backticks_exist(name: str) -> None:
    for path, test in re.findall(r"`((?:src|tests|docs|examples|\.ci)/[\w./-]*)(?:::(\w+))?`", page(name)):
        place = ROOT / path
        assert place.exists(), path
        assert not test or re.search(rf"^\s*(async )?def {test}\b", place.read_text("utf-8"), re.M), f"{path}::{test}"


@pytest.mark.parametrize("name", NAMES)
def test_modules_in_backticks_exist(name: str) -> None:
    """`gateway/turn.py` is short for the file below src/turnloom."""
    for path in re.findall(r"`([a-z_]+/[\w/]+\.py)`", page(name)):
        assert (ROOT / path).exists() or (ROOT / "src/turnloom" / path).exists(), path


@pytest.mark.parametrize("name", NAMES)
def test_python_blocks_compile(name: str) -> None:
    for code in blocks(page(name), "python"):
        ast.parse(code)


def commands(code: str) -> Iterator[list[str]]:
    """The words of each simple command of a bash block, its leading assignments left out."""
    for line in code.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), ";"]:
            if word in (";", "&&", "||", "|", "&"):
                if words:
                    yield words
                words = []
            elif words or not re.match(r"\w+=", word):
                words.append(word)


@pytest.mark.parametrize("name", NAMES)
def test_bash_blocks_use_what_there_is(name: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for words in (words for code in blocks(page(name), "bash") for words in commands(code)):
        if words[0] == "turnloom":
            assert words[1] in VERBS, words
            used = {w.partition("=")[0] for w in words[2:] if re.match(r"--?[a-z]", w)}
            assert used <= options(VERBS[words[1]]), words
        elif words[0] == "make":
            assert {w for w in words[1:] if "=" not in w} <= targets, words
        elif words[0].startswith("python"):
            assert all((ROOT / w).exists() for w in words[1:] if w.endswith(".py")), words


def test_there_is_no_bash_block_that_no_shell_would_take() -> None:
    """`sh` and unmarked blocks would escape the checks above."""
    for name in NAMES:
        assert set(re.findall(r"^```(\w+)$", page(name), re.M)) <= {"bash", "python", "text", "json", "toml", "mermaid"}, name
