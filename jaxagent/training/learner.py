"""From finished episodes to new weights: pack, score, assign credit, update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxagent.credit.base import Credit, assign
from jaxagent.credit.rewards import RewardTransform
from jaxagent.data.augment import Augment, Marks, marked_score
from jaxagent.data.batch import Batch
from jaxagent.data.kinds import Kind
from jaxagent.data.packing import Placement, TruncationMode, first_fit, pack, place
from jaxagent.episodes.episode import Episode
from jaxagent.models.config import ModelConfig
from jaxagent.models.transformer import Params
from jaxagent.training.passes import Pass, Setting, Work
from jaxagent.training.state import TrainState, snapshot
from jaxagent.training.step import Update, make_scorer

# Scalars on the device, and facts the host knows already.
Metrics = dict[str, Any]


@dataclass(frozen=True)
class Shapes:
    """The batch shapes of a run, all known (and compiled) before it starts.

    Attributes:
      row_length: tokens a row; no context may be longer.
      rows: allowed numbers of rows; the smallest that holds a batch is taken.
      episodes: episodes in a batch, at the most.
      turns: turns of an episode, at the most.
      truncation, truncation_penalty: see ``jaxagent.data.packing.pack``.
    """

    row_length: int
    rows: tuple[int, ...]
    episodes: int
    turns: int
    truncation: TruncationMode = "score"
    truncation_penalty: float = 0.0

    def place(self, episodes: Sequence[Episode]) -> Placement:
        """Where :meth:`pack` puts each context."""
        return place(episodes, buckets=(self.row_length,), truncation=self.truncation)

    def pack(self, episodes: Sequence[Episode], rows: int | None = None) -> Batch:
        """Packs into the smallest of the shapes, or into ``rows``.

        Raises ValueError when none holds them.
        """
        return pack(
            episodes,
            buckets=(self.row_length,),
            rows=rows or self._rows_for(episodes),
            num_episodes=self.episodes,
            max_turns=self.turns,
            truncation=self.truncation,
            truncation_penalty=self.truncation_penalty,
        )

    def _rows_for(self, episodes: Sequence[Episode]) -> int:
        lengths = [len(c) for e in episodes if e.valid for c in e.contexts]
        fitting = [length for length in lengths if length <= self.row_length]
        used = int(first_fit(fitting, self.row_length)[0].max(initial=-1)) + 1
        # Too many even for the largest: pack then says so, naming the numbers.
        return next((rows for rows in sorted(self.rows) if rows >= used), max(self.rows))


class Learner:
    """Holds the train state; ``learn`` consumes a batch of whole groups.

    ``version`` is the number of updates done, which is the version of the weights; it is
    counted on the host, so that reading it waits for no update.

    Args:
      state: the train state; the learner owns it from here on (updates donate it).
      update: from ``make_update``.
      credit: fills the advantages; None leaves them 0 (supervised training).
      rewards: reward transforms, applied in this order before credit.
      passes: in this order, what else the batch is given (see ``training.passes``).
      augment: adds sequences that some term of the objective is trained on beside the
        episodes; ``shapes.episodes`` must have room for the episodes it adds.

    Raises ValueError when the objective or the credit needs what no pass provides.
    """

    def __init__(
        self,
        state: TrainState,
        update: Update,
        shapes: Shapes,
        model_config: ModelConfig,
        *,
        credit: Credit | None = None,
        rewards: Sequence[RewardTransform] = (),
        passes: Sequence[Pass] = (),
        augment: Augment | None = None,
        temperature: float = 1.0,
        mesh: Mesh | None = None,
    ) -> None:
        self.state = state
        self.version = int(state.step)
        self.shapes = shapes
        self._update = update
        self._augment = augment
        marks = augment.scores if augment else frozenset()
        scores = marks.union(*(p.scores for p in passes))
        update.objective.require(outputs=update.objective.needs, scores=scores)
        _check_provided("score", credit.scores if credit else frozenset(), scores)
        extras = frozenset().union(*(p.extras for p in passes))
        _check_provided("extra", credit.extras if credit else frozenset(), extras)
        hidden = frozenset().union(*(p.hidden for p in passes))
        _check_provided("hidden state", update.teachers, hidden)
        setting = Setting(
            model=model_config,
            tokens=max(shapes.rows) * shapes.row_length,
            row_length=shapes.row_length,
            episodes=shapes.episodes,
            turns=shapes.turns,
            temperature=temperature,
            mesh=mesh,
        )
        self._passes = [p.build(setting) for p in passes]
        self._unembeddings = {
            name: table for p in passes for name, table in (p.unembeddings or {}).items()
        }
        self._score = make_scorer(model_config, temperature=temperature, mesh=mesh)
        self._assign = jax.jit(partial(_assign, credit, tuple(rewards))) if credit else None

    @property
    def compilations(self) -> int:
        return self._update.compilations

    def params(self) -> Params:
        """A copy of the weights that later updates cannot touch."""
        return snapshot(self.state.params)

    def learn(self, episodes: Sequence[Episode]) -> Metrics:
        """One update; returns metrics, those of the update still on the device."""
        self.state, metrics = self._step(self.state, episodes)
        self.version += 1
        return metrics

    def _step(
        self, state: TrainState, episodes: Sequence[Episode], rows: int | None = None
    ) -> tuple[TrainState, Metrics]:
        marks: Mapping[str, Marks] = {}
        if self._augment is not None:
            augmented = self._augment.fn(episodes)
            episodes, marks = augmented.episodes, augmented.marks
        batch, placement = self.shapes.pack(episodes, rows), self.shapes.place(episodes)
        for name, values in marks.items():
            batch = batch.with_score(name, marked_score(placement, values, batch.tokens.shape))
        found: Metrics = {}
        work = Work(state, episodes, placement)
        for fn in self._passes:
            batch, facts = fn(work, batch)
            found |= facts
        if self._assign is not None:
            batch, credited = self._assign(batch)
            found |= credited
        state, metrics = self._update(state, batch, self._unembeddings)
        return state, {**metrics, **found}

    def logprob_gap(self, episodes: Sequence[Episode]) -> float:
        """Largest |trainer - sampler| log-prob of ACTION tokens that the present weights drew."""
        largest = 0.0
        for start in range(0, len(episodes), self.shapes.episodes):
            batch = self.shapes.pack(episodes[start : start + self.shapes.episodes])
            scored = np.asarray(self._score(self.state.params, batch))
            actions = batch.kind == Kind.ACTION
            gap = np.abs(scored - batch.behavior_logprobs)[actions]
            largest = max(largest, float(gap.max(initial=0.0)))
        return largest

    def warmup(self) -> None:
        """Compiles every shape, on empty batches and a copy of the state."""
        for rows in self.shapes.rows:
            spare, _ = self._step(snapshot(self.state), [], rows)
            jax.block_until_ready(spare)


def _assign(
    credit: Credit, rewards: Sequence[RewardTransform], batch: Batch
) -> tuple[Batch, dict[str, jax.Array]]:
    found: dict[str, jax.Array] = {}
    for transform in rewards:
        batch, metrics = transform(batch)
        found |= metrics
    batch, metrics = assign(credit, batch)
    return batch, {**found, **metrics}


def _check_provided(kind: str, needed: frozenset[str], given: frozenset[str]) -> None:
    missing = needed - given
    if missing:
        raise ValueError(
            f"the {kind} {', '.join(sorted(missing))} is needed, but no pass provides it (they "
            f"provide: {', '.join(sorted(given)) or 'none'}); see jaxagent.training.passes"
        )
