"""What a task is, whatever format it was loaded from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from envs.sandboxes.base import SandboxConfig


@dataclass(frozen=True)
class Task:
    """One task for a terminal agent.

    Attributes:
      id: unique and stable, for example ``"count_lines/d1/train/17"``.
      instruction: what the policy reads.
      setup: shell script that prepares the world before the policy acts.
      files: path -> bytes written before ``setup`` runs.
      verify: shell script run after the agent's processes are dead, in a clean shell:
        exit status 0 is success, 1 is failure; any other status, or a time-out, is a
        verifier error and makes the episode invalid.
      verify_files: path -> bytes copied in only for ``verify``.
      solution: reference commands, one per turn, that solve the task in order.
      near_miss: commands that look right and must fail; used by tests.
      family, difficulty, split: where a procedural task comes from.
      sandbox: limits and image.
      command_timeout, verify_timeout: seconds.
    """

    id: str
    instruction: str
    verify: str
    setup: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    verify_files: Mapping[str, bytes] = field(default_factory=dict)
    solution: tuple[str, ...] = ()
    near_miss: tuple[str, ...] = ()
    family: str = ""
    difficulty: int = 1
    split: str = ""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    command_timeout: float = 10.0
    verify_timeout: float = 30.0
