"""A channel over one connection attached to a container's stdin, stdout and stderr."""

import asyncio
import contextlib
import socket
import ssl
import struct
from typing import Any

from envs.sandboxes.base import SandboxUnavailable

CHUNK = 64 << 10
_HEADER = struct.Struct(">BxxxL")
_STDOUT, _STDERR = 1, 2
_RETRY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class AttachChannel:
    """See ``channel.Channel``. Docker carries the two streams apart: no order between them.

    Args:
      connection: what ``attach_socket`` of the docker package returned.
    """

    ordered = False

    def __init__(self, connection: Any) -> None:
        self._connection = connection  # Keeps the response, which owns the socket, alive.
        raw = getattr(connection, "_sock", connection)
        if not isinstance(raw, socket.socket):
            raise SandboxUnavailable(
                f"DOCKER_HOST: a connection of type {type(raw).__name__} is not supported; "
                "use a unix://, tcp:// or TLS address"
            )
        self._socket: socket.socket = raw
        self._socket.setblocking(False)
        self._buffer = bytearray()
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except _RETRY as reason:
                await self._wait(writing=not isinstance(reason, ssl.SSLWantReadError))

    async def read(self) -> tuple[bytes, bytes] | None:
        first = True
        while True:
            output, control = self.read_ready()
            if output or control:
                if first:
                    # Data without a wait: others get their turn, deadlines are noticed.
                    await asyncio.sleep(0)
                return output, control
            if self._ended:
                return None
            await self._wait(writing=False)
            first = False

    def read_ready(self) -> tuple[bytes, bytes]:
        if not self._ended:
            try:
                data = self._socket.recv(CHUNK)
                self._ended = not data
                self._buffer += data
            except _RETRY:
                pass
            except OSError:
                self._ended = True
        return self._demultiplex()

    def _demultiplex(self) -> tuple[bytes, bytes]:
        """Takes the frames that are complete out of the buffer."""
        streams: dict[int, list[bytes]] = {_STDOUT: [], _STDERR: []}
        at = 0
        while len(self._buffer) - at >= _HEADER.size:
            kind, size = _HEADER.unpack_from(self._buffer, at)
            end = at + _HEADER.size + size
            if len(self._buffer) < end:
                break
            streams[_STDERR if kind == _STDERR else _STDOUT].append(
                bytes(self._buffer[at + _HEADER.size : end])
            )
            at = end
        del self._buffer[:at]
        return b"".join(streams[_STDOUT]), b"".join(streams[_STDERR])

    async def _wait(self, *, writing: bool) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        add, remove = (
            (loop.add_writer, loop.remove_writer)
            if writing
            else (loop.add_reader, loop.remove_reader)
        )
        add(self._socket, wake)
        try:
            await ready
        finally:
            remove(self._socket)

    def hang_up(self) -> None:
        # Unread output would keep the daemon from noticing the container's end. Not closed:
        # who waits here is to find the end of the stream.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._ended = True
        self._connection.close()
        self._socket.close()
