"""One persistent shell over a channel: what the backends have in common.

A backend is a ``Machine``: something that can kill every process inside and start a
supervisor again on the same file system. Time-outs, verifiers and restores all go through
that one operation, so none of them trusts a process that the agent could have reached.
"""

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from envs.sandboxes.base import ExecResult, SandboxDied, SandboxError
from envs.sandboxes.channel import (
    GO,
    PRELUDE,
    Channel,
    ChannelCorrupt,
    Done,
    Failed,
    Frame,
    FrameParser,
    ShellEnded,
    ShellState,
    Started,
    encode,
    export_script,
    run_line,
    state_line,
)
from envs.sandboxes.output import OutputBuffer

START_SECONDS = 60.0
RESPAWN_SECONDS = 10.0
DRAIN_SECONDS = 2.0
MAX_EXPORT_BYTES = 256 << 10


class Machine(Protocol):
    """The processes of one sandbox."""

    async def start(self) -> Channel:
        """Starts a supervisor where none runs. Raises SandboxError."""
        ...

    def started(self) -> None:
        """Called when the supervisor has answered for the first time since ``start``."""
        ...

    async def kill(self) -> None:
        """Kills every process inside and returns when they are gone. Idempotent."""
        ...

    def kill_soon(self) -> None:
        """Starts killing without waiting, where that is possible."""
        ...

    async def cause_of_death(self) -> str:
        """Why the supervisor ended without being asked to."""
        ...


@dataclass
class _Shell:
    """A started supervisor and the shell under it."""

    channel: Channel
    parser: FrameParser
    alive: bool = True


class _NoShell(Exception):
    """The supervisor lives, but no shell under it answers."""


