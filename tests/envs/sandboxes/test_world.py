"""What every backend's machine does: verifiers, files, snapshots, creation, removal."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from envs.sandboxes.base import SandboxConfig, SandboxDied, SandboxError

from .conftest import Backend, Shell
from .test_shell import COUNT

OWNER = "from envs.sandboxes"


def test_a_clean_shell_owes_the_agent_nothing(shell: Shell) -> None:
    shell("mkdir -p /tmp/evil; printf '#!/bin/sh\\necho evil' >/tmp/evil/ls; chmod +x /tmp/evil/ls")
    shell("echo 'echo evil' | tee ~/.bashrc ~/.profile ~/.bash_profile >/dev/null")
    shell(
        "cd /tmp; export PATH=/tmp/evil A=1 BASH_ENV=~/.bashrc ENV=~/.bashrc; ls() { echo evil; }"
    )
    shell("trap 'echo evil' EXIT DEBUG; export LD_PRELOAD=/tmp/evil/x.so")
    result = shell.clean('echo "[$A$BASH_ENV$ENV$LD_PRELOAD]"; pwd; ls /; echo $GIVEN', GIVEN="g")
    assert result.exit_code == 0
    assert result.output.startswith("[]\n/home/agent\n") and result.output.endswith("g\n")
    assert "evil" not in result.output
    # The agent's own state is back afterwards, its processes are not.
    assert shell("echo $A; PATH=/usr/bin:/bin; unset LD_PRELOAD").output == "1\n"


def test_a_clean_shell_finds_the_agents_processes_dead(shell: Shell) -> None:
    tick = "while :; do echo x >>/tmp/tick; sleep 0.01; done"
    shell(f"rm -f /tmp/tick; setsid sh -c '{tick}' & sleep 0.2")
    result = shell.clean(f"wc -c </tmp/tick; sleep 0.2; wc -c </tmp/tick; {COUNT}")
    before, after, processes = map(int, result.output.split())
    assert before == after > 0
    assert processes == 2


@pytest.mark.parametrize("status", [0, 1, 2, 77])
def test_a_clean_shells_status(shell: Shell, status: int) -> None:
    assert shell.clean(f"echo x; exit {status}").exit_code == status


def test_a_clean_shell_can_time_out(shell: Shell) -> None:
    assert shell.clean("echo x; sleep 60", timeout=0.3).timed_out


def test_stop_keeps_directory_and_variables(shell: Shell) -> None:
    shell("cd /tmp; export A=7; sleep 60 &")
    shell.backend.run(shell.sandbox.stop())
    assert shell.out("pwd; echo $A; " + COUNT) == "/tmp\n7\n2\n"


def test_files_round_trip(shell: Shell) -> None:
    data = bytes(range(256)) * 500
    shell.write("/home/agent/new/deep/file", data, mode=0o750)
    assert shell.read("/home/agent/new/deep/file") == data
    assert shell.out("wc -c <new/deep/file") == "128000\n"
    assert shell.out("stat -c '%a %U' new/deep/file new/deep").split()[0] == "750"
    assert shell.out("stat -c %u new/deep/file new/deep | sort -u") == shell.out("id -u")
    shell.write("/home/agent/new/deep/file", b"")
    assert shell.read("/home/agent/new/deep/file") == b""


def test_files_of_the_shell_can_be_read(shell: Shell) -> None:
    shell("echo hi >/tmp/from-shell; ln -s from-shell /tmp/link; ln -s /tmp/link /tmp/link2")
    assert shell.read("/tmp/from-shell") == shell.read("/tmp/link2") == b"hi\n"
    assert b"agent" in shell.read("/etc/passwd")


def test_what_cannot_be_read(shell: Shell) -> None:
    shell("mkfifo /tmp/fifo; ln -s loop /tmp/loop; head -c 2000 /dev/zero >/tmp/big")
    with pytest.raises(FileNotFoundError):
        shell.read("/tmp/missing/file")
    for path in ("/tmp", "/tmp/fifo", "/tmp/loop"):
        with pytest.raises((SandboxError, FileNotFoundError)):
            shell.read(path)
    with pytest.raises(SandboxError, match="max_bytes=1000"):
        shell.read("/tmp/big", max_bytes=1000)


def test_links_do_not_lead_outside(shell: Shell, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    (outside / "secret").write_text("secret")
    up = "../" * 12
    shell(f"ln -s {outside} /tmp/a; ln -s {up}{outside} /tmp/b; ln -s {outside}/secret /tmp/c")
    for path in ("/tmp/a/secret", "/tmp/b/secret", "/tmp/c", f"/{up}{outside}/secret"):
        with pytest.raises((FileNotFoundError, SandboxError)):
            shell.read(path)
    for path in ("/tmp/a/new", "/tmp/b/new", "/tmp/c"):
        try:
            shell.write(path, b"mine")
        except SandboxError:
            continue
    assert [p.name for p in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "secret"


def test_a_written_file_replaces_links_and_directories(shell: Shell) -> None:
    shell("echo kept >/tmp/target; ln -s /tmp/target /tmp/l; mkdir -p /tmp/d/sub")
    shell.write("/tmp/l", b"new")
    shell.write("/tmp/d", b"new")
    assert shell.out("cat /tmp/target /tmp/l /tmp/d; test -L /tmp/l || echo file") == (
        "kept\nnewnewfile\n"
    )


def test_snapshots_bring_back_files_and_state(make: Any) -> None:
    new: Shell = make()
    new("mkdir -p /srv/x; cd /srv/x; echo 1 >f; export A=1; ln -s f l; chmod 640 f; mkfifo p")
    one = new.backend.run(new.sandbox.snapshot())
    new("echo 2 >f; rm l; touch extra; export A=2; cd /; sleep 60 &")
    two = new.backend.run(new.sandbox.snapshot())
    new.backend.run(new.sandbox.restore(one))
    assert new.out("pwd; cat l; echo $A; ls; stat -c %a f; " + COUNT) == (
        "/srv/x\n1\n1\nf\nl\np\n640\n2\n"
    )
    new.backend.run(new.sandbox.restore(two))
    assert new.out("pwd; cd /srv/x; cat f; echo $A; ls") == "/\n2\n2\nextra\nf\np\n"
    with pytest.raises(SandboxError, match="no such snapshot"):
        new.backend.run(new.sandbox.restore("none"))


def test_close_is_idempotent_and_final(backend: Backend) -> None:
    sandbox = backend.create()
    backend.run(sandbox.exec("setsid sleep 60 & echo x >/tmp/f; chmod 000 /tmp; mkdir -p a/b", 5))
    backend.run(sandbox.close())
    backend.run(sandbox.close())
    with pytest.raises(SandboxDied):
        backend.run(sandbox.exec("true", 5))


def traces(backend: Backend, sandbox: Any) -> list[str]:
    """What is left of a sandbox on this machine."""
    if backend.is_docker:
        api = backend.factory.client.api
        return [c["Id"] for c in api.containers(all=True) if c["Id"] == sandbox.container]
    paths = [sandbox.directory, *sandbox.groups]
    mounts = Path("/proc/self/mountinfo").read_text()
    found = [str(p) for p in paths if p.exists()] + ["mount"] * (str(sandbox.directory) in mounts)
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [str(status)] if str(sandbox.directory).encode() in status.read_bytes() else []
        except OSError:
            continue
    return found


def test_close_removes_every_trace(backend: Backend) -> None:
    sandbox: Any = backend.create()
    backend.run(sandbox.exec("setsid sleep 60 & sleep 60", 0.2))
    backend.run(sandbox.snapshot())
    assert traces(backend, sandbox)
    container = getattr(sandbox, "container", None)
    backend.run(sandbox.close())
    if container is not None:
        sandbox._machine.container = container
        images = backend.factory.client.api.images(filters={"label": "jaxagent.owner"})
        assert not images
    assert traces(backend, sandbox) == []


def test_many_at_once(backend: Backend) -> None:
    count = 6 if backend.is_docker else 64

    async def one(number: int) -> str:
        sandbox = await backend.factory.create(SandboxConfig())
        try:
            await sandbox.exec(f"echo {number} >/tmp/n; sleep 0.1", 30)
            return str((await sandbox.exec("cat /tmp/n", 30)).output)
        finally:
            await sandbox.close()

    async def everything() -> list[str]:
        return list(await asyncio.gather(*map(one, range(count))))

    assert backend.run(everything()) == [f"{n}\n" for n in range(count)]


@pytest.mark.parametrize("delay", [0.0, 0.004, 0.02, 0.1])
def test_a_cancelled_creation_leaves_nothing(
    backend: Backend, tmp_path: Path, delay: float
) -> None:
    tmp_path.chmod(0o755)
    factory = backend.fresh_factory(_open_base(tmp_path))

    async def cancelled() -> None:
        await (await factory.create(SandboxConfig())).close()
        task = asyncio.ensure_future(factory.create(SandboxConfig()))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            await task.result().close()

    backend.run(cancelled())
    assert not factory._sandboxes
    backend.run(factory.close())
    assert list(_open_base(tmp_path).iterdir()) == []


def _open_base(tmp_path: Path) -> Path:
    """A directory that root's sandboxes, which run as another user, can reach."""
    base = Path("/tmp") / f"sandbox-tests-{tmp_path.parent.name}-{tmp_path.name}"
    base.mkdir(mode=0o711, exist_ok=True)
    return base


