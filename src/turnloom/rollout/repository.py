"""Runs git on a workspace, with nothing in reach that an agent or a user configured.

Each use has a git directory of its own, made for it and found nowhere before.
Attributes, filters, hooks and ignore files of anyone's home are off, so what is
compared are the bytes on disk. Inside the sandbox it needs git, a POSIX shell
and find, chmod, mkdir, mv and rm, as GNU, BSD and BusyBox have them.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from turnloom.errors import TaskError
from turnloom.sandbox.contract import ExecResult, Sandbox, SandboxUnavailable

_GIT_TIME = 300.0
_SIGKILL = -9
_PLAIN_BYTES = b"* -text !eol -filter -ident !working-tree-encoding !diff\n"
_SETTINGS = {
    "core.excludesFile": "/dev/null",
    "core.attributesFile": "/dev/null",
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "pack.compression": "1",
}
# git-config(1): GIT_CONFIG_COUNT with its keys and values ranks above every file.
CLEAN = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": str(len(_SETTINGS)),
    **{f"GIT_CONFIG_KEY_{index}": key for index, key in enumerate(_SETTINGS)},
    **{f"GIT_CONFIG_VALUE_{index}": value for index, value in enumerate(_SETTINGS.values())},
}

# Fixed scripts; what is found arrives as arguments. A path ends in ".git", so the shell cuts nothing off it.
_HIDE = 'n=0; for found do n=$((n+1)); printf %s "$found" >"$0/$$.$n.path" && mv -- "$found" "$0/$$.$n" || exit 1; done'
_SHOW = 'for path in "$0"/*.path; do test -e "$path" || continue; mv -- "${path%.path}" "$(cat "$path")" || exit 1; done'


@dataclass(frozen=True, slots=True)
class Repository:
    """A fresh repository over the sandbox's workspace, in `place` beside it."""

    sandbox: Sandbox
    place: str

    async def git(self, *words: str, limit: int = 1 << 20, stdin: bytes | None = None) -> ExecResult:
        return await git(self.sandbox, words, self.environment, limit=limit, stdin=stdin)

    @property
    def environment(self) -> dict[str, str]:
        return {**CLEAN, "GIT_DIR": f"{self.place}/git", "GIT_WORK_TREE": self.sandbox.workdir}

    async def hide_nested(self) -> None:
        """Move the `.git` of every repository inside the workspace aside: git would note such a directory as a mere commit id."""
        find = ["find", ".", "-path", "./.git", "-prune", "-o", "-name", ".git", "-prune", "-exec", "sh", "-c", _HIDE]
        await command(self.sandbox, [*find, f"{self.place}/nested", "{}", "+"])

    async def show_nested(self) -> None:
        """Put them back."""
        await command(self.sandbox, ["sh", "-c", _SHOW, f"{self.place}/nested"])

    async def remove(self) -> None:
        await command(self.sandbox, ["rm", "-rf", "--", self.place])


async def open_repository(sandbox: Sandbox) -> Repository:
    repository = Repository(sandbox, f"{sandbox.root}/git-{uuid.uuid4().hex}")
    await sandbox.write_file(f"{repository.place}/git/info/attributes", _PLAIN_BYTES)
    await command(sandbox, ["mkdir", f"{repository.place}/nested"])
    await repository.git("init", "-q", "--template=")
    return repository


async def git(
    sandbox: Sandbox, words: tuple[str, ...], env: dict[str, str], *, limit: int = 1 << 20, stdin: bytes | None = None
) -> ExecResult:
    result = await sandbox.exec(["git", *words], env=env, timeout=_GIT_TIME, output_limit=limit, stdin=stdin)
    return _checked(f"git {words[0]}", result)


async def command(sandbox: Sandbox, argv: list[str], *, cwd: str | None = None) -> ExecResult:
    """Run a command of ours. Raises TaskError when it fails, SandboxUnavailable when that is the machine's doing."""
    return _checked(argv[0], await sandbox.exec(argv, cwd=cwd, timeout=_GIT_TIME))


def _checked(name: str, result: ExecResult) -> ExecResult:
    if not result.timed_out and result.exit_code == 0:
        return result
    problem = f"{name} {ending(result)}"
    if "No space left on device" in result.err or (result.exit_code == _SIGKILL and not result.timed_out):
        raise SandboxUnavailable(problem)
    raise TaskError(problem)


def ending(result: ExecResult) -> str:
    """How a command that failed ended, with the last line it wrote."""
    lines = (result.err.strip() or result.out.strip()).splitlines()
    how = "did not end in time" if result.timed_out else f"ended with {result.exit_code}"
    return f"{how}: {lines[-1][:300]}" if lines else how
