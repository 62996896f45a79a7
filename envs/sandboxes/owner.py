"""Who owns what a sandbox leaves on a machine, so that only the dead's is reaped."""

import os
from pathlib import Path


def _start_time(pid: int) -> str | None:
    """The kernel's start time of a process; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def place() -> str:
    """The boot and the PID namespace, within which process ids mean something."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


def owner_id(pid: int | None = None) -> str:
    """Names a process for ever: place, process id and start time."""
    pid = os.getpid() if pid is None else pid
    return f"{place()}:{pid}:{_start_time(pid)}"


def is_dead(owner: str) -> bool | None:
    """Whether the owner is gone; None if that cannot be told from here."""
    where, _, rest = owner.rpartition(":")[0].rpartition(":")
    if where != place():
        return None
    pid, start = rest, owner.rpartition(":")[2]
    return _start_time(int(pid)) != start
