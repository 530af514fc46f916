"""What `turnloom doctor --engine` finds out about real engines: the truth, no trap that is none, and nothing left running."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.checkpoint import VOCAB_SIZE, checkpoint
from tests.engines.cluster import Cluster, load
from tests.engines.servers import Server, post, router
from turnloom.engine.models import find_model
from turnloom.engine.probe import Report, probe_engines
from turnloom.engine.probe_profile import Difference, Profile, Severity, findings, pool_findings
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.tokenizer import load_tokenizer
from turnloom.types import AbortOutcome

EXACT = 1e-4


@pytest.fixture
def round_robin(workers: list[Server]) -> Iterator[Server]:
    server = router([worker.url for worker in workers], policy="round_robin")
    server.start()
    yield server
    server.stop()


async def examined(url: str, tokenizer: Any = None) -> tuple[Profile, dict[str, Severity]]:
    report = await probe_engines([url], tokenizer)
    (profile,) = report.profiles
    return profile, {finding.code: finding.severity for finding in findings(profile)}


def exact(difference: Difference | None) -> bool:
    return difference is not None and difference.tokens >= 8 and difference.largest < EXACT


def told(report: Report) -> dict[str, Severity]:
    return {finding.code: finding.severity for finding in pool_findings(report.profiles, report.differences)}


async def test_an_sglang_worker(workers: list[Server]) -> None:
    worker = workers[0]
    profile, found = await examined(worker.url, qwen_tokenizer("qwen3"))
    assert found == {"vocabulary_unknown": Severity.NOTE, "unstructured": Severity.NOTE}
    assert (profile.kind, profile.version, profile.router) == ("sglang", "0.5.23", False)
    assert (profile.convention, profile.measured, profile.style) == ("temperature", "temperature", "cumulative")
    assert exact(profile.difference)
    assert (profile.prompt_counted, profile.cached_tokens) == (profile.prompt_sent, profile.prompt_sent - 1)
    assert (profile.end_kept, profile.text_agrees, profile.load_readable, profile.disconnect_stops) == (True, True, True, True)
    assert profile.abort is AbortOutcome.VERIFIED
    assert (profile.weight_version, profile.sampled_version) == ("default", "default")
    assert load(worker) == 0


async def test_a_manual_router_is_found_sticky_and_its_workers_alike(cluster: Cluster) -> None:
    profile, found = await examined(cluster.router.url)
    assert Severity.ERROR not in found.values()
    assert "not_sticky" not in found
    assert (profile.router, profile.sticky, profile.keys) == (True, True, 6)
    assert [worker.reachable and exact(worker.difference) for worker in profile.workers] == [True, True]
    assert cluster.running() == 0


async def test_a_round_robin_router_is_found_not_to_keep_a_key(round_robin: Server) -> None:
    profile, found = await examined(round_robin.url)
    assert found["not_sticky"] is Severity.WARNING
    assert profile.keys_moved == profile.keys == 6


async def test_a_worker_that_missed_an_update_is_found(cluster: Cluster) -> None:
    update = {"model_path": str(checkpoint(1)), "weight_version": "next", "abort_all_requests": True}
    post(cluster.workers[1].url, "/update_weights_from_disk", update)
    _, found = await examined(cluster.router.url)
    assert found["worker_foreign"] is Severity.ERROR
    assert found["workers_weight_version"] is Severity.WARNING


async def test_vllm(vllm_server: Server) -> None:
    profile, found = await examined(f"vllm://127.0.0.1:{vllm_server.port}", qwen_tokenizer("qwen3"))
    assert set(found.values()) == {Severity.NOTE}
    assert (profile.kind, profile.version, profile.convention, profile.measured) == ("vllm", "0.32.0", "raw", "raw")
    assert exact(profile.difference)
    assert (profile.end_kept, profile.text_agrees, profile.load_readable, profile.disconnect_stops) == (True, True, True, True)
    assert (profile.prompt_counted, profile.abort) == (profile.prompt_sent, AbortOutcome.VERIFIED)


async def test_llama_cpp(llama_server: Server) -> None:
    profile, found = await examined(f"llamacpp://127.0.0.1:{llama_server.port}", load_tokenizer(find_model("smollm2")))
    assert Severity.ERROR not in found.values()
    assert (profile.kind, profile.measured, profile.vocab_size) == ("llamacpp", "raw", 49_152)
    assert (profile.text_agrees, profile.load_readable, profile.disconnect_stops) == (True, True, True)
    assert (profile.prompt_counted, profile.abort) == (profile.prompt_sent, AbortOutcome.VERIFIED)


async def test_the_wrong_word_in_a_url_is_named(workers: list[Server], llama_server: Server) -> None:
    for url in (f"vllm://127.0.0.1:{workers[0].port}", f"sglang://127.0.0.1:{llama_server.port}"):
        _, found = await examined(url)
        assert found == {"wrong_kind": Severity.ERROR}


async def test_workers_of_one_model_fit_together_and_other_weights_do_not(cluster: Cluster) -> None:
    urls = [f"{worker.url}?vocab_size={VOCAB_SIZE}" for worker in cluster.workers]
    report = await probe_engines(urls)
    assert [exact(difference) for difference in report.differences] == [True]
    assert told(report) == {}
    update = {"model_path": str(checkpoint(1)), "weight_version": "default", "abort_all_requests": True}
    post(cluster.workers[1].url, "/update_weights_from_disk", update)
    assert told(await probe_engines(urls)) == {"pool_model": Severity.NOTE, "pool_foreign": Severity.ERROR}
