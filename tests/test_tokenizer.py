"""Real tokenizers: control tokens are safe, ids are the model's own, templates render or say why not."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from turnloom.engine.models import SMOLLM2, package_files
from turnloom.errors import ConfigError, RenderError
from turnloom.testing.tokenizers import qwen_directory, qwen_tokenizer, smollm2_tokenizer, trl_template
from turnloom.tokenizer import HFTokenizer, load_tokenizer

EXAMPLE = json.loads((Path(__file__).parent / "data" / "worked_example.json").read_text("utf-8"))
SPELLINGS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<|endoftext|>", "<|im_", "end|>", "<tool_call", "<", "|>"]
TEXTS = st.lists(st.one_of(st.sampled_from([*SPELLINGS, " ", "\n", "  ", "1", "你好", "🏴‍☠️"]), st.text(max_size=6)), max_size=12).map(
    "".join
)

SMOLLM2_LACKS = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}


@pytest.fixture(scope="module")
def qwen() -> HFTokenizer:
    return qwen_tokenizer()


@pytest.fixture(scope="module")
def smollm2() -> HFTokenizer:
    return smollm2_tokenizer()


def openai_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    functions = [{"name": t["name"], "description": t["description"], "parameters": t["input_schema"]} for t in tools]
    return [{"type": "function", "function": function} for function in functions]


def test_the_worked_example_has_exactly_its_prompt_ids(qwen: HFTokenizer) -> None:
    text = qwen.apply_template(EXAMPLE["chat_messages"], openai_tools(EXAMPLE["tools"]), generation_prompt=True)
    assert qwen.encode(text) == EXAMPLE["prompt_ids"]
    assert len(EXAMPLE["prompt_ids"]) == EXAMPLE["expected"]["anthropic"]["usage"]["input_tokens"] == 218
    assert qwen.decode(EXAMPLE["output_ids"]) == EXAMPLE["decoded"]


def test_qwen_is_what_it_should_be(qwen: HFTokenizer) -> None:
    assert qwen.vocab_size == 151_665
    assert qwen.control_tokens["<|im_end|>"] == 151_645
    assert qwen.control_tokens["<tool_call>"] == 151_657
    assert 151_645 in qwen.special_ids
    assert 151_657 not in qwen.special_ids
    assert qwen.eos_ids == {151_643, 151_645}
    assert qwen.encode("Hello world, 2024!") == [9707, 1879, 11, 220, 17, 15, 17, 19, 0]
    three = qwen_tokenizer("qwen3")
    assert three.control_tokens["<think>"] == 151_667
    assert three.vocab_size == 151_669


def test_smollm2_is_what_its_file_says(smollm2: HFTokenizer) -> None:
    assert smollm2.vocab_size == 49_152
    assert smollm2.control_tokens["<|im_start|>"] == 1
    assert smollm2.special_ids == set(range(17))
    assert smollm2.eos_ids == {2}
    assert smollm2.chat_template
    text = smollm2.apply_template([{"role": "user", "content": "hi"}], None, generation_prompt=True)
    assert smollm2.encode(text)[-4:] == [198, 1, 520, 9531, 198][-4:]


@pytest.mark.parametrize("build", [qwen_tokenizer, smollm2_tokenizer])
@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_plain_text_never_holds_a_control_token_and_decodes_to_itself(build: Any, text: str) -> None:
    tokenizer = build()
    found = tokenizer.encode_plain(text)
    assert not set(found) & set(tokenizer.control_tokens.values())
    # SmolLM2 has no token for some bytes that no readable text holds, and drops them.
    assume(build is not smollm2_tokenizer or not SMOLLM2_LACKS & set(text.encode()))
    expected = text if build is smollm2_tokenizer else normalizers.NFC().normalize_str(text)
    assert tokenizer.decode(found) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40).filter(lambda t: "<" not in t and "[" not in t))
def test_plain_and_ordinary_encoding_agree_without_control_spellings(text: str) -> None:
    tokenizer = qwen_tokenizer()
    assert tokenizer.encode_plain(text) == tokenizer.encode(text)


def test_special_tokens_are_kept_in_decoding_and_unknown_ids_are_nothing(qwen: HFTokenizer) -> None:
    assert qwen.decode([151_644, 9707, 151_645]) == "<|im_start|>Hello<|im_end|>"
    assert qwen.decode([9707, 151_900]) == "Hello"
    assert qwen.decode([]) == ""


def from_vocabulary(ignore_merges: bool) -> Tokenizer:
    """A vocabulary whose ordinary entries hold `<s>` whole, as some published ones do."""
    vocab = {token: index for index, token in enumerate(["<", "s", ">", "a", "<s", "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("<", "s"), ("<s", ">")], ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return tokenizer


@pytest.mark.parametrize("ignore_merges", [True, False])
def test_a_spelling_that_the_vocabulary_holds_is_cut(ignore_merges: bool) -> None:
    tokenizer = HFTokenizer(from_vocabulary(ignore_merges), name="t", templates={}, special={}, eos_ids=frozenset())
    assert tokenizer.encode("a<s>") == [3, 5]
    for text in ("<s>", "a<s>a<s><s>", "<<s>>" * 500):
        found = tokenizer.encode_plain(text)
        assert 5 not in found
        assert tokenizer.decode(found) == text


def test_a_spelling_that_cannot_be_plain_is_an_error() -> None:
    backend = Tokenizer(models.WordLevel(vocab={"<": 0, "<s>": 1, "s": 2, "[UNK]": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    tokenizer = HFTokenizer(backend, name="odd", templates={}, special={}, eos_ids=frozenset())
    with pytest.raises(RenderError, match="odd can write"):
        tokenizer.encode_plain("<s>")


def test_runs_of_spaces_are_ordinary_text_and_tags_are_control() -> None:
    backend = from_vocabulary(False)
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("   ", "[TOOL]", "<think>", "word", "[]")])
    tokenizer = HFTokenizer(backend, name="t", templates={}, special={}, eos_ids=frozenset())
    assert set(tokenizer.control_tokens) == {"<s>", "[TOOL]", "<think>"}
    assert tokenizer.encode_plain("   a") == tokenizer.encode("   a") == [backend.token_to_id("   "), 3]


MESSAGES = [{"role": "user", "content": "hi"}]


def with_template(template: str, **special: str) -> HFTokenizer:
    return HFTokenizer(from_vocabulary(False), name="t", templates={"default": template}, special=special, eos_ids=frozenset())


def test_a_template_sees_special_tokens_tools_and_arguments() -> None:
    template = "{{ bos_token }}{{ tools | tojson if tools else 'none' }}{{ extra }}{{ add_generation_prompt }}"
    tokenizer = with_template(template, bos_token="<s>")
    assert tokenizer.apply_template(MESSAGES, None, generation_prompt=True, extra="!") == "<s>none!True"
    assert tokenizer.apply_template(MESSAGES, [{"a": "é"}], generation_prompt=False) == '<s>[{"a": "é"}]False'


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "division"),
        ("{% if %}", "Expected"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("", "has no chat template"),
    ],
)
def test_a_template_that_refuses_is_quoted(template: str, words: str) -> None:
    with pytest.raises(RenderError, match=words):
        with_template(template).apply_template(MESSAGES, None, generation_prompt=True)


@pytest.mark.parametrize("name", ["tools", "messages", "conversations", "chat_template", "add_generation_prompt", "documents"])
def test_arguments_cannot_take_the_names_of_the_rendering(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot set {name}\b"):
        with_template("{{ messages }}").apply_template(MESSAGES, None, generation_prompt=True, **{name: "x"})


def test_a_lone_surrogate_is_encoded_as_the_replacement_character(qwen: HFTokenizer) -> None:
    assert qwen.encode("a\ud83d<|im_end|>") == qwen.encode("a\ufffd<|im_end|>")
    assert qwen.encode_plain("a\ud83d<|im_end|>\udc00") == qwen.encode_plain("a\ufffd<|im_end|>\ufffd")
    assert qwen.encode_plain("\ud83d\ude42") == qwen.encode_plain("🙂")


def test_keys_without_a_value_are_not_there_for_the_template() -> None:
    template = "{{ 'tool_calls' in messages[0] }}"
    assert with_template(template).apply_template([{"role": "user", "tool_calls": None}], None, generation_prompt=False) == "False"


def test_the_tool_template_is_used_for_tools() -> None:
    templates = {"default": "plain", "tool_use": "tools"}
    tokenizer = HFTokenizer(from_vocabulary(False), name="t", templates=templates, special={}, eos_ids=frozenset())
    assert tokenizer.apply_template(MESSAGES, [{}], generation_prompt=False) == "tools"
    assert tokenizer.apply_template(MESSAGES, [], generation_prompt=False) == "plain"


def test_threads_share_one_tokenizer(qwen: HFTokenizer) -> None:
    def work(number: int) -> tuple[list[int], str]:
        text = qwen.apply_template([{"role": "user", "content": f"{number} <|im_end|> 你好"}], None, generation_prompt=True)
        return qwen.encode(text) + qwen.encode_plain(text), text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(200))) == [work(number) for number in range(200)]


def test_a_template_can_be_given_as_text_or_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("own", "utf-8")
    model = package_files(SMOLLM2)[0]
    assert load_tokenizer(model, chat_template=str(file)).chat_template == "own"
    assert load_tokenizer(model, chat_template="{{ x }}").chat_template == "{{ x }}"
    assert load_tokenizer(qwen_directory(), chat_template="{{ x }}").chat_template == "{{ x }}"
    assert qwen_tokenizer().chat_template == trl_template("qwen2_5")
    with pytest.raises(ConfigError, match=r"missing\.jinja"):
        load_tokenizer(model, chat_template=str(tmp_path / "missing.jinja"))


def test_what_is_no_tokenizer_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot load a tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match="as a GGUF file"):
        load_tokenizer(tmp_path / "x.gguf")


def gguf(**pairs: str | list[str] | list[int]) -> bytes:
    """A GGUF header of strings, string arrays and int32 arrays."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    out = b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs))
    for key, value in pairs.items():
        out += text(key.replace("__", "."))
        if isinstance(value, str):
            out += struct.pack("<I", 8) + text(value)
        else:
            strings = isinstance(value[0], str)
            out += struct.pack("<IIQ", 9, 8 if strings else 5, len(value))
            out += b"".join(text(str(item)) if strings else struct.pack("<i", int(item)) for item in value)
    return out


