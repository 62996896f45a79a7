"""Turns compared with other turns that started from the same state."""

import difflib
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxagent.credit.base import Credit, CreditMetrics
from jaxagent.credit.group import dense_ids, segment_stats
from jaxagent.credit.turns import (
    RewardSource,
    check_discount,
    check_source,
    discounted,
    rewards_by_turn,
)
from jaxagent.data.batch import Batch, per_turn_token, turn_mask


def gigpo_state(
    weight: float = 1.0,
    gamma: float = 0.95,
    scale: Literal["mean_norm", "mean_std_norm"] = "mean_norm",
    rewards: RewardSource = "turns",
    eps: float = 1e-6,
) -> Credit:
    """Adds ``weight * A_state``: a turn's return against those from the same state (GiGPO).

    ``G_k = sum_j>=k gamma^(j-k) r_j``, and over all turns of one group with the same
    ``extras["state_ids"]`` [E,K] ``A_state = G - mean`` (``"mean_norm"``) or
    ``(G - mean) / (std + eps)`` with the sample deviation (``"mean_std_norm"``). A state seen
    once gives 0, and so does a negative id (no state). ``rewards``: see
    :func:`jaxagent.credit.turns.rewards_by_turn`. :func:`state_ids` makes the ids.

    Source: Feng et al. 2025, arXiv:2505.10978; ``gigpo/core_gigpo.py``, whose default is
    ``mean_norm``.
    """
    if not weight > 0:
        raise ValueError(f"weight must be above 0, got {weight}")
    check_discount("gamma", gamma)
    check_source(rewards)
    if scale not in ("mean_norm", "mean_std_norm"):
        raise ValueError(f"scale must be 'mean_norm' or 'mean_std_norm', got {scale!r}")
    if not eps > 0:
        raise ValueError(f"eps must be above 0, got {eps}")

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        turns = turn_mask(batch)
        states = jnp.asarray(batch.extras["state_ids"])
        returns = discounted(rewards_by_turn(batch, rewards), turns, gamma).reshape(-1)
        groups = jnp.broadcast_to(jnp.asarray(batch.group_ids)[:, None], states.shape)
        ids = dense_ids(groups.reshape(-1), states.reshape(-1))
        counted = (turns & (states >= 0)).reshape(-1)
        stats = segment_stats(ids, returns, counted, ids.size)
        values = jnp.where(stats.signal & counted, returns - stats.mean, 0.0)
        if scale == "mean_std_norm":
            values = values / (stats.std + eps)
        return advantages + weight * per_turn_token(batch, values.reshape(states.shape)), {}

    return Credit(fn, extras=frozenset({"state_ids"}), stage="additive")


def state_ids(
    observations: Sequence[Sequence[str]],
    groups: Sequence[int],
    shape: tuple[int, int],
    similarity: float = 1.0,
) -> NDArray[np.int32]:
    """``extras["state_ids"]`` of ``shape`` [E,K] from what the policy saw before each turn.

    ``observations[e][k]`` belongs to turn k of episode e; ``groups`` are the episodes' group
    ids, as in ``batch.group_ids``. Equal texts of a group are one state; with ``similarity``
    below 1 a text also joins the first state of its group, in order of appearance, whose
    first text has ``difflib``'s ratio of at least that (GiGPO: 0.95). -1 where there is no turn.
    """
    if not 0 < similarity <= 1:
        raise ValueError(f"similarity must lie in 0..1 (0 excluded), got {similarity}")
    if len(groups) != len(observations):
        raise ValueError(f"{len(observations)} episodes of observations, but {len(groups)} groups")
    longest = max((len(seen) for seen in observations), default=0)
    if len(observations) > shape[0] or longest > shape[1]:
        raise ValueError(
            f"{len(observations)} episodes of up to {longest} turns do not fit the batch's {shape}"
        )
    ids = np.full(shape, -1, np.int32)
    known: dict[int, dict[str, int]] = {}
    firsts: dict[int, list[tuple[str, int]]] = {}
    count = 0
    for index, (seen, group) in enumerate(zip(observations, groups, strict=True)):
        texts, states = known.setdefault(group, {}), firsts.setdefault(group, [])
        for turn, text in enumerate(seen):
            state = texts.get(text)
            if state is None and similarity < 1:
                state = _similar(text, states, similarity)
            if state is None:
                state, count = count, count + 1
                states.append((text, state))
            texts[text] = ids[index, turn] = state
    return ids


def _similar(text: str, states: Sequence[tuple[str, int]], similarity: float) -> int | None:
    for first, state in states:
        matcher = difflib.SequenceMatcher(None, first, text)
        # Two cheap upper bounds first: the ratio itself takes quadratic time.
        if (
            matcher.real_quick_ratio() >= similarity
            and matcher.quick_ratio() >= similarity
            and matcher.ratio() >= similarity
        ):
            return state
    return None
