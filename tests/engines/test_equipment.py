"""The equipment itself: each engine starts, samples over plain HTTP, and the SGLang client's logprobs are those of a recomputation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.checkpoint import VOCAB_SIZE, checkpoint
from tests.engines.cluster import Cluster, load
from tests.engines.servers import Server, StartFailed, free_port, get, post
from tests.engines.setup import SGLANG, Environment, SetupFailed, ensure
from turnloom.engine.sglang import SGLangEngine
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import FinishReason, Sampling, ids

EXACT = 1e-4
PROMPT = list(range(1000, 1020))


def generate(url: str, count: int, temperature: float = 1.0) -> dict[str, Any]:
    params = {"max_new_tokens": count, "temperature": temperature}
    answer: dict[str, Any] = post(url, "/generate", {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True})
    return answer


def test_a_worker_samples(workers: list[Server]) -> None:
    for worker in workers:
        answer = generate(worker.url, 8)
        assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] == 8
        assert answer["meta_info"]["weight_version"] == "default"


def test_the_router_samples_on_its_workers(router: Server, workers: list[Server]) -> None:
    assert sorted(worker["url"] for worker in get(router.url, "/workers")["workers"]) == sorted(worker.url for worker in workers)
    assert len(generate(router.url, 8)["output_ids"]) == 8


def test_a_checkpoint_writes_no_control_token_and_is_sharp(workers: list[Server]) -> None:
    """So a reply lasts as long as it may, and a wrong prefix or other weights show in every logprob."""
    answer = generate(workers[0].url, 200)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 200}
    tokenizer = qwen_tokenizer("qwen3")
    assert max(answer["output_ids"]) < tokenizer.vocab_size < VOCAB_SIZE
    assert not set(answer["output_ids"]) & set(tokenizer.control_tokens.values())
    logprobs = np.array([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    assert -6.0 < logprobs.mean() < -3.0
    assert np.isfinite(logprobs).all()


def test_another_seed_is_other_weights(workers: list[Server]) -> None:
    before = generate(workers[0].url, 12, 0.0)["output_ids"]
    assert generate(workers[1].url, 12, 0.0)["output_ids"] == before
    update = {"model_path": str(checkpoint(1)), "weight_version": "1"}
    assert post(workers[0].url, "/update_weights_from_disk", update)["success"]
    after = generate(workers[0].url, 12, 0.0)
    assert after["output_ids"] != before
    assert after["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 12}]


def test_what_a_test_does_to_the_cluster_is_undone(cluster: Cluster) -> None:
    first, second = cluster.workers
    before = generate(first.url, 12, 0.0)["output_ids"]
    update = {"model_path": str(checkpoint(1)), "weight_version": "1"}
    assert post(first.url, "/update_weights_from_disk", update)["success"]
    post(first.url, "/pause_generation", {"mode": "in_place"})
    second.kill()
    assert not second.alive
    with pytest.raises(OSError):
        load(second)
    cluster.restore()
    assert [generate(worker.url, 12, 0.0)["output_ids"] for worker in cluster.workers] == [before, before]
    assert get(first.url, "/model_info")["weight_version"] == "default"
    assert cluster.router.healthy()
    assert cluster.running() == 0


@pytest.mark.parametrize("through", ["a worker", "the router"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_the_client_s_logprobs_are_those_of_a_prefill(cluster: Cluster, through: str, temperature: float) -> None:
    """A tempered logprob is after temperature here; the recomputation is at temperature 1 and must differ then."""
    url = cluster.router.url if through == "the router" else cluster.workers[0].url
    engine = SGLangEngine(url, vocab_size=VOCAB_SIZE)
    try:
        able = await engine.capabilities()
        assert (able.context_length, able.weight_version, able.logprob_convention) == (2043, "default", "temperature")
        chunks = [
            chunk async for chunk in engine.sample(ids(PROMPT), Sampling(max_tokens=64, temperature=temperature), rid=uuid.uuid4().hex)
        ]
        assert chunks[-1].finish is not None
        assert chunks[-1].finish.reason is FinishReason.LENGTH
        sampled = [token for chunk in chunks for token in chunk.ids.tolist()]
        logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
        assert len(sampled) == 64
        recomputed = await engine.prompt_logprobs(ids([*PROMPT, *sampled]), len(PROMPT))
        worst = float(np.abs(recomputed - logprobs).max())
        assert worst < EXACT if temperature == 1.0 else worst > 0.1
    finally:
        await engine.close()


def test_vllm_samples(vllm_server: Server) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 8, "logprobs": 0}, "stream": False}
    (choice,) = post(vllm_server.url, "/inference/v1/generate", body)["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 8


def test_vllm_and_sglang_find_the_same_logprobs(vllm_server: Server, workers: list[Server]) -> None:
    answer = generate(workers[0].url, 32)
    whole = PROMPT + answer["output_ids"]
    body = {"token_ids": whole, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}, "stream": False}
    entries = post(vllm_server.url, "/inference/v1/generate", body)["prompt_logprobs"][len(PROMPT) :]
    found = [entry[str(token)]["logprob"] for entry, token in zip(entries, answer["output_ids"], strict=True)]
    assert np.abs(np.array(found) - [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]).max() < EXACT


def test_llama_cpp_samples(llama_server: Server) -> None:
    body = {"prompt": PROMPT, "n_predict": 8, "n_probs": 1, "return_tokens": True, "temperature": 0}
    answer = post(llama_server.url, "/completion", body)
    assert [entry["id"] for entry in answer["completion_probabilities"]] == answer["tokens"]
    assert len(answer["tokens"]) == answer["tokens_predicted"]


def sleeper(tmp_path: Path, script: str) -> Server:
    path = tmp_path / "engine.py"
    path.write_text(script, "utf-8")
    return Server("sleeper", [sys.executable, str(path)], port=free_port())


def test_a_start_that_fails_shows_the_end_of_the_log(tmp_path: Path) -> None:
    server = sleeper(tmp_path, "raise SystemExit('no weights here')")
    with pytest.raises(StartFailed, match="no weights here"):
        server.start()
    assert not server.alive


def test_no_child_outlives_its_server_nor_the_process_that_started_it(tmp_path: Path) -> None:
    """The child is in the group and would run on: it is gone when the server is killed, and when its owner is."""
    child = "import subprocess, sys, time\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
    serve = "import http.server; http.server.HTTPServer(('127.0.0.1', {port}), http.server.SimpleHTTPRequestHandler).serve_forever()"
    port = free_port()
    path = tmp_path / "engine.py"
    path.write_text(child + serve.format(port=port), "utf-8")
    server = Server("parent", [sys.executable, str(path)], port=port, health="/")
    server.start()
    pid = int(server.tail().split()[0])
    os.kill(pid, 0)
    server.kill()
    assert gone(pid)
    owner = (
        "import os, signal, sys; from tests.engines.servers import Server\n"
        f"server = Server('parent', [sys.executable, {str(path)!r}], port={port}, health='/'); server.start()\n"
        "print(server.tail().split()[0], flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", owner], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert gone(int(ended.stdout))


def gone(pid: int) -> bool:
    """Within a while; one that has ended and that nobody has waited for is gone too."""
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        subprocess.run(["sleep", "0.02"], check=True)
    return False


def test_a_setup_is_done_once_and_what_was_broken_off_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNLOOM_CACHE", str(tmp_path))
    said: list[str] = []
    environment = Environment("nothing", "1", (("no package", ("list", "--quiet")),))
    ensure(environment, said.append)
    assert environment.ready
    assert "no package" in "".join(said)
    said.clear()
    ensure(environment, said.append)
    assert said == []
    (environment.folder / ".complete").unlink()
    (environment.folder / "left-over").touch()
    ensure(environment, said.append)
    assert environment.ready
    assert not (environment.folder / "left-over").exists()


def test_a_setup_that_fails_says_why_and_leaves_no_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNLOOM_CACHE", str(tmp_path))
    environment = Environment("nothing", "1", (("a package", ("install", "--no-index", "there-is-no-such-package")),))
    with pytest.raises(SetupFailed, match="there-is-no-such-package"):
        ensure(environment, lambda _: None)
    assert not environment.ready


def test_sglang_is_set_up() -> None:
    """Never skipped: without SGLang and its router the tests of this folder show nothing."""
    ensure(SGLANG)
    assert SGLANG.ready
