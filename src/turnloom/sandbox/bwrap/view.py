"""What a process in a bubblewrap sandbox sees of the file system. It lists; it mounts and copies nothing.

The root is an empty read-only file system into which only what is named here is
bound: there is no list of what to hide, so what nobody thought of is not there.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import turnloom
from turnloom.engine.models import cache_dir
from turnloom.errors import SandboxError
from turnloom.sandbox.beneath import open_in
from turnloom.sandbox.contract import Needs

ROOT = "/sandbox"
"""The sandbox's own directory, as seen inside."""

UID = 1000
"""Who a process is inside, whichever user of the host that is."""

SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "opt", "nix")
"""What of the host's root there is: programs and libraries. Homes, /var, /run, /srv, /mnt and all else are not."""

ETC = tuple(
    """alternatives bash.bashrc ca-certificates ca-certificates.conf debian_version fonts host.conf inputrc java-8-openjdk
    java-11-openjdk java-17-openjdk java-21-openjdk ld.so.cache ld.so.conf ld.so.conf.d localtime locale.alias locale.gen
    login.defs lsb-release magic mime.types os-release pki/ca-trust pki/tls/certs profile profile.d protocols python3
    redhat-release rpc services shells ssl/certs ssl/openssl.cnf terminfo timezone""".split()
)
"""What of the host's /etc there is. Who the host's users are, its network and its services is not."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_OURS = ("proc", "dev", "sys", "tmp", "run", "sandbox")


@dataclass(frozen=True, slots=True)
class Mount:
    """One option of bwrap: `--ro-bind`, `--bind` or `--symlink`, from where, to where."""

    kind: str
    source: str
    target: str


def users() -> dict[str, str]:
    """Files of /etc, by name, that say who is there. The names are looked up nowhere else."""
    return {
        "passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:{UID}:{UID}:agent:{ROOT}/home:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
        "group": f"root:x:0:\nagent:x:{UID}:\nnogroup:x:65534:\n",
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "resolv.conf": "",
    }


def of_host(control: Path) -> list[Mount]:
    """The host's programs and libraries."""
    found = [mount for name in SYSTEM for mount in _entry(Path("/", name), f"/{name}")]
    for name in ETC:
        if (source := Path("/etc", name)).exists():
            found.append(Mount("--ro-bind", str(source.resolve()), f"/etc/{name}"))
    return found + [Mount("--ro-bind", str(control / "etc" / name), f"/etc/{name}") for name in users()]


def of_image(image: Path, workdir: str, control: Path) -> list[Mount]:
    """A root file system, but for what the sandbox has of its own. Raises SandboxError when it cannot be read."""
    try:
        names = sorted(os.listdir(image))
    except OSError as error:
        raise SandboxError(f"cannot read the root file system {image}: {error}") from error
    skipped = {*_OURS, *(top.strip("/") for top in writable(workdir))}
    found = [mount for name in names if name not in skipped for mount in _entry(image / name, f"/{name}")]
    for name in users():
        target = image / "etc" / name
        if not (image / "etc").is_symlink() and target.is_file() and not target.is_symlink():
            found.append(Mount("--ro-bind", str(control / "etc" / name), f"/etc/{name}"))
    return found


def _entry(source: Path, target: str) -> list[Mount]:
    try:
        mode = source.lstat().st_mode
    except FileNotFoundError:
        return []
    if stat.S_ISLNK(mode):
        return [Mount("--symlink", os.readlink(source), target)]
    return [Mount("--ro-bind", str(source), target)] if stat.S_ISDIR(mode) or stat.S_ISREG(mode) else []


def shown_of_host(more: Sequence[Path]) -> list[Path]:
    """Directories shown beside the system's own: installed agents, this Python with Turnloom, Node.js, and `more`.

    Those that are not there are left out. Raises SandboxError for one so wide that a home or this cache lies below it.
    """
    own = [cache_dir() / "agents", Path(sys.prefix), Path(sys.base_prefix), Path(turnloom.__file__).parent]
    if (node := shutil.which("node")) is not None:
        own.append(Path(node).resolve().parent.parent)
        own.append(Path(node).parent.parent)
    for path in more:
        if _too_wide(path.absolute()):
            raise SandboxError(f"{path} is not shown in a sandbox: a home or Turnloom's cache lies below it")
    wanted = [path.absolute() for path in (*own, *more)]
    found: list[Path] = []
    for path in sorted(set(wanted)):
        system = any(path.is_relative_to(Path("/", name)) for name in SYSTEM)
        if path.exists() and not system and not _too_wide(path) and not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return found


