"""A corpus of published chat templates, each with a tokenizer: the model's own where a package carries it, else a stand-in.

Nothing of the templates or vocabularies is in this repository: packages carry
them, which are found as `engine.models` says. A template is always the
original text. One that prints the day gets a fixed one where it takes it as an
argument; the others read the clock, so their text changes at midnight.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import orjson

from turnloom.errors import ConfigError
from turnloom.testing.families import FAMILIES, Family
from turnloom.testing.tokenizers import qwen_directory, trl_template
from turnloom.tokenizer import HFTokenizer

_KWARGS: dict[str, Mapping[str, Any]] = {
    "trl/llama3_1": MappingProxyType({"date_string": "02 Jan 2025"}),
    "trl/llama3_2": MappingProxyType({"date_string": "02 Jan 2025"}),
    "trl/muse_glimmer": MappingProxyType({"current_date": "2025-01-02"}),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One template. `name` is `source/template`; `tokenizer` says whose vocabulary it has and, for a stand-in, why.

    `exact_tokenizer`: ids are the model's own. `template_kwargs` go to every rendering.
    """

    name: str
    source: str
    family: str
    tokenizer: str
    exact_tokenizer: bool
    template_kwargs: Mapping[str, Any]


_TRL = {
    "cohere": "cohere",
    "cohere2": "cohere2",
    "deepseek_r1_distill": "deepseek",
    "deepseekv3": "deepseek",
    "diffusion_gemma": "gemma4",
    "gemma": "gemma",
    "gemma3": "gemma",
    "gemma4": "gemma4",
    "gemma4_v2": "gemma4",
    "gemma4_v3": "gemma4",
    "gemma4_v4": "gemma4",
    "gemma4_v5": "gemma4",
    "glm4moe": "glm4",
    "gptoss": "gpt-oss",
    "idefics3": "idefics3",
    "lfm2": "lfm2",
    "lfm2_2_5": "lfm2.5",
    "lfm2_2_5_v2": "lfm2.5",
    "lfm2_2_5_vl": "lfm2.5",
    "lfm2_v2": "lfm2",
    "llama3": "llama3",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "llava_next": "llava-next",
    "muse_glimmer": "muse-glimmer",
    "nemotron_3_5_lightning": "nemotron3",
    "nemotron_3_nano": "nemotron3",
    "nemotron_3_super": "nemotron3",
    "nemotron_3_ultra": "nemotron3",
    "phi3": "phi3",
    "phi3_5": "phi3",
    "qwen2_5": "qwen2.5",
    "qwen2_5_vl": "qwen2.5",
    "qwen3": "qwen3",
    "qwen3_5_nothink": "qwen3.5",
    "qwen3_5_think": "qwen3.5",
    "qwen3_6": "qwen3.5",
    "qwen3_8": "qwen3.5",
    "qwen3_instruct_2507": "qwen3",
    "qwen3_vl": "qwen3",
    "smolvlm": "smolvlm",
}


def _entry(source: str, template: str, family: str) -> Entry:
    found = FAMILIES[family]
    about = f"{found.vocabulary}, the model's own" if not found.stand_in else f"{found.vocabulary}, a stand-in: {found.stand_in}"
    name = f"{source}/{template}"
    return Entry(name, source, family, about, not found.stand_in, _KWARGS.get(name, MappingProxyType({})))


ENTRIES: tuple[Entry, ...] = tuple(_entry("trl", template, family) for template, family in _TRL.items())

_BY_NAME = {entry.name: entry for entry in ENTRIES}


def entry(name: str) -> Entry:
    """Raises ConfigError for a name that no entry has."""
    if name not in _BY_NAME:
        raise ConfigError(f"the corpus has no template {name!r}; it has: {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


@functools.cache
def load(name: str) -> HFTokenizer:
    """The tokenizer of an entry with its original template; entries of one family share its vocabulary. Raises ConfigError."""
    found = entry(name)
    return _Templated(_of_family(found.family), name, trl_template(name.partition("/")[2]))


class _Templated(HFTokenizer):
    """Another template on a tokenizer that is already built: a second copy of a vocabulary costs a second and 100 MB."""

    def __init__(self, base: HFTokenizer, name: str, template: str) -> None:
        self.__dict__.update(base.__dict__)
        self.name = name
        self._templates = {"default": template}
        self.chat_template = template


@functools.cache
def _of_family(name: str) -> HFTokenizer:
    family = FAMILIES[name]
    backend = _backend(family)
    special = {f"{key}_token": getattr(family, key) for key in ("bos", "eos", "pad") if getattr(family, key)}
    ends = frozenset(backend.token_to_id(end) for end in family.ends)
    return HFTokenizer(backend, name=name, templates={}, special=special, eos_ids=ends)


def _backend(family: Family) -> Any:
    from tokenizers import AddedToken, Tokenizer

    text = (qwen_directory(family.vocabulary) / "tokenizer.json").read_bytes()
    if not family.special:
        return Tokenizer.from_str(text.decode())
    described = orjson.loads(text)
    described["added_tokens"] = []
    backend = Tokenizer.from_str(orjson.dumps(described).decode())
    backend.add_special_tokens([AddedToken(spelling, special=True, normalized=False) for spelling in family.special])
    backend.add_tokens([AddedToken(spelling, special=False, normalized=False) for spelling in family.added])
    return backend
