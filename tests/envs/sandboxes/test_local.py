"""What only the local backend promises: its view, limits without control groups, refusals."""

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envs.sandboxes import cgroups, namespaces, owner
from envs.sandboxes.base import SandboxConfig, SandboxUnavailable
from envs.sandboxes.local import LocalSandboxes

from .conftest import Backend, Run, Shell, available, init_pid


@pytest.fixture(scope="module", params=["bwrap", "unshare"])
def local(request: pytest.FixtureRequest, run: Run[Any]) -> Any:
    factory = available(run, request.param)
    yield Backend(request.param, factory, run)
    run(factory.close())


@pytest.fixture(scope="module")
def shell(local: Backend) -> Any:
    sandbox = local.create()
    yield Shell(local, sandbox)
    local.run(sandbox.close())


def test_nothing_else_of_the_host_is_visible(shell: Shell) -> None:
    names = set(shell.out("ls /").split())
    private = {"home", "tmp", "var", "run", "opt", "srv", "proc", "dev", "etc"}
    assert names <= private | set(namespaces.SYSTEM)
    assert shell.out("ls -A /home /tmp /var/tmp /opt /srv /run").split() == [
        "/home:", "agent", "/opt:", "/run:", "/srv:", "/tmp:", "/var/tmp:",
    ]  # fmt: skip
    mounts = shell.out("cat /proc/mounts")
    assert str(Path.cwd()) not in mounts and "cgroup" not in mounts
    commands = shell.out("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "pytest" not in commands


def test_the_system_is_read_only(shell: Shell) -> None:
    for path in ("/usr/x", "/bin/x", "/lib/x", "/etc/x", "/dev/x", "/proc/sys/kernel/core_pattern"):
        assert shell(f"echo x >{path}").exit_code != 0, path
    for command in ("mv /bin /bin2", "rm -d /etc", "mount -t tmpfs x /usr", "umount /usr"):
        assert shell(command).exit_code != 0, command


def test_an_ordinary_user_without_more_namespaces(shell: Shell) -> None:
    assert shell.out("id -u; id -un") == "1000\nagent\n"
    assert shell("unshare --user true").exit_code != 0
    assert shell.out("readlink /proc/self/ns/uts") != os.readlink("/proc/self/ns/uts") + "\n"
    assert shell.out("readlink /proc/self/ns/ipc") != os.readlink("/proc/self/ns/ipc") + "\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root has another user to become")
def test_roots_sandboxes_are_another_user_of_the_host(shell: Shell) -> None:
    assert os.stat(f"/proc/{init_pid(shell.sandbox)}").st_uid > 1000


def test_usual_programs_work(shell: Shell) -> None:
    assert shell.out("echo b a | tr ' ' '\\n' | sort | awk '{print NR $1}'") == "1a\n2b\n"
    assert shell.out("mkfifo f; (echo x >f &); cat f; rm f; echo y >/dev/shm/y") == "x\n"


def test_limits_without_control_groups(run: Run[Any], local: Backend) -> None:
    factory = LocalSandboxes(isolation=local.name, use_cgroups=False)  # type: ignore[arg-type]
    assert factory.enforced_by["memory_mb"] == "RLIMIT_DATA"
    backend = Backend(local.name, factory, run)
    new = Shell(backend, backend.create(memory_mb=64, max_processes=20))
    command = "i=0; while [ $i -lt 60 ]; do sleep 2 & i=$((i+1)); done"
    result = new(command, timeout=1)
    assert "fork" in result.output or result.timed_out, result
    new("kill -9 -1")
    hog = "x=$(head -c 200000000 /dev/zero | tr '\\0' a); echo ${#x}"
    assert new(hog, timeout=30).output.strip() != "200000000"
    assert new.out("echo alive") == "alive\n"
    with pytest.raises(SandboxUnavailable, match="cpus=1"):
        backend.create(cpus=1.0)
    run(factory.close())


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"image": "debian"}, "image='debian'"),
        ({"network": True}, "network=True"),
        ({"workdir": "relative"}, "workdir='relative'"),
        ({"workdir": "/usr/local/x"}, "workdir='/usr/local/x'"),
        ({"workdir": "/home/../etc"}, "workdir"),
    ],
)
def test_refusals_name_the_field(local: Backend, limits: dict[str, Any], message: str) -> None:
    with pytest.raises(SandboxUnavailable, match=message):
        local.create(**limits)


