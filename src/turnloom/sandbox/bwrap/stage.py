"""The user that a sandbox's processes are out here, and the directories that user reaches. It starts no command itself.

When Turnloom runs as root each sandbox has a user id of its own, which owns its
files and nothing else. What bubblewrap binds is then looked up as that user, who
does not get into a private directory such as root's home or a temporary directory
of root's; such a directory is bound, in a mount namespace of the command's own,
where the user reaches it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnloom.errors import SandboxError

_FIRST = 1_900_000_000
_COUNT = 200_000_000
"""User ids that no distribution hands out and that systemd leaves free, below 2^31."""

_NOBODY = 65534
_STAGES = ("/mnt", "/media", "/srv", "/home")

# Its words are the stage and then pairs of a source and a name, an empty one, and the command. It expands no word of theirs.
_SCRIPT = """
set -e
stage=$1; shift
mount -t tmpfs -o mode=0711 turnloom "$stage"
while test -n "$1"; do
  mkdir "$stage/$2"
  mount --rbind -- "$1" "$stage/$2"
  shift 2
done
shift
exec "$@"
"""


def user_of(sandbox: str) -> int:
    """The host's user id for the sandbox of this id: our own, unless we are root."""
    if os.geteuid() != 0:
        return os.geteuid()
    wanted = _FIRST + int(sandbox[:8], 16) % _COUNT
    return wanted if _mapped(wanted) else _NOBODY


def _mapped(uid: int) -> bool:
    """Whether this user namespace knows the id; inside a container often only the first 65536 are."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
    except OSError:
        return True
    return any(int(first) <= uid < int(first) + int(count) for first, _, count in (line.split() for line in lines))


@dataclass(frozen=True, slots=True)
class Stage:
    """How a sandbox's user is become, and where a directory of the host is reached by that user."""

    uid: int
    moved: dict[Path, str]
    place: str

    def command(self) -> list[str]:
        """Words to put in front of a command that is to run as the user."""
        if self.uid == os.geteuid():
            return []
        words = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "--"]
        if not self.moved:
            return words
        pairs = [word for path, name in self.moved.items() for word in (str(path), name)]
        return ["unshare", "--mount", "--", "sh", "-c", _SCRIPT, "sh", self.place, *pairs, "", *words]

    def seen(self, path: str) -> str:
        """Where the user reaches this path."""
        for top, name in self.moved.items():
            if Path(path).is_relative_to(top):
                return os.path.normpath(f"{self.place}/{name}/{Path(path).relative_to(top)}")
        return path


def stage(uid: int, directories: Sequence[Path]) -> Stage:
    """For a user, and directories that bubblewrap binds something of. Raises SandboxError when there is no way to show them."""
    hidden = [path for path in directories if uid != os.geteuid() and not _reached(path)]
    if not hidden:
        return Stage(uid, {}, "")
    for place in _STAGES:
        if os.path.isdir(place) and not any(path.is_relative_to(place) for path in directories):
            return Stage(uid, {path: str(number) for number, path in enumerate(hidden)}, place)
    raise SandboxError(f"an unprivileged user cannot reach {hidden[0]}: choose another directory for sandboxes (TMPDIR)")


def _reached(path: Path) -> bool:
    """Whether any user gets into the directory."""
    return all(os.stat(part).st_mode & stat.S_IXOTH for part in (path, *path.parents))
