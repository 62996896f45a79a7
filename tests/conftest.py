"""Shared fixtures: test vectors, and small batches given as lists of per-token numbers."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxagent.data.batch import Batch
from jaxagent.data.kinds import Kind
from jaxagent.data.packing import pack
from jaxagent.episodes.episode import Context, Episode


@pytest.fixture(scope="session")
def vectors() -> dict[str, Any]:
    """Small inputs with right outputs, computed in float64."""
    loaded: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text())
    return loaded


@pytest.fixture
def x64() -> Iterator[None]:
    """Float64 for the duration of a test."""
    with jax.enable_x64(True):
        yield


class Laid:
    """A packed batch of episodes that hold one prompt token and then the given tokens.

    ``kinds`` holds one list a episode; ``lay`` turns per-episode lists (one number for each
    token after the prompt) into an array [R,T] of the batch, with ``fill`` elsewhere.
    """

    def __init__(
        self,
        kinds: Sequence[Sequence[Kind]],
        rewards: Sequence[float],
        groups: Sequence[int],
        row_length: int = 16,
        valid: Sequence[bool] | None = None,
    ) -> None:
        valid = valid or [True] * len(kinds)
        episodes = []
        for index, (run, reward, group) in enumerate(zip(kinds, rewards, groups, strict=True)):
            size = len(run) + 1
            context = Context(
                tokens=np.arange(size, dtype=np.int32),
                kinds=np.asarray([Kind.PROMPT, *run], np.uint8),
                turn_ids=np.asarray([-1] + [0] * len(run), np.int32),
                logprobs=np.zeros(size, np.float32),
                versions=np.zeros(size, np.int32),
            )
            episodes.append(Episode("task", f"g{group}", (context,), reward, valid=valid[index]))
        batch = pack(episodes, buckets=(row_length,), num_episodes=len(kinds) + 2)
        padded = np.zeros(batch.num_episodes)
        padded[: len(rewards)] = np.where(valid, rewards, 0.0)
        self.batch: Batch = batch.replace(  # type: ignore[attr-defined]
            rewards=padded,
            behavior_logprobs=np.zeros(batch.tokens.shape),
            advantages=np.zeros(batch.tokens.shape),
        )

    def lay(self, values: Sequence[Sequence[float]], fill: float = 0.0) -> NDArray[np.float64]:
        out = np.full(self.batch.tokens.shape, fill, np.float64)
        for index, numbers in enumerate(values):
            rows, columns = np.nonzero(self.batch.episode_ids == index)
            if rows.size:
                assert rows.size == len(numbers) + 1
                out[rows[1:], columns[1:]] = numbers
        return out

    def spread(self, values: Sequence[float]) -> NDArray[np.float64]:
        """One number an episode, on all its tokens after the prompt."""
        counts = [int((self.batch.episode_ids == i).sum()) - 1 for i in range(len(values))]
        return self.lay([[v] * max(n, 0) for v, n in zip(values, counts, strict=True)])


@pytest.fixture(scope="session")
def laid() -> Callable[..., Laid]:
    return Laid
