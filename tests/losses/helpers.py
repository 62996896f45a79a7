"""What the loss tests share: one random packed batch with every input, values, gradients."""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent import losses
from jaxagent.data.kinds import Kind
from jaxagent.data.packing import pack
from jaxagent.data.synthetic import random_episodes
from jaxagent.losses.base import ratio

STEP = 4
# Per token: name -> centre of the draw (None: the sampler's own log-probability), spread.
OUTPUTS: dict[str, tuple[float | None, float]] = {
    "logprobs": (None, 0.3),
    "entropy": (2.0, 0.3),
    "log_z": (0.3, 1.0),
    "values": (0.4, 0.3),
    "failure": (0.0, 2.0),
    "progress": (1.0, 1.0),
    "divergence:t:jsd": (0.5, 0.1),
    "divergence:u:forward_kl": (0.5, 0.1),
}
SCORES: dict[str, tuple[float | None, float]] = {
    "proximal": (None, 0.3),
    "reference": (None, 0.5),
    "teacher/t": (None, 0.5),
    "teacher/u": (None, 0.5),
    "returns": (0.4, 0.5),
    "values": (0.4, 0.3),
}


class Case:
    """``outputs`` and ``batch``, float64; each token's numbers depend on that token alone.

    So the same ``seed`` laid out anew (``order``, ``buckets``, ``rows``) is the same data. One
    episode is invalid although its tokens are there, and one score covers few tokens.
    """

    def __init__(
        self, seed: int, order: int = 1, buckets: tuple[int, ...] = (64,), rows: int | None = None
    ) -> None:
        episodes = random_episodes(seed, groups=3, max_contexts=2, truncated=0.3, version=STEP + 1)
        batch: Any = pack(episodes[::order], buckets=buckets, rows=rows, rows_multiple=2)
        count = len(episodes)
        names = np.arange(batch.num_episodes)
        names = np.where(names < count, count - 1 - names if order < 0 else names, names)
        rewards = np.where(names % 3 == 0, 0.0, batch.rewards.astype(np.float64))
        outputs = {name: np.zeros(batch.tokens.shape) for name in OUTPUTS}
        scores = {
            name: np.zeros(batch.tokens.shape)
            for name in (*SCORES, "teacher/t/mask", "observation_weight", "preference", "suffix")
        }
        advantages = np.zeros(batch.tokens.shape)
        for r, t in zip(*np.nonzero(batch.segment_ids), strict=True):
            index = int(names[batch.episode_ids[r, t]])
            fields = (batch.turn_ids, batch.positions, batch.kind, batch.tokens)
            key = repr((seed, index, *(int(field[r, t]) for field in fields)))
            rng = np.random.default_rng(zlib.crc32(key.encode()))
            own = float(batch.behavior_logprobs[r, t])
            for table, into in ((OUTPUTS, outputs), (SCORES, scores)):
                for name, (centre, spread) in table.items():
                    into[name][r, t] = (own if centre is None else centre) + spread * rng.normal()
            scores["teacher/t/mask"][r, t] = rng.integers(0, 2)
            scores["observation_weight"][r, t] = rng.choice([0.0, 0.5, 2.0])
            scores["preference"][r, t] = rng.integers(-3, 4)
            scores["suffix"][r, t] = rng.integers(0, 2)
            advantages[r, t] = rng.normal()
        covered = scores["teacher/t/mask"] > 0
        scores["teacher/t"] = np.where(covered, scores["teacher/t"], np.nan)
        self.outputs: dict[str, Any] = {**outputs, "step": STEP}
        self.batch: Any = batch.replace(
            rewards=rewards,
            behavior_logprobs=batch.behavior_logprobs.astype(np.float64),
            advantages=np.where(batch.kind == Kind.ACTION, advantages, 0.0),
            valid=batch.valid & (names != count // 2),
            scores=scores,
        )


def value(loss: losses.Loss, outputs: Mapping[str, Any], batch: Any) -> float:
    numerator, denominator, _ = loss.fn({k: jnp.asarray(v) for k, v in outputs.items()}, batch)
    return float(ratio(numerator, denominator))


def gradients(
    loss: losses.Loss, outputs: Mapping[str, Any], batch: Any
) -> dict[str, np.ndarray[Any, Any]]:
    """With respect to every output the loss needs, the step aside."""
    needed = {name: jnp.asarray(outputs[name]) for name in loss.needs - {"step"}}

    def scalar(live: Any) -> jax.Array:
        return ratio(*loss.fn({**live, "step": outputs.get("step", 0)}, batch)[:2])

    return {name: np.asarray(x) for name, x in jax.grad(scalar)(needed).items()}
