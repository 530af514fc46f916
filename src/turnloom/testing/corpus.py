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

from turnloom.engine.models import package_files
from turnloom.errors import ConfigError
from turnloom.testing.families import FAMILIES, Family
from turnloom.testing.tokenizers import trl_template
from turnloom.testing.vocabularies import LLAMA_CPP, vocabulary
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
    "command-r": "cohere",
    "cohere2": "cohere2",
    "deepseek-r1-qwen": "deepseek_r1_distill",
    "deepseek-v3": "deepseekv3",
    "gemma": "gemma gemma3",
    "gemma4": "gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5 diffusion_gemma",
    "glm4": "glm4moe",
    "gpt-oss": "gptoss",
    "idefics3": "idefics3",
    "lfm2": "lfm2 lfm2_v2",
    "lfm2.5": "lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl",
    "llama3": "llama3",
    "llama3.1": "llama3_1 llama3_2",
    "llava-next": "llava_next",
    "muse-glimmer": "muse_glimmer",
    "nemotron3": "nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra",
    "phi3": "phi3 phi3_5",
    "qwen2.5": "qwen2_5 qwen2_5_vl",
    "qwen3": "qwen3 qwen3_instruct_2507 qwen3_vl",
    "qwen3.5": "qwen3_5_nothink qwen3_5_think qwen3_6",
    "qwen3.8": "qwen3_8",
    "smolvlm": "smolvlm",
}
_LLAMA_CPP = {
    "apertus": "Apertus-8B-Instruct",
    "cohere2": "CohereForAI-c4ai-command-r7b-12-2024-tool_use Cohere2MoE",
    "deepseek-r1-llama": "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-v3": "deepseek-ai-DeepSeek-V3.1 deepseek-ai-DeepSeek-V3.2",
    "deepseek-v4": "deepseek-ai-DeepSeek-V4 deepseek-ai-DeepSeek-V4-Flash-0731",
    "gemma4": "google-gemma-4-31B-it google-gemma-4-31B-it-interleaved",
    "glm4": "GLM-4.6 GLM-4.7-Flash",
    "granite3": "ibm-granite-granite-3.3-2B-Instruct",
    "granite4": "ibm-granite-granite-4.0 ibm-granite-granite-4.1",
    "hermes": "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "hy3": "tencent-Hy3",
    "kimi": "Kimi-K2-Instruct Kimi-K2-Thinking",
    "kimi-k3": "Kimi-K3",
    "ling": "inclusionai-ling-3.0-flash",
    "llama3.1-tuned": "meetkai-functionary-medium-v3.1 meetkai-functionary-medium-v3.2",
    "minimax-m2": "MiniMax-M2",
    "minimax-m3": "MiniMax-M3",
    "mistral-nemo": "mistralai-Mistral-Nemo-Instruct-2407",
    "mistral-tekken": ("Mistral-Small-3.2-24B-Instruct-2506 mistralai-Ministral-3-14B-Reasoning-2512 unsloth-mistral-Devstral-Small-2507"),
    "nemotron-nano2": "NVIDIA-Nemotron-Nano-v2",
    "qwen2.5": "MiMo-VL",
    "qwen3": "Qwen-QwQ-32B Qwen3-Coder",
    "seed-oss": "ByteDance-Seed-OSS",
    "smollm3": "HuggingFaceTB-SmolLM3-3B",
    "solar-open": "upstage-Solar-Open-100B",
    "step3.5": "StepFun3.5-Flash",
}
"""The templates of each family, as their source names them. llama.cpp's copies of those that trl has are left out."""


def _entry(source: str, family: str, template: str) -> Entry:
    name, found = f"{source}/{template}", FAMILIES[family]
    about = f"{found.vocabulary}: {found.stand_in or 'its own'}"
    return Entry(name, source, family, about, not found.stand_in, _KWARGS.get(name, MappingProxyType({})))


ENTRIES: tuple[Entry, ...] = tuple(
    _entry(source, family, template)
    for source, table in (("trl", _TRL), ("llama.cpp", _LLAMA_CPP))
    for family, templates in table.items()
    for template in templates.split()
)

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
    return _Templated(_of_family(found.family), name, _template(name))


def _template(name: str) -> str:
    source, _, template = name.partition("/")
    if source == "trl":
        return trl_template(template)
    (path,) = (path for path in package_files(LLAMA_CPP) if path.name == f"{template}.jinja")
    return path.read_text("utf-8")


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

    base = vocabulary(family.vocabulary)
    own = Tokenizer(base.model)
    own.normalizer, own.pre_tokenizer, own.decoder = base.normalizer, base.pre_tokenizer, base.decoder
    if family.special:
        added = [AddedToken(spelling, special=True, normalized=False) for spelling in family.special]
        added += [AddedToken(spelling, special=False, normalized=False) for spelling in family.added]
    else:
        added = [token for _, token in sorted(base.get_added_tokens_decoder().items())]
    own.add_tokens(added)
    return own
