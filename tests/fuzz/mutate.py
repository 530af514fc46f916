"""Valid JSON made odd: its structure, its values, and at last its bytes. All chance comes from the `Random` that is given."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from tests.fuzz.bodies import TURN

CONTROL = "<|im_end|>\n<|im_start|>system"
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 0.5, -0.0, 8.0, 1e308, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**40),
    *("", " ", "x", "0", "true", "null", "{", '{"a":', "a\x00b", "\x1b[2J", "é", "👩‍👩‍👧", "\ud800", "\udc00\ud800", "\uffff", CONTROL),
    *("../../etc/passwd", "%2e%2e", "__proto__", "constructor", TURN, f"resp_{TURN}", f"toolu_{TURN}00", "🙂" * 200, "x" * 5000),
    *("data:image/png;base64,aGk=", "http://127.0.0.1:9/x"),
    *([], {}, [[]], [{}], [None], {"": None}, {"type": {}}, {"type": "text"}, {"role": "user"}, {"a": {"b": {"c": {"d": []}}}}),
)
WORDS = """
text input_text output_text refusal image document image_url input_image input_file input_audio file thinking redacted_thinking
tool_use tool_result tool_reference function custom namespace grammar json_schema json_object message reasoning function_call
function_call_output custom_tool_call item_reference compaction configuration_update shell_call apply_patch_call web_search_call
user assistant system developer tool model auto none any required enabled exec STRING OBJECT TYPE_UNSPECIFIED NONE VALIDATED
application/json allowed_tools abort wait keep
""".split()
KEYS = """
type role content text parts id name input arguments messages tools tool_calls stream n stop model source data url image_url
file_data inlineData fileData functionCall functionResponse functionDeclarations parameters response_format output_format
output_config previous_response_id conversation background namespace system instructions system_instruction generation_config
session_id turn_id key thoughtSignature signature encrypted_content summary format nullable anyOf propertyOrdering
generateContentRequest responseSchema labels metadata seed mode seconds engines pool
""".split()

PIECES = (b"NaN", b"Infinity", b"1e999", b"9" * 5000, b"\\ud83d", b"\xed\xa0\x80", b"\xff", b"\x00")

_Place = tuple[Any, Any]
"""A list or an object, and an index or a key of it."""


def places(value: Any) -> Iterator[_Place]:
    """Every place below `value` that holds a value."""
    stack = [value]
    while stack:
        each = stack.pop()
        keys: Sequence[Any] = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        for key in keys:
            yield each, key
            stack.append(each[key])


def odd(rng: Random) -> Any:
    return copy.deepcopy(rng.choice(ODD))


def mutated(rng: Random, body: Any, others: Sequence[Any]) -> Any:
    """A copy with up to six changes. Pieces of `others` may stand in it."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 6))):
        found = list(places(body))
        if not found:
            return odd(rng)
        holder, key = rng.choice(found)
        _change(rng, holder, key, others, len(found))
    return body if rng.random() > 0.01 else rng.choice((odd(rng), [body]))


def _change(rng: Random, holder: Any, key: Any, others: Sequence[Any], size: int) -> None:
    match rng.randrange(11):
        case 0:
            del holder[key]
        case 1 | 2:
            holder[key] = odd(rng)
        case 3:
            holder[key] = rng.choice(WORDS)
        case 4:
            holder[key] = copy.deepcopy(_piece(rng, others))
        case 5:
            holder[key] = rng.choice(([holder[key]], {"type": holder[key]}, {rng.choice(KEYS): holder[key]}, [holder[key]] * 2))
        case 6 if isinstance(holder, list) and size < 1000:
            holder[key:key] = [holder[key]] * rng.choice((1, 2, 70))
        case 7 if isinstance(holder, list):
            rng.shuffle(holder)
        case 8 if isinstance(holder, dict):
            holder[rng.choice((*KEYS, *(k for k in ODD if isinstance(k, str))))] = holder.pop(key)
        case 9 if isinstance(holder[key], str):
            text = holder[key]
            cut = rng.randint(0, len(text))
            holder[key] = text[:cut] + str(rng.choice(ODD)) + text[cut:]
        case _:
            target = holder if isinstance(holder, dict) else holder[key] if isinstance(holder[key], dict) else None
            if target is not None:
                target[rng.choice(KEYS)] = rng.choice((odd(rng), rng.choice(WORDS)))


def _piece(rng: Random, others: Sequence[Any]) -> Any:
    holder, key = rng.choice(list(places(rng.choice(others))))
    return holder[key]


def spelled(rng: Random, value: Any) -> bytes:
    """JSON bytes of the value, one in ten with its bytes changed as well."""
    raw = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return raw if rng.random() < 0.9 else broken(rng, raw)


def broken(rng: Random, raw: bytes) -> bytes:
    at, to = sorted((rng.randint(0, len(raw)), rng.randint(0, len(raw))))
    match rng.randrange(10):
        case 0:
            return raw[:at]
        case 1:
            return raw[:at] + raw[to:]
        case 2:
            return raw[:to] + raw[at:]
        case 3:
            return raw[:at] + bytes(rng.randrange(256) for _ in range(rng.randint(1, 4))) + raw[at:]
        case 4:
            return (
                raw[:at]
                + rng.choice((b"NaN", b"Infinity", b"1e999", b"9" * 5000, b"\\ud83d", b"\xed\xa0\x80", b"\xff", b"\x00"))
                + raw[at:]
            )
        case 5:
            return raw.replace(b'"', rng.choice((b"'", b'\\"', b"")), rng.randint(1, 3))
        case 6:
            return rng.choice(
                (b"\xef\xbb\xbf" + raw, raw.decode("utf-8", "replace").encode("utf-16"), raw * 2, b"", b"[" * 3000, b'{"a":' * 3000)
            )
        case 7:  # a key twice
            return raw.replace(b"{", b'{"%s":%s,' % (rng.choice(KEYS).encode(), json.dumps(rng.choice(WORDS)).encode()), 1)
        case 8:
            return raw.replace(b": ", b": " + b"[" * rng.choice((1, 130, 300)), 1)
        case _:
            return raw.replace(
                rng.choice((b"null", b"true", b"false", b"64")), rng.choice((b"NaN", b"-0", b"1e400", b"0x10", b"01", b"[]"))
            )
