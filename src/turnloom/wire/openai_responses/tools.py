"""Reads the tools of a request, and what its `tool_choice` asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnloom.errors import BadRequest
from turnloom.types import Tool
from turnloom.wire import fields, freeform
from turnloom.wire.fields import MAX_TOOLS, optional_string, string
from turnloom.wire.json import text_of

_NO_PARAMETERS = '{"type":"object","properties":{}}'


class Toolbox:
    """A request's tools, in the order they came. `declined` names those that only the provider's servers, or no model here, could use."""

    def __init__(self) -> None:
        self._tools: dict[str, Tool] = {}
        self._declined: dict[str, None] = {}
        self._short: dict[str, set[str]] = {}
        """The full names of tools in namespaces, by the short ones."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(self._tools.values())

    @property
    def declined(self) -> tuple[str, ...]:
        return tuple(self._declined)

    def called(self, name: str, group: object) -> str:
        """The full name of a call's tool. A client that leaves the namespace out means the one tool of that short name."""
        full = full_name(name, group)
        if full in self._tools or group:
            return full
        found = self._short.get(name, ())
        return next(iter(found)) if len(found) == 1 else full

    def add(self, value: Any, where: str) -> None:
        """All tools of a list. One that is known by its name already takes the other's place."""
        for i, sent in enumerate(fields.objects(value, where, MAX_TOOLS)):
            self._add(sent, f"{where}.{i}")
        if len(self._tools) > MAX_TOOLS:
            raise BadRequest(f"{where}: there are {len(self._tools)} tools; at most {MAX_TOOLS} are supported")

    def _add(self, sent: Mapping[str, Any], where: str) -> None:
        kind = string(sent, "type", where)
        if kind == "namespace":
            group = string(sent, "name", where)
            for i, inner in enumerate(fields.objects(sent.get("tools"), f"{where}.tools", MAX_TOOLS)):
                self._keep(inner, group, f"{where}.tools.{i}")
        else:
            self._keep(sent, "", where)

    def _keep(self, sent: Mapping[str, Any], group: str, where: str) -> None:
        kind = string(sent, "type", where)
        if kind not in ("function", "custom"):
            name = sent.get("name") or sent.get("server_label")
            self._declined[name if isinstance(name, str) and name else kind] = None
            return
        short = string(sent, "name", where)
        name = full_name(short, group)
        if name in self._tools and self._tools[name].namespace != group:
            raise BadRequest(f"{where}.name: {fields.shown(name)} is the name of two tools, in different namespaces; rename one")
        if group:
            self._short.setdefault(short, set()).add(name)
        description = optional_string(sent, "description", where)
        if kind == "custom":
            description = "\n\n".join(filter(None, [description, _format(sent.get("format"), f"{where}.format")]))
            self._tools[name] = Tool(name, description, freeform.PARAMETERS, freeform=True, namespace=group)
        else:
            self._tools[name] = Tool(name, description, _parameters(sent.get("parameters"), where), namespace=group)


def full_name(name: str, group: object) -> str:
    """The name under which the model knows a tool of a namespace."""
    return f"{group}__{name}" if isinstance(group, str) and group else name


def short_name(tool: Tool) -> str:
    """The name under which the client knows it."""
    return tool.name.removeprefix(f"{tool.namespace}__") if tool.namespace else tool.name


def _parameters(value: Any, where: str) -> str:
    if value is None:
        return _NO_PARAMETERS
    if not isinstance(value, dict):
        raise BadRequest(f"{where}.parameters: must be a JSON Schema object")
    return text_of(value)


def _format(value: Any, where: str) -> str:
    """What a freeform tool takes, in words for the model. No grammar holds the model to it: the client checks it."""
    if value is None or (isinstance(value, dict) and value.get("type") == "text"):
        return ""
    if not isinstance(value, dict) or value.get("type") != "grammar":
        raise BadRequest(f'{where}.type: must be "text" or "grammar"')
    syntax, definition = string(value, "syntax", where), string(value, "definition", where)
    return f"The text in `input` must follow this {syntax} grammar:\n{definition}"


def call_tools(choice: Any, declined: Sequence[str]) -> bool:
    """Whether tools may be called. Raises BadRequest for a choice that would force a call."""
    if choice is None or choice in ("auto", "none"):
        return bool(choice != "none")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "allowed_tools":
        raise BadRequest("tool_choice.type: 'allowed_tools' is not supported; send only the tools that may be called")
    named = choice.get("name") if isinstance(choice, dict) else None
    if kind in declined or (named is not None and named in declined):
        raise BadRequest(f"tool_choice: {fields.shown(named or kind)} runs on the provider's servers and is not available here")
    raise BadRequest(
        f'tool_choice: {fields.shown(named or kind)} cannot be forced; the sampled tokens are the model\'s own, use "auto" or "none"'
    )
