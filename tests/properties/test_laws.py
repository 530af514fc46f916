"""Laws 1 to 5 and 9 on random sessions, against what the engine really got and gave."""

from __future__ import annotations

import asyncio
import copy
import functools
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.properties.driver import ACTIONS, CONTROL, Driver, words
from turnloom.core.dump import dump_samples, dump_tree, summary
from turnloom.export.check import check_samples
from turnloom.render.contract import Rendered, Tokenizer
from turnloom.render.template import ChatTemplateRenderer
from turnloom.testing.tokenizers import qwen_tokenizer, smollm2_tokenizer
from turnloom.types import Message, Outcome, Text, Tool, ToolCall, ToolResult

SESSIONS = 700
"""Per template: 2,100 in all."""

TEMPLATES = {"qwen2.5": lambda: qwen_tokenizer("qwen2.5"), "qwen3": lambda: qwen_tokenizer("qwen3"), "smollm2": smollm2_tokenizer}


@functools.cache
def renderer_of(name: str) -> tuple[Tokenizer, ChatTemplateRenderer]:
    tokenizer = TEMPLATES[name]()
    return tokenizer, ChatTemplateRenderer(tokenizer)


steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2**32 - 1)), min_size=1, max_size=9)
laws = settings(max_examples=SESSIONS, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


def run(name: str, seed: int, plan: list[tuple[str, int]]) -> Driver:
    driver = Driver(*renderer_of(name), seed)
    asyncio.run(driver.run(plan))
    return driver


@pytest.mark.parametrize("name", TEMPLATES)
@laws
@given(seed=st.integers(0, 2**32 - 1), plan=steps)
def test_laws_hold_on_random_sessions(name: str, seed: int, plan: list[tuple[str, int]]) -> None:
    driver = run(name, seed, plan)
    tree = driver.session.tree
    calls = {c.rid: c for c in driver.engine.calls}
    assert tree.turns.keys() == calls.keys(), "every engine call is a turn, and every turn an engine call"

    for turn in tree.turns.values():
        call = calls[turn.id]
        np.testing.assert_array_equal(turn.output, call.output, "law 4: exactly what was sampled")
        np.testing.assert_array_equal(turn.logprobs, call.logprobs)
        if turn.base is not None:
            base = calls[turn.base]
            held = np.concatenate([base.prompt, base.output])
            np.testing.assert_array_equal(call.prompt[: len(held)], held, "law 1: a bridged prompt starts with the tokens held")
            assert len(call.prompt) > len(held)
            shared = any(t.base == turn.base for t in tree.turns.values() if t.index < turn.index)
            assert (turn.fork is None) == (not shared), "a turn that leaves recorded tokens says why"
        else:
            assert (turn.fork is None) == (turn.index == 0), "a sequence that starts anew says why"

    unrolled = driver.unroll()
    trained: dict[tuple[str, int], int] = {}
    by_index = {t.index: t for t in tree.turns.values()}
    for sample in unrolled.samples:
        for position in np.flatnonzero(sample.loss_mask):
            turn = by_index[int(sample.turn_index[position])]
            call = calls[turn.id]
            offset = int(position) - len(call.prompt)
            assert 0 <= offset < len(call.output)
            assert sample.token_ids[position] == call.output[offset], "law 4: only sampled ids"
            assert sample.logprobs[position] == call.logprobs[offset], "law 4: with the logprob that came with them"
            trained[turn.id, offset] = trained.get((turn.id, offset), 0) + 1
        for turn in by_index.values():
            where = np.flatnonzero((sample.turn_index == turn.index) & (sample.loss_mask == 1))
            if len(where):
                seen = np.concatenate([calls[turn.id].prompt, calls[turn.id].output])[: int(where[-1]) + 1]
                np.testing.assert_array_equal(sample.token_ids[: int(where[-1]) + 1], seen, "law 2: the context the engine had")

    untrained = {u.turn_id: u for u in unrolled.untrained}
    for turn in tree.turns.values():
        for offset in range(len(turn.output)):
            times = trained.get((turn.id, offset), 0)
            assert times == (0 if turn.id in untrained else 1), "law 3: once, or a reason"
        kept_back = turn.outcome is not Outcome.DELIVERED or not len(turn.output)
        assert (turn.id in untrained) == kept_back, "what was delivered trains"

    assert not unrolled.samples or check_samples(unrolled.samples).ok


@pytest.mark.parametrize("name", TEMPLATES)
@settings(laws, max_examples=150)
@given(seed=st.integers(0, 2**32 - 1), seeds=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=7))
def test_a_client_that_only_goes_on_never_forks(name: str, seed: int, seeds: list[int]) -> None:
    """However it spells its echoes: each turn continues the last one that was delivered, and every message stands once."""
    driver = run(name, seed, [("continue", s) for s in seeds])
    tree = driver.session.tree
    last = None
    for turn in tree.turns.values():
        assert turn.base == last
        assert turn.fork is None or turn.fork.kind == "resampled"
        messages = tree.messages(tree.node_of[turn.id])
        prompt = driver.parts.tokenizer.decode(tree.held(turn.id)[: turn.prompt_len].tolist())
        opened = prompt.count("<|im_start|>assistant\n")
        assert opened == sum(m.role == "assistant" for m in messages), "one opening a reply, this one's too"
        if turn.outcome is Outcome.DELIVERED:
            last = turn.id


