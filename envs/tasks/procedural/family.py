"""What a family's maker returns, and how it becomes a ``Task``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from envs.sandboxes.base import SandboxConfig
from envs.tasks.procedural.checks import WORKDIR, verify_script
from envs.tasks.procedural.draw import Draw
from envs.tasks.task import Task


@dataclass(frozen=True)
class Spec:
    """One task before it is bound to a working directory.

    Attributes:
      instruction: what the policy reads.
      solution, near_miss: commands, one per turn, run from the working directory.
      checks: lines made by ``envs.tasks.procedural.checks``; all must hold.
      files: path relative to the working directory -> text.
      setup: shell lines run in the working directory after the files are there.
      env: variables of the policy's shell.
      answer: what the policy has to find out, "" where the instruction says it all; it never
        occurs in the instruction.
      command_timeout: seconds; lower where a wrong command is likely to block.
    """

    instruction: str
    solution: tuple[str, ...]
    near_miss: tuple[str, ...]
    checks: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    setup: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    answer: str = ""
    command_timeout: float = 10.0


class Family(NamedTuple):
    """A kind of task.

    Attributes:
      name: unique name, the first part of its tasks' identifiers.
      description: one line.
      make: ``Draw -> Spec``; ``draw.difficulty`` is 1, 2 or 3.
      requires: programs beyond POSIX sh and coreutils (or busybox) that set-up, reference or
        verifier call; the sandbox must have them.
      turns: fewest commands a policy needs that must read before it can act (at difficulty 1).
    """

    name: str
    description: str
    make: Callable[[Draw], Spec]
    requires: tuple[str, ...] = ()
    turns: int = 1


def lines(*items: object) -> str:
    """The text of a file with these lines."""
    return "".join(f"{item}\n" for item in items)


def to_task(family: str, split: str, difficulty: int, seed: int, spec: Spec) -> Task:
    # A subshell: set-up must leave nothing behind in a persistent shell, not even on failure.
    setup = f"(\nset -e\ncd {WORKDIR}\n{spec.setup}\n)" if spec.setup else ""
    return Task(
        id=f"{family}/d{difficulty}/{split}/{seed}",
        instruction=spec.instruction,
        verify=verify_script(spec.checks),
        setup=setup,
        files={f"{WORKDIR}/{path}": text.encode() for path, text in spec.files.items()},
        solution=spec.solution,
        near_miss=spec.near_miss,
        family=family,
        difficulty=difficulty,
        split=split,
        sandbox=SandboxConfig(env=dict(spec.env), workdir=WORKDIR),
        command_timeout=spec.command_timeout,
    )