def _too_wide(path: Path) -> bool:
    return any(held.is_relative_to(path) for held in (Path.home(), cache_dir()))


def search_path(shown: Iterable[Path]) -> str:
    """This process's PATH as far as it can be seen inside."""
    seen = [*(Path("/", name) for name in SYSTEM), *shown]
    own = [part for part in os.environ.get("PATH", "").split(":") if any(Path(part).is_relative_to(top) for top in seen)]
    return ":".join(dict.fromkeys([*own, *PATH.split(":")]))


def find_program(root: int, name: str, cwd: str, path: str) -> None:
    """Look for a program as execvp(3) does, in the root that is open. Raises SandboxError when it is not there."""
    candidates = [f"{cwd}/{name}" if not name.startswith("/") else name]
    if "/" not in name:
        candidates = [f"{part if part.startswith('/') else f'{cwd}/{part}'}/{name}" for part in path.split(":")]
    reason = "No such file or directory"
    for candidate in candidates if name else ():
        try:
            descriptor = open_in(root, candidate, os.O_PATH)
        except OSError as error:
            reason = error.strerror or reason if "/" in name else reason
            continue
        mode = os.fstat(descriptor).st_mode
        os.close(descriptor)
        if stat.S_ISREG(mode) and mode & 0o111:
            return
        reason = "Permission denied"
    raise SandboxError(f"cannot start {name!r}: {reason}")


def writable(workdir: str) -> tuple[str, ...]:
    """The directories inside that are the sandbox's own."""
    tops = (ROOT, "/tmp")
    return tops if any(PurePosixPath(workdir).is_relative_to(top) for top in tops) else (*tops, workdir)


def own(inside: Path, workdir: str, image: Path | None) -> list[Mount]:
    """Those, from the directory `inside` that holds them out here."""
    found = [Mount("--bind", f"{inside}{top}", top) for top in writable(workdir)]
    if image is None or (image / "var" / "tmp").is_dir():
        found.append(Mount("--bind", f"{inside}/tmp", "/var/tmp"))
    return found


def refuse_odd_needs(needs: Needs) -> None:
    """Raises SandboxError for an image that is no root file system, and for a workdir that can be nowhere in it."""
    workdir, image = PurePosixPath(needs.workdir), Path(needs.image).resolve()
    if needs.image and (not (image / "usr").is_dir() or image == Path("/") or _too_wide(image)):
        raise SandboxError(f"{needs.image!r} is not the folder of a root file system, which bubblewrap takes as an image")
    if not needs.workdir:
        return
    if (
        not workdir.is_absolute()
        or ".." in workdir.parts
        or len(workdir.parts) < 2
        or str(workdir) != needs.workdir
        or "\0" in str(workdir)
    ):
        raise SandboxError(f"the workdir {needs.workdir!r} is no plain absolute path")
    top = workdir.parts[1]
    if top in ("proc", "dev", "sys", "run", "etc") or (not needs.image and top in SYSTEM):
        raise SandboxError(f"a sandbox cannot have its workdir at {needs.workdir}")
    if needs.image and not has(image, needs.workdir) and has(image, f"/{top}") and top not in _OURS:
        raise SandboxError(f"{needs.image} has no directory {needs.workdir}")


def has(image: Path, path: str) -> bool:
    """Whether a root file system has this directory. Raises SandboxError when a symlink leads to it."""
    root = os.open(image, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(open_in(root, path, os.O_PATH | os.O_DIRECTORY, symlinks=False))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise SandboxError(f"{path!r} of {image} is no directory, or a symlink leads to it: {error.strerror}") from error
    finally:
        os.close(root)
    return True


Seen = Callable[[str], str]


def arguments(mounts: Sequence[Mount], shm: int, seen: Seen) -> list[str]:
    """bwrap's options for what is seen: in their order. `seen` says where a source can be reached."""
    words = ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(shm), "--tmpfs", "/dev/shm", "--dir", "/run"]
    for mount in mounts:
        source = mount.source if mount.kind == "--symlink" else seen(mount.source)
        words += [mount.kind, source, mount.target]
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/"]
