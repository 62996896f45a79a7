"""The types every environment of this package speaks in.

They satisfy ``jaxagent.episodes.environment`` structurally; neither package imports
the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Source = Literal["observation", "template"]


@dataclass(frozen=True)
class Segment:
    """Text for the policy: the environment's own output, or scaffolding around it."""

    text: str
    source: Source


@dataclass(frozen=True)
class Step:
    """The result of one action; the episode's reward is the sum over its steps."""

    segments: Sequence[Segment]
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
