"""Which tokenizer each family of chat templates gets: the model's own, or a stand-in that says why. Data only.

A stand-in is a real vocabulary in which the family's own control tokens take
the place of the vocabulary's: what is one token to the model is one token
here, under another id, and ordinary text may be cut elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """`special` and `added` are spellings to put in place of the vocabulary's own control tokens; both empty keeps those.

    `ends`: spellings of the ids that end a reply. `stand_in`: why this is not
    the model's own tokenizer; empty when it is.
    """

    vocabulary: str
    eos: str
    ends: tuple[str, ...]
    bos: str
    pad: str
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    stand_in: str = ""


_NO_PACKAGE = "no package carries the model's vocabulary"
_CHATML = "<|im_start|> <|im_end|>"
_THINK = "<think> </think>"
_HERMES = "<tool_call> </tool_call> <tool_response> </tool_response>"
_ARGUMENTS = "<arg_key> </arg_key> <arg_value> </arg_value>"


def _own(vocabulary: str, eos: str, ends: str, bos: str = "", pad: str = "") -> Family:
    return Family(vocabulary, eos, tuple(ends.split()), bos, pad)


def _like(vocabulary: str, why: str, eos: str, ends: str, bos: str = "", pad: str = "") -> Family:
    """A vocabulary with its own control tokens that is not quite the model's."""
    return Family(vocabulary, eos, tuple(ends.split()), bos, pad, stand_in=why)


def _with(
    special: str, added: str = "", *, eos: str, ends: str = "", bos: str = "", pad: str = "", on: str = "gpt-2", why: str = _NO_PACKAGE
) -> Family:
    """Another vocabulary with the family's control tokens."""
    return Family(on, eos, tuple((ends or eos).split()), bos, pad, tuple(special.split()), tuple(added.split()), why)


_QWEN = ("<|im_end|>", "<|im_end|> <|endoftext|>", "", "<|endoftext|>")
_LLAMA = ("<|eot_id|>", "<|end_of_text|> <|eom_id|> <|eot_id|>", "<|begin_of_text|>", "<|finetune_right_pad_id|>")
_DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>")
_MISTRAL = ("</s>", "</s>", "<s>", "<pad>")
_COHERE = (
    "<PAD> <UNK> <CLS> <SEP> <MASK_TOKEN> <BOS_TOKEN> <EOS_TOKEN> <EOP_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> "
    "<|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> <|START_THINKING|> <|END_THINKING|> <|START_ACTION|> <|END_ACTION|> "
    "<|START_RESPONSE|> <|END_RESPONSE|> <|START_TOOL_RESULT|> <|END_TOOL_RESULT|> <|START_TEXT|> <|END_TEXT|> <|IMG_PATCH|>"
)
_LFM = (
    "<|pad|> <|startoftext|> <|endoftext|> <|im_start|> <|im_end|> <|tool_list_start|> <|tool_list_end|> <|tool_call_start|> "
    "<|tool_call_end|> <|tool_response_start|> <|tool_response_end|>"
)
_KIMI = (
    "[BOS] [EOS] [PAD] [UNK] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|> "
    "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> <|media_start|> <|media_content|> "
    "<|media_pad|> <|media_end|>"
)
_TEKKEN_LATER = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [ARGS] [CALL_ID] [THINK] [/THINK]"
)
_TEKKEN_WHY = "Mistral NeMo's vocabulary, with other ids for the later control tokens"
_LLAMA_TUNED = "the vocabulary of the Llama it was tuned from, with other ids for its own control tokens"
_HY = (
    "<｜hy_eos:opensource｜> <｜hy_begin_of_sentence:opensource｜> <｜hy_pad:opensource｜> <｜hy_User:opensource｜> "
    "<｜hy_Assistant:opensource｜> <｜reasoning_mode:opensource｜>"
)
_HY_ADDED = " ".join(
    f"<{name}:opensource> </{name}:opensource>"
    for name in ("think", "tool_calls", "tool_call", "arg_key", "arg_value", "tool_responses", "tool_response")
)
_SOLAR = (
    "<|endoftext|> <|begin|> <|end|> <|content|> <|think|> <|calls|> <|tool_calls|> <|tool_response|> <|tools:begin|> <|tools:end|> "
    "<|tool:begin|> <|tool:end|> <|tool_call:begin|> <|tool_call:end|> <|tool_call:name|> <|tool_call:args|> <|tool_response:begin|> "
    "<|tool_response:end|> <|tool_response:id|> <|tool_response:name|> <|tool_response:result|>"
)

