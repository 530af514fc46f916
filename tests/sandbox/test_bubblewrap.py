"""The bubblewrap sandbox: the shared contract, and what it keeps in."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import uuid
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.sandbox.rootfs import rootfs
from turnloom.errors import SandboxError
from turnloom.sandbox.bubblewrap import BubblewrapBackend
from turnloom.sandbox.bwrap.view import shown_of_host
from turnloom.sandbox.conformance import CHECKS
from turnloom.sandbox.contract import Needs

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="THERE IS NO bwrap HERE: nothing of the bubblewrap sandbox is tested")


@asynccontextmanager
async def started(parent, needs=Needs()):  # noqa: B008
    sandbox = BubblewrapBackend(parent=parent, grace=0.5).make(needs)
    await sandbox.start()
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def eventually(sandbox, path):
    while True:
        try:
            return await sandbox.read_file(path)
        except SandboxError:
            await asyncio.sleep(0.02)


async def cancelled(task):
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def hosts_processes(mark):
    """The processes of this machine with this word in their command line."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    return found


@pytest.fixture
async def sandbox(tmp_path):
    async with started(tmp_path) as sandbox:
        yield sandbox


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check, sandbox):
    await check(sandbox)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract_on_a_root_file_system_of_its_own(check, tmp_path):
    async with started(tmp_path, Needs(image=str(rootfs()))) as sandbox:
        await check(sandbox)


