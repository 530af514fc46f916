"""The neutral vocabulary: what every layer says to every other.

Everything here is frozen. Token ids are read-only int32 arrays and logprobs
read-only float32 arrays (see `ids` and `floats`); a value made once is never
changed, a changed one is a new value (`dataclasses.replace`).

A tool's schema and a call's arguments are kept as JSON *text*: that is what
crosses the wire, it is hashable, and nothing is lost by parsing it early.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from turnloom.arrays import NO_FLOATS, NO_IDS, FloatArray, IntArray, floats, ids, same_fields

# These belong to the vocabulary too.
__all__ = ["NO_FLOATS", "NO_IDS", "FloatArray", "IntArray", "floats", "ids", "same_fields"]

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thought."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the JSON text of an object. `written` is the id that the model wrote itself, where its format has one."""

    id: str
    name: str
    arguments: str
    written: str = ""


@dataclass(frozen=True, slots=True)
class ToolResult:
    call_id: str
    text: str
    is_error: bool = False


Part = Text | Reasoning | ToolCall | ToolResult


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. A `tool` message holds exactly one ToolResult.

    `ref` is the turn that the opaque fields of an echoed reply name (signatures,
    item ids), as the client brought them: evidence, to be checked.
    """

    role: Role
    parts: tuple[Part, ...]
    ref: str = ""

    @property
    def text(self) -> str:
        """The visible text: text parts (or the tool result), joined by newlines."""
        return "\n".join(p.text for p in self.parts if isinstance(p, Text | ToolResult))

    @property
    def reasoning(self) -> str:
        return "".join(p.text for p in self.parts if isinstance(p, Reasoning))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(p for p in self.parts if isinstance(p, ToolCall))


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters` is the JSON text of a JSON Schema.

    A freeform tool takes one string, its property `input`, which the client wants
    as it is. `namespace` is the group that a client keeps the tool in; `name`
    then begins with it and `__`.
    """

    name: str
    description: str
    parameters: str
    freeform: bool = False
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The policy a session pins. top_k -1 and top_p 1.0 are off; `max_tokens` None is the engine's room."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    json_schema: str = ""
    """JSON text of a JSON Schema that the engine holds the reply to: its logprobs are then not those of the policy alone."""


