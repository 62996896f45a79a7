"""Token-in-token-out records of finished episodes.

Tokens are stored exactly as they were sampled or fed; text is derived for people
and never turned back into tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxagent.data.kinds import Kind


@dataclass(frozen=True)
class Context:
    """One token sequence as the model saw it; all arrays have shape ``[n]``.

    ``logprobs`` is the sampler's log-probability (0 off ACTION tokens), ``versions`` the
    weights that drew the token (-1 off ACTION), ``turn_ids`` the turn (-1 in the prompt;
    an observation carries the id of the turn that caused it).
    """

    tokens: NDArray[np.int32]
    kinds: NDArray[np.uint8]
    turn_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]

    def __post_init__(self) -> None:
        shapes = {
            name: getattr(self, name).shape
            for name in ("tokens", "kinds", "turn_ids", "logprobs", "versions")
        }
        if len(set(shapes.values())) != 1 or self.tokens.ndim != 1:
            raise ValueError(f"Context arrays must all have one shape [n], got {shapes}")

    def __len__(self) -> int:
        return int(self.tokens.shape[0])


@dataclass(frozen=True)
class Episode:
    """A finished episode: one context when history only grows, several when it was rewritten.

    ``valid`` is False where the environment failed; ``error`` then says how (such an
    episode has no score: its reward is 0 and masked). ``truncated`` is the cause when a
    limit ended the episode: ``"context"``, ``"turns"``, ``"time"`` or ``"tokens"``.
    """

    task_id: str
    group_id: str
    contexts: tuple[Context, ...]
    reward: float
    turn_rewards: tuple[float, ...] = ()
    valid: bool = True
    truncated: str | None = None
    error: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(len(context) for context in self.contexts)

    @property
    def num_action_tokens(self) -> int:
        return sum(int((c.kinds == Kind.ACTION).sum()) for c in self.contexts)

    @property
    def num_turns(self) -> int:
        return 1 + max((int(c.turn_ids.max(initial=-1)) for c in self.contexts), default=-1)