@pytest.mark.skipif(os.geteuid() != 0, reason="this is what the other tests do then")
def test_contract_as_a_user_without_rights(tmp_path):
    words = ("unshare", "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-m", "turnloom.cli.main", "sandbox", "check")
    done = subprocess.run([*words, "bubblewrap"], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.endswith(f"bubblewrap: {len(CHECKS)} of {len(CHECKS)} checks passed\n")


# What is seen


async def test_of_the_host_only_programs_and_libraries_are_seen(sandbox, tmp_path):
    other = BubblewrapBackend(parent=tmp_path).make(Needs())
    await other.start()
    await other.write_file("secret", b"")
    (tmp_path / "host.txt").touch()
    tops = set((await sandbox.exec(["ls", "/"])).out.split())
    known = {"bin", "lib", "lib32", "lib64", "libx32", "nix", "opt", "sbin", "usr", "etc", "dev", "proc", "run", "sandbox", "tmp", "var"}
    assert tops <= known | {path.parts[1] for path in shown_of_host(())}
    for path in ("/run", "/tmp", "/var/tmp", "/var", "/home", "/srv", "/mnt", "/sys", "/boot", str(Path.home() / ".ssh"), str(tmp_path)):
        found = await sandbox.exec(["ls", "-A", path])
        below = {
            shown.relative_to(path.replace("/var/tmp", "/tmp")).parts[0]
            for shown in shown_of_host(())
            if shown.is_relative_to(path.replace("/var/tmp", "/tmp"))
        }
        assert not {*found.out.split()} - ({"tmp"} if path == "/var" else below), path
    for name in ("shadow", "sudoers", "ssh", "hostname", "machine-id", "fstab", "ssl/private"):
        assert (await sandbox.exec(["ls", f"/etc/{name}"])).exit_code != 0, name
    assert "secret" not in (await sandbox.exec(["find", "/", "-name", "secret", "-not", "-path", "/proc/*"])).out
    sockets = await sandbox.exec(["find", "/", "-type", "s", "-not", "-path", "/proc/*"])
    assert sockets.stdout == b""
    await other.stop()


async def test_the_home_is_hidden_but_for_the_installed_agents(sandbox, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("TURNLOOM_CACHE", str(tmp_path / "user" / "cache"))
    agent = tmp_path / "user" / "cache" / "agents" / "one" / "run"
    agent.parent.mkdir(parents=True)
    agent.write_text("#!/bin/sh\necho ran\n")
    agent.chmod(0o755)
    (tmp_path / "user").chmod(0o700)
    (tmp_path / "user" / "token").write_text("secret")
    (tmp_path / "user" / "cache" / "engines").mkdir()
    assert (await sandbox.exec([str(agent)])).out == "ran\n"
    assert (await sandbox.exec(["find", str(tmp_path / "user"), "-name", "token", "-o", "-name", "engines"])).stdout == b""
    assert (await sandbox.exec(["sh", "-c", f"echo x >> {agent}"])).exit_code != 0
    assert agent.read_text() == "#!/bin/sh\necho ran\n"


async def test_nothing_but_its_own_directories_can_be_written(sandbox):
    script = """
    for place in / /usr /etc /dev /run /var /proc/sys/kernel "$1"; do
      (echo x > "$place/turnloom-was-here") 2>/dev/null && echo "$place"
    done
    for place in "$HOME" /tmp /var/tmp /sandbox /sandbox/work /dev/shm; do echo x > "$place/mine" || echo "not $place"; done
    chmod 777 /usr/bin /etc/passwd 2>/dev/null && echo modes
    mount -o remount,rw /usr 2>/dev/null && echo mounted
    unshare --user true 2>/dev/null && echo "more namespaces"
    true
    """
    result = await sandbox.exec(["sh", "-c", script, "sh", sys.prefix])
    assert (result.out, result.exit_code) == ("", 0), result


async def test_a_process_has_no_rights_and_no_descriptors_of_the_host(sandbox):
    status = (await sandbox.exec(["cat", "/proc/self/status"])).out
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert fields["NoNewPrivs"].strip() == "1"
    assert fields["Uid"].split() == ["1000"] * 4
    assert fields.get("Groups", "").split() in ([], ["65534"], ["1000"])
    listed = await sandbox.exec(["python3", "-c", "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"])
    assert listed.out == "[0, 1, 2]\n"
    assert (await sandbox.exec(["id", "-un"])).out == "agent\n"


async def test_files_belong_to_a_user_of_the_sandbox_alone(sandbox, tmp_path):
    await sandbox.write_file("written", b"one")
    await sandbox.upload(Path(__file__), "uploaded")
    assert (await sandbox.exec(["sh", "-c", "echo two >> written && echo two >> uploaded && touch made"])).exit_code == 0
    assert await sandbox.read_file("written") == b"onetwo\n"
    owners = {path.lstat().st_uid for path in tmp_path.glob("*/inside/sandbox/work/*")}
    if os.geteuid() != 0:
        assert owners == {os.geteuid()}
        return
    other = BubblewrapBackend(parent=tmp_path).make(Needs())
    await other.start()
    await other.write_file("written", b"")
    assert len(owners) == 1
    assert owners.isdisjoint({0, os.stat(next(p for p in tmp_path.glob("*/inside/sandbox/work/written") if not p.stat().st_size)).st_uid})
    await other.stop()


async def test_the_environment_is_in_no_command_line_of_the_host(sandbox):
    running = asyncio.ensure_future(sandbox.exec(["sh", "-c", "touch up; sleep 1000"], env={"KEY": "the-secret-of-the-session"}))
    await eventually(sandbox, "up")
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert any(b"touch up; sleep" in line for line in lines)
    assert not any(b"the-secret-of-the-session" in line for line in lines)
    await cancelled(running)


# Its end


DAEMON = """
import os, sys, time
if os.fork(): sys.exit()
os.setsid()
if os.fork(): sys.exit()
os.execve(sys.executable, ["python3", "-c", "import time; open('up', 'w').close(); time.sleep(1000)", sys.argv[1]], {})
"""


async def test_a_daemon_that_hides_is_ended_too(sandbox):
    mark = f"daemon-{uuid.uuid4().hex}"
    await sandbox.write_file("daemon.py", DAEMON.encode())
    script = f"python3 daemon.py {mark}; until test -e up; do sleep 0.01; done"
    assert (await sandbox.exec(["sh", "-c", script], timeout=60)).exit_code == 0
    assert not hosts_processes(mark)


async def test_stop_ends_what_runs(sandbox, tmp_path):
    mark = f"running-{uuid.uuid4().hex}"
    running = asyncio.ensure_future(sandbox.exec(["sh", "-c", "touch up; sleep 1000", mark]))
    await eventually(sandbox, "up")
    assert hosts_processes(mark)
    await sandbox.stop()
    assert not hosts_processes(mark)
    assert (await running).exit_code == -9
    assert not os.listdir(tmp_path)


KILLED = """
import asyncio, sys
from pathlib import Path
from turnloom.sandbox.bubblewrap import BubblewrapSandbox

async def main():
    sandbox = BubblewrapSandbox(parent=Path(sys.argv[1]))
    await sandbox.start()
    await sandbox.exec(["sh", "-c", "mkdir locked; chmod 0 locked; touch up; setsid sleep 1000 & sleep 1000", sys.argv[2]])

asyncio.run(main())
"""


async def test_a_killed_turnloom_leaves_no_process_and_prune_removes_the_rest(tmp_path):
    mark = f"killed-{uuid.uuid4().hex}"
    async with started(tmp_path) as live:
        owner = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, str(tmp_path), mark)
        while not list(tmp_path.glob("*/inside/sandbox/work/up")):
            assert owner.returncode is None
            await asyncio.sleep(0.02)
        assert hosts_processes(mark) - {owner.pid}
        assert await BubblewrapBackend(parent=tmp_path).prune() == [], "its process lives"
        owner.kill()
        await owner.wait()
        while hosts_processes(mark):
            await asyncio.sleep(0.02)
        removed = await BubblewrapBackend(parent=tmp_path).prune()
        assert len(removed) == 1
        assert len(os.listdir(tmp_path)) == 1
        assert (await live.exec(["true"])).exit_code == 0


async def test_many_side_by_side_leave_nothing(tmp_path):
    mark = f"many-{uuid.uuid4().hex}"

    async def one(number):
        async with started(tmp_path) as sandbox:
            result = await sandbox.exec(["sh", "-c", "sleep 1000 & echo $1 > f; cat f", mark, str(number)])
            return int(result.out)

    await one(0)
    before = len(os.listdir("/proc/self/fd"))
    assert await asyncio.gather(*map(one, range(24))) == list(range(24))
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert not os.listdir(tmp_path)
    assert not hosts_processes(mark)


# Its limits


async def test_a_full_disk_ends_the_command_and_says_so(tmp_path):
    backend = BubblewrapBackend(parent=tmp_path, disk=8 << 20)
    sandbox = backend.make(Needs())
    await sandbox.start()
    script = "i=0; while true; do head -c 1000000 /dev/zero > /tmp/$i; i=$((i+1)); sleep 0.05; done"
    result = await sandbox.exec(["sh", "-c", script], timeout=60)
    assert (result.limit, result.exit_code, result.timed_out) == ("disk", -9, False)
    assert "limit of disk was exceeded" in result.err
    await sandbox.stop()


async def test_a_file_grows_no_further_than_its_limit(tmp_path):
    sandbox = BubblewrapBackend(parent=tmp_path, file_size=1 << 20).make(Needs())
    await sandbox.start()
    result = await sandbox.exec(["sh", "-c", "head -c 9000000 /dev/zero > big; stat -c %s big"])
    assert result.out == f"{1 << 20}\n"
    await sandbox.stop()


async def test_processes_are_limited_and_a_fork_bomb_is_ended(tmp_path):
    sandbox = BubblewrapBackend(parent=tmp_path, processes=30, grace=0.5).make(Needs())
    await sandbox.start()
    count = "import os, sys, time\nn = 0\ntry:\n while n < 500:\n  if not os.fork(): time.sleep(1000)\n  n += 1\nexcept OSError: print(n)"
    made = int((await sandbox.exec(["python3", "-c", count])).out)
    assert 10 < made <= 30
    bomb = await sandbox.exec(["python3", "-c", "import os\nwhile True:\n try: os.fork()\n except OSError: pass"], timeout=1)
    assert bomb.timed_out
    assert (await sandbox.exec(["true"])).exit_code == 0
    await sandbox.stop()


async def test_memory_of_all_processes_together_is_limited(tmp_path):
    sandbox = BubblewrapBackend(parent=tmp_path, memory=64 << 20).make(Needs())
    await sandbox.start()
    result = await sandbox.exec(["python3", "-c", "x = b'x' * (256 << 20); print('had it')"])
    assert "had it" not in result.out
    assert result.exit_code != 0
    await sandbox.stop()
    assert not [path for path in Path("/sys/fs/cgroup").glob("**/turnloom-*") if path.name.removeprefix("turnloom-") == sandbox._id]


# A hostile agent and the files


SWAP = """
import os
os.mkdir("real")
open("real/file", "w").write("mine")
os.symlink("/etc", "link")
open("up", "w").close()
while not os.path.exists("stop"):
    os.rename("real", "moved"); os.rename("link", "real"); os.rename("real", "link"); os.rename("moved", "real")
"""


async def test_a_directory_that_becomes_a_symlink_meanwhile_leads_nowhere(sandbox, tmp_path):
    before = {path.name for path in Path("/etc").iterdir()}
    running = asyncio.ensure_future(sandbox.exec(["python3", "-c", SWAP]))
    await eventually(sandbox, "up")
    written = 0
    for round_ in range(300):
        for work in (sandbox.write_file(f"real/{round_}", b"x"), sandbox.read_file("real/hostname"), sandbox.read_file("real/file")):
            try:
                assert await work in (None, b"mine")
                written += 1
            except SandboxError:
                pass
    await sandbox.write_file("stop", b"")
    await running
    assert written > 100
    assert {path.name for path in Path("/etc").iterdir()} == before


async def test_symlinks_within_the_sandbox_are_followed_as_inside(sandbox):
    await sandbox.exec(["sh", "-c", "mkdir -p /sandbox/home/there && ln -s /sandbox/home/there here && ln -s ../home/there/f file"])
    await sandbox.write_file("here/f", b"data")
    assert await sandbox.read_file("/sandbox/home/there/f") == b"data"
    assert await sandbox.read_file("file") == b"data"
    assert (await sandbox.exec(["pwd"], cwd="here")).out == "/sandbox/home/there\n"


async def test_what_is_copied_out_is_data(sandbox, tmp_path):
    await sandbox.exec(["sh", "-c", "mkdir -p out/sub && ln -s /etc/passwd out/link && touch out/sub/f && chmod 6755 out/sub/f"])
    await sandbox.download("out", tmp_path / "out")
    assert os.readlink(tmp_path / "out" / "link") == "/etc/passwd"
    assert (tmp_path / "out" / "sub" / "f").stat().st_mode & 0o7000 == 0
    await sandbox.exec(["sh", "-c", "mkfifo out/fifo"])
    with pytest.raises(SandboxError, match="neither a file nor a directory"):
        await sandbox.download("out", tmp_path / "again")
    deep = "import os\nfor _ in range(2000): os.mkdir('d'); os.chdir('d')"
    await sandbox.exec(["sh", "-c", f'mkdir deep && cd deep && python3 -c "{deep}"'])
    with pytest.raises(SandboxError, match="in one another"):
        await sandbox.download("deep", tmp_path / "deep")


async def test_an_agent_that_moves_its_home_away_does_not_hold_the_next_command(sandbox):
    await sandbox.exec(["sh", "-c", "mv /sandbox/home /sandbox/elsewhere; chmod 0 /tmp"])
    assert (await sandbox.exec(["sh", "-c", "pwd; ls /sandbox"])).out == "/sandbox/work\nelsewhere\nwork\n"


# An image


async def test_the_workdir_starts_as_the_image_has_it_and_the_image_stays(tmp_path):
    image = rootfs()
    before = {path: path.lstat().st_mtime_ns for path in (image / "testbed").rglob("*")}
    async with started(tmp_path, Needs(image=str(image), workdir="/testbed")) as sandbox:
        assert sandbox.workdir == "/testbed"
        assert not sandbox.host_files
        assert (await sandbox.exec(["./run.sh"])).out == "ran\n"
        assert await sandbox.read_file("link") == b"VALUE = 1\n"
        assert (await sandbox.exec(["readlink", "link"])).out == "package/module.py\n"
        script = "echo VALUE=2 > package/module.py && rm run.sh && touch new && git init -q . && git add -A && git status --short"
        assert (await sandbox.exec(["sh", "-c", script])).out.splitlines() == ["A  link", "A  new", "A  package/module.py"]
        await sandbox.write_file("/testbed/more/file", b"x")
        assert (await sandbox.exec(["cat", "/etc/debian_version"])).out.startswith("12")
        assert (await sandbox.exec(["sh", "-c", "echo x > /usr/x"])).exit_code != 0
    assert {path: path.lstat().st_mtime_ns for path in (image / "testbed").rglob("*")} == before
    async with started(tmp_path, Needs(image=str(image), workdir="/testbed")) as sandbox:
        assert await sandbox.read_file("package/module.py") == b"VALUE = 1\n"


async def test_with_an_image_nothing_of_the_host_is_seen(tmp_path):
    image = rootfs()
    async with started(tmp_path, Needs(image=str(image))) as sandbox:
        tops = set((await sandbox.exec(["ls", "/"])).out.split())
        assert tops == {*os.listdir(image)} - {"sys"} | {"sandbox"}
        assert (await sandbox.exec(["ls", str(Path(sys.prefix))])).exit_code != 0


@pytest.mark.parametrize(
    "needs",
    [
        Needs(image="/"),
        Needs(image="/no/such/folder"),
        Needs(image="debian:12"),
        Needs(workdir="relative"),
        Needs(workdir="/a/../etc"),
        Needs(workdir="/"),
        Needs(workdir="/usr/src"),
        Needs(workdir="/etc/x"),
        Needs(workdir="/proc/1"),
    ],
    ids=str,
)
def test_needs_that_cannot_be_met_are_refused(needs):
    with pytest.raises(SandboxError):
        BubblewrapBackend().make(needs)


async def test_a_workdir_without_an_image_starts_empty(tmp_path):
    async with started(tmp_path, Needs(workdir="/testbed/here")) as sandbox:
        assert (await sandbox.exec(["pwd"])).out == "/testbed/here\n"
        await sandbox.write_file("f", b"x")
        assert (await sandbox.exec(["ls"])).out == "f\n"


def test_a_directory_with_a_home_below_is_not_shown():
    with pytest.raises(SandboxError, match="is not shown"):
        BubblewrapBackend(show=[Path.home().parent]).make(Needs())


async def test_what_is_shown_can_be_read_and_not_written(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "f").write_text("data")
    (tmp_path / "own").mkdir()
    sandbox = BubblewrapBackend(parent=tmp_path / "own", show=[tmp_path / "data"]).make(Needs())
    await sandbox.start()
    assert (await sandbox.exec(["cat", f"{tmp_path}/data/f"])).out == "data"
    assert (await sandbox.exec(["touch", f"{tmp_path}/data/g"])).exit_code != 0
    await sandbox.stop()


async def test_this_machine_is_looked_at_before_a_run(monkeypatch):
    await BubblewrapBackend().require()
    monkeypatch.setattr("turnloom.sandbox.bubblewrap._OUTER_PATH", "/nowhere")
    with pytest.raises(SandboxError, match="no bwrap"):
        await BubblewrapBackend().require()