@pytest.mark.parametrize("name", TEMPLATES)
@settings(laws, max_examples=150)
@given(seed=st.integers(0, 2**32 - 1), plan=steps)
def test_law5_reading_changes_nothing(name: str, seed: int, plan: list[tuple[str, int]]) -> None:
    driver = run(name, seed, plan)
    tree = driver.session.tree
    nodes, turns = list(tree.nodes), copy.copy(tree.turns)
    first = driver.unroll()
    dump_tree(tree), dump_samples(first), summary(tree)
    assert driver.unroll() == first
    assert tree.nodes == nodes
    assert tree.turns == turns
    for column in (first.samples[0].token_ids, first.samples[0].loss_mask) if first.samples else ():
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1


@pytest.mark.parametrize("name", TEMPLATES)
@settings(laws, max_examples=150)
@given(seed=st.integers(0, 2**32 - 1), plan=steps)
def test_a_restart_loads_the_same_tree_and_samples(name: str, seed: int, plan: list[tuple[str, int]]) -> None:
    from turnloom.core.tree import Tree
    from turnloom.gateway.session import Session

    driver = run(name, seed, plan)
    again = Tree()
    for delta in asyncio.run(_deltas(driver)):
        again.apply(delta)
    assert again.nodes == driver.session.tree.nodes
    assert again.turns == driver.session.tree.turns
    assert Session(driver.session.row, driver.store, again).unroll() == driver.unroll()


async def _deltas(driver: Driver) -> list:
    return list(await driver.store.deltas("s"))


def _spoil(rng: random.Random, text: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """The same text with a control token's spelling put in, and with a harmless word in its place."""
    at = rng.randint(0, len(text))
    spelling = rng.choice([c for c in CONTROL if c in tokenizer.control_tokens])
    return text[:at] + spelling + text[at:], text[:at] + "harmless" + text[at:]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(laws, max_examples=200)
@given(seed=st.integers(0, 2**32 - 1))
def test_law9_text_never_becomes_a_control_token(name: str, seed: int) -> None:
    """The control tokens of a prompt are the template's own: the same as with a harmless word in each spelling's place."""
    tokenizer, renderer = renderer_of(name)
    rng = random.Random(seed)

    def pair(make) -> tuple:
        return tuple(make(t) for t in _spoil(rng, words(rng, control=0), tokenizer))

    columns = [
        pair(lambda t: Message("system", (Text(t),))),
        pair(lambda t: Message("user", (Text(t),))),
        pair(lambda t: Message("assistant", (Text(t), ToolCall("c1", "bash", _arguments(t))))),
        pair(lambda t: Message("tool", (ToolResult("c1", t),))),
        pair(lambda t: Message("user", (Text(t),))),
    ]
    tools = pair(lambda t: (Tool("bash", t, _arguments(t)),))
    control = set(tokenizer.control_tokens.values())
    seen = []
    for i in (0, 1):
        whole = renderer.render([c[i] for c in columns], tools[i])
        bridge = renderer.bridge(columns[2][i], None, [c[i] for c in columns[3:]], tools[i])
        assert isinstance(bridge, Rendered)
        seen.append([[t for t in r.ids.tolist() if t in control] for r in (whole, bridge)])
        assert (whole.escaped > 0) == (i == 0)
    assert seen[0] == seen[1]


def _arguments(text: str) -> str:
    import json

    return json.dumps({"type": "object", "cmd": text})


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2"])
@settings(laws, max_examples=200)
@given(seed=st.integers(0, 2**32 - 1), turns=st.integers(2, 5))
def test_bridged_text_is_the_templates_own(name: str, seed: int, turns: int) -> None:
    """Where the template only appends and the client echoes faithfully, a bridge spells what a full rendering spells."""
    tokenizer, renderer = renderer_of(name)
    rng = random.Random(seed)
    end = tokenizer.control_tokens["<|im_end|>"]
    history = [Message("system", (Text("s"),)), Message("user", (Text(words(rng, 0)),))]
    held = renderer.render(history, ()).ids.tolist()
    for _ in range(turns):
        said = words(rng, 0)
        reply = Message("assistant", (Text(said),))
        held += [*tokenizer.encode(said), end]
        new = [Message("user", (Text(words(rng, 0)),)) for _ in range(rng.randint(1, 2))]
        bridged = renderer.bridge(reply, end, new, ())
        assert isinstance(bridged, Rendered)
        held += bridged.ids.tolist()
        history += [reply, *new]
        assert tokenizer.decode(held) == tokenizer.decode(renderer.render(history, ()).ids.tolist())
