"""A terminal as an environment: commands in, what a person would see out."""

from collections.abc import Sequence
from dataclasses import dataclass

from envs.environment import Segment, Step
from envs.rendering import render
from envs.sandboxes.base import ExecResult, Sandbox, SandboxFactory
from envs.tasks.task import Task
from envs.verifier import verify

__all__ = ["Notices", "SetupError", "TerminalEnv", "observe", "render"]


class SetupError(Exception):
    """The task's world could not be prepared: the episode is invalid."""


@dataclass(frozen=True)
class Notices:
    """What the harness says around a command's output; an empty text says nothing.

    Attributes:
      failed: after a status other than 0; ``{status}``.
      succeeded: after status 0; ``{status}``.
      timed_out: after a time-out; ``{seconds}``.
      cut: in place of output left out; ``{bytes}``.
      silent: when a command printed nothing.
    """

    failed: str = "[exit {status}]\n"
    succeeded: str = ""
    timed_out: str = "[timed out after {seconds:g} s]\n"
    cut: str = "[... {bytes} bytes left out ...]\n"
    silent: str = ""


def observe(result: ExecResult, timeout: float, max_chars: int, notices: Notices) -> list[Segment]:
    """A command's result as segments: rendered output is "observation", the rest "template".

    Of output over ``max_chars`` the first and the last half of that are kept.
    """
    if max_chars < 2:
        raise ValueError(f"max_chars={max_chars}: at least 2 are needed")
    segments: list[Segment] = []
    if result.truncated:
        head = render(result.output[: result.cut_at])
        tail = render(result.output[result.cut_at :])
        cut = result.cut_bytes
        kept_head, kept_tail = head[: max_chars - max_chars // 2], tail[-(max_chars // 2) :]
        cut += len((head[len(kept_head) :] + tail[: len(tail) - len(kept_tail)]).encode())
    else:
        text = render(result.output)
        kept_head, kept_tail, cut = text, "", 0
        if len(text) > max_chars:
            kept_head, kept_tail = text[: max_chars - max_chars // 2], text[-(max_chars // 2) :]
            cut = len(text[len(kept_head) : len(text) - len(kept_tail)].encode())
    if kept_head:
        segments.append(Segment(kept_head, "observation"))
    if cut:
        _notice(segments, notices.cut.format(bytes=cut))
        if kept_tail:
            segments.append(Segment(kept_tail, "observation"))
    elif not kept_head:
        _notice(segments, notices.silent)
    if result.timed_out:
        _notice(segments, notices.timed_out.format(seconds=timeout))
    else:
        text = notices.succeeded if result.exit_code == 0 else notices.failed
        _notice(segments, text.format(status=result.exit_code))
    return segments


def _notice(segments: list[Segment], text: str) -> None:
    """Adds a notice on a line of its own; the line break it may need is its own, too."""
    if text:
        unfinished = bool(segments) and not segments[-1].text.endswith("\n")
        segments.append(Segment("\n" + text if unfinished else text, "template"))


class TerminalEnv:
    """One episode of a task in a sandbox (``jaxagent.episodes.environment.Environment``).

    Args:
      task: what to do and how it is verified.
      sandboxes: where the sandbox comes from; not closed by the environment.
      max_chars: longest observation, in characters.
      notices: what is said around the output.
      setup_timeout: seconds for ``task.setup``.
    """

    def __init__(
        self,
        task: Task,
        sandboxes: SandboxFactory,
        *,
        max_chars: int = 8192,
        notices: Notices | None = None,
        setup_timeout: float = 60.0,
    ) -> None:
        self.task = task
        self._sandboxes = sandboxes
        self._max_chars = max_chars
        self._notices = notices or Notices()
        self._setup_timeout = setup_timeout
        self._sandbox: Sandbox | None = None
        self._done = False

    async def reset(self) -> Sequence[Segment]:
        """Prepares the world and returns the instruction.

        Raises SetupError if ``task.setup`` fails, SandboxError if the sandbox does.
        """
        if self._sandbox is not None:
            raise RuntimeError("TerminalEnv.reset was called twice: an environment is single use")
        sandbox = self._sandbox = await self._sandboxes.create(self.task.sandbox)
        for path, data in self.task.files.items():
            await sandbox.write_file(path, data)
        if self.task.setup:
            # A subshell: the agent's shell starts where the task says, with nothing set.
            script = f"(\n{self.task.setup}\n)"
            result = await sandbox.exec(script, self._setup_timeout)
            if result.timed_out or result.exit_code != 0:
                how = (
                    f"ran over setup_timeout={self._setup_timeout:g} s"
                    if result.timed_out
                    else f"ended with status {result.exit_code}"
                )
                raise SetupError(
                    f"task {self.task.id}: setup {how}; its output: {result.text[-2000:]!r}"
                )
        return [Segment(self.task.instruction, "template")]

    async def step(self, action: str | None) -> Step:
        """Runs one command; ``None`` verifies and ends the episode.

        Raises SandboxError or VerifierError when the world, not the policy, failed.
        """
        if self._sandbox is None or self._done:
            raise RuntimeError("TerminalEnv.step needs a reset before it and no end behind it")
        if action is None:
            self._done = True
            verdict = await verify(self._sandbox, self.task)
            info = {"verifier_output": verdict.output, "seconds": verdict.seconds}
            return Step((), verdict.reward, done=True, info=info)
        timeout = self.task.command_timeout
        result = await self._sandbox.exec(action, timeout)
        info = {
            "exit_code": result.exit_code,
            "timed_out": result.timed_out,
            "truncated": result.truncated,
            "seconds": result.seconds,
        }
        return Step(observe(result, timeout, self._max_chars, self._notices), info=info)

    async def close(self) -> None:
        """Removes the sandbox. Idempotent."""
        self._done = True
        if self._sandbox is not None:
            await self._sandbox.close()
