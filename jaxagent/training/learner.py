"""From finished episodes to new weights: pack, score, assign credit, update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxagent.credit.base import Credit, assign
from jaxagent.data.batch import Batch
from jaxagent.data.kinds import Kind
from jaxagent.data.packing import TruncationMode, first_fit, pack
from jaxagent.episodes.episode import Episode
from jaxagent.models.config import ModelConfig
from jaxagent.models.transformer import Params
from jaxagent.training.state import TrainState, snapshot
from jaxagent.training.step import Update, make_scorer

Metrics = dict[str, jax.Array]


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

    def pack(self, episodes: Sequence[Episode]) -> Batch:
        """Packs into the smallest of the shapes. Raises ValueError when none holds them."""
        return pack(
            episodes,
            buckets=(self.row_length,),
            rows=self._rows_for(episodes),
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
      scored_by: score name -> parameters, for example ``{"reference": params}``; each is
        one more forward pass over every batch.
    """

    def __init__(
        self,
        state: TrainState,
        update: Update,
        shapes: Shapes,
        model_config: ModelConfig,
        *,
        credit: Credit | None = None,
        scored_by: Mapping[str, Params] | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.state = state
        self.version = int(state.step)
        self.shapes = shapes
        self._update = update
        self._scored_by = dict(scored_by or {})
        # The objective's scores are checked when a batch arrives; say it now instead.
        update.objective.require(outputs=update.objective.needs, scores=frozenset(self._scored_by))
        missing = (credit.scores if credit else frozenset()) - set(self._scored_by)
        if missing:
            raise ValueError(
                f"the credit pipeline needs the score {', '.join(sorted(missing))}: "
                "name its parameters in scored_by"
            )
        self._score = make_scorer(model_config, temperature=temperature)
        self._assign = jax.jit(lambda batch: assign(credit, batch)) if credit else None

    @property
    def compilations(self) -> int:
        return self._update.compilations

    def params(self) -> Params:
        """A copy of the weights that later updates cannot touch."""
        return snapshot(self.state.params)

    def learn(self, episodes: Sequence[Episode]) -> Metrics:
        """One update; returns metrics that are still on the device."""
        return self.learn_batch(self.shapes.pack(episodes))

    def learn_batch(self, batch: Batch) -> Metrics:
        self.state, metrics = self._step(self.state, batch)
        self.version += 1
        return metrics

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        for name, params in self._scored_by.items():
            batch = batch.with_score(name, self._score(params, batch))
        credited: Metrics = {}
        if self._assign is not None:
            batch, credited = self._assign(batch)
        state, metrics = self._update(state, batch)
        return state, {**metrics, **credited}

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
            batch = pack(
                [],
                buckets=(self.shapes.row_length,),
                rows=rows,
                num_episodes=self.shapes.episodes,
                max_turns=self.shapes.turns,
            )
            spare, _ = self._step(snapshot(self.state), batch)
            jax.block_until_ready(spare)
