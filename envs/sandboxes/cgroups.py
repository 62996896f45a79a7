"""Control groups, version 1 or 2, where this process may make them."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = ("memory", "pids", "cpu")
CPU_PERIOD_US = 100_000


@dataclass(frozen=True)
class Cgroups:
    """Where groups can be made: controller -> (version, parent directory)."""

    parents: Mapping[str, tuple[int, Path]]

    def has(self, controller: str) -> bool:
        return controller in self.parents


def find(proc: Path = Path("/proc/self")) -> Cgroups:
    """Finds writable parents for the controllers among the mounted hierarchies."""
    own = _own_paths((proc / "cgroup").read_text())
    parents: dict[str, tuple[int, Path]] = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if not right:
            continue
        mount_root, mount_point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        if kind == "cgroup":
            for controller in set(options.split(",")) & set(CONTROLLERS):
                parent = _below(Path(mount_point), mount_root, own.get(controller, "/"))
                if os.access(parent, os.W_OK) and controller not in parents:
                    parents[controller] = (1, parent)
        elif kind == "cgroup2":
            start = _below(Path(mount_point), mount_root, own.get("", "/"))
            for controller, parent in _delegated(start, Path(mount_point)).items():
                parents.setdefault(controller, (2, parent))
    return Cgroups(parents)


def _own_paths(text: str) -> dict[str, str]:
    """Controller -> path of this process's group; "" is version 2's."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _below(mount_point: Path, mount_root: str, path: str) -> Path:
    """The directory of group ``path`` under a mount that shows ``mount_root``."""
    relative = os.path.relpath(path, mount_root)
    directory = mount_point if relative.startswith("..") else mount_point / relative
    return directory if directory.is_dir() else mount_point


def _delegated(start: Path, top: Path) -> dict[str, Path]:
    """Version 2: the nearest ancestors that hand controllers down and are writable."""
    found: dict[str, Path] = {}
    for directory in (start, *start.parents):
        try:
            enabled = (directory / "cgroup.subtree_control").read_text().split()
        except OSError:
            break
        writable = os.access(directory, os.W_OK) and os.access(directory / "cgroup.procs", os.W_OK)
        for controller in enabled:
            if controller in CONTROLLERS and writable:
                found.setdefault(controller, directory)
        if directory == top:
            break
    return found


def create(
    cgroups: Cgroups,
    name: str,
    *,
    memory_bytes: int | None = None,
    pids: int | None = None,
    cpus: float | None = None,
) -> list[Path]:
    """Makes the groups the limits ask for and returns their directories."""
    wanted: list[tuple[str, dict[int, dict[str, str]]]] = []
    if memory_bytes is not None:
        limit = str(memory_bytes)
        wanted.append(
            (
                "memory",
                {
                    1: {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit},
                    2: {"memory.max": limit, "memory.swap.max": "0"},
                },
            )
        )
    if pids is not None:
        wanted.append(("pids", {1: {"pids.max": str(pids)}, 2: {"pids.max": str(pids)}}))
    if cpus is not None:
        quota, period = int(cpus * CPU_PERIOD_US), str(CPU_PERIOD_US)
        v1 = {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": str(quota)}
        wanted.append(("cpu", {1: v1, 2: {"cpu.max": f"{quota} {period}"}}))
    made: list[Path] = []
    try:
        for controller, files in wanted:
            version, parent = cgroups.parents[controller]
            group = parent / name
            if group not in made:
                group.mkdir()
                made.append(group)
            for file, value in files[version].items():
                # Swap accounting is often compiled out or turned off; there is no such file.
                if "swap" in file or "memsw" in file:
                    if (group / file).exists():
                        (group / file).write_text(value)
                else:
                    (group / file).write_text(value)
    except BaseException:
        remove(made)
        raise
    return made


def processes(group: Path) -> list[int]:
    """Process ids in a group, as this process numbers them."""
    try:
        return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def oom_kills(groups: list[Path]) -> int:
    """How often the kernel killed for memory in these groups."""
    for group in groups:
        for name in ("memory.events", "memory.oom_control"):
            try:
                lines = (group / name).read_text().splitlines()
            except OSError:
                continue
            for line in lines:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def remove(groups: list[Path], seconds: float = 2.0) -> list[Path]:
    """Removes empty groups, waiting for exiting processes; returns what would not go."""
    deadline = time.monotonic() + seconds
    left = []
    for group in groups:
        while True:
            try:
                group.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    left.append(group)
                    break
                time.sleep(0.002)
    return left
