"""Bridges and whole renderings on every chat template of the corpus."""

from __future__ import annotations

import pytest

from turnloom.render.contract import Rendered, Unbridgeable
from turnloom.render.profile import SHAPES, Shape, find_profile, reply
from turnloom.render.template import ChatTemplateRenderer
from turnloom.testing import corpus
from turnloom.types import Message, Text, Tool

TOOL = Tool("probe_tool", "probed", '{"type": "object", "properties": {"a": {"type": "string"}}}')
NAMES = [entry.name for entry in corpus.ENTRIES]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def renderer(name: str) -> ChatTemplateRenderer:
    return ChatTemplateRenderer(corpus.load(name), corpus.entry(name).template_kwargs)


def bridge(renderer: ChatTemplateRenderer, shape: Shape, output: list[int]) -> Rendered | Unbridgeable:
    return renderer.bridge(reply(shape.calls), output, shape.new, [TOOL] if shape.calls else [])


def test_every_shape_bridges(name: str, renderer: ChatTemplateRenderer) -> None:
    profile = find_profile(renderer, renderer.tokenizer)
    assert profile.bridges == {shape.name: "yes" for shape in SHAPES}
    assert profile.whole == profile.bridges | {"empty reply": "yes"}


def test_what_was_sampled_of_the_ending_is_not_written_again(name: str, renderer: ChatTemplateRenderer) -> None:
    """After words alone the whole ending is appended; each more of its tokens that was sampled, one less is."""
    words = renderer.tokenizer.encode("some words", start=False)
    for shape in SHAPES:
        whole = bridge(renderer, shape, words)
        assert isinstance(whole, Rendered)
        appended = whole.ids.tolist()
        closed = bridge(renderer, shape, [*words, appended[0]])
        assert isinstance(closed, Rendered)
        if appended[0] in renderer.tokenizer.special_ids:
            assert closed.ids.tolist() == appended[1:], shape.name
        for end in renderer.end_ids - set(appended):
            other = bridge(renderer, shape, [*words, end])
            assert isinstance(other, Rendered)
            assert other.ids.tolist() in (appended, appended[1:]), "another end token"


def test_new_messages_stand_in_the_bridge_as_they_are(name: str, renderer: ChatTemplateRenderer) -> None:
    """Every new message's words, in order, and none of the stand-in history's."""
    for shape in SHAPES:
        found = bridge(renderer, shape, [])
        assert isinstance(found, Rendered)
        text, at = renderer.tokenizer.decode(found.ids.tolist()), 0
        for message in shape.new:
            at = text.find(message.text, at)
            assert at >= 0, (shape.name, message.text)
            at += len(message.text)


def test_control_spellings_in_messages_stay_text(name: str, renderer: ChatTemplateRenderer) -> None:
    tokenizer = renderer.tokenizer
    control = set(tokenizer.control_tokens.values())

    def written(spelling: str) -> tuple[list[int], int]:
        said = [Message("user", (Text(f"a {spelling} b"),)), reply(0, Text(f"c {spelling} d")), Message("user", (Text(spelling),))]
        whole, bridged = renderer.render(said, []), renderer.bridge(said[1], [], said[2:], [])
        assert isinstance(bridged, Rendered)
        return [t for r in (whole, bridged) for t in r.ids.tolist() if t in control], whole.escaped

    expected, none = written("harmless")
    assert none == 0
    for spelling in tokenizer.control_tokens:
        found, escaped = written(spelling)
        assert found == expected, spelling
        assert escaped >= 2