_OWNER_SCRIPT = """
import asyncio, os, sys
from pathlib import Path
from envs.sandboxes.base import SandboxConfig
name, base, image = sys.argv[1:]
if name == "docker":
    from envs.sandboxes.docker import DockerSandboxes
    factory = DockerSandboxes(image=image)
else:
    from envs.sandboxes.local import LocalSandboxes
    factory = LocalSandboxes(base, isolation=name)
async def main():
    sandbox = await factory.create(SandboxConfig())
    await sandbox.exec("setsid sleep 1000 & true", 5)
    running = asyncio.ensure_future(sandbox.exec("sleep 1000", 1000))
    await asyncio.sleep(0.3)
    print(getattr(sandbox, "container", None) or sandbox.machine.monitor_pid, flush=True)
    await running
asyncio.run(main())
"""


def test_a_killed_owner_leaves_nothing_after_the_next_start(
    backend: Backend, tmp_path: Path
) -> None:
    from .conftest import IMAGE

    base = _open_base(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER_SCRIPT, backend.name, str(base), IMAGE],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdout is not None
    left = process.stdout.readline().strip()
    assert left
    bystander = backend.create()
    process.send_signal(signal.SIGKILL)
    process.wait()
    if not backend.is_docker:
        # Without anybody's help: the kernel ends them with their owner.
        deadline = time.monotonic() + 5
        while _named(base) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert _named(base) == []
    factory = backend.fresh_factory(base)
    backend.run(_make_and_close(factory))
    assert list(base.iterdir()) == []
    if backend.is_docker:
        ids = [c["Id"] for c in backend.factory.client.api.containers(all=True)]
        assert left not in ids
    else:
        assert not [g for g in Path("/sys/fs/cgroup").glob("*/*owner-*") if str(base) in str(g)]
    # Nobody else's sandbox was touched.
    assert backend.run(bystander.exec("echo here", 5)).output == "here\n"
    backend.run(bystander.close())
    base.rmdir()


def _named(base: Path) -> list[str]:
    """Processes whose command line names a directory."""
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(base).encode() in cmdline.read_bytes():
                found.append(cmdline.parent.name)
        except OSError:
            continue
    return [pid for pid in found if int(pid) != os.getpid()]


async def _make_and_close(factory: Any) -> None:
    await (await factory.create(SandboxConfig())).close()
    await factory.close()
