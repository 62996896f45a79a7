"""The interface between a terminal environment and the machine it runs on."""

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Protocol


class SandboxError(Exception):
    """The sandbox, not the policy, failed. An episode that meets it is invalid."""


class SandboxUnavailable(SandboxError):
    """No isolation of this kind is to be had here; the message says what to install."""


class SandboxDied(SandboxError):
    """The sandbox is gone (killed, out of memory, engine stopped); it answers no more."""


@dataclass(frozen=True)
class ExecResult:
    """What one command did.

    Attributes:
      output: stdout and stderr as they came, decoded (invalid UTF-8 replaced) and bounded:
        of a longer stream the head and the tail are kept, joined without a marker.
      exit_code: the shell's status; None when ``timed_out``.
      timed_out: the deadline passed; ``output`` is what came until then.
      truncated: ``cut_bytes`` bytes were left out of ``output`` at index ``cut_at``.
      seconds: wall time.
    """

    output: str
    exit_code: int | None
    timed_out: bool = False
    truncated: bool = False
    seconds: float = 0.0
    cut_at: int = 0
    cut_bytes: int = 0

    @property
    def text(self) -> str:
        """``output`` with a marker line where bytes were left out."""
        if not self.truncated:
            return self.output
        head, tail = self.output[: self.cut_at], self.output[self.cut_at :]
        return f"{head}\n[... {self.cut_bytes} bytes left out ...]\n{tail}"


@dataclass(frozen=True)
class SandboxConfig:
    """Limits of one sandbox. A backend that cannot enforce a set limit refuses it.

    Attributes:
      image: docker only: the image; None elsewhere.
      memory_mb: memory limit of all processes together.
      max_processes: process (and thread) limit.
      cpus: CPU limit in cores; None leaves it open.
      max_file_mb: largest file a process may write.
      network: whether the sandbox can reach the network.
      env: variables set in the shell, over the backend's own defaults.
      workdir: where the shell starts (created if missing).
      max_output_bytes: kept bytes of one command's output (head and tail).
    """

    image: str | None = None
    memory_mb: int | None = 512
    max_processes: int | None = 128
    cpus: float | None = None
    max_file_mb: int | None = 256
    network: bool = False
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/home/agent"
    max_output_bytes: int = 16_384


class Sandbox(Protocol):
    """A disposable machine with one persistent shell.

    The working directory and exported variables persist from command to command.
    Commands have empty stdin. A time-out kills the whole process tree of the command,
    ``setsid`` children included, and returns the partial output. A command that times out
    or ends the shell (``exit``, ``exec``, ``kill``) leaves the working directory and the
    exported variables as they were before it; the shell is usable again at once.

    Every method raises ``SandboxDied`` once the sandbox is gone.
    """

    async def exec(self, command: str, timeout: float) -> ExecResult:
        """Runs ``command`` in the persistent shell; ``timeout`` in seconds."""
        ...

    async def exec_clean(
        self, command: str, timeout: float, env: dict[str, str] | None = None
    ) -> ExecResult:
        """Kills every process of the agent, then runs ``command`` in a fresh shell.

        The fresh shell has a clean environment (none of the agent's variables, PATH,
        functions or working directory). Verifiers run through this.
        """
        ...

    async def stop(self) -> None:
        """Kills every process of the agent, its shell too.

        The next ``exec`` finds a new shell with the directory and variables of the last.
        """
        ...

    async def write_file(self, path: str | PurePosixPath, data: bytes, mode: int = 0o644) -> None:
        """Writes a file (parents are created), owned by the agent's user.

        An existing file or link of that name is replaced. Raises SandboxError if the path
        is not writable to the agent or leads outside the sandbox.
        """
        ...

    async def read_file(self, path: str | PurePosixPath, max_bytes: int = 16 << 20) -> bytes:
        """Reads a regular file. Raises FileNotFoundError; refuses links that lead outside."""
        ...

    async def snapshot(self) -> str:
        """Saves the writable file system and returns an identifier."""
        ...

    async def restore(self, snapshot: str) -> None:
        """Brings back a snapshot of this sandbox; running processes are killed.

        The working directory and exported variables are those of the snapshot as well.
        """
        ...

    async def close(self) -> None:
        """Kills everything and removes every trace. Idempotent."""
        ...


class SandboxFactory(Protocol):
    """Makes sandboxes: ``LocalSandboxes()``, ``DockerSandboxes()``, a pool."""

    async def create(self, config: SandboxConfig) -> Sandbox: ...

    async def close(self) -> None: ...
