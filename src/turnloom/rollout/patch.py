"""Takes what an agent changed as a patch, and applies a patch to a clean workspace. It trusts nothing the agent could write.

What the workspace held before the agent is kept on this side of the sandbox and
compared in a repository made after the agent has ended: whatever the agent does
to its own repository (commits, a rewritten history, none at all), to its home or
to files beside the workspace does not change the patch. When no patch can be
taken, that is the agent's doing too, and PatchRefused says why.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from turnloom.errors import SandboxError, TaskError
from turnloom.rollout.repository import Repository, command, ending, open_repository
from turnloom.sandbox.contract import Sandbox, SandboxUnavailable

PATCH_LIMIT = 64 << 20
"""Bytes; a larger patch is refused."""

FILE_LIMIT = 256 << 20
"""Bytes; a new file, or one that grew, beyond this is refused before git reads it."""

_LIST_LIMIT = 64 << 20
_APPLY_TIME = 300.0


class PatchRefused(TaskError):
    """The agent's changes cannot be graded as they are: its own doing, so it is graded as a failure."""


@dataclass(frozen=True, slots=True)
class Base:
    """What a workspace held: the id of its git tree, and a git pack with all objects of it in a file without a name."""

    tree: str
    pack: IO[bytes]

    def close(self) -> None:
        self.pack.close()


async def take_base(sandbox: Sandbox) -> Base:
    """Note what the workspace holds now, files of repositories inside it too. Close the result."""
    repository = await open_repository(sandbox)
    await repository.hide_nested()
    await repository.git("add", "-A")
    await repository.show_nested()
    tree = (await repository.git("write-tree")).out.strip()
    pack = f"{repository.place}/base"
    named = await repository.git("pack-objects", "-q", "--revs", "--window=0", pack, stdin=f"{tree}\n".encode())
    with tempfile.TemporaryDirectory(prefix="turnloom-base-") as directory:
        copy = Path(directory, "pack")
        await sandbox.download(f"{pack}-{named.out.strip()}.pack", copy)
        await repository.remove()
        # Open beyond its removal: no path leads to it, and it goes with this process.
        return Base(tree, await asyncio.to_thread(copy.open, "rb"))


async def take_patch(sandbox: Sandbox, base: Base) -> bytes:
    """Everything that differs from `base`, new and binary files too, as a git diff; empty when nothing does.

    Ignored files are left out, as in any git diff; files in a repository that the
    agent made inside the workspace are not. Raises PatchRefused when the agent
    left nothing a patch can be taken from or one that is too large, and
    SandboxUnavailable when the sandbox is at fault. The workspace is used up.
    """
    try:
        await _open_directories(sandbox)
        repository = await open_repository(sandbox)
        await _lend(base, repository)
        await repository.git("read-tree", base.tree)
        await repository.hide_nested()
        await _refuse_huge_files(repository, base)
        await repository.git("add", "-A")
        options = ["-p", "--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color"]
        result = await repository.git("diff-index", "--cached", *options, base.tree, "--", limit=PATCH_LIMIT)
    except (PatchRefused, SandboxUnavailable):
        raise
    except (SandboxError, TaskError) as error:
        raise PatchRefused(f"no patch can be taken from the workspace as the agent left it: {error}") from error
    if result.stdout_dropped:
        raise PatchRefused(f"the patch is larger than {PATCH_LIMIT >> 20} MiB")
    return result.stdout


async def _open_directories(sandbox: Sandbox) -> None:
    """Give back the rights to read that the agent took away; git keeps none of these rights."""
    itself = ["-maxdepth", "0", "-type", "d", "-exec", "chmod", "u+rwx", "{}", ";", "-print"]
    if not (await sandbox.exec(["find", sandbox.workdir, *itself], cwd=sandbox.root)).stdout:
        raise PatchRefused("the workspace is gone, or is no longer a directory")
    directories = ["-type", "d", "!", "-perm", "-700", "-exec", "chmod", "u+rwx", "{}", ";"]
    files = ["-type", "f", "!", "-perm", "-400", "-exec", "chmod", "u+r", "{}", "+"]
    await command(sandbox, ["find", ".", "-path", "./.git", "-prune", "-o", *directories, "-o", *files])


