"""Groups: several episodes of one task, and what is decided about them as a whole."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxagent.data.kinds import Kind
from jaxagent.episodes.episode import Episode


@dataclass(frozen=True)
class Group:
    """The episodes of one task, in rollout order, invalid ones included.

    ``index`` is the position of the task in the run's task order and unique in a run.
    """

    index: int
    task_id: str
    group_id: str
    episodes: tuple[Episode, ...]

    @property
    def valid(self) -> tuple[Episode, ...]:
        return tuple(episode for episode in self.episodes if episode.valid)


def action_versions(episodes: Iterable[Episode]) -> Iterator[int]:
    """The distinct weight versions of each context's ACTION tokens."""
    for episode in episodes:
        for context in episode.contexts:
            yield from np.unique(context.versions[context.kinds == Kind.ACTION]).tolist()


def staleness(group: Group, version: int) -> int:
    """How many versions before ``version`` the oldest token of a valid episode was drawn."""
    oldest = min(action_versions(group.valid), default=version)
    return max(0, version - oldest)


def episode_seed(run_seed: int, index: int, rollout: int) -> int:
    """The 31-bit sampling seed of one episode; depends on nothing else."""
    text = f"{run_seed}/{index}/{rollout}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1


class HasId(Protocol):
    """A task of any kind; ``id`` is unique and stable."""

    @property
    def id(self) -> str: ...


@dataclass(frozen=True)
class ShuffledTasks:
    """A finite list repeated for ever, each pass in an order of its own.

    ``tasks[i]`` is the i-th task of the run; the order depends on ``seed`` and the pass
    only, so the loop's cursor (a number) is all that a checkpoint must hold.
    """

    items: Sequence[HasId]
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not self.items:
            raise ValueError("ShuffledTasks.items is empty: give at least one task")
        ids = [task.id for task in self.items]
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise ValueError(f"ShuffledTasks.items has two tasks with the id {twice!r}")

    def __getitem__(self, index: int) -> HasId:
        epoch, offset = divmod(index, len(self.items))
        if not self.shuffle:
            return self.items[offset]
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.items))
        return self.items[int(order[offset])]
