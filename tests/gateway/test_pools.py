"""Which engines answer which requests: the rules, the real shapes of agents' side requests, and two models in one session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.test_survival import QWEN, engines, said
from tests.support.gateways import Bench, bench, follow, user
from tests.support.members import Member
from tests.support.pools import Story, pooled
from tests.support.wires import WIRES, Wire
from turnloom.engine.pool import Patience, Pool
from turnloom.errors import ConfigError
from turnloom.gateway.api import Gateway
from turnloom.gateway.pools import by_pool, check_pools, open_pool, read_route, read_routes, routed
from turnloom.testing.scripted_engine import ScriptedEngine
from turnloom.testing.tokenizers import smollm2_tokenizer
from turnloom.types import COMPACTION, SIDE, ForkKind, Outcome, Request
from turnloom.wire.contract import Envelope

SMOLLM2 = smollm2_tokenizer()
POOLS = ("policy", "side", "judge")
LABEL = "x-turnloom-label"


def sent_to(routes: list[str], *, model: str = "m", label: str = "", pools: tuple[str, ...] = POOLS, **headers: str) -> str:
    request = Request((), model=model, label=label)
    return routed(read_routes(routes, pools), request, Envelope({k.replace("_", "-"): v for k, v in headers.items()}))


@pytest.mark.parametrize(
    ("routes", "request_", "pool"),
    [
        ([], {}, ""),
        ([], {"label": "side"}, "side"),
        ([], {"label": "judge"}, "judge"),
        ([], {"label": "Side"}, ""),
        ([], {"label": "main"}, ""),
        ([], {"model": "judge"}, ""),
        (["side=label:compaction"], {"label": "compaction"}, "side"),
        (["side=label:compaction"], {"label": "side"}, ""),
        (["side=label:compaction", "side=label:side"], {"label": "side"}, "side"),
        (["judge=model:judge-*"], {"model": "judge-7b"}, "judge"),
        (["judge=model:judge-*"], {"model": "a judge-7b"}, ""),
        (["judge=model:gpt-[45]?"], {"model": "gpt-4o"}, "judge"),
        (["judge=model:gpt-[45]?"], {"model": "gpt-3o"}, ""),
        (["judge=model:*"], {"model": ""}, "judge"),
        (["judge=header:X-Role:judge"], {"x_role": "judge"}, "judge"),
        (["judge=header:X-Role:judge"], {"x_role": "judges"}, ""),
        (["judge=header:x-role:*"], {}, ""),
        (["judge=header:x-role:*"], {"x_role": ""}, "judge"),
        (["side=label:main"], {}, "side"),
        (["side=model:*", "judge=label:judge"], {"label": "judge"}, "side"),
        (["judge=label:judge", "side=model:*"], {"label": "judge"}, "judge"),
        (["policy=model:m", "side=model:*"], {"model": "m"}, ""),
        (["policy=model:m", "side=model:*"], {"model": "n"}, "side"),
        (["side=label:a:b"], {"label": "a:b"}, "side"),
    ],
    ids=str,
)
def test_the_first_rule_that_fits_counts(routes: list[str], request_: dict[str, str], pool: str) -> None:
    assert sent_to(routes, **request_) == pool


@pytest.mark.parametrize(
    "headers", [{"x_role": "judge"}, {"x_pool": "judge"}, {"x_turnloom_pool": "judge"}, {"x_turnloom_label": "judge"}], ids=str
)
def test_no_header_reaches_what_no_rule_names(headers: dict[str, str]) -> None:
    assert sent_to(["judge=model:judge-only"], **headers) == ""
    assert sent_to(["judge=header:x-secret-role:judge"], **headers) == ""


@pytest.mark.parametrize(
    "words",
    [
        "side",
        "side=",
        "side=label",
        "side=label:",
        "side=Label:x",
        "side=header:x",
        "side=header::x",
        "=label:x",
        "Side=label:x",
        "side=pool:x",
    ],
)
def test_what_is_no_route_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="is no route; give POOL=model:PATTERN"):
        read_route(words)


def test_a_route_to_no_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="no pool 'other' to route to; there are: judge, policy, side"):
        read_routes(["other=label:x"], POOLS)


def test_a_pool_called_main_needs_a_route() -> None:
    """By its name alone it would take the task from the policy."""
    with pytest.raises(ConfigError, match="would take the task itself"):
        read_routes([], ("policy", "main"))
    assert sent_to(["main=model:x"], model="x", pools=("policy", "main")) == "main"


@pytest.mark.parametrize("name", ["", "Side", "1side", "a" * 33, "side pool", "ſide"])
def test_a_pools_name_is_plain(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a pool's name"):
        check_pools({"policy": "sglang://h", name: "sglang://h"})


def test_one_pool_is_the_policys() -> None:
    with pytest.raises(ConfigError, match="no engine is the policy's"):
        check_pools({"side": "sglang://h"})


def test_words_are_gathered_by_pool() -> None:
    assert by_pool(["sglang://a", "side=vllm://s?key_env=K", "sglang://b"]) == {
        "policy": "sglang://a,sglang://b",
        "side": "vllm://s?key_env=K",
    }
    assert by_pool(["policy=sglang://a", "sglang://b"]) == {"policy": "sglang://a,sglang://b"}
    assert by_pool([]) == {}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "names no engine"),
        ("sglang://a:1,", "names no engine"),
        ("sglang://a:1,smtp://b", "names no engine"),
        ("sglang://a:1, sglang://a:1", "named twice"),
    ],
)
async def test_a_bad_spec_is_told_in_one_line(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as told:
        await open_pool(spec, Patience())
    assert "\n" not in str(told.value)


async def test_a_spec_may_be_several_urls_an_engine_or_a_pool() -> None:
    several = await open_pool("sglang://a:1, sglang://b:2", Patience())
    assert several.name == "http://a:1,http://b:2"
    await several.close()
    one = Member("one")
    assert (await open_pool(one, Patience())).members == [one]
    pool = Pool([one])
    assert await open_pool(pool, Patience()) is pool


async def test_a_gateway_does_not_start_with_engines_that_do_not_fit() -> None:
    async with ScriptedEngine(vocab_size=100) as one, ScriptedEngine(vocab_size=101) as other:
        with pytest.raises(ConfigError, match=r"differ in vocab_size: 10[01] and 10[01]; give each model a pool of its own") as told:
            await Gateway(f"{one.url},{other.url}", QWEN).start()
        assert "\n" not in str(told.value)


async def test_a_pool_without_a_tokenizer_is_told_by_name() -> None:
    with pytest.raises(ConfigError, match="--tokenizer side=PATH_OR_ID"):
        await Gateway({"policy": Member("one"), "side": Member("two")}, QWEN).start()


def both(policy: str = "It is done.", side: str = "A title", **options: Any) -> tuple[Any, Story, Story]:
    """Two models: the policy's Qwen2.5, the side's SmolLM2."""
    main, other = Story(QWEN, policy), Story(SMOLLM2, side)
    pair = {
        "policy": engines(main, grammar_backend="xgrammar")[0],
        "side": ScriptedEngine(other.of("side"), tokenizer=SMOLLM2, model="small", vocab_size=49_152),
    }
    return pooled(pair, {"policy": QWEN, "side": SMOLLM2}, **options), main, other


def shape(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """A request as Claude Code was seen to send it: its headers, and a body of that form."""
    headers = {"user-agent": "claude-cli/2.1.332 (external, sdk-cli)", "anthropic-beta": "claude-code-20250219,effort-2025-11-24"}
    tool = {"name": "Bash", "description": "runs", "input_schema": {"type": "object"}}
    match name:
        case "title":
            schema = {"type": "json_schema", "schema": {"type": "object"}}
            return user("Name this.", output_config={"format": schema}), headers
        case "classifier":
            return user("Is it about a new topic?"), headers
        case "compaction":
            body = user("Do it.", tools=[tool])
            body["messages"] += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Summarise."}]
            return body, {**headers, "anthropic-beta": "effort-1,fallback-credit-2026-06-01"}
    return user("Do it.", tools=[tool]), headers


@pytest.mark.parametrize(
    ("name", "label", "routes", "pool"),
    [
        ("main", "main", [], ""),
        ("classifier", SIDE, [], "side"),
        ("title", SIDE, [], "side"),
        ("compaction", COMPACTION, [], ""),
        ("compaction", COMPACTION, ["side=label:compaction", "side=label:side"], "side"),
        ("classifier", SIDE, ["side=label:compaction", "side=label:side"], "side"),
    ],
)
async def test_an_agents_own_requests_find_their_pool(name: str, label: str, routes: list[str], pool: str) -> None:
    body, headers = shape(name)
    context, main, other = both(routes=routes)
    async with context as b:
        answer = await b.post(body, **headers)
        if name == "title":
            assert answer.status == 400, "the side's engine has no grammar, the policy's has one"
            assert not main.asked
            return
        assert said(answer) == ("A title" if pool else "It is done.")
        (turn,) = (await b.session()).tree.turns.values()
        assert (turn.pool, turn.label) == (pool, label)
        assert (len(main.asked), len(other.asked)) == (0, 1) if pool else (1, 0)


async def test_only_the_policys_turns_train() -> None:
    context, main, other = both()
    async with context as b:
        first = await b.post(user("hi"))
        await b.post(user("Name this."), **{LABEL: "side"})
        await b.post(follow(user("hi"), first.body, "go on"))
        session = await b.session()
        turns = list(session.tree.turns.values())
        assert [t.pool for t in turns] == ["", "side", ""]
        assert turns[2].base == turns[0].id
        assert turns[1].output.tolist() == other.whole
        assert turns[1].model == "small"
        found = session.unroll()
        (sample,) = found.samples
        assert int(sample.loss_mask.sum()) == 2 * len(main.whole)
        assert [(u.turn_id, u.tokens, u.reason) for u in found.untrained] == [(turns[1].id, len(other.whole), "pool side")]
        _, tree = await b.admin("GET", f"/sessions/{b.handle.id}/tree")
        assert [t["pool"] for t in tree["turns"]] == ["policy", "side", "policy"]


async def test_no_turn_goes_on_from_another_models_ids() -> None:
    context, _, other = both()
    async with context as b:
        first = await b.post(user("hi"))
        await b.post(follow(user("hi"), first.body, "name this"), **{LABEL: "side"})
        _, turn = (await b.session()).tree.turns.values()
        assert turn.base is None
        assert turn.fork is not None
        assert turn.fork.kind is ForkKind.OTHER_POOL
        ((_, prompt),) = other.asked
        assert "It is done." in SMOLLM2.decode(prompt), "the same words, in its own tokens"


async def test_both_models_are_listed() -> None:
    context, *_ = both()
    async with context as b:
        async with b.http.get(f"{b.handle.base_url}/v1/models") as answer:
            assert [m["id"] for m in (await answer.json())["data"]] == ["scripted", "small"]


COUNTS = {
    "anthropic": "/v1/messages/count_tokens",
    "openai_responses": "/v1/responses/input_tokens",
    "gemini": "/v1beta/models/m:countTokens",
}


@pytest.mark.parametrize("name", COUNTS)
async def test_tokens_are_counted_by_the_model_that_would_answer(name: str) -> None:
    wire: Wire = WIRES[name]
    context, main, other = both()
    async with context as b:
        body = wire.body("Internationalisation of naïve cafés 🦊")
        counted = []
        for label in ("main", "side"):
            answer = await b.post(body, COUNTS[name], **{LABEL: label})
            assert answer.status == 200, answer.body
            counted.append(answer.body.get("input_tokens") or answer.body.get("totalTokens"))
            await b.post(body, wire.whole, **{LABEL: label})
        assert counted == [len(main.asked[0][1]), len(other.asked[0][1])]
        assert counted[0] != counted[1]


async def test_a_client_may_call_the_model_as_it_likes() -> None:
    """The name alone sends nothing elsewhere."""
    context, main, other = both()
    async with context as b:
        for name in ("small", "side", "policy"):
            answer = await b.post({**user(name), "model": name})
            assert answer.body["model"] == name
        assert (len(main.asked), len(other.asked)) == (3, 0)


async def test_pools_outlive_a_restart(tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    context, *_ = both(store=store)
    async with context as b:
        first = await b.post(user("hi"))
        await b.post(user("Name this."), **{LABEL: "side"})
        session = await b.session()
        await session.settled()
        kept, samples, session_id, key = dict(session.tree.turns), session.unroll(), b.handle.id, b.handle.key
    context, *_ = both(store=store)
    async with context as b:
        again = await b.gateway.session(session_id)
        assert again.tree.turns == kept
        assert again.unroll() == samples
        answer = await _post(b, key, follow(user("hi"), first.body, "go on"))
        assert answer == "It is done."
        *_, last = again.tree.turns.values()
        assert last.base == next(iter(kept))
        assert (last.outcome, last.pool) == (Outcome.DELIVERED, "")


async def _post(b: Bench, key: str, body: dict[str, Any]) -> str:
    async with b.http.post(f"{b.gateway.url}/s/{key}/v1/messages", data=json.dumps(body).encode()) as answer:
        return str((await answer.json())["content"][0]["text"])


async def test_one_engine_needs_no_word_of_pools() -> None:
    async with bench(["Hello"]) as b:
        assert said(await b.post(user("hi"))) == "Hello"
        assert [t.pool for t in (await b.session()).tree.turns.values()] == [""]
        assert (await b.admin("GET", "/engines"))[1]["pools"].keys() == {"policy"}


def test_qwen_and_smollm2_do_not_share_their_ids() -> None:
    """Else the tests above would prove nothing."""
    assert QWEN.encode("It is done.") != SMOLLM2.encode("It is done.")
