"""How each format spells a reply with calls: what the tests of several formats share. Values are strings or numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Value = Any
Calls = list[tuple[str, dict[str, Value]]]


def _json(value: Value) -> str:
    return json.dumps(value, ensure_ascii=False)


def _bare(value: Value) -> str:
    return value if isinstance(value, str) else _json(value)


def hermes(calls: Calls) -> str:
    return "\n".join(f'<tool_call>\n{{"name": {_json(name)}, "arguments": {_json(args)}}}\n</tool_call>' for name, args in calls)


def qwen3_coder(calls: Calls) -> str:
    def call(name: str, args: dict[str, Value]) -> str:
        inner = "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in args.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"

    return "\n".join(call(*one) for one in calls)


def glm(calls: Calls) -> str:
    def call(name: str, args: dict[str, Value]) -> str:
        inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n" for key, value in args.items())
        return f"<tool_call>{name}\n{inner}</tool_call>"

    return "\n".join(call(*one) for one in calls)


def deepseek_v3(calls: Calls) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(args)}\n```<｜tool▁call▁end｜>" for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    inner = "".join(f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(args)}<｜tool▁call▁end｜>" for name, args in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def kimi_k2(calls: Calls) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{_json(args)}<|tool_call_end|>"
        for index, (name, args) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def minimax_m2(calls: Calls) -> str:
    def call(name: str, args: dict[str, Value]) -> str:
        inner = "".join(f'<parameter name="{key}">{_bare(value)}</parameter>\n' for key, value in args.items())
        return f'<invoke name="{name}">\n{inner}</invoke>\n'

    return "<minimax:tool_call>\n" + "".join(call(*one) for one in calls) + "</minimax:tool_call>"


def deepseek_dsml(calls: Calls) -> str:
    def parameter(key: str, value: Value) -> str:
        is_string = "true" if isinstance(value, str) else "false"
        return f'<｜DSML｜parameter name="{key}" string="{is_string}">{_bare(value)}</｜DSML｜parameter>\n'

    def call(name: str, args: dict[str, Value]) -> str:
        inner = "".join(parameter(*one) for one in args.items())
        return f'<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>\n'

    return "<｜DSML｜function_calls>\n" + "".join(call(*one) for one in calls) + "</｜DSML｜function_calls>"


SPELLED: dict[str, Callable[[Calls], str]] = {
    write.__name__: write for write in (hermes, qwen3_coder, glm, deepseek_v3, deepseek_v31, kimi_k2, minimax_m2, deepseek_dsml)
}
MARKED_UP = ("qwen3_coder", "glm", "minimax_m2", "deepseek_dsml")
"""Formats whose values are bare text; the others write JSON."""
SECTIONED = ("deepseek_v3", "deepseek_v31", "kimi_k2", "minimax_m2", "deepseek_dsml")
