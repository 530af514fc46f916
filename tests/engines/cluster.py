"""Two SGLang workers behind their router, kept for many tests: each test finds them as new, whatever the one before did to them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.engines.checkpoint import checkpoint
from tests.engines.servers import Router, Server, get, post, router, sglang, start_all, stop_all

VERSION = "default"
"""What SGLang calls the weights that it was started with."""

_IDLE = 30.0


@dataclass(frozen=True, slots=True)
class Cluster:
    workers: tuple[Server, Server]
    router: Router

    def restore(self) -> None:
        """Both workers up, idle, not paused, with the first weights and no cached prefix; the router sure of both. Raises StartFailed."""
        start_all([worker for worker in self.workers if not worker.alive])
        for worker in self.workers:
            if not refreshed(worker):
                worker.start()
        if not (self.router.alive and self.router.healthy()):
            self.router.start()

    def running(self) -> int:
        """Requests that the workers have, running or waiting, as their latest snapshots say."""
        return sum(load(worker) for worker in self.workers)

    def stop(self) -> None:
        stop_all([self.router, *self.workers])


def start_cluster() -> Cluster:
    """Raises SetupFailed, StartFailed."""
    workers = sglang(name="sglang-a"), sglang(name="sglang-b")
    cluster = Cluster(workers, router([worker.url for worker in workers]))
    try:
        start_all(workers)
        cluster.router.start()
    except BaseException:
        cluster.stop()
        raise
    return cluster


def refreshed(worker: Server) -> bool:
    """Whether a worker that runs could be brought back to what it was when it was started."""
    try:
        post(worker.url, "/continue_generation", {})
        post(worker.url, "/abort_request", {"abort_all": True})
        post(
            worker.url,
            "/update_weights_from_disk",
            {"model_path": str(checkpoint()), "weight_version": VERSION, "abort_all_requests": True},
        )
        end = time.monotonic() + _IDLE
        while load(worker):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
    except OSError:
        return False
    return True


def load(worker: Server) -> int:
    """Requests running or waiting. Raises OSError when it is dead."""
    (rank,) = get(worker.url, "/v1/loads")["loads"]
    return int(rank["num_running_reqs"]) + int(rank["num_waiting_reqs"])
