"""Loads a tokenizer and its chat template: a Hugging Face directory or hub id, or a GGUF file.

Owns the one implementation of `render.contract.Tokenizer`. Ids come from the
Rust tokenizer itself, never from `transformers`' call path, which changes the
tokenizer's padding and truncation while it runs and so is not safe to share
between threads. The chat template runs in transformers' sandbox, as trainers run it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from turnloom.errors import ConfigError, RenderError
from turnloom.gguf import read_tokenizer

# One text at a time gains nothing from the library's own threads, and every later fork would print a warning for them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_TEMPLATE_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""What a template raises, beside Jinja's own errors, when messages are not what it expects."""


_RESERVED = frozenset(
    "messages conversations tools documents chat_template add_generation_prompt continue_final_message return_assistant_tokens_mask".split()
)
"""What a chat template is given, or its rendering, in ways of its own."""

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""A byte token, as SentencePiece spells it."""

_TAG_MARKS = frozenset("<>[]|｜")


class HFTokenizer:
    """A `tokenizers.Tokenizer`, taken over from the caller, with a chat template; safe to share between threads.

    `templates` maps a name to a template's text: `default`, and `tool_use` where
    the model has one for requests with tools. `special` is what the template
    sees as `bos_token` and the like.
    """

    def __init__(
        self,
        backend: Any,
        *,
        name: str,
        templates: Mapping[str, str],
        special: Mapping[str, Any],
        eos_ids: frozenset[int],
    ) -> None:
        self.name = name
        self._templates = dict(templates)
        self.chat_template = self._templates.get("default", "")
        self._special = dict(special)
        self._full = backend
        self._full.no_padding()
        self._full.no_truncation()
        added = self._full.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.control_tokens: Mapping[str, int] = {token.content: index for index, token in added.items() if _is_control(token)}
        self.eos_ids = eos_ids
        self.vocab_size = 1 + max(self._full.get_vocab(with_added_tokens=True).values())
        self.byte_tokens: Mapping[int, int] = _byte_tokens(backend)
        """Id -> value of every token that is one byte of UTF-8; empty unless the decoder puts such bytes together."""
        self._control_ids = frozenset(self.control_tokens.values())
        self._spellings = {index: spelling for spelling, index in self.control_tokens.items()}
        self._plain, self._middle = _variants(backend, self.control_tokens)
        spellings = sorted(self.control_tokens, key=len, reverse=True)
        self._any_control = re.compile("|".join(map(re.escape, spellings))) if spellings else None

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        text = _whole(text)
        if start or self._middle is None:
            return _encode(self._full, text)
        first = self._any_control.search(text) if self._any_control else None
        at = first.start() if first else len(text)
        head = _encode(self._middle, text[:at]) if at else []
        return head + (_encode(self._full, text[at:]) if at < len(text) else [])

    def encode_plain(self, text: str) -> list[int]:
        """Raises RenderError when the tokenizer can write some spelling only as the control token itself."""
        text = _whole(text)
        found = _encode(self._plain, text)
        wrong = self._control_ids.intersection(found)
        if not wrong:
            return found
        # A vocabulary that holds a spelling as one ordinary entry yields it from plain text too. Cut after the
        # spelling's first character, there is nothing left for that entry to match.
        spellings = [re.escape(self._spellings[index]) for index in sorted(wrong)]
        cuts = [match.start() + 1 for match in re.finditer("|".join(spellings), text)]
        bounds = [0, *cuts, len(text)]
        pieces: list[int] = []
        for start, end in itertools.pairwise(bounds):
            pieces += _encode(self._plain, text[start:end])
        if self._control_ids.intersection(pieces) or self.decode(pieces) != self.decode(found):
            raise RenderError(f"{self.name} can write {sorted(self._spellings[index] for index in wrong)} only as control tokens")
        return pieces

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._full.decode([int(index) for index in token_ids], skip_special_tokens=False))

    def apply_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, /, *, generation_prompt: bool, **kwargs: Any
    ) -> str:
        """Raises ConfigError when `kwargs` has a name that the rendering itself uses."""
        if reserved := _RESERVED.intersection(kwargs):
            raise ConfigError(f"a chat template's kwargs cannot set {', '.join(sorted(reserved))}: rendering sets it itself")
        return self._rendered(messages, tools, generation_prompt, kwargs)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        import jinja2

        with _quiet_transformers():
            from transformers.utils.chat_template_utils import render_jinja_template

        template = self._templates.get("tool_use", self.chat_template) if tools else self.chat_template
        if not template:
            raise RenderError(f"{self.name} has no chat template; give one")
        try:
            # A key whose value is None is dropped, as apply_chat_template does: templates print it or fail on it.
            rendered, _ = render_jinja_template(
                conversations=[[{key: value for key, value in message.items() if value is not None} for message in messages]],
                tools=[dict(tool) for tool in tools] if tools is not None else None,
                chat_template=template,
                add_generation_prompt=generation_prompt,
                **{**self._special, **kwargs},
            )
        except jinja2.TemplateError as error:
            raise RenderError(f"the chat template refuses these messages: {error}") from error
        except _TEMPLATE_FAILURES as error:
            raise RenderError(f"the chat template fails on these messages: {type(error).__name__}: {error}") from error
        return str(rendered[0])


def load_tokenizer(path_or_id: str | Path, *, chat_template: str | None = None) -> HFTokenizer:
    """The tokenizer at a `.gguf` file, a Hugging Face directory or a hub id.

    `chat_template` overrides the tokenizer's own: the text, or the path of a
    `.jinja` file. Raises ConfigError when there is none, or none that can be loaded exactly.
    """
    path = Path(path_or_id).expanduser()
    override = {} if chat_template is None else {"default": _template_text(chat_template)}
    if path.suffix == ".gguf":
        found = read_tokenizer(path)
        return HFTokenizer(
            found.tokenizer,
            name=str(path_or_id),
            templates=override or {"default": found.chat_template},
            special=found.special,
            eos_ids=found.eos_ids,
        )
    if not path.exists() and (path.is_absolute() or str(path_or_id).startswith((".", "~"))):
        raise ConfigError(f"there is no tokenizer at {path}")
    return _load_hf(str(path) if path.exists() else str(path_or_id), override)


def _load_hf(source: str, override: dict[str, str]) -> HFTokenizer:
    with _quiet_transformers():
        from transformers import AutoTokenizer
    try:
        loaded = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"cannot load a tokenizer from {source}: {reason}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"the tokenizer of {source} has no fast form (tokenizer.json); convert it first")
    own = loaded.chat_template
    templates = dict(own) if isinstance(own, Mapping) else {"default": own or ""}
    ends = {loaded.eos_token_id} if loaded.eos_token_id is not None else set()
    return HFTokenizer(
        backend,
        name=source,
        templates=override or templates,
        special=loaded.special_tokens_map,
        eos_ids=frozenset(ends | _generation_ends(Path(source))),
    )


def _generation_ends(directory: Path) -> set[int]:
    """`eos_token_id` of generation_config.json: an int or a list; empty when there is none."""
    file = directory / "generation_config.json"
    if not file.is_file():
        return set()
    try:
        value = json.loads(file.read_text("utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if value is None:
        return set()
    return {int(end) for end in value} if isinstance(value, list) else {int(value)}


def _template_text(given: str) -> str:
    if given.endswith(".jinja") and "\n" not in given:
        try:
            return Path(given).expanduser().read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read the chat template {given}: {error.strerror}") from error
    return given


def _whole(text: str) -> str:
    """The text with every lone surrogate as U+FFFD: no token can hold one, and what a model writes may."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _encode(backend: Any, text: str) -> list[int]:
    """Through the batch call: of the library's calls only that one lets other threads run, an event loop's among them."""
    return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _is_control(token: Any) -> bool:
    """Special tokens, and added ones with a mark that tags are made of; not runs of spaces, which are ordinary text."""
    return bool(token.special or (len(token.content) > 2 and _TAG_MARKS.intersection(token.content)))


