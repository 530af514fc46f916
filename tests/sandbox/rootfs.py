"""A small Debian as an image for tests, made once and kept in Turnloom's cache."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from turnloom.engine.models import cache_dir

SUITE = "bookworm"
INCLUDE = "python3-minimal,git,procps"
MIRROR = "http://deb.debian.org/debian"


def rootfs() -> Path:
    """Its folder. Skips the test, and says so, where it neither is nor can be made."""
    place = cache_dir() / "rootfs" / f"debian-{SUITE}-minbase"
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            _make(place)
    return place


def _make(place: Path) -> None:
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip(f"NO ROOT FILE SYSTEM: {place} is missing, and making it takes root and debootstrap")
    draft = place.with_name(f"{place.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    words = ["debootstrap", "--variant=minbase", f"--include={INCLUDE}", SUITE, str(draft), MIRROR]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=900, check=False)
    if done.returncode != 0:
        shutil.rmtree(draft, ignore_errors=True)
        pytest.skip(f"NO ROOT FILE SYSTEM: debootstrap fails: {' '.join(done.stdout.splitlines()[-2:])}")
    shutil.rmtree(draft / "var" / "cache" / "apt", ignore_errors=True)
    (draft / "testbed" / "package").mkdir(parents=True)
    (draft / "testbed" / "package" / "module.py").write_text("VALUE = 1\n")
    (draft / "testbed" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (draft / "testbed" / "run.sh").chmod(0o755)
    (draft / "testbed" / "link").symlink_to("package/module.py")
    draft.rename(place)
