"""What an episode needs of a sampler; ``jaxagent.rollout.engine.Engine`` satisfies it."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Generation(Protocol):
    """Tokens sampled in one turn; arrays of shape ``[n]``, the stop token included."""

    @property
    def tokens(self) -> NDArray[np.int32]: ...

    @property
    def logprobs(self) -> NDArray[np.float32]: ...

    @property
    def versions(self) -> NDArray[np.int32]: ...

    @property
    def stop(self) -> str:
        """``"stop_token"``, ``"stop_string"``, ``"length"`` or ``"context"``."""
        ...


class Session(Protocol):
    """One growing token sequence; sampled tokens become part of it by themselves."""

    def generate(self, new_tokens: Sequence[int], sampling: Any) -> Future[Any]: ...

    def close(self) -> None: ...


class Engine(Protocol):
    def open_session(self, key: int) -> Session: ...