def _byte_tokens(backend: Any) -> dict[int, int]:
    if b'"ByteFallback"' not in orjson.dumps(_described(backend.decoder)):
        return {}
    vocabulary = backend.get_vocab(with_added_tokens=True).items()
    return {index: int(token[3:5], 16) for token, index in vocabulary if _BYTE.fullmatch(token)}


def _variants(backend: Any, control: Mapping[str, int]) -> tuple[Any, Any]:
    """Two more tokenizers with the same ids, for text in the middle of other text: neither opens it with a space of its own.

    The first is blind to control spellings: added tokens stay, so that no id
    moves, and the blind ones are marked special. The second knows them; it is
    None where the tokenizer itself never adds a space.
    """
    steps = {place: _described(getattr(backend, place)) for place in ("normalizer", "pre_tokenizer")}
    middle = _same_model(backend, steps, ()) if _drop_opening_space(steps) else None
    plain = _same_model(backend, steps, control)
    plain.encode_special_tokens = True
    return plain, middle


def _described(step: Any) -> Any:
    return orjson.loads(step.__getstate__()) if step is not None else None


def _same_model(backend: Any, steps: Mapping[str, Any], special: Container[str]) -> Any:
    """A tokenizer with this one's model and ids, other steps before it, and those added tokens special that are named."""
    from tokenizers import AddedToken, Tokenizer

    bare = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}, **steps}
    shell = Tokenizer.from_str(orjson.dumps(bare).decode())
    made = Tokenizer(backend.model)
    made.normalizer, made.pre_tokenizer, made.decoder = shell.normalizer, shell.pre_tokenizer, backend.decoder
    added = backend.get_added_tokens_decoder()
    for _, token in sorted(added.items()):
        kept = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        made.add_tokens([AddedToken(token.content, special=token.content in special or (token.special and not special), **kept)])
    if made.get_added_tokens_decoder().keys() == added.keys():
        return made
    # Ids with gaps between them cannot be added one by one: the long way round.
    whole = orjson.loads(backend.to_str()) | steps
    for token in whole["added_tokens"]:
        token["special"] = token["content"] in special or (token["special"] and not special)
    return Tokenizer.from_str(orjson.dumps(whole).decode())


def _drop_opening_space(described: dict[str, Any]) -> bool:
    """Take every such step out of a tokenizer.json; whether there was one."""
    dropped = False
    for place, inner in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        step = described.get(place)
        steps = step.get(inner, [step]) if step else []
        for each in steps:
            if each["type"] == "Metaspace" and each.get("prepend_scheme", "always") != "never":
                each.update(prepend_scheme="never")
                each.pop("add_prefix_space", None)
                dropped = True
            elif each["type"] == "ByteLevel" and each.get("add_prefix_space"):
                each["add_prefix_space"] = False
                dropped = True
        if kept := [each for each in steps if each["type"] != "Prepend"]:
            if len(kept) < len(steps):
                described[place], dropped = {"type": "Sequence", inner: kept}, True
        elif steps:
            described[place], dropped = None, True
    return dropped


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Importing transformers without PyTorch prints an advice that does not concern a tokenizer."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    if name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)
