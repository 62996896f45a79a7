"""Sandboxes made of Linux namespaces on this machine: no daemon, no image, no privilege.

A sandbox is a private directory as its root, the host's system directories read-only over
it, and one PID namespace at a time in which a supervisor runs the shell. Killing the
namespace's PID 1 makes the kernel kill all of it; the files stay, so a new namespace on the
same directory takes a few milliseconds and trusts nothing that ran before.
"""

import asyncio
import fcntl
import os
import secrets
import subprocess
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Literal

from envs.sandboxes import cgroups, files, namespaces
from envs.sandboxes.base import (
    ExecResult,
    SandboxConfig,
    SandboxError,
    SandboxUnavailable,
)
from envs.sandboxes.channel import START, SUPERVISOR, ShellState
from envs.sandboxes.defaults import shell_environment
from envs.sandboxes.etc import build_etc
from envs.sandboxes.local_machine import JOIN, LocalMachine, limits_script
from envs.sandboxes.local_roots import (
    Place,
    make_base,
    make_directories,
    make_root,
    reap_orphans,
    uid_range,
)
from envs.sandboxes.shell import ShellSession

Isolation = Literal["bwrap", "unshare"]

# Private roots made ahead: on a disk the two dozen directories cost more than the namespaces.
SPARE_ROOTS = 4


class LocalSandbox:
    """See ``base.Sandbox``; made by ``LocalSandboxes.create``."""

    def __init__(
        self,
        factory: "LocalSandboxes",
        directory: Path,
        tree: files.Tree,
        groups: list[Path],
        machine: LocalMachine,
        session: ShellSession,
    ) -> None:
        self._factory = factory
        self.directory = directory
        self.machine = machine
        self._tree = tree
        self.groups = groups
        self._session = session
        self._snapshots: dict[str, ShellState] = {}
        self._closing: asyncio.Task[None] | None = None

    async def exec(self, command: str, timeout: float) -> ExecResult:
        return await self._session.exec(command, timeout)

    async def exec_clean(
        self, command: str, timeout: float, env: dict[str, str] | None = None
    ) -> ExecResult:
        return await self._session.exec_clean(command, timeout, env)

    async def stop(self) -> None:
        await self._session.stop()

    async def write_file(self, path: str | PurePosixPath, data: bytes, mode: int = 0o644) -> None:
        self._session.check_alive()
        try:
            if len(data) < 64 << 10:
                files.write(self._tree, path, data, mode)
            else:
                await asyncio.to_thread(files.write, self._tree, path, data, mode)
        except OSError as error:
            raise SandboxError(f"cannot write {path}: {error.strerror or error}") from error

    async def read_file(self, path: str | PurePosixPath, max_bytes: int = 16 << 20) -> bytes:
        self._session.check_alive()
        try:
            return await asyncio.to_thread(files.read, self._tree, path, max_bytes)
        except FileNotFoundError:
            raise FileNotFoundError(f"no such file in the sandbox: {path}") from None
        except OSError as error:
            raise SandboxError(f"cannot read {path}: {error.strerror or error}") from error

    async def snapshot(self) -> str:
        self._session.check_alive()
        name = f"snapshot-{len(self._snapshots)}"
        await self._factory.copy(self._tree.root, self.directory / name)
        self._snapshots[name] = self._session.state
        return name

    async def restore(self, snapshot: str) -> None:
        if snapshot not in self._snapshots:
            raise SandboxError(f"snapshot={snapshot!r}: this sandbox has no such snapshot")
        await self._session.stop()
        await asyncio.to_thread(files.remove_tree, self._tree.root)
        await self._factory.copy(self.directory / snapshot, self._tree.root)
        self._session.state = self._snapshots[snapshot]

    async def close(self) -> None:
        if self._closing is None:
            self.machine.kill_soon()
            self._closing = asyncio.ensure_future(self._close())
        # A cancelled caller leaves, the removal goes on.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._session.close()
        await asyncio.to_thread(self._remove)
        self._factory.forget(self)

    def _remove(self) -> None:
        cgroups.remove(self.groups)
        files.remove_tree(self.directory)