@dataclass(frozen=True, slots=True)
class Request:
    """One model call as a dialect read it. `max_tokens` and `stop` are the client's wishes.

    `choices` replies are asked for, each a turn of its own. `json_schema` is the
    JSON text of a schema that the reply must fit, "" where it is free. `previous`
    names the turn whose history stands before `messages`; `instructed` says that
    the first message is this request's own instructions, which no later request
    inherits. `label` is what the client says this request is for. `declined` are
    the tools that only a provider's servers have, by name; `images` counts those
    that a placeholder stands for. `pool` names the engines that answer, "" those
    of the policy.

    `fingerprint` and `idempotency` say which earlier request this one may be again, as in `Turn`.

    `wire` holds what only the dialect needs, to say it again in its reply.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    model: str = ""
    call_tools: bool = True
    """False when the client forbids tool calls in this reply (`tool_choice: none`)."""
    choices: int = 1
    logprobs: bool = False
    json_schema: str = ""
    previous: str = ""
    instructed: bool = False
    label: str = ""
    fingerprint: str = ""
    idempotency: str = ""
    declined: tuple[str, ...] = ()
    images: int = 0
    pool: str = ""
    wire: Mapping[str, Any] = field(default_factory=dict)


MAIN, SUBAGENT, SIDE, COMPACTION = "main", "subagent", "side", "compaction"
"""What a request was for: the task itself, a part of it handed to another agent, something beside it (a title, a
classification), or a summary of the history to go on from."""


class Outcome(StrEnum):
    """How a turn ended. Only delivered turns train by default."""

    DELIVERED = "delivered"
    ORPHANED = "orphaned"
    ABORTED = "aborted"
    FAILED = "failed"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why the engine stopped. `matched` is the stop token id or stop string it names, if it does."""

    reason: FinishReason
    matched: int | str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens [start, end) were sampled by this weight version."""

    version: str
    start: int
    end: int


class AbortOutcome(StrEnum):
    """What is known of a request that an engine was told to stop."""

    VERIFIED = "verified"
    UNVERIFIED = "unverified"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Piece:
    """Output tokens from `start` on, to the next piece, were sampled in one request to the engine called `engine`.

    `why` says how the piece before came to its end; "" for the first.
    """

    start: int
    engine: str
    why: str = ""


class CallStatus(StrEnum):
    """What became of one attempt at a tool call. Only OK reaches the client as a call; the rest as text."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    UNCLOSED = "unclosed"
    MISSING_NAME = "missing_name"
    UNKNOWN_TOOL = "unknown_tool"
    MALFORMED = "malformed"


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One attempt at a tool call.

    `raw` is all its text, [start, end) its characters in the decoded output, and
    [first_token, end_token) the ids of the output that hold any of them.
    """

    status: CallStatus
    name: str
    raw: str
    start: int
    end: int
    first_token: int = 0
    end_token: int = 0


class ForkKind(StrEnum):
    """Why a token sequence starts anew, or leaves one that is recorded, instead of going on with it."""

    TOOLS_CHANGED = "tools_changed"
    SYSTEM_CHANGED = "system_changed"
    HISTORY_CHANGED = "history_changed"
    RESAMPLED = "resampled"
    """The same prompt was asked again."""
    BRANCHED = "branched"
    """Another turn already continued these tokens with other messages; both go on from what they share."""
    OTHER_POOL = "other_pool"
    """The last recorded reply was sampled by another pool's model: its ids are not this one's."""
    NEW_CONVERSATION = "new_conversation"
    """Nothing recorded in this session begins like this request: a sub-agent, a side request, a restart."""
    TEMPLATE = "template"
    """The chat template cannot be split after this assistant message."""
    RERENDERED = "rerendered"
    """Under the `template` history policy: the template wrote the history anew and its ids are not those held."""
    REALIGNED = "realigned"
    """As RERENDERED, but only inside the last reply: the sequence goes on, without what was sampled after the difference."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a request departs from the nearest recorded history.

    `message_index` is the first message (0-based, in the request) that differs,
    `token_index` the first id of the prompt that does (-1 where nothing was
    compared); `recorded` and `came` are the decoded text from there on, a few
    tokens each. `joined_by` names the setting under which this request would
    have gone on from what is held (`history=sampled`), empty where none would.
    """

    kind: ForkKind
    message_index: int
    detail: str = ""
    token_index: int = -1
    recorded: str = ""
    came: str = ""
    joined_by: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One model call, exact. Immutable; an amended outcome is a new Turn with the same id.

    The prompt the engine saw is the first `kept` ids of the base turn's sequence
    (its prompt, then its output), plus `appended`; with no base it is `appended`
    alone. A bridge keeps all of them; a realigned turn, and only that, leaves
    off the end of the base's output. `prompt_crc` is the CRC-32
    of the little-endian int32 prompt *as it was sent*, so that a rebuilt prompt
    can prove that it is the one the engine had.
    """

    id: str
    index: int
    base: str | None
    fork: Fork | None
    appended: IntArray
    prompt_len: int
    prompt_crc: int
    output: IntArray
    logprobs: FloatArray
    finish: Finish
    outcome: Outcome
    sampling: Sampling
    versions: tuple[VersionSpan, ...] = ()
    calls: tuple[CallRecord, ...] = ()
    logprob_convention: str = "raw"
    model: str = ""
    label: str = ""
    """What the request was for: MAIN, SUBAGENT, SIDE, COMPACTION, or a word of the client's own; "" where nobody asked."""
    escaped: int = 0
    """Control-token spellings found in message text and encoded as plain text."""
    respelled: int = 0
    """Earlier replies that came back with other arguments under the ids minted for them, or as the beginning of a reply
    that was cut off; the recorded tokens stand."""
    started: float = 0.0
    ended: float = 0.0
    error: str = ""
    pool: str = ""
    """Which other engines than the policy's sampled it, "" for the policy's own. Only these train."""
    pieces: tuple[Piece, ...] = ()
    """The requests that the output was sampled in, first to last: more than one where an engine gave out within the turn."""
    abort: str = ""
    """What is known of the engine's work where it was stopped before its end: an AbortOutcome; "" where nothing was stopped."""
    surplus: int = 0
    """Tokens that the engine sampled after the reply's own end, at a stop string or stop token. They are not kept."""
    cached_tokens: int = 0
    """Prompt tokens that the engine had in its cache, as it says; of several pieces the first."""
    fingerprint: str = ""
    """Of the request that it answers: equal ones come from equal requests; "" where nobody looked."""
    idempotency: str = ""
    """Hex SHA-256 of the idempotency key that came with the request, "" for none."""
    choice: int = 0
    """Which of the replies to its request it is."""
    reasoning_open: bool = False
    """The prompt ends within the model's reasoning, so the output begins there."""
    acknowledged: bool = False
    """Its client is known to have the whole reply: all of it was written to a connection that stood."""

    @property
    def kept(self) -> int:
        """How many ids of the base's sequence the prompt begins with."""
        return self.prompt_len - len(self.appended)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Turn) and same_fields(self, other)

    def __hash__(self) -> int:
        return hash(self.id)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One training row; all per-token columns have length N = len(token_ids).

    token_ids int32 [N]; loss_mask uint8 [N], 1 = train on this token;
    logprobs float32 [N], NaN where not sampled; turn_index int32 [N], -1 where
    not sampled; weight_version one string or None per token. `prompt_len` is
    the index of the first sampled token. `weight` makes a rollout count once:
    1 / number of its samples among those that are exported together.
    """

    token_ids: IntArray
    loss_mask: npt.NDArray[np.uint8]
    logprobs: FloatArray
    turn_index: IntArray
    weight_version: tuple[str | None, ...]
    prompt_len: int
    temperature: float
    session_id: str
    rollout_id: str
    group_id: str
    lineage_id: str
    label: str
    sample_index: int
    weight: float
    reward: float | None
    outcome: str
    finish_reason: str
    statuses: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, object] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sample) and same_fields(self, other)
