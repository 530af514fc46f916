"""Real tokenizers and chat templates for tests, without a model hub. None of their data is in this repository.

Qwen's rank file comes from the PyPI package `dashscope` and the chat templates
from `trl` (both Apache-2.0): the installed package, else the cache, else pip.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from turnloom.engine.models import SMOLLM2, PackageData, built_once, cache_dir, package_files
from turnloom.errors import ConfigError
from turnloom.testing.ranks import byte_bpe, read_ranks
from turnloom.tokenizer import HFTokenizer, load_tokenizer

QWEN_RANKS = PackageData("dashscope==2.0.2", "dashscope", r"resources/qwen\.tiktoken", "2.4 MB")
TEMPLATES = PackageData("trl==1.16.0", "trl", r"chat_templates/[a-z0-9_]+\.jinja", "1 MB")

_QWEN_TEMPLATE = {"qwen2.5": "qwen2_5", "qwen3": "qwen3"}
_QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# fmt: off
_QWEN_SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
]
_QWEN_ADDED = [
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
]
# fmt: on
_QWEN3_ADDED = ["<tool_response>", "</tool_response>", "<think>", "</think>"]


def trl_template(name: str) -> str:
    """The text of one chat template, such as `qwen2_5`, `llama3_1` or `glm4moe`."""
    paths = {path.stem: path for path in package_files(TEMPLATES)}
    if name not in paths:
        raise ConfigError(f"trl has no chat template {name!r}; it has: {', '.join(sorted(paths))}")
    return paths[name].read_text("utf-8")


@functools.cache
def qwen_tokenizer(kind: str = "qwen2.5", template: str | None = None) -> HFTokenizer:
    """The tokenizer of `qwen2.5` or `qwen3` with its own chat template, or with trl's one named `template`."""
    return load_tokenizer(qwen_directory(kind), chat_template=None if template is None else trl_template(template))


@functools.cache
def smollm2_tokenizer() -> HFTokenizer:
    return load_tokenizer(package_files(SMOLLM2)[0])


def qwen_directory(kind: str = "qwen2.5") -> Path:
    """A Hugging Face tokenizer directory, built once in the cache."""
    if kind not in _QWEN_TEMPLATE:
        raise ConfigError(f"there is no Qwen tokenizer {kind!r}; there are: {', '.join(_QWEN_TEMPLATE)}")
    return built_once(cache_dir() / f"{kind}-tokenizer-1", lambda folder: _build_qwen(kind, folder))


def _build_qwen(kind: str, folder: Path) -> None:
    (ranks_file,) = package_files(QWEN_RANKS)
    ranks = read_ranks(ranks_file)
    added = _QWEN_ADDED if kind == "qwen2.5" else _QWEN_ADDED + _QWEN3_ADDED
    control = [*((spelling, True) for spelling in _QWEN_SPECIAL), *((spelling, False) for spelling in added)]
    byte_bpe(ranks, _QWEN_SPLIT, control, nfc=True).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    ends = {"eos_token_id": [len(ranks) + _QWEN_SPECIAL.index(end) for end in ("<|im_end|>", "<|endoftext|>")]}
    (folder / "generation_config.json").write_text(json.dumps(ends), "utf-8")
    (folder / "chat_template.jinja").write_text(trl_template(_QWEN_TEMPLATE[kind]), "utf-8")
