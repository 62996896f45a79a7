"""A channel over three pipes."""

import array
import asyncio
import fcntl
import os
import termios
from typing import IO

CHUNK = 64 << 10


class PipeChannel:
    """See ``channel.Channel``. Output written before a frame is in its pipe before it.

    Nothing is read between commands: a background process that floods its output blocks on
    the full pipe instead of keeping this process busy.
    """

    ordered = True

    def __init__(self, requests: IO[bytes], output: IO[bytes], control: IO[bytes]) -> None:
        self._files = (requests, output, control)
        self._requests, self._output, self._control = (file.fileno() for file in self._files)
        self._ends = {self._output: False, self._control: False}
        for file in self._files:
            os.set_blocking(file.fileno(), False)

    @property
    def ended(self) -> bool:
        return self._ends[self._control]

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._requests, view) :]
            except BlockingIOError:
                await self._wait(writing=True)

    async def read(self) -> tuple[bytes, bytes] | None:
        first = True
        while True:
            control = self._take(self._control)
            output = self._take(self._output)
            if control or output:
                if first:
                    # Data without a wait: others get their turn, deadlines are noticed.
                    await asyncio.sleep(0)
                return output, control
            if self._ends[self._control]:
                return None
            await self._wait(writing=False)
            first = False

    def read_ready(self) -> tuple[bytes, bytes]:
        control = self._take(self._control)
        left = array.array("i", [0])
        try:
            fcntl.ioctl(self._output, termios.FIONREAD, left)
        except OSError:
            return b"", control
        parts = []
        while left[0] > 0 and (data := self._take(self._output, left[0])):
            parts.append(data)
            left[0] -= len(data)
        return b"".join(parts), control

    def _take(self, fd: int, size: int = CHUNK) -> bytes:
        if self._ends[fd]:
            return b""
        try:
            data = os.read(fd, size)
        except BlockingIOError:
            return b""
        if not data:
            self._ends[fd] = True
        return data

    async def _wait(self, *, writing: bool) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        reading = [fd for fd, ended in self._ends.items() if not ended]
        for fd in reading:
            if not writing:
                loop.add_reader(fd, wake)
        if writing:
            loop.add_writer(self._requests, wake)
        try:
            await ready
        finally:
            if writing:
                loop.remove_writer(self._requests)
            else:
                for fd in reading:
                    loop.remove_reader(fd)

    def hang_up(self) -> None:
        # A killed process that was writing to a full pipe ends all the same.
        pass

    def close(self) -> None:
        for file in self._files:
            file.close()
