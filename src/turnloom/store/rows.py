"""A session's row as bytes and back. Pure, as `codec` is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from turnloom.core.credit import Reward
from turnloom.store.blobs import check_crc, damaged, pack, unpack
from turnloom.store.codec import decode_sampling, encode_sampling
from turnloom.store.contract import Limits, SessionRow
from turnloom.store.typed import check_types


def encode_session(row: SessionRow) -> bytes:
    """Raises StoreError for metadata that is no JSON."""
    return pack(
        {
            "id": row.id,
            "key_hash": row.key_hash,
            "created": row.created,
            "sampling": encode_sampling(row.sampling),
            "limits": asdict(row.limits),
            "group": row.group,
            "rollout": row.rollout,
            "labels": dict(row.labels),
            "metadata": dict(row.metadata),
            "status": row.status,
            "rewards": [[reward.value, reward.at, reward.lineage] for reward in row.rewards],
            "reward_rule": row.reward_rule,
            "repeats": row.repeats,
            "ended": row.ended,
            "reached": list(row.reached),
        }
    )


def decode_session(body: bytes, known: int | None = None) -> SessionRow:
    """`known` is the CRC that was stored with it, None where none was. Raises StoreError for what no `encode_session` wrote."""
    try:
        check_crc(known, body)
        data = unpack(body)
        fields = {
            **data,
            "sampling": decode_sampling(data["sampling"]),
            "limits": Limits(**data["limits"]),
            "rewards": _rewards(data),
            "reached": tuple(data.get("reached", ())),
        }
        fields.pop("reward", None)
        row = SessionRow(**fields)
        check_types(row)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise damaged("session is", error) from error
    return row


def _rewards(data: Any) -> tuple[Reward, ...]:
    """Stores written earlier hold one reward or none."""
    if (only := data.get("reward")) is not None:
        return (Reward(float(only), data["created"]),)
    return tuple(Reward(*fields) for fields in data.get("rewards", ()))
