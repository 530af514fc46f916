"""llama.cpp's own HTTP server, from xllamacpp: `python llama_server.py MODEL PORT`. Runs until it is killed."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import xllamacpp

from turnloom.engine.models import find_model


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a GGUF model over llama.cpp's HTTP.")
    parser.add_argument("model", help="a .gguf file, or smollm2")
    parser.add_argument("port", type=int)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--context", type=int, default=2048, help="tokens of each sequence")
    parser.add_argument("--key", default="")
    options = parser.parse_args()
    model: Path = find_model(options.model)
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.n_parallel = options.parallel
    params.n_ctx = options.context * options.parallel
    params.kv_unified = False
    params.endpoint_slots = True
    params.endpoint_metrics = True
    params.cpuparams.n_threads = 1
    params.warmup = False
    if options.key:
        params.api_keys = [options.key]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
