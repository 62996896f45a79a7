"""The processes of a local sandbox: one PID namespace at a time."""

import asyncio
import os
import resource
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from envs.sandboxes import cgroups, namespaces
from envs.sandboxes.base import SandboxConfig, SandboxError
from envs.sandboxes.pipes import PipeChannel

OPEN_FILES = 1024

# Joins the control groups given before "--", volunteers for the kernel's out-of-memory
# killer before anything of the host, and becomes the rest.
JOIN = """
while [ "$1" != -- ]; do echo 0 >"$1/cgroup.procs" || exit 97; shift; done
shift
echo 500 >/proc/self/oom_score_adj
exec "$@"
"""


class LocalMachine:
    """The PID namespace of one sandbox (``shell.Machine``)."""

    def __init__(self, argv: Sequence[str], groups: list[Path]) -> None:
        self._argv = argv
        self._groups = groups
        self._monitor: subprocess.Popen[bytes] | None = None
        self._pidfds: list[int] = []

    async def start(self) -> PipeChannel:
        try:
            # Spawned through vfork (no preexec_fn): its cost does not grow with this
            # process, and no thread's lock is taken in the child.
            self._monitor = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd="/",
                env={"PATH": namespaces.HOST_PATH},
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"cannot start a sandbox: {error}") from error
        monitor = self._monitor
        assert monitor.stdin and monitor.stdout and monitor.stderr
        self._pidfds = [os.pidfd_open(monitor.pid)]
        return PipeChannel(monitor.stdin, monitor.stdout, monitor.stderr)

    def started(self) -> None:
        """Notes PID 1 of the namespace: the only child of the monitor."""
        assert self._monitor is not None
        pid = self._monitor.pid
        with suppress(OSError, ValueError, IndexError):
            child = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
            self._pidfds.append(os.pidfd_open(child))

    @property
    def monitor_pid(self) -> int | None:
        return None if self._monitor is None else self._monitor.pid

    def kill_soon(self) -> None:
        # PID 1 first; the monitor, killed, would take it along, but later.
        for pidfd in reversed(self._pidfds):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    async def kill(self) -> None:
        monitor = self._monitor
        if monitor is None:
            return
        if len(self._pidfds) == 1:
            self.started()
        self.kill_soon()
        for pidfd in self._pidfds:
            await _exited(pidfd)
        # PID 1 is reaped only after everything else in its namespace.
        while monitor.poll() is None:
            await asyncio.sleep(0.001)
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds = []
        self._monitor = None

    async def cause_of_death(self) -> str:
        killed = cgroups.oom_kills(self._groups)
        await self.kill()
        if killed:
            return "the sandbox's supervisor ended: out of memory"
        return "the sandbox's supervisor was killed from outside"


async def _exited(pidfd: int) -> None:
    """Waits until the process behind a pidfd has ended."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not done.done():
            done.set_result(None)

    loop.add_reader(pidfd, wake)
    try:
        await done
    finally:
        loop.remove_reader(pidfd)


def limits_script(config: SandboxConfig, how: dict[str, str]) -> str:
    """Shell code that lowers this process's limits or says what would not be lowered."""
    limits = [("-c", 0, resource.RLIMIT_CORE, 1), ("-n", OPEN_FILES, resource.RLIMIT_NOFILE, 1)]
    if config.max_file_mb is not None:
        # POSIX: -f counts in blocks of 512 bytes.
        limits.append(("-f", config.max_file_mb << 11, resource.RLIMIT_FSIZE, 512))
    if config.memory_mb is not None and how["memory_mb"] != "cgroup":
        limits.append(("-d", config.memory_mb << 10, resource.RLIMIT_DATA, 1024))
    lines = []
    for option, value, kind, unit in limits:
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard // unit)
        lines.append(f"ulimit {option} {value} || exit_limit {option}")
    if config.max_processes is not None and how["max_processes"] != "cgroup":
        count = config.max_processes
        # bash says -u, dash and busybox -p (which in bash is the read-only pipe size).
        lines.append(f"ulimit -u {count} || ulimit -p {count} || exit_limit -u")
    body = "\n".join(lines)
    fail = r"""exit_limit() { printf 'Eulimit %s failed\0' "$1" >&2; exit 1; }"""
    return f"{fail}\nexec 9>&2 2>/dev/null\n{body}\nexec 2>&9 9>&-\n"