class LocalSandboxes:
    """Makes ``LocalSandbox``es. Use one in one event loop.

    The loop's thread must outlive the sandboxes: the kernel kills them with the thread that
    started them, which is what ends them when this process is killed.

    Memory and process limits are enforced by control groups where this process may make
    them. Elsewhere ``memory_mb`` falls back to RLIMIT_DATA (every process on its own, shared
    memory not counted) and ``max_processes`` to RLIMIT_NPROC, and ``cpus`` is refused.

    Args:
      base_dir: where private directories go; the system's temporary directory by default.
      isolation: "bwrap" or "unshare"; the first that works by default.
      use_cgroups: False leaves control groups alone.
    """

    def __init__(
        self,
        base_dir: str | Path | None = None,
        isolation: Isolation | None = None,
        use_cgroups: bool = True,
    ) -> None:
        self._base = Path(base_dir or tempfile.gettempdir()) / f"jaxagent-local-{os.getuid()}"
        self._wanted = isolation
        self._cgroups = cgroups.find() if use_cgroups else cgroups.Cgroups({})
        self._isolation: Isolation | None = None
        self._directory: Path | None = None
        self._lock_fd = -1
        self._etc = Path()
        self._opening = asyncio.Lock()
        self._sandboxes: set[LocalSandbox] = set()
        self._count = 0
        self._spare: deque[asyncio.Task[Place]] = deque()
        self._closed = False
        self._uids = uid_range()

    @property
    def isolation(self) -> Isolation | None:
        """The way of isolation in use; None before the first ``create``."""
        return self._isolation

    @property
    def enforced_by(self) -> dict[str, str]:
        """How each limit is enforced here; "refused" where it cannot be."""
        memory = "cgroup" if self._cgroups.has("memory") else "RLIMIT_DATA"
        processes = "cgroup" if self._cgroups.has("pids") else "RLIMIT_NPROC"
        if processes == "RLIMIT_NPROC" and not self._rlimit_counts_processes():
            processes = "refused"
        cpu = "cgroup" if self._cgroups.has("cpu") else "refused"
        return {"memory_mb": memory, "max_processes": processes, "cpus": cpu}

    def _rlimit_counts_processes(self) -> bool:
        unprivileged = os.getuid() != 0 or self._uids is not None
        return unprivileged and namespaces.counts_processes_per_namespace()

    async def create(self, config: SandboxConfig) -> LocalSandbox:
        self._check(config)
        await self._open()
        return await self._create(config)

    def _check(self, config: SandboxConfig) -> None:
        if self._closed:
            raise SandboxError("this factory is closed")
        if config.image is not None:
            raise SandboxUnavailable(f"image={config.image!r}: only the docker backend has images")
        if config.network:
            raise SandboxUnavailable("network=True: local sandboxes have none; use docker")
        how = self.enforced_by
        for name in ("memory_mb", "max_processes", "cpus"):
            if getattr(config, name) is not None and how[name] == "refused":
                raise SandboxUnavailable(
                    f"{name}={getattr(config, name)}: cannot be enforced here without write "
                    f"access to a control group; set {name}=None or use docker"
                )
        top = PurePosixPath(config.workdir)
        if not top.is_absolute() or ".." in top.parts:
            raise SandboxUnavailable(f"workdir={config.workdir!r}: must be an absolute path")
        if len(top.parts) > 1 and top.parts[1] in namespaces.mount_points(self._etc):
            raise SandboxUnavailable(f"workdir={config.workdir!r}: is in the read-only system")

    async def _open(self) -> None:
        """Takes a directory of this owner's, reaps dead owners', finds what isolation works."""
        async with self._opening:
            if self._isolation is not None:
                return
            if self._directory is None:
                await asyncio.to_thread(self._take_directory)
            wanted: tuple[Isolation, ...] = ("bwrap", "unshare")
            if self._wanted is not None:
                wanted = (self._wanted,)
            reasons = []
            for kind in wanted:
                self._isolation = kind
                try:
                    sandbox = await self._create(SandboxConfig(memory_mb=None, max_processes=None))
                    await sandbox.close()
                    return
                except (SandboxError, OSError) as error:
                    reasons.append(f"{kind}: {error}")
                    self._isolation = None
            raise SandboxUnavailable(
                "no sandbox can be made here; " + namespaces.TOOLS + ", and allow user "
                "namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone,"
                " kernel.apparmor_restrict_unprivileged_userns). Tried " + "; ".join(reasons)
            )

    def _take_directory(self) -> None:
        make_base(self._base, traversable=self._uids is not None)
        reap_orphans(self._base)
        directory = Path(tempfile.mkdtemp(prefix="owner-", dir=self._base))
        directory.chmod(0o711)
        self._lock_fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        parents = {str(parent) for _, parent in self._cgroups.parents.values()}
        (directory / "cgroups").write_text("\n".join(sorted(parents)))
        self._etc = directory / "etc"
        build_etc(self._etc)
        self._directory = directory

    async def _create(self, config: SandboxConfig) -> LocalSandbox:
        assert self._directory is not None
        groups: list[Path] = []
        sandbox: LocalSandbox | None = None
        place = await self._take_place()
        try:
            directory, tree, uid = place.directory, place.tree, place.uid
            make_directories(tree, [config.workdir])
            name = f"{self._directory.name}-{directory.name.rpartition('-')[2]}"
            groups += self._make_groups(config, name)
            env = {**shell_environment(), **_IDENTITY, **config.env}
            view = namespaces.View(tree.root, self._etc, env)
            start = limits_script(config, self.enforced_by) + START + SUPERVISOR
            argv = self._argv(view, ["/bin/sh", "-c", start, "sh"], uid, groups)
            machine = LocalMachine(argv, groups)
            session = ShellSession(machine, ShellState(config.workdir, ""), config.max_output_bytes)
            sandbox = LocalSandbox(self, directory, tree, groups, machine, session)
            self._sandboxes.add(sandbox)
            await session.start()
            return sandbox
        except BaseException as error:
            if sandbox is not None:
                await sandbox.close()
            else:
                cgroups.remove(groups)
                files.remove_tree(place.directory)
            if isinstance(error, OSError):
                raise SandboxError(f"cannot make a sandbox: {error}") from error
            raise

    async def _take_place(self) -> Place:
        """A private root made ahead; others are made in the background."""
        loop = asyncio.get_running_loop()
        while len(self._spare) <= SPARE_ROOTS:
            number, self._count = self._count, self._count + 1
            self._spare.append(loop.create_task(asyncio.to_thread(self._make_place, number)))
        task = self._spare.popleft()
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._spare.appendleft(task)
            raise
        except OSError as error:
            raise SandboxError(f"cannot make a sandbox's directory: {error}") from error

    def _make_place(self, number: int) -> Place:
        assert self._directory is not None
        directory = self._directory / f"sandbox-{number}"
        directory.mkdir(mode=0o711)
        uid = None if self._uids is None else self._uids[number % len(self._uids)]
        owner = None if uid is None else (uid, uid)
        mounts = namespaces.mount_points(self._etc)
        tree = files.Tree(directory / "root", mounts, owner)
        make_root(tree)
        return Place(directory, tree, uid)

    def _make_groups(self, config: SandboxConfig, name: str) -> list[Path]:
        how = self.enforced_by
        memory = config.memory_mb if how["memory_mb"] == "cgroup" else None
        return cgroups.create(
            self._cgroups,
            name,
            memory_bytes=None if memory is None else memory << 20,
            pids=config.max_processes if how["max_processes"] == "cgroup" else None,
            cpus=config.cpus,
        )

    def _argv(
        self, view: namespaces.View, command: list[str], uid: int | None, groups: list[Path]
    ) -> list[str]:
        assert self._isolation is not None
        try:
            inner = namespaces.BUILDERS[self._isolation](view, command)
            prefix = namespaces.drop_to(uid, uid)
        except FileNotFoundError as error:
            raise SandboxUnavailable(str(error)) from error
        return ["/bin/sh", "-c", JOIN, "sh", *map(str, groups), "--", *prefix, *inner]

    async def copy(self, source: Path, target: Path) -> None:
        """Copies a private root, from inside a sandbox: a live agent can swap in links."""
        uid = source.stat().st_uid if self._uids is not None else None
        directory = source.parent
        scratch = directory / f"copy-{secrets.token_hex(4)}"
        owner = None if uid is None else (uid, uid)
        tree = files.Tree(scratch, namespaces.mount_points(self._etc), owner)
        await asyncio.to_thread(make_root, tree)
        make_directories(tree, ["from", "to"])
        target.mkdir(mode=0o755)
        if uid is not None:
            os.chown(target, uid, uid)
        view = namespaces.View(
            scratch, self._etc, shell_environment(), [(source, "from", False), (target, "to", True)]
        )
        script = ["/bin/sh", "-c", "cp -a --reflink=auto /from/. /to >&2"]
        process = await asyncio.create_subprocess_exec(
            *self._argv(view, script, uid, []),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            env={"PATH": namespaces.HOST_PATH},
        )
        try:
            _, errors = await process.communicate()
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            raise
        await asyncio.to_thread(files.remove_tree, scratch)
        if process.returncode != 0:
            message = errors.decode("utf-8", "replace").strip()[-300:]
            raise SandboxError(f"cannot copy the sandbox's files: {message}")

    def forget(self, sandbox: LocalSandbox) -> None:
        self._sandboxes.discard(sandbox)

    async def close(self) -> None:
        """Closes every sandbox and removes this owner's directory. Idempotent."""
        self._closed = True
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._sandboxes)))
        await asyncio.gather(*self._spare, return_exceptions=True)
        self._spare.clear()
        if self._directory is not None:
            await asyncio.to_thread(files.remove_tree, self._directory)
            self._directory = None
            os.close(self._lock_fd)
            with suppress(OSError):
                self._base.rmdir()


_IDENTITY = {
    "HOME": "/home/agent",
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh",
    "PATH": namespaces.HOST_PATH,
}
