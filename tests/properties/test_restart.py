"""Law 6 under every history policy: what the store gives back is the same tree, and goes on in the same way."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.test_policies import POLICIES, run, steps
from turnloom.core.tree import Tree
from turnloom.gateway.session import Session
from turnloom.store import codec
from turnloom.types import Message, Request, Text


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(seed=st.integers(0, 2**32 - 1), plan=steps)
def test_a_session_goes_on_from_the_store_as_from_memory(policy: str, name: str, seed: int, plan: list[tuple[str, int]]) -> None:
    driver = run(name, seed, plan, policy)
    tree, again = driver.session.tree, Tree(driver.session.tree.matcher)
    for delta in asyncio.run(_deltas(driver.store)):
        again.apply(codec.decode_delta(codec.encode_delta(delta)))
    assert again.nodes == tree.nodes
    assert again.turns == tree.turns
    assert Session(driver.session.row, driver.store, again).unroll() == driver.unroll()
    for turn_id, node in tree.node_of.items():
        asked = Request((*tree.messages(node), Message("user", (Text("Go on."),))), tree.nodes[tree.path(node)[0]].tools)
        assert again.prepare(asked) == tree.prepare(asked)
        assert again.held(turn_id).tolist() == tree.held(turn_id).tolist()


async def _deltas(store: object) -> list:
    return list(await store.deltas("s"))  # type: ignore[attr-defined]