FAMILIES: dict[str, Family] = {
    "qwen2.5": _own("qwen2.5", *_QWEN),
    "qwen3": _own("qwen3", *_QWEN),
    "qwen3.5": _own("qwen3.5", *_QWEN),
    "qwen3.8": _like("qwen3.5", "Qwen 3.6's; that 3.8 has the same is not known", *_QWEN),
    "llama3": _own("llama3", "<|eot_id|>", "<|end_of_text|> <|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>"),
    "llama3.1": _own("llama3.1", *_LLAMA),
    "llama3.1-tuned": _like("llama3.1", _LLAMA_TUNED, *_LLAMA),
    "gpt-oss": _own("o200k-harmony", "<|return|>", "<|return|> <|endoftext|> <|call|>", "<|startoftext|>", "<|endoftext|>"),
    "mistral-nemo": _own("tekken", *_MISTRAL),
    "deepseek-v4": _own("deepseek-v4", *_DEEPSEEK),
    "deepseek-v3": _like("deepseek-v4", "DeepSeek V4's, with other ids for the reasoning tags", *_DEEPSEEK),
    "command-r": _own("command-r", "<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>", "<PAD>"),
    "gemma4": _own("gemma4", "<eos>", "<eos> <turn|> <|tool_response>", "<bos>", "<pad>"),
    "phi3": _own("phi3", "<|endoftext|>", "<|endoftext|> <|assistant|> <|end|>", "<s>", "<|endoftext|>"),
    "gemma": _with(
        "<pad> <eos> <bos> <unk> <start_of_turn> <end_of_turn> <start_of_image> <end_of_image>",
        eos="<eos>",
        ends="<eos> <end_of_turn>",
        bos="<bos>",
        pad="<pad>",
        on="gemma4",
        why="Gemma 4's vocabulary",
    ),
    "cohere2": _with(_COHERE, eos="<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>", pad="<PAD>", on="command-r", why="Command R's vocabulary"),
    "deepseek-r1-qwen": _with(
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>",
        f"<｜User｜> <｜Assistant｜> <|EOT|> {_THINK}",
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        on="qwen2.5",
        why="Qwen 2.5's vocabulary, with other ids for the control tokens",
    ),
    "deepseek-r1-llama": _with(
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>",
        f"<｜User｜> <｜Assistant｜> {_THINK}",
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        on="llama3.1",
        why="Llama 3.1's vocabulary, with other ids for the control tokens",
    ),
    "hermes": _with(
        f"<|begin_of_text|> <|end_of_text|> {_CHATML}",
        _HERMES,
        eos="<|im_end|>",
        bos="<|begin_of_text|>",
        on="llama3.1",
        why=_LLAMA_TUNED,
    ),
    "smollm3": _with(
        f"<|begin_of_text|> <|end_of_text|> {_CHATML}",
        f"{_HERMES} {_THINK}",
        eos="<|im_end|>",
        on="llama3.1",
        why="Llama 3.1's vocabulary, with other ids for the control tokens",
    ),
    "idefics3": _with(
        "<|begin_of_text|> <|end_of_text|> <fake_token_around_image> <image> <end_of_utterance>",
        eos="<end_of_utterance>",
        ends="<end_of_utterance> <|end_of_text|>",
        bos="<|begin_of_text|>",
        on="llama3.1",
        why=_LLAMA_TUNED,
    ),
    "smolvlm": _with(
        "<|endoftext|> <|im_start|> <|im_end|> <fake_token_around_image> <image> <end_of_utterance>",
        eos="<end_of_utterance>",
        bos="<|im_start|>",
        on="smollm2",
        why="SmolLM2's vocabulary, with other ids for the control tokens of images",
    ),
    "llava-next": _with("<unk> <s> </s> <image> <pad>", eos="</s>", bos="<s>", pad="<pad>"),
    "mistral-tekken": _with(_TEKKEN_LATER, eos="</s>", bos="<s>", pad="<pad>", on="tekken", why=_TEKKEN_WHY),
    "nemotron3": _with(
        f"<unk> <s> </s> {_CHATML}",
        f"{_HERMES} {_THINK}",
        eos="<|im_end|>",
        ends="</s> <|im_end|>",
        bos="<s>",
        on="tekken",
        why=_TEKKEN_WHY,
    ),
    "nemotron-nano2": _with(
        "<unk> <s> </s> <SPECIAL_10> <SPECIAL_11> <SPECIAL_12>",
        eos="<SPECIAL_12>",
        ends="</s> <SPECIAL_11> <SPECIAL_12>",
        bos="<s>",
        on="tekken",
        why="Mistral NeMo's vocabulary",
    ),
    "apertus": _with(
        "<unk> <s> </s> <pad> <|system_start|> <|system_end|> <|developer_start|> <|developer_end|> <|user_start|> <|user_end|> "
        "<|assistant_start|> <|assistant_end|> <|inner_prefix|> <|inner_suffix|> <|tools_prefix|> <|tools_suffix|>",
        eos="<|assistant_end|>",
        ends="</s> <|assistant_end|> <|tools_suffix|>",
        bos="<s>",
        pad="<pad>",
        on="tekken",
        why=_TEKKEN_WHY,
    ),
    "granite3": _with(
        "<|end_of_text|> <fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <|start_of_role|> <|end_of_role|> <|tool_call|> "
        "<|start_of_cite|> <|end_of_cite|>",
        eos="<|end_of_text|>",
        bos="<|end_of_text|>",
    ),
    "granite4": _with(
        "<|end_of_text|> <|pad|> <|start_of_role|> <|end_of_role|>", f"{_HERMES} {_THINK}", eos="<|end_of_text|>", bos="<|end_of_text|>"
    ),
    "glm4": _with(
        "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|>",
        f"{_HERMES} {_THINK} {_ARGUMENTS}",
        eos="<|endoftext|>",
        ends="<|endoftext|> <|user|> <|observation|>",
        pad="<|endoftext|>",
    ),
    "kimi": _with(_KIMI, _THINK, eos="[EOS]", ends="[EOS] <|im_end|>", bos="[BOS]", pad="[PAD]"),
    "kimi-k3": _with(
        "[BOS] [EOS] [PAD] [UNK] <|open|> <|close|> <|sep|> <|end_of_msg|> <|kimi_image_placeholder|>",
        eos="[EOS]",
        ends="[EOS] <|end_of_msg|>",
        bos="[BOS]",
        pad="[PAD]",
    ),
    "minimax-m2": _with("]~!b[ ]~b] [e~[ ]!p~[", f"<minimax:tool_call> </minimax:tool_call> {_THINK}", eos="[e~[", bos="]~!b["),
    "minimax-m3": _with(
        "]~!b[ ]~b] [e~[ ]!p~[ ]<]minimax[>[ ]<]image[>[ ]<]video[>[",
        "<tool_call> </tool_call> <mm:think> </mm:think>",
        eos="[e~[",
        bos="]~!b[",
    ),
    "lfm2": _with(_LFM, eos="<|im_end|>", bos="<|startoftext|>", pad="<|pad|>"),
    "lfm2.5": _with(_LFM, _THINK, eos="<|im_end|>", bos="<|startoftext|>", pad="<|pad|>"),
    "muse-glimmer": _with(
        "<|begin_of_text|> <|end_of_text|> <|start|> <|message|> <|eom|> <|eot|> <|finetune_right_pad|> <|patch|> <|video|>",
        eos="<|eot|>",
        ends="<|eot|> <|eom|> <|end_of_text|>",
        bos="<|begin_of_text|>",
        pad="<|finetune_right_pad|>",
    ),
    "seed-oss": _with(
        "<seed:bos> <seed:eos> <seed:pad>",
        "<seed:think> </seed:think> <seed:tool_call> </seed:tool_call> <seed:cot_budget_reflect> </seed:cot_budget_reflect>",
        eos="<seed:eos>",
        bos="<seed:bos>",
        pad="<seed:pad>",
    ),
    "step3.5": _with(
        f"<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> {_CHATML}",
        f"{_HERMES} {_THINK}",
        eos="<|im_end|>",
        ends="<|im_end|> <｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    "hy3": _with(
        _HY,
        f"{_HY_ADDED} <tool_sep:opensource>",
        eos="<｜hy_eos:opensource｜>",
        bos="<｜hy_begin_of_sentence:opensource｜>",
        pad="<｜hy_pad:opensource｜>",
    ),
    "ling": _with(
        "<|startoftext|> <|endoftext|> <|role_end|> <role> </role>",
        f"{_HERMES} {_THINK} {_ARGUMENTS}",
        eos="<|role_end|>",
        ends="<|role_end|> <|endoftext|>",
        bos="<|startoftext|>",
    ),
    "solar-open": _with(_SOLAR, eos="<|end|>", ends="<|end|> <|calls|> <|endoftext|>", bos="<|begin|>"),
}
