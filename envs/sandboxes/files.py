"""Reads and writes below a directory that hostile links must not lead out of.

Paths are resolved here, one component at a time through directory descriptors that never
follow a link, as the kernel would inside the sandbox: an absolute link starts again at the
sandbox's root and ``..`` stops there. So no race with a process inside leads outside.
"""

import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

MAX_LINKS = 40


@dataclass(frozen=True)
class Tree:
    """A sandbox's file system as the host sees it.

    Attributes:
      root: the writable root.
      read_only: top-level name -> what is mounted over it; None: nothing to be had.
      owner: uid and gid of what is created, None: the caller's.
    """

    root: Path
    read_only: Mapping[str, Path | None] = field(default_factory=dict)
    owner: tuple[int, int] | None = None


class _Walk:
    """Descriptors from the root down to the current directory."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.fds = [os.open(tree.root, os.O_PATH | os.O_DIRECTORY)]
        self.read_only_from: int | None = None

    @property
    def fd(self) -> int:
        return self.fds[-1]

    @property
    def read_only(self) -> bool:
        return self.read_only_from is not None

    def up(self) -> None:
        if len(self.fds) > 1:
            os.close(self.fds.pop())
        if self.read_only_from is not None and len(self.fds) <= self.read_only_from:
            self.read_only_from = None

    def to_root(self) -> None:
        while len(self.fds) > 1:
            self.up()

    def down(self, name: str) -> None:
        self.fds.append(os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self.fd))

    def into_mount(self, name: str) -> None:
        source = self.tree.read_only[name]
        if source is None:
            raise PermissionError(f"/{name} is not a file system of files")
        self.read_only_from = len(self.fds)
        self.fds.append(os.open(source, os.O_PATH | os.O_DIRECTORY))

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def _resolve(walk: _Walk, path: str, *, create: bool) -> str:
    """Walks to the directory of ``path`` and returns the last name in it.

    With ``create`` missing directories are made and a link of the last name is not followed.
    """
    pending = [part for part in path.split("/") if part not in ("", ".")][::-1]
    links = 0
    while pending:
        name = pending.pop()
        if name == "..":
            walk.up()
            continue
        if len(walk.fds) == 1 and name in walk.tree.read_only:
            walk.into_mount(name)
            continue
        try:
            mode = os.stat(name, dir_fd=walk.fd, follow_symlinks=False).st_mode
        except FileNotFoundError:
            if not pending:
                return name
            if not create or walk.read_only:
                raise
            os.mkdir(name, 0o755, dir_fd=walk.fd)
            if walk.tree.owner is not None:
                os.chown(name, *walk.tree.owner, dir_fd=walk.fd, follow_symlinks=False)
            mode = stat.S_IFDIR
        if stat.S_ISLNK(mode) and not (create and not pending):
            links += 1
            if links > MAX_LINKS:
                raise OSError(f"too many links in {path}")
            target = os.readlink(name, dir_fd=walk.fd)
            if target.startswith("/"):
                walk.to_root()
            pending += [part for part in target.split("/") if part not in ("", ".")][::-1]
        elif pending:
            walk.down(name)
        else:
            return name
    raise IsADirectoryError(f"{path} is a directory")


def write(tree: Tree, path: str | PurePosixPath, data: bytes, mode: int) -> None:
    """Writes a regular file in place of whatever has that name. Raises OSError."""
    walk = _Walk(tree)
    try:
        name = _resolve(walk, str(path), create=True)
        if walk.read_only:
            raise PermissionError(f"{path} is part of the read-only system")
        _remove(name, walk.fd)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = os.open(name, flags, 0o600, dir_fd=walk.fd)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            if tree.owner is not None:
                os.fchown(file.fileno(), *tree.owner)
            os.fchmod(file.fileno(), mode)
    finally:
        walk.close()


def _remove(name: str, dir_fd: int) -> None:
    try:
        os.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        shutil.rmtree(name, dir_fd=dir_fd)


def read(tree: Tree, path: str | PurePosixPath, max_bytes: int) -> bytes:
    """Reads a regular file. Raises FileNotFoundError or another OSError."""
    walk = _Walk(tree)
    try:
        name = _resolve(walk, str(path), create=False)
        # Non-blocking: a fifo put in the file's place cannot hang the host.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(name, flags, dir_fd=walk.fd)
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise OSError(f"{path} is not a regular file")
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise OSError(f"{path} is larger than max_bytes={max_bytes}")
        return data
    finally:
        walk.close()


def remove_tree(path: Path) -> None:
    """Removes a directory whose owner may have taken its own permissions away.

    For trees that no process uses any more: it changes modes by path.
    """
    try:
        shutil.rmtree(path)
        return
    except FileNotFoundError:
        return
    except PermissionError:
        pass
    os.chmod(path, 0o700)
    for directory, names, _ in os.walk(path):
        for name in names:
            child = os.path.join(directory, name)
            if not os.path.islink(child):
                os.chmod(child, 0o700)
    shutil.rmtree(path)