class ShellSession:
    """Runs commands in the persistent shell of a machine."""

    def __init__(self, machine: Machine, state: ShellState, max_output_bytes: int) -> None:
        self._machine = machine
        self._first_state = state
        self._max_output = max_output_bytes
        self._shell: _Shell | None = None
        self._ids = itertools.count()
        self._lock = asyncio.Lock()
        self._dirty = False
        self._dead: str | None = None
        self.state = state

    async def start(self) -> None:
        """Starts the shell now rather than with the first command."""
        async with self._lock:
            await self._ready_shell()

    async def exec(self, command: str, timeout: float) -> ExecResult:
        async with self._lock:
            self.check_alive()
            result, state = await self._guarded(self._ready_shell, command, timeout)
            if state is not None and len(state.exports) <= MAX_EXPORT_BYTES:
                self.state = state
            return result

    async def exec_clean(
        self, command: str, timeout: float, env: dict[str, str] | None
    ) -> ExecResult:
        async def fresh() -> _Shell:
            await self._discard_living()
            first = self._first_state
            exports = "\n".join(filter(None, (first.exports, export_script(env or {}))))
            self._shell = await self._open(ShellState(first.cwd, exports))
            return self._shell

        async with self._lock:
            self.check_alive()
            result, _ = await self._guarded(fresh, command, timeout)
            await self._discard()
            return result

    async def stop(self) -> None:
        """Kills every process; the next command finds a new shell in the old state."""
        async with self._lock:
            self.check_alive()
            await self._discard_living()

    def hang_up(self) -> None:
        """Reads nothing more from the processes, which are about to be killed."""
        if self._shell is not None:
            self._shell.channel.hang_up()

    async def close(self) -> None:
        self._dead = self._dead or "the sandbox is closed"
        await self._discard()

    def check_alive(self) -> None:
        if self._dead is not None:
            raise SandboxDied(self._dead)

    async def _guarded(
        self, ready: Callable[[], Awaitable[_Shell]], command: str, timeout: float
    ) -> tuple[ExecResult, ShellState | None]:
        """Runs a command; whatever goes wrong, no half-finished command stays behind."""
        if "\0" in command:
            return ExecResult("a command cannot contain a NUL character\n", 2), None
        try:
            return await self._run(await ready(), command, timeout)
        except SandboxDied as died:
            self._dead = self._dead or str(died)
            await self._discard()
            raise
        except ChannelCorrupt:
            # Only a process inside can have written there: its own shell ends for it.
            await self._discard()
            return ExecResult("", 137), None
        except BaseException:
            self._dirty = True
            self._machine.kill_soon()
            raise

    async def _run(
        self, shell: _Shell, command: str, timeout: float
    ) -> tuple[ExecResult, ShellState | None]:
        buffer = OutputBuffer(self._max_output)
        state: ShellState | None = None
        status: int | None = None
        # From here: the time it takes to start a shell is not the command's.
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                status, state = await self._converse(shell, command, buffer)
        except TimeoutError:
            await self._kill_drained(shell, buffer)
            await self._discard()
        kept = buffer.kept()
        result = ExecResult(
            kept.text,
            status,
            timed_out=status is None,
            truncated=kept.cut_bytes > 0,
            seconds=time.monotonic() - began,
            cut_at=kept.cut_at,
            cut_bytes=kept.cut_bytes,
        )
        return result, state

    async def _converse(
        self, shell: _Shell, command: str, buffer: OutputBuffer
    ) -> tuple[int, ShellState | None]:
        """Sends the command and reads until it ended; returns its status and the state."""
        while True:
            command_id = f"c{next(self._ids)}"
            await self._write(shell, run_line(command_id, command))
            begun = False
            while True:
                for frame in await self._read(shell, buffer):
                    match frame:
                        case Started(id) if id == command_id:
                            begun = True
                        case Done(id, status, state) if id == command_id:
                            await self._finish_output(shell, buffer)
                            return status, state
                        case ShellEnded(status):
                            shell.alive = False
                        case Failed(message):
                            raise ChannelCorrupt(message)
                if not shell.alive:
                    break
            if begun:
                await self._finish_output(shell, buffer)
                return status, None
            # The shell had ended before it saw the command (a background job killed it).
            await self._respawn(shell)

    async def _finish_output(self, shell: _Shell, buffer: OutputBuffer) -> None:
        """Takes the rest of a finished command's output, and no more than that.

        Between a channel's streams order may be lost (Docker carries them apart). There a
        random token, drawn only now, is sent through the output after the command's end;
        it is cut off again. No program can have printed it before.
        """
        if shell.channel.ordered:
            output, control = shell.channel.read_ready()
            buffer.feed(output)
            self._note(shell, shell.parser.feed(control))
            return
        if not shell.alive:
            # No shell to echo a token: the new one does, for the stream is the same.
            await self._respawn(shell, buffer)
        token = secrets.token_hex(16).encode()
        await shell.channel.write(b"command printf " + token + b" >&4\n")
        held = b""
        while True:
            chunk = await shell.channel.read()
            if chunk is None:
                raise SandboxDied(await self._machine.cause_of_death())
            output, control = chunk
            self._note(shell, shell.parser.feed(control))
            held += output
            at = held.find(token)
            if at >= 0:
                buffer.feed(held[:at] + held[at + len(token) :])
                return
            if not shell.alive:
                buffer.feed(held)
                return
            buffer.feed(held[: -len(token)])
            held = held[-len(token) :]

    async def _kill_drained(self, shell: _Shell, buffer: OutputBuffer) -> None:
        """Kills everything and takes what had been written; the streams end by themselves.

        It is read while the killing goes on: Docker does not notice the end of a container
        whose output nobody takes.
        """

        async def drain() -> None:
            while (chunk := await shell.channel.read()) is not None:
                buffer.feed(chunk[0])

        draining = asyncio.ensure_future(drain())
        try:
            await self._machine.kill()
            await asyncio.wait([draining], timeout=DRAIN_SECONDS)
        finally:
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)

    def _note(self, shell: _Shell, frames: Iterable[Frame]) -> None:
        if any(isinstance(frame, ShellEnded) for frame in frames):
            shell.alive = False

    async def _ready_shell(self) -> _Shell:
        """The running shell, restarted in its last state if it had ended."""
        self.check_alive()
        if self._dirty:
            await self._discard()
        if self._shell is None:
            self._shell = await self._open(self.state)
            return self._shell
        if not self._shell.alive:
            await self._respawn(self._shell)
        return self._shell

    async def _open(self, state: ShellState) -> _Shell:
        shell = _Shell(await self._machine.start(), FrameParser())
        self._shell = shell
        try:
            await self._handshake(shell, PRELUDE, state, None, START_SECONDS)
        except (SandboxDied, ChannelCorrupt, _NoShell) as error:
            await self._discard()
            detail = shell.parser.leftover or str(error)
            raise SandboxError(f"the sandbox's shell did not start: {detail}") from error
        self._machine.started()
        return shell

    async def _respawn(self, shell: _Shell, buffer: OutputBuffer | None = None) -> None:
        """A new shell under the same supervisor; failing that, a new supervisor.

        The agent's other processes live on in the first case only.
        """
        shell.alive = True
        try:
            await self._handshake(shell, GO + PRELUDE, self.state, buffer, RESPAWN_SECONDS)
        except (ChannelCorrupt, _NoShell):
            shell.channel.close()
            await self._machine.kill()
            fresh = await self._open(self.state)
            shell.channel, shell.parser, shell.alive = fresh.channel, fresh.parser, True
            self._shell = shell

    async def _handshake(
        self,
        shell: _Shell,
        opening: str,
        state: ShellState,
        buffer: OutputBuffer | None,
        seconds: float,
    ) -> None:
        command_id = f"i{next(self._ids)}"
        try:
            async with asyncio.timeout(seconds):
                await self._write(shell, opening + state_line(command_id, state))
                while True:
                    for frame in await self._read(shell, buffer):
                        match frame:
                            case Done(id) if id == command_id:
                                return
                            case ShellEnded(status):
                                raise _NoShell(f"the shell ended at once, status {status}")
                            case Failed(message):
                                raise _NoShell(message)
        except TimeoutError:
            raise _NoShell(f"no shell after {seconds:.0f} s") from None

    async def _write(self, shell: _Shell, line: str) -> None:
        # The end of the streams, read next, tells the same with the reason.
        with contextlib.suppress(ConnectionError):
            await shell.channel.write(encode(line))

    async def _read(self, shell: _Shell, buffer: OutputBuffer | None) -> list[Frame]:
        chunk = await shell.channel.read()
        if chunk is None:
            raise SandboxDied(await self._machine.cause_of_death())
        output, control = chunk
        if buffer is not None:
            buffer.feed(output)
        return shell.parser.feed(control)

    async def _discard_living(self) -> None:
        """``_discard`` where a sandbox that died unnoticed must not come to life again."""
        shell = self._shell
        if shell is not None and not self._dirty:
            # Unread output counts for nothing now; past it may be the end.
            for _ in range(64):
                if not any(shell.channel.read_ready()):
                    break
            if shell.channel.ended:
                self._dead = await self._machine.cause_of_death()
                await self._discard()
                raise SandboxDied(self._dead)
        await self._discard()

    async def _discard(self) -> None:
        """Kills everything inside and forgets the channel."""
        self.hang_up()
        shell, self._shell, self._dirty = self._shell, None, False
        await self._machine.kill()
        if shell is not None:
            shell.channel.close()