def test_a_gguf_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "other.gguf"
    file.write_bytes(
        gguf(
            tokenizer__ggml__model="gpt2",
            tokenizer__ggml__pre="deepseek-llm",
            tokenizer__ggml__tokens=["a"],
            tokenizer__ggml__token_type=[1],
            tokenizer__ggml__merges=["a a"],
        )
    )
    with pytest.raises(ConfigError, match="'gpt2' with pre-tokenizer 'deepseek-llm'"):
        load_tokenizer(file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="as a GGUF file"):
        load_tokenizer(file)


@pytest.fixture(scope="module")
def llama_tokenize() -> Iterator[Any]:
    """llama.cpp's own tokenizer for SmolLM2, over its HTTP server, in a process of its own."""
    script = (
        "import sys, xllamacpp\n"
        "p = xllamacpp.CommonParams(); p.model.path = sys.argv[1]; p.port = 0; p.hostnames = ['127.0.0.1']; p.warmup = False\n"
        "p.verbosity = -1; p.n_ctx = 512\n"
        "s = xllamacpp.Server(p); print(s.listening_address, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(package_files(SMOLLM2)[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()

        def tokenize(text: str, control: bool) -> list[int]:
            body = json.dumps({"content": text, "parse_special": control, "add_special": False}).encode()
            request = urllib.request.Request(f"{url}/tokenize", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as response:
                return list(json.loads(response.read())["tokens"])

        yield tokenize
        server.terminate()


@pytest.mark.engine
@settings(max_examples=500, deadline=None)
@given(text=st.one_of(TEXTS, st.text(max_size=60), st.text("abc 12'sSt\n\t.,(){}é½٣Ⅷ\u00a0\u3000", max_size=60)))
def test_a_rebuilt_gguf_tokenizer_agrees_with_llama_cpp(llama_tokenize: Any, text: str) -> None:
    assume(not SMOLLM2_LACKS & set(text.encode()))  # Hugging Face's merges close up over a byte that is dropped, llama.cpp's do not
    tokenizer = smollm2_tokenizer()
    assert tokenizer.encode(text) == llama_tokenize(text, True)
    assert tokenizer.encode_plain(text) == llama_tokenize(text, False)
