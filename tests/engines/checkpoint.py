"""Small checkpoints of the Qwen3 architecture for real engines, made of noise, with Qwen3's own tokenizer. Needs no torch.

Sampled at temperature 1 a checkpoint spreads over some tens of tokens a step, so
that two seeds, two prompts or one token too few give clearly other logprobs; it
never ends a reply by itself, so that a stream lasts until `max_tokens`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from turnloom.engine.models import built_once, cache_dir
from turnloom.testing.tokenizers import qwen_directory, qwen_tokenizer

VOCAB_SIZE = 151_936
"""Rows of the embedding, as in Qwen's own checkpoints: the tokenizer knows some hundreds of ids fewer."""

CONTEXT = 4096

_LAYERS, _HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _MLP = 2, 64, 4, 2, 32, 128
_REVISION = 1
_SPREAD = 4.0
"""Standard deviation of the logits. Of n tokens about n / exp(spread² / 2) are likely at any one time."""

_BIAS = 2.0
"""What every embedding holds in dimension 0, which no layer writes to: after the last norm it is a constant that can set a logit apart."""

_NEVER = 40.0
"""How far below the others the logits of control tokens and of ids without a token are."""


def checkpoint(seed: int = 0) -> Path:
    """A Hugging Face model directory in the cache. Each seed gives other weights for the same tokenizer."""
    return built_once(cache_dir() / "engines" / f"noise-qwen3-{_REVISION}-{seed}", lambda folder: _build(folder, seed))


def _build(folder: Path, seed: int) -> None:
    shutil.copytree(qwen_directory("qwen3"), folder, dirs_exist_ok=True)
    ends = json.loads((folder / "generation_config.json").read_text("utf-8"))["eos_token_id"]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": ends[0],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    save_file(_weights(np.random.default_rng(seed)), folder / "model.safetensors", {"format": "pt"})


def _weights(rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    def noise(rows: int, columns: int, *, keeps_bias: bool = False) -> NDArray[np.float32]:
        """A projection that keeps the scale of what it is given; one that writes to the residual stream leaves dimension 0 alone."""
        weight = rng.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)
        if keeps_bias:
            weight[0] = 0
        return weight

    embedding = rng.standard_normal((VOCAB_SIZE, _HIDDEN), np.float32)
    embedding[:, 0] = _BIAS
    head = noise(VOCAB_SIZE, _HIDDEN) * np.float32(_SPREAD)
    head[:, 0] = 0
    head[_never_sampled(), 0] = -_NEVER
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
        "lm_head.weight": head,
    }
    for layer in range(_LAYERS):
        own = {
            "input_layernorm": np.ones(_HIDDEN, np.float32),
            "post_attention_layernorm": np.ones(_HIDDEN, np.float32),
            "self_attn.q_norm": np.ones(_HEAD_DIM, np.float32),
            "self_attn.k_norm": np.ones(_HEAD_DIM, np.float32),
            "self_attn.q_proj": noise(_HEADS * _HEAD_DIM, _HIDDEN),
            "self_attn.k_proj": noise(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            "self_attn.v_proj": noise(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            "self_attn.o_proj": noise(_HIDDEN, _HEADS * _HEAD_DIM, keeps_bias=True),
            "mlp.gate_proj": noise(_MLP, _HIDDEN),
            "mlp.up_proj": noise(_MLP, _HIDDEN),
            "mlp.down_proj": noise(_HIDDEN, _MLP, keeps_bias=True),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": weight for name, weight in own.items()}
    return weights


def _never_sampled() -> list[int]:
    tokenizer = qwen_tokenizer("qwen3")
    return [*sorted(tokenizer.control_tokens.values()), *range(tokenizer.vocab_size, VOCAB_SIZE)]
