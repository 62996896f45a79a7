"""Files in and out of a container through Docker's archive calls.

The daemon resolves paths inside the container's own root, links included. All functions
block, take the docker package's low-level client and raise SandboxError.
"""

import base64
import io
import json
import posixpath
import tarfile
import time
from typing import TYPE_CHECKING, Any

from envs.sandboxes.base import SandboxError

if TYPE_CHECKING:
    from docker import APIClient

_TAR_OVERHEAD = 64 << 10


def _stat(api: "APIClient", container: str, path: str) -> dict[str, Any] | None:
    """The daemon's description of a path; None if there is nothing there."""
    url = api._url("/containers/{0}/archive", container)  # type: ignore[attr-defined]
    response = api.head(url, params={"path": path})
    if response.status_code == 404:
        return None
    if response.status_code != 200:
        raise SandboxError(f"cannot look at {path} in the container: {response.reason}")
    header = response.headers["X-Docker-Container-Path-Stat"]
    described: dict[str, Any] = json.loads(base64.b64decode(header))
    return described


def _put(api: "APIClient", container: str, path: str, entry: tarfile.TarInfo, data: bytes) -> None:
    """Puts one entry at ``path``, with the directories above it that are missing."""
    if not path.startswith("/"):
        raise SandboxError(f"path={path!r}: must be absolute")
    path = posixpath.normpath(path)
    parent = posixpath.dirname(path)
    missing: list[str] = []
    while parent != "/" and _stat(api, container, parent) is None:
        missing.append(parent)
        parent = posixpath.dirname(parent)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for directory in reversed(missing):
            made = tarfile.TarInfo(posixpath.relpath(directory, parent))
            made.type, made.mode, made.mtime = tarfile.DIRTYPE, 0o755, int(time.time())
            made.uid, made.gid = entry.uid, entry.gid
            tar.addfile(made)
        entry.name = posixpath.relpath(path, parent)
        entry.mtime = int(time.time())
        tar.addfile(entry, io.BytesIO(data))
    from docker.errors import APIError

    try:
        if not api.put_archive(container, parent, buffer.getvalue()):
            raise SandboxError(f"cannot write {path} in the container")
    except APIError as error:
        raise SandboxError(f"cannot write {path}: {error.explanation}") from error


def write_file(
    api: "APIClient", container: str, path: str, data: bytes, mode: int, owner: tuple[int, int]
) -> None:
    """Writes a file in place of whatever has that name."""
    entry = tarfile.TarInfo()
    entry.size, entry.mode = len(data), mode
    entry.uid, entry.gid = owner
    _put(api, container, path, entry, data)


def make_directory(api: "APIClient", container: str, path: str, owner: tuple[int, int]) -> None:
    """Makes a directory unless it is there."""
    if _stat(api, container, path) is None:
        entry = tarfile.TarInfo()
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        entry.uid, entry.gid = owner
        _put(api, container, path, entry, b"")


def read_file(api: "APIClient", container: str, path: str, max_bytes: int) -> bytes:
    """Reads a regular file, following links inside the container."""
    described = _stat(api, container, path)
    if described is not None and described.get("linkTarget"):
        path = described["linkTarget"]
        described = _stat(api, container, path)
    if described is None:
        raise FileNotFoundError(f"no such file in the sandbox: {path}")
    from docker.errors import APIError

    try:
        chunks, _ = api.get_archive(container, path)
        buffer = io.BytesIO()
        for chunk in chunks:
            buffer.write(chunk)
            if buffer.tell() > max_bytes + _TAR_OVERHEAD:
                raise SandboxError(f"cannot read {path}: larger than max_bytes={max_bytes}")
    except APIError as error:
        raise SandboxError(f"cannot read {path}: {error.explanation}") from error
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as tar:
        entry = tar.next()
        file = tar.extractfile(entry) if entry is not None and entry.isfile() else None
        if file is None:
            raise SandboxError(f"cannot read {path}: not a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise SandboxError(f"cannot read {path}: larger than max_bytes={max_bytes}")
    return data
