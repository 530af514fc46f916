"""The parser's laws for the formats that `spelled` spells and for none, on random mixtures of calls, broken calls, reasoning and junk.

`test_block_laws` has the other formats, whose outputs are made of other pieces.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parse.spelled import MARKED_UP, SPELLED
from tests.parse.test_block_laws import FORMATS as OTHERS
from turnloom.parse.contract import CallEvent
from turnloom.parse.formats import FORMATS
from turnloom.parse.tags import TagParser
from turnloom.types import CallStatus

law = settings(deadline=None, max_examples=40)

EVERY = (*SPELLED, "none")

EXAMPLES = {form: write([("bash", {"text": "a", "count": 1}), ("read_file", {}), ("rm", {"path": "x"})]) for form, write in SPELLED.items()}
TAGS = sorted({tag for example in EXAMPLES.values() for tag in re.findall(r"</?[^<>\n]+>|```(?:json)?", example)})
WORDS = ["\n", "\n\n", " ", "{", "}", '"', "\\", "\\ud83d", "<", ">", "</", "<｜", "<|", "=", "文", "\x00", "word", "bash"]
JUNK = [*TAGS, "<think>", "</think>", *WORDS]

STRINGS = st.lists(st.one_of(st.sampled_from(JUNK), st.text(max_size=4)), max_size=5).map("".join)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["bash", "read_file", "rm", ""]),
        st.dictionaries(st.sampled_from(["path", "text", "count"]), st.one_of(STRINGS, st.integers()), max_size=2),
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def outputs(draw: Any, form: str) -> str:
    """Calls of the format, whole, cut or with a piece left out, between junk; perhaps after reasoning."""
    write = SPELLED[form if form in SPELLED else "hermes"]
    pieces = [draw(st.sampled_from(["", "<think>", "<think>x</think>", "</think>"]))]
    for _ in range(draw(st.integers(0, 3))):
        whole = write(draw(CALLS))
        start, stop = draw(st.integers(0, len(whole))), draw(st.integers(0, len(whole)))
        pieces.append(draw(st.sampled_from([whole, whole[:stop], whole[:start] + whole[stop:]])))
        pieces.append(draw(STRINGS))
    return "".join(pieces)


def cut(output: str, data: Any) -> list[str]:
    at = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=8)))
    return [output[a:b] for a, b in zip([0, *at], [*at, len(output)], strict=True)]


def test_every_format_is_under_the_laws_here_or_there() -> None:
    assert {*EVERY, *OTHERS} == set(FORMATS)


@pytest.mark.parametrize("form", EVERY)
@law
@given(data=st.data(), opened=st.booleans())
def test_any_chunking_of_any_format_gives_the_same_events_and_records(parse: Any, form: str, data: Any, opened: bool) -> None:
    output = data.draw(outputs(form))
    whole = parse(output, form=form, reasoning_open=opened)
    assert parse(*output, form=form, reasoning_open=opened) == whole
    assert parse(*cut(output, data), form=form, reasoning_open=opened) == whole


@pytest.mark.parametrize("form", EVERY)
@law
@given(data=st.data(), opened=st.booleans())
def test_records_of_any_format_are_spans_of_the_output(parse: Any, form: str, data: Any, opened: bool) -> None:
    output = data.draw(outputs(form))
    parsed = parse(output, form=form, reasoning_open=opened)
    assert [output[record.start : record.end] for record in parsed.records] == [record.raw for record in parsed.records]
    assert all(a.end <= b.start for a, b in itertools.pairwise(parsed.records))
    assert [event.record for event in parsed.events if isinstance(event, CallEvent)] == [
        record for record in parsed.records if record.status is CallStatus.OK
    ]
    for name, arguments in parsed.calls:
        assert name in ("read_file", "write_file", "bash")
        assert isinstance(json.loads(arguments), dict)
        arguments.encode("utf-8")


def sections_of(form: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    parser = FORMATS[form].build((), False, None)
    assert isinstance(parser, TagParser)
    return parser.markup.section_opens, parser.markup.section_closes


@pytest.mark.parametrize("form", EVERY)
@law
@given(data=st.data(), opened=st.booleans())
def test_nothing_is_lost_but_framing(parse: Any, form: str, data: Any, opened: bool) -> None:
    """Between two calls the text is the output's, less tags that frame a call or the reasoning and newlines beside those."""
    output = data.draw(outputs(form))
    parsed = parse(output, form=form, reasoning_open=opened, reasoning=True)
    good = [record for record in parsed.records if record.status is CallStatus.OK]
    spans = itertools.pairwise([0, *(at for record in good for at in (record.start, record.end)), len(output)])
    between = [output[a:b] for a, b in itertools.islice(spans, 0, None, 2)]
    came: list[list[str]] = [[]]
    for event in parsed.events:
        if isinstance(event, CallEvent):
            came.append([])
        else:
            came[-1].append(event.text)
    assert len(came) == len(between)
    opens, closes = sections_of(form)
    for index, (written, texts) in enumerate(zip(between, came, strict=True)):
        lost = lost_tags(written, texts, (*opens, *closes, "<think>", "</think>"))
        first, last = index == 0, index == len(between) - 1
        assert sum(lost[tag] for tag in opens) <= (not last)
        assert sum(lost[tag] for tag in closes) <= (not first)
        assert max(lost["<think>"], lost["</think>"]) <= first
        sections = sum(lost[tag] for tag in (*opens, *closes))
        newlines = written.count("\n") - sum(text.count("\n") for text in texts)
        assert 0 <= newlines <= (not first) + (not last) + 2 * sections + 2 * lost["<think>"] + 3 * lost["</think>"]


def lost_tags(written: str, texts: list[str], tags: tuple[str, ...]) -> Counter[str]:
    """Which tags did not come out; all else must have, newlines aside."""
    pattern = re.compile("|".join(map(re.escape, tags)))
    assert pattern.sub("", written).replace("\n", "") == "".join(pattern.sub("", text).replace("\n", "") for text in texts)
    lost = Counter(pattern.findall(written))
    for text in texts:
        lost.subtract(pattern.findall(text))
    assert min(lost.values(), default=0) >= 0
    return lost


@pytest.mark.parametrize("form", SPELLED)
@law
@given(data=st.data(), opened=st.booleans())
def test_well_formed_calls_of_any_format_round_trip(parse: Any, form: str, data: Any, opened: bool) -> None:
    strings = STRINGS.filter(lambda text: form not in MARKED_UP or not AMBIGUOUS[form].search(text))
    values = st.dictionaries(st.sampled_from(["path", "text"]), strings, max_size=2).flatmap(
        lambda strings: st.integers().map(lambda count: {**strings, "count": count})
    )
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["bash", "read_file"]), values), min_size=1, max_size=3))
    lead = "thought</think>" if opened else data.draw(st.sampled_from(["", "<think>thought</think>"]))
    parsed = parse(lead + "before\n" + SPELLED[form](calls) + "\nafter", form=form, reasoning_open=opened)
    assert [(name, json.loads(text)) for name, text in parsed.calls] == calls
    assert (parsed.text, parsed.reasoning) == ("beforeafter", "thought" if lead else "")


AMBIGUOUS = {
    "qwen3_coder": re.compile(r"</parameter>|<function=|<tool_call>"),
    "glm": re.compile(r"</arg_value>|<tool_call>"),
    "minimax_m2": re.compile(r"</parameter>|<invoke|<minimax:tool_call>"),
    "deepseek_dsml": re.compile("</｜DSML｜parameter>|<｜DSML｜(invoke|function_calls)"),
}
"""Of what a value may hold, what could be the end of it together with what follows; `test_traps` has these one by one."""