async def _lend(base: Base, repository: Repository) -> None:
    """Copy the pack into the repository. git checks every object of it against its id."""
    pack = f"{repository.place}/git/objects/pack/pack-{base.tree}.pack"
    with tempfile.TemporaryDirectory(prefix="turnloom-base-") as directory:
        copy = Path(directory, "pack")
        try:
            await asyncio.to_thread(_copy, base.pack, copy)
        except OSError as error:
            raise SandboxUnavailable(f"cannot copy the base of the workspace: {error}") from error
        await repository.sandbox.upload(copy, pack)
    await repository.git("index-pack", pack)


def _copy(source: IO[bytes], target: Path) -> None:
    source.seek(0)
    with target.open("wb") as sink:
        shutil.copyfileobj(source, sink)


async def _refuse_huge_files(repository: Repository, base: Base) -> None:
    sandbox = repository.sandbox
    found = await command(
        sandbox, ["find", ".", "-path", "./.git", "-prune", "-o", "-type", "f", "-size", f"+{FILE_LIMIT // 512}", "-print0"]
    )
    if found.stdout_dropped:
        raise PatchRefused(f"the workspace holds very many files larger than {FILE_LIMIT >> 20} MiB")
    huge = {path.removeprefix(b"./") for path in found.stdout.split(b"\0") if path}
    if not huge:
        return
    listed = await repository.git("ls-tree", "-r", "-l", "-z", base.tree, limit=_LIST_LIMIT)
    huge -= _huge_before(listed.stdout)
    ignored = await sandbox.exec(
        ["git", "check-ignore", "-z", "--stdin"], env=repository.environment, stdin=b"".join(path + b"\0" for path in huge)
    )
    huge -= set(ignored.stdout.split(b"\0"))
    if huge:
        raise PatchRefused(f"{os.fsdecode(min(huge))!r} is larger than {FILE_LIMIT >> 20} MiB")


def _huge_before(listing: bytes) -> set[bytes]:
    """From `git ls-tree -r -l -z`: `MODE TYPE ID SIZE\\tPATH`, the size padded with blanks, "-" for what is no file."""
    lines = (line.partition(b"\t") for line in listing.split(b"\0") if line)
    sizes = ((head.split()[-1], path) for head, _, path in lines)
    return {path for size, path in sizes if size.isdigit() and int(size) > FILE_LIMIT}


async def apply_patch(sandbox: Sandbox, patch: bytes, protected: tuple[str, ...]) -> None:
    """Apply a patch to a prepared workspace, but nothing below a protected path. Raises PatchRefused when it does not apply.

    git itself refuses a patch that leads out of the workspace, through a symlink too.
    """
    if not patch:
        return
    repository = await open_repository(sandbox)
    options = [f"--exclude={pattern}" for path in protected for pattern in _patterns(path)]
    argv = ["git", "apply", "--whitespace=nowarn", *options, "-"]
    result = await sandbox.exec(argv, env=repository.environment, stdin=patch, timeout=_APPLY_TIME)
    if result.timed_out or result.exit_code != 0:
        raise PatchRefused(f"the patch does not apply to the clean workspace: git {ending(result)}")
    await repository.remove()


def _patterns(path: str) -> list[str]:
    """What covers a path in git's wildmatch: itself, all below, and its parents, which a patch could turn into a symlink."""
    pure = PurePosixPath(path)
    names = [pure, *(parent for parent in pure.parents if parent.parts)]
    escaped = ["".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in str(name)) for name in names]
    return [*escaped, f"{escaped[0]}/*"]
