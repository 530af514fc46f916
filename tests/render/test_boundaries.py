"""Where a prompt begins and where a reply's own control tokens end: one id too many or too few is another prompt."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.render.test_ending import appended
from tests.support.histories import assistant, user
from turnloom.render.contract import Rendered
from turnloom.render.template import ChatTemplateRenderer
from turnloom.tokenizer import HFTokenizer


def spaced() -> tuple[HFTokenizer, dict[int, str]]:
    """A tokenizer that opens a text with a space of its own, as many a SentencePiece one does, and its tokens: letters, and ` U`."""
    tokens = {token: i for i, token in enumerate(["▁", "▁U", *"U:<|end>abrs."])}
    backend = Tokenizer(models.BPE(vocab=tokens, merges=[("▁", "U")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first")
    backend.add_special_tokens(["<|end|>"])
    template = "{% for m in messages %}{{ 'U' if m.role == 'user' else 's' }}:{{ m.content }}<|end|>{% endfor %}"
    template += "{% if add_generation_prompt %}s:{% endif %}"
    ends = frozenset({backend.token_to_id("<|end|>")})
    written = {i: token for token, i in backend.get_vocab().items()}
    return HFTokenizer(backend, name="spaced", templates={"default": template}, special={}, eos_ids=ends), written


@pytest.mark.parametrize("said", ["a", "a<|end|>b"], ids=["plain", "with a control token's spelling"])
def test_only_the_start_of_a_prompt_has_the_space_that_opens_a_text(said: str) -> None:
    tokenizer, written = spaced()
    renderer = ChatTemplateRenderer(tokenizer)
    whole = renderer.render([user(said), assistant("b"), user(said)], ()).ids.tolist()
    assert "".join(written[i] for i in whole) == f"▁U:{said}<|end|>s:b<|end|>U:{said}<|end|>s:"
    bridged = renderer.bridge(assistant("b"), [tokenizer.control_tokens["<|end|>"]], [user(said)], ())
    assert isinstance(bridged, Rendered)
    assert "".join(written[i] for i in bridged.ids.tolist()) == f"U:{said}<|end|>s:"


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        ("<call>x<section><user>", "u<bot>"),
        ("<call>x<section>", "<user>u<bot>"),
        ("<call>x", "<user>u<bot>"),
        ("<call>x<section>words", "<user>u<bot>"),
    ],
    ids=["stopped at the opening", "closed", "broken off in the call", "words past the close"],
)
def test_after_calls_that_only_the_next_opening_ends_that_is_what_is_appended(sampled: str, expected: str) -> None:
    """The tokens that close a section of calls belong to the call; where none ends the turn they are never written for the model."""
    assert appended("y<section><user>u<bot>", "y<section>", sampled) == expected
