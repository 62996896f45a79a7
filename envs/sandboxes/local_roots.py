"""The private directories of local sandboxes, and what dead owners left of them."""

import fcntl
import os
import signal
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from envs.sandboxes import cgroups, files
from envs.sandboxes.base import SandboxUnavailable

# Host user ids for sandboxes made by root: outside every range that distributions hand out.
FIRST_UID = 1_879_100_000
UIDS = 60_000


@dataclass(frozen=True)
class Place:
    """A directory for one sandbox: its private root as ``files`` sees it, its host user."""

    directory: Path
    tree: files.Tree
    uid: int | None


def uid_range() -> range | None:
    """Unprivileged host users for the sandboxes of root; None for an ordinary user."""
    if os.getuid() != 0:
        return None
    mapped = [
        (int(first), int(count))
        for first, _, count in map(str.split, Path("/proc/self/uid_map").read_text().splitlines())
    ]
    for start, length in ((FIRST_UID, UIDS), (60_000, 500)):
        if any(first <= start and start + length <= first + count for first, count in mapped):
            return range(start, start + length)
    return None


def make_root(tree: files.Tree) -> None:
    """Makes a private root: mount points, home, temporary and common directories."""
    tree.root.mkdir()
    if tree.owner is not None:
        os.chown(tree.root, *tree.owner)
    for name in tree.read_only:
        (tree.root / name).mkdir()
    make_directories(tree, ["home/agent", "tmp", "var/tmp", "var/log", "run", "opt", "srv"])
    for name in ("tmp", "var/tmp"):
        (tree.root / name).chmod(0o1777)


def make_directories(tree: files.Tree, names: Iterable[str]) -> None:
    """Makes directories of a root that nothing has run in yet."""
    for name in names:
        path = tree.root
        for part in PurePosixPath(name.strip("/")).parts:
            path = path / part
            if not path.is_dir():
                path.mkdir()
                if tree.owner is not None:
                    os.chown(path, *tree.owner)


def make_base(base: Path, traversable: bool) -> None:
    """Makes or checks the directory shared by this user's owners."""
    base.mkdir(mode=0o711, exist_ok=True, parents=True)
    info = os.lstat(base)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise SandboxUnavailable(f"{base} belongs to somebody else; pass another base_dir")
    if traversable:
        for directory in (base, *base.parents):
            if not directory.stat().st_mode & stat.S_IXOTH:
                raise SandboxUnavailable(
                    f"{directory} is closed to other users, and root's sandboxes run as one: "
                    "pass another base_dir"
                )


def reap_orphans(base: Path) -> list[str]:
    """Removes what owners that are gone left below ``base``; returns their names.

    An owner holds a lock for as long as it lives, so a lock that can be had is a dead one's.
    """
    reaped = []
    for directory in base.glob("owner-*"):
        try:
            fd = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # Just being made, or just removed.
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _reap(directory)
            reaped.append(directory.name)
        except BlockingIOError:
            continue
        finally:
            os.close(fd)
    return reaped


def _reap(directory: Path) -> None:
    parents = directory / "cgroups"
    for parent in parents.read_text().splitlines() if parents.exists() else []:
        groups = list(Path(parent).glob(f"{directory.name}-*"))
        for group in groups:
            for pid in cgroups.processes(group):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        cgroups.remove(groups)
    files.remove_tree(directory)
