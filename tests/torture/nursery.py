"""Forks a `turnloom serve` at each word from its parent, with everything imported and the tokenizer loaded: it starts in a blink.

    python -m tests.torture.nursery TOKENIZER_DIRECTORY

A line of standard input is a JSON object: `words` of the command line, `log` for
standard error, `seed`, `sabotage`. The child's process id comes on standard output,
then what `serve` itself prints there. An empty line waits for the child's end.
"""

from __future__ import annotations

import json
import os
import random
import sys

from tests.torture.sabotage import SABOTAGE, linger
from turnloom.cli.main import main
from turnloom.gateway import api
from turnloom.render.choose import choose_renderer
from turnloom.tokenizer import load_tokenizer


def child(order: dict[str, object]) -> None:
    log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    linger(random.Random(int(str(order["seed"]))))
    if order["sabotage"]:
        SABOTAGE[str(order["sabotage"])]()
    sys.argv = ["turnloom", *order["words"]]  # type: ignore[misc]
    main()


def nursery(tokenizer: str) -> None:
    loaded, pid = load_tokenizer(tokenizer), 0
    choose_renderer("auto", loaded, today="2026-01-01")  # what renders is imported at the first use of it
    api.load_tokenizer = lambda *_, **__: loaded
    for line in iter(sys.stdin.readline, ""):
        if not line.strip():
            _, status = os.waitpid(pid, 0)
            print(f"ended {status}", flush=True)
            continue
        pid = os.fork()
        if not pid:
            try:
                child(json.loads(line))
            finally:
                sys.stderr.flush()
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    nursery(sys.argv[1])
