"""The command line as a person meets it, a store that a real gateway wrote, and a scripted engine in a process of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.gateways import bench, follow, user
from turnloom.cli.main import main
from turnloom.testing.scripted_engine import Fault, Reply
from turnloom.testing.tokenizers import qwen_directory


@dataclass(frozen=True)
class Said:
    """What a verb printed and how it ended."""

    code: int
    out: str
    err: str


Cli = Callable[..., Said]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli("show", "latest")` runs the installed command's own `main` and returns what it did."""

    def run(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["turnloom", *map(str, words)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        printed = capsys.readouterr()
        return Said(code, printed.out, printed.err)

    return run


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of three sessions, oldest first: `alpha-one`, `alpha-two`, `beta`.

    `alpha-one` is two turns, the second bridged. `alpha-two` forks where its
    history was changed, and its third turn was aborted. `beta` is still open.
    """
    path = tmp_path_factory.mktemp("recorded") / "turnloom.db"
    asyncio.run(_record(path))
    return path


async def _record(path: Path) -> None:
    cut = Reply(text="cut short here", fault=Fault.ABORT)
    script = ["First answer.", "Second answer.", "Third answer.", "Fourth answer.", cut, "Fifth."]
    async with bench(script, store=path, session_id="alpha-one") as b:
        asked = user("What is a turn?")
        first = await b.post(asked)
        assert (await b.post(follow(asked, first.body, "And a session?"))).status == 200
        await b.handle.finish(reward=1.0)

        b.handle = await b.gateway.open_session(id="alpha-two")
        await b.post(asked)
        changed = {**asked, "messages": [*asked["messages"], {"role": "assistant", "content": "Never said."}, *user("Go on.")["messages"]]}
        assert (await b.post(changed)).status == 200
        assert (await b.post(user("Something else."))).status == 529
        await b.handle.finish(reward=0.0)

        b.handle = await b.gateway.open_session(id="beta")
        assert (await b.post(user("Still here?"))).status == 200


@pytest.fixture(scope="session")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scripted engine as a real process. It names its tokenizer, and says "It is done." whatever it is asked."""
    script = tmp_path_factory.mktemp("engine") / "replies.json"
    script.write_text(json.dumps(["It is done."]), "utf-8")
    words = ["-m", "turnloom.testing.scripted_engine", "--script", str(script), "--tokenizer", str(qwen_directory())]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def one_line(said: Said) -> str:
    """The only line of an error: code 2, nothing on standard output, no traceback."""
    assert said.code == 2, said
    assert said.out == ""
    lines = said.err.splitlines()
    assert len(lines) == 1, said.err
    assert lines[0].startswith("turnloom: ")
    return lines[0].removeprefix("turnloom: ")