def test_no_isolation_says_what_to_install(run: Run[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "which", lambda name: None)
    with pytest.raises(SandboxUnavailable, match="install bubblewrap"):
        run(LocalSandboxes().create(SandboxConfig()))


def _as_ordinary_user(body: Callable[[], Any]) -> Any:
    """Runs a function in a forked process that gave root up; returns what it returns."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            writer.send(body())
        except BaseException as error:
            writer.send(repr(error))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert reader.poll()
    return reader.recv()


@pytest.mark.skipif(os.getuid() != 0, reason="every other test runs as an ordinary user here")
def test_works_for_an_ordinary_user(local: Backend) -> None:
    async def session() -> list[Any]:
        factory = LocalSandboxes(isolation=local.name)  # type: ignore[arg-type]
        sandbox = await factory.create(SandboxConfig())
        results = [(await sandbox.exec("id -u; mkdir -p a/b; chmod 000 a", 10)).output]
        await sandbox.write_file("/tmp/x", b"x", 0o600)
        results.append((await sandbox.exec("cat /tmp/x; sleep 10", 0.5)).output)
        saved = await sandbox.exec_clean("ulimit -p 2>/dev/null; rm -rf /tmp/x; exit 1", 10)
        results.append(saved.exit_code)
        await sandbox.close()
        directory = sandbox.directory
        await factory.close()
        return [*results, directory.exists(), factory.enforced_by["memory_mb"]]

    result = _as_ordinary_user(lambda: asyncio.new_event_loop().run_until_complete(session()))
    assert result == ["1000\n", "x", 1, False, "RLIMIT_DATA"]


def test_creation_from_a_large_threaded_process(local: Backend) -> None:
    """The child is not a copy of this process: 1 GB of it costs nothing."""
    ballast = bytearray(1 << 30)
    ballast[:: 1 << 12] = b"x" * (1 << 18)
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(32)]
    for thread in threads:
        thread.start()
    try:
        # The blocking part of a creation; a fork of this process takes tens of milliseconds.
        times = []
        for _ in range(5):
            sandbox: Any = local.create()
            local.run(sandbox.close())
            machine = type(sandbox.machine)(["/bin/true"], [])
            started = time.perf_counter()
            channel = local.run(machine.start())
            times.append(time.perf_counter() - started)
            channel.close()
            local.run(machine.kill())
        assert min(times) < 0.02
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_owners() -> None:
    assert owner.is_dead(owner.owner_id()) is False
    assert owner.is_dead(f"{owner.place()}:{os.getpid()}:1") is True
    assert owner.is_dead("other-boot:1:2:3") is None


def test_control_groups_are_found(tmp_path: Path) -> None:
    """Version 2: the nearest ancestor that hands controllers down; version 1: the own group."""
    top = tmp_path / "unified"
    inner = top / "user" / "app"
    inner.mkdir(parents=True)
    (top / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (top / "user" / "cgroup.subtree_control").write_text("memory\n")
    (inner / "cgroup.subtree_control").write_text("\n")
    for directory in (top, top / "user", inner):
        (directory / "cgroup.procs").write_text("")
    old = tmp_path / "pids"
    (old / "own").mkdir(parents=True)
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text("8:pids:/own\n0::/user/app\n")
    (proc / "mountinfo").write_text(
        f"1 0 0:1 / {top} rw - cgroup2 cgroup2 rw\n2 0 0:2 / {old} rw - cgroup cgroup rw,pids\n"
    )
    found = cgroups.find(proc).parents
    assert found["memory"] == (2, top / "user")
    assert found["cpu"] == (2, top)
    assert found["pids"] in ((2, top), (1, old / "own"))


def test_control_group_files(tmp_path: Path) -> None:
    groups = cgroups.Cgroups({name: (2, tmp_path) for name in cgroups.CONTROLLERS})
    made = cgroups.create(groups, "g", memory_bytes=1 << 20, pids=7, cpus=1.5)
    assert made == [tmp_path / "g"]
    read = {path.name: path.read_text() for path in made[0].iterdir()}
    assert read == {"memory.max": "1048576", "pids.max": "7", "cpu.max": "150000 100000"}


def test_process_limits_per_namespace_by_kernel() -> None:
    assert namespaces.counts_processes_per_namespace("5.14.0-generic")
    assert namespaces.counts_processes_per_namespace("6.1")
    assert not namespaces.counts_processes_per_namespace("5.4.0")
