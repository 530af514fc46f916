"""Which tokenizer each family of chat templates gets: the model's own, or a stand-in that says why. Data only.

A stand-in is a real vocabulary in which the family's own control tokens take
the place of the vocabulary's: what is one token to the model is one token
here, and everything else differs at most in where ordinary text is cut.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """`special` and `added` are spellings to put in place of the vocabulary's own control tokens; both empty keeps those.

    `ends`: spellings of the ids that end a reply, as in the model's generation_config.json.
    `stand_in`: why this is not the model's own tokenizer; empty when it is.
    """

    vocabulary: str
    eos: str
    ends: tuple[str, ...]
    bos: str = ""
    pad: str = ""
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    stand_in: str = ""


_NO_PACKAGE = "no package carries the model's vocabulary"
_THINK = ("<think>", "</think>")
_HERMES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", *_THINK)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_QWEN = Family("qwen2.5", "<|im_end|>", ("<|im_end|>", "<|endoftext|>"), pad="<|endoftext|>")
_GEMMA4_SPECIAL = _words(
    '<pad> <eos> <bos> <unk> <mask> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|> <|think|> '
    "<|channel> <channel|> <|turn> <turn|> <|image> <image|> <|image|> <|audio> <audio|> <|audio|> <|video|>"
)
_COHERE = _words(
    "<PAD> <UNK> <CLS> <SEP> <MASK_TOKEN> <BOS_TOKEN> <EOS_TOKEN> <EOP_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> "
    "<|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>"
)
_COHERE2 = _words(
    "<|START_THINKING|> <|END_THINKING|> <|START_ACTION|> <|END_ACTION|> <|START_RESPONSE|> <|END_RESPONSE|> "
    "<|START_TOOL_RESULT|> <|END_TOOL_RESULT|> <|START_TEXT|> <|END_TEXT|>"
)
_LFM = _words("<|pad|> <|startoftext|> <|endoftext|> <|im_start|> <|im_end|>")
_LFM_TOOLS = _words(
    "<|tool_list_start|> <|tool_list_end|> <|tool_call_start|> <|tool_call_end|> <|tool_response_start|> <|tool_response_end|>"
)

FAMILIES: dict[str, Family] = {
    "qwen2.5": _QWEN,
    "qwen3": Family("qwen3", "<|im_end|>", _QWEN.ends, pad="<|endoftext|>"),
    "cohere": Family("qwen2.5", "<|END_OF_TURN_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",), "<BOS_TOKEN>", "<PAD>", _COHERE, (), _NO_PACKAGE),
    "cohere2": Family(
        "qwen2.5", "<|END_OF_TURN_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",), "<BOS_TOKEN>", "<PAD>", (*_COHERE, *_COHERE2), (), _NO_PACKAGE
    ),
    "deepseek": Family(
        "qwen2.5",
        "<｜end▁of▁sentence｜>",
        ("<｜end▁of▁sentence｜>",),
        "<｜begin▁of▁sentence｜>",
        "<｜▁pad▁｜>",
        _words("<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜>"),
        _words(
            "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
            "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜> <think> </think>"
        ),
        _NO_PACKAGE,
    ),
    "gemma": Family(
        "qwen2.5",
        "<eos>",
        ("<eos>", "<end_of_turn>"),
        "<bos>",
        "<pad>",
        _words("<pad> <eos> <bos> <unk> <start_of_turn> <end_of_turn> <start_of_image> <end_of_image>"),
        (),
        _NO_PACKAGE,
    ),
    "gemma4": Family("qwen2.5", "<eos>", ("<eos>", "<turn|>", "<|tool_response>"), "<bos>", "<pad>", _GEMMA4_SPECIAL, (), _NO_PACKAGE),
    "glm4": Family(
        "qwen2.5",
        "<|endoftext|>",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        "",
        "<|endoftext|>",
        _words("<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|>"),
        (*_HERMES, *_words("<arg_key> </arg_key> <arg_value> </arg_value>")),
        _NO_PACKAGE,
    ),
    "gpt-oss": Family(
        "qwen2.5",
        "<|return|>",
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        "<|startoftext|>",
        "<|endoftext|>",
        _words("<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> <|call|>"),
        (),
        _NO_PACKAGE,
    ),
    "idefics3": Family(
        "qwen2.5",
        "<end_of_utterance>",
        ("<end_of_utterance>", "<|end_of_text|>"),
        "<|begin_of_text|>",
        "<|end_of_text|>",
        _words("<|begin_of_text|> <|end_of_text|> <fake_token_around_image> <image> <end_of_utterance>"),
        (),
        _NO_PACKAGE,
    ),
    "lfm2": Family("qwen2.5", "<|im_end|>", ("<|im_end|>",), "<|startoftext|>", "<|pad|>", (*_LFM, *_LFM_TOOLS), (), _NO_PACKAGE),
    "lfm2.5": Family("qwen2.5", "<|im_end|>", ("<|im_end|>",), "<|startoftext|>", "<|pad|>", (*_LFM, *_LFM_TOOLS), _THINK, _NO_PACKAGE),
    "llama3": Family(
        "qwen2.5",
        "<|eot_id|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|finetune_right_pad_id|>",
        _words(
            "<|begin_of_text|> <|end_of_text|> <|finetune_right_pad_id|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> "
            "<|python_tag|>"
        ),
        (),
        _NO_PACKAGE,
    ),
    "llava-next": Family("qwen2.5", "</s>", ("</s>",), "<s>", "<pad>", _words("<unk> <s> </s> <image> <pad>"), (), _NO_PACKAGE),
    "muse-glimmer": Family(
        "qwen2.5",
        "<|eot|>",
        ("<|eot|>", "<|eom|>", "<|end_of_text|>"),
        "<|begin_of_text|>",
        "<|finetune_right_pad|>",
        _words("<|begin_of_text|> <|end_of_text|> <|start|> <|message|> <|eom|> <|eot|> <|finetune_right_pad|> <|patch|> <|video|>"),
        (),
        _NO_PACKAGE,
    ),
    "nemotron3": Family(
        "qwen2.5",
        "<|im_end|>",
        ("</s>", "<|im_end|>"),
        "<s>",
        "",
        _words("<unk> <s> </s> <|im_start|> <|im_end|>"),
        _HERMES,
        _NO_PACKAGE,
    ),
    "phi3": Family(
        "qwen2.5",
        "<|endoftext|>",
        ("<|endoftext|>", "<|assistant|>", "<|end|>"),
        "<s>",
        "<|endoftext|>",
        _words("<unk> <s> </s> <|endoftext|> <|assistant|> <|system|> <|end|> <|user|>"),
        (),
        _NO_PACKAGE,
    ),
    "qwen3.5": Family(
        "qwen3", "<|im_end|>", _QWEN.ends, pad="<|endoftext|>", stand_in="Qwen 3's vocabulary, which has the same control tokens"
    ),
    "smolvlm": Family(
        "qwen2.5",
        "<end_of_utterance>",
        ("<end_of_utterance>",),
        "<|im_start|>",
        "<|im_end|>",
        _words("<|endoftext|> <|im_start|> <|im_end|> <fake_token_around_image> <image> <end_of_utterance>"),
        (),
        _NO_PACKAGE,
    ),
}
