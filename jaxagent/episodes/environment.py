"""The one interface the episode loop needs from an environment: text in, text out.

Everything here is structural: an environment satisfies the protocols by having
the right attributes, and needs no import from this package.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Segment(Protocol):
    """A piece of text for the policy.

    ``source`` is ``"observation"`` for bytes the environment itself produced (what
    observation prediction learns) or ``"template"`` for scaffolding around them
    (exit status, truncation notices, error messages of the harness).
    """

    @property
    def text(self) -> str: ...

    @property
    def source(self) -> str: ...


class StepResult(Protocol):
    """What one action led to.

    ``reward`` is the reward of this turn; the episode's reward is the sum over its
    turns. ``done`` ends the episode. ``info`` is for people and logs.
    """

    @property
    def segments(self) -> Sequence[Segment]: ...

    @property
    def reward(self) -> float: ...

    @property
    def done(self) -> bool: ...

    @property
    def info(self) -> Mapping[str, Any]: ...


class Environment(Protocol):
    """One episode's world. Single use: ``reset`` is called once.

    A method that raises means that the *environment* failed (a dead sandbox, a full
    disk, a crashed verifier); the episode is then invalid, never scored 0. What the
    policy did wrong is a normal observation instead.
    """

    async def reset(self) -> Sequence[Segment]:
        """Prepares the world and returns the prompt (the task's instruction)."""
        ...

    async def step(self, action: str | None) -> StepResult:
        """Runs one action.

        ``None`` means that no action will follow (the policy declared itself done, or
        the loop's limits ended the episode): score the world as it stands and return
        ``done=True``.
        """
        ...

    async def close(self) -> None:
        """Frees everything. Called exactly once, after a failure or cancellation too."""
        ...
