"""The wire between the host and a shell in a sandbox, the same for every backend.

Three streams. *Requests* (stdin): one line of shell code a command. *Output*: what the
commands write, and nothing else. *Control*: frames whose fields end in NUL, which no value
of a shell can contain. A frame names the command it is about, so that a late one cannot end
the next command, and no marker is ever looked for in the output.

    S<id>                        the shell begins command <id>
    D<id> <status> <cwd> <vars>  command <id> ended; the shell's directory and exports
    X<status>                    the shell itself ended
    E<message>                   the supervisor cannot work here

The supervisor is PID 1 of the sandbox: nothing inside can kill it, it reaps orphans while
it waits, and the kernel kills everything else when it ends. It starts the shell again when
the shell ends. It runs on any POSIX shell (dash, busybox ash, bash) and needs no tool.
"""

from dataclasses import dataclass
from typing import Protocol

MAX_FRAME_BYTES = 4 << 20
# Tells the supervisor to start the shell again. A shell that is alive after all (the frame
# that said otherwise was forged) runs this line, and so gives itself away.
GO = ": go; command printf 'Ethe shell had not ended\\0' >&3\n"

# $1...: the shell to run. A line other than GO (a command that raced with the end of the
# shell) is skipped; the host sends it again. End of file: the host is gone.
# The shell that waits says "Killed" on its own stderr, so that is not the control stream.
SUPERVISOR = r"""
exec 3>&2 2>/dev/null
while :; do
  (exec "$@" 2>&3 3>&-)
  printf 'X%s\0' "$?" >&3
  while :; do
    IFS= read -r line || exit 0
    case $line in ": go"*) break ;; esac
  done
done
"""

# Runs $1 (bash where there is one, for agents expect it) under the supervisor.
START = r"""
if command -v bash >/dev/null 2>&1; then
  set -- bash --noprofile --norc -s
else
  set -- sh -s
fi
"""

# What a fresh shell reads first. Its own messages go nowhere; 3 is control, 4 is output.
# `command` keeps a function of the agent's with the name of a builtin out of the way.
# Where ash and dash cannot fork, a background job carries on as if it were the shell: past its
# command, to these lines. The kernel knows it by its number, and there it ends. (Comparing
# directories is fast, reading is exact.)
PRELUDE = (
    "exec 3>&2 4>&1 2>/dev/null; _jx_nl='\n'; "
    '_jx_rc() { return "$1"; }; '
    "_jx_done() { _jx_s=$2; "
    'command test /proc/self -ef "/proc/$$" || '
    "if IFS= command read -r _jx_p </proc/self/stat; then "
    'case $_jx_p in "$$ "*) ;; *) command exit 1 ;; esac; fi; '
    '{ command printf \'D%s\\0%s\\0%s\\0\' "$1" "$2" "$PWD"; '
    "command export -p; command printf '\\0'; } >&3; }; _jx_s=0\n"
)


@dataclass(frozen=True)
class Started:
    id: str


@dataclass(frozen=True)
class ShellState:
    """What of a shell outlives it: directory and ``export -p``."""

    cwd: str
    exports: str


@dataclass(frozen=True)
class Done:
    id: str
    status: int
    state: ShellState


@dataclass(frozen=True)
class ShellEnded:
    status: int


@dataclass(frozen=True)
class Failed:
    message: str


Frame = Started | Done | ShellEnded | Failed


class ChannelCorrupt(Exception):
    """Something inside wrote to the control stream."""


class FrameParser:
    """Turns control bytes into frames; raises ChannelCorrupt on anything else."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def leftover(self) -> str:
        """Bytes of no complete frame: the message of a program that failed to start."""
        return bytes(self._buffer[:2000]).decode("utf-8", "replace").strip()

    def feed(self, data: bytes) -> list[Frame]:
        self._buffer += data
        frames: list[Frame] = []
        while (end := self._buffer.find(0)) >= 0:
            kind = self._buffer[:1]
            fields = self._buffer.split(b"\0", 4)
            if kind == b"D" and len(fields) < 5:
                break
            text = [bytes(f).decode("utf-8", "surrogateescape") for f in fields]
            try:
                frame, size = _frame(text, [len(f) + 1 for f in fields], end)
            except ValueError as error:
                raise ChannelCorrupt(f"bad control frame: {text[0][:80]!r}") from error
            frames.append(frame)
            del self._buffer[:size]
        if len(self._buffer) > MAX_FRAME_BYTES:
            raise ChannelCorrupt(f"a control frame is longer than {MAX_FRAME_BYTES} bytes")
        return frames


def _frame(text: list[str], sizes: list[int], end: int) -> tuple[Frame, int]:
    head = text[0]
    match head[:1]:
        case "S":
            return Started(head[1:]), end + 1
        case "D":
            state = ShellState(cwd=text[2], exports=text[3])
            return Done(head[1:], int(text[1]), state), sum(sizes[:4])
        case "X":
            return ShellEnded(int(head[1:])), end + 1
        case "E":
            return Failed(head[1:]), end + 1
    raise ValueError(head)


def quote(text: str) -> str:
    """``text`` as one shell word on one line (newlines come from ``$_jx_nl``)."""
    if "\0" in text:
        raise ValueError("a command cannot contain a NUL character")
    return "'" + text.replace("'", "'\\''").replace("\n", "'\"$_jx_nl\"'") + "'"


def encode(line: str) -> bytes:
    """UTF-8; bytes of a shell's state that were not UTF-8 come out as they went in."""
    try:
        return line.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # Other lone surrogates: a policy's text can hold anything.
        return line.encode("utf-8", "replace")


def run_line(command_id: str, command: str) -> str:
    """The request line that runs ``command`` with empty stdin.

    The redirections are undone after the command, whatever it did to these descriptors,
    and neither the control stream nor the requests are open in its children. ``$?`` is the
    last command's.
    """
    return (
        f"command printf 'S%s\\0' {command_id} >&3; _jx_rc \"$_jx_s\"; "
        f"command eval {quote(command)} </dev/null >&4 2>&1 3>&- 4>&-; "
        f"_jx_done {command_id} $?\n"
    )


def state_line(command_id: str, state: ShellState) -> str:
    """The request line that brings a fresh shell to ``state``."""
    script = f"{state.exports}\ncd -- {quote_plain(state.cwd)} || cd /\n"
    return f"command eval {quote(script)} </dev/null 3>&- 4>&-; _jx_done {command_id} 0\n"


def quote_plain(text: str) -> str:
    """``text`` as one shell word, newlines kept."""
    return "'" + text.replace("'", "'\\''") + "'"


def export_script(env: dict[str, str]) -> str:
    """Shell code that exports ``env``."""
    return "\n".join(f"export {name}={quote_plain(value)}" for name, value in env.items())


class Channel(Protocol):
    """An open wire to one supervisor. Reads and writes never block the event loop."""

    @property
    def ordered(self) -> bool:
        """Whether output written before a frame is readable once the frame is."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the control stream was read to its end: the supervisor is gone."""
        ...

    async def write(self, data: bytes) -> None:
        """Sends request bytes. Raises ConnectionError when the other end is gone."""
        ...

    async def read(self) -> tuple[bytes, bytes] | None:
        """The next bytes of (output, control), one of them may be empty; None at the end."""
        ...

    def read_ready(self) -> tuple[bytes, bytes]:
        """The output and control bytes that can be had at once, within a bound."""
        ...

    def hang_up(self) -> None:
        """Takes nothing more, so that the end of the processes waits for no reader."""
        ...

    def close(self) -> None:
        """Closes the host's ends. Idempotent."""
        ...
