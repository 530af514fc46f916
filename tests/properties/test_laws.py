"""Laws 1 to 5 and 9 on random sessions, against what the engine really got and gave: a few on every template, many on some."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.properties.agreement import Faithful
from tests.properties.driver import ACTIONS, Driver
from tests.properties.replies import Replies, words
from tests.properties.subjects import subject_of
from tests.properties.tongues import TONGUES
from tests.properties.trials import session_of
from tests.properties.violations import violations
from turnloom.core.dump import dump_samples, dump_tree, summary
from turnloom.core.tree import Tree
from turnloom.gateway.session import Session
from turnloom.render.contract import Rendered, Tokenizer
from turnloom.types import Message, Outcome, Text, Tool, ToolCall, ToolResult

SESSIONS = 700
"""Per template: 2,100 in all."""

TEMPLATES = ("qwen2.5", "qwen3", "smollm2")

EVERY = 6
"""Random sessions of each other template; `make laws` has thousands, of the whole corpus."""

# One vocabulary each is loaded for a family; these are the families' first templates, and those with a way of their own.
CORPUS = (
    "trl/cohere trl/deepseekv3 trl/gemma4 trl/glm4moe trl/gptoss harmony trl/idefics3 trl/lfm2_2_5_v2 trl/llama3_1 trl/llava_next"
    " trl/muse_glimmer trl/nemotron_3_nano trl/phi3 trl/qwen2_5_vl trl/qwen3_vl llama.cpp/Kimi-K2-Instruct llama.cpp/MiniMax-M2"
    " llama.cpp/mistralai-Mistral-Nemo-Instruct-2407 llama.cpp/ibm-granite-granite-4.0 llama.cpp/ByteDance-Seed-OSS"
).split()


@functools.cache
def replies_of(name: str) -> Replies:
    return Replies(subject_of(name))


def parts_of(name: str) -> tuple[Tokenizer, object]:
    subject = subject_of(name)
    return subject.tokenizer, subject.renderer


steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2**32 - 1)), min_size=1, max_size=9)
laws = settings(max_examples=SESSIONS, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


def run(name: str, seed: int, plan: list[tuple[str, int]], tongue: str = "anthropic") -> Driver:
    driver = Driver(subject_of(name), replies_of(name), seed, tongue=TONGUES[tongue])
    asyncio.run(driver.run(plan))
    return driver


@pytest.mark.parametrize("name", TEMPLATES)
@laws
@given(seed=st.integers(0, 2**32 - 1), plan=steps)
def test_laws_hold_on_random_sessions(name: str, seed: int, plan: list[tuple[str, int]]) -> None:
    assert violations(run(name, seed, plan)) == []


@pytest.mark.parametrize("tongue", sorted(TONGUES.keys() - {"anthropic"}))
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
@settings(laws, max_examples=150)
@given(seed=st.integers(0, 2**32 - 1), plan=steps)
def test_laws_hold_in_every_dialect(name: str, tongue: str, seed: int, plan: list[tuple[str, int]]) -> None:
    assert violations(run(name, seed, plan, tongue)) == []


@pytest.mark.parametrize("tongue", sorted(TONGUES))
@pytest.mark.parametrize("name", TEMPLATES)
@settings(laws, max_examples=100)
@given(seed=st.integers(0, 2**32 - 1), seeds=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=7))
def test_a_client_that_only_goes_on_never_forks(name: str, tongue: str, seed: int, seeds: list[int]) -> None:
    """However it spells its echoes: each turn continues the last one that was delivered, and every message stands once."""
    driver = run(name, seed, [("continue", s) for s in seeds], tongue)
    tree = driver.session.tree
    last = None
    for turn in tree.turns.values():
        assert turn.base == last
        assert turn.fork is None or turn.fork.kind == "resampled"
        messages = tree.messages(tree.node_of[turn.id])
        prompt = driver.parts.policy.tokenizer.decode(tree.held(turn.id)[: turn.prompt_len].tolist())
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
    spelling = rng.choice(sorted(tokenizer.control_tokens))
    return text[:at] + spelling + text[at:], text[:at] + "harmless" + text[at:]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(laws, max_examples=200)
@given(seed=st.integers(0, 2**32 - 1))
def test_law9_text_never_becomes_a_control_token(name: str, seed: int) -> None:
    """The control tokens of a prompt are the template's own: the same as with a harmless word in each spelling's place."""
    tokenizer, renderer = parts_of(name)
    rng = random.Random(seed)

    def pair(make) -> tuple:
        return tuple(make(t) for t in _spoil(rng, words(rng), tokenizer))

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
        bridge = renderer.bridge(columns[2][i], (), [c[i] for c in columns[3:]], tools[i])
        assert isinstance(bridge, Rendered)
        seen.append([[t for t in r.ids.tolist() if t in control] for r in (whole, bridge)])
        assert (whole.escaped > 0) == (i == 0)
    assert seen[0] == seen[1]


def _arguments(text: str) -> str:
    return json.dumps({"type": "object", "cmd": text})


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2"])
@settings(laws, max_examples=200)
@given(seed=st.integers(0, 2**32 - 1), turns=st.integers(2, 5))
def test_bridged_text_is_the_templates_own(name: str, seed: int, turns: int) -> None:
    """Where the template only appends and the client echoes faithfully, a bridge spells what a full rendering spells."""
    tokenizer, renderer = parts_of(name)
    rng = random.Random(seed)
    end = tokenizer.control_tokens["<|im_end|>"]
    history = [Message("system", (Text("s"),)), Message("user", (Text(words(rng)),))]
    held = renderer.render(history, ()).ids.tolist()
    for _ in range(turns):
        said = words(rng)
        reply = Message("assistant", (Text(said),))
        held += [*tokenizer.encode(said), end]
        new = [Message("user", (Text(words(rng)),)) for _ in range(rng.randint(1, 2))]
        bridged = renderer.bridge(reply, [end], new, ())
        assert isinstance(bridged, Rendered)
        held += bridged.ids.tolist()
        history += [reply, *new]
        assert tokenizer.decode(held) == tokenizer.decode(renderer.render(history, ()).ids.tolist())


@pytest.mark.parametrize("name", CORPUS)
def test_laws_hold_on_every_kind_of_template(name: str) -> None:
    """Under every policy; the same sessions as the first ones of `make laws`."""
    subject, replies = subject_of(name), Replies(subject_of(name))
    for number in range(EVERY):
        assert violations(asyncio.run(session_of(subject, replies, number))) == []
    for cut in (True, False):
        found = asyncio.run(Faithful(subject, replies, 0, cut).run(5))
        assert found.wrong == []
        assert found.bridged == 4, "a faithful client's every turn is bridged"
