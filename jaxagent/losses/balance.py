"""Flow-matching losses: the policy's probability of a whole episode follows its reward.

They square a sum over an episode, and take the place of a policy gradient. With S a sum
over the ACTION tokens of an episode b, all its contexts together, and n_b their number:

    d_b = log Z + S(log p - log p_ref) - (what the episode is worth),  loss = mean_b d_b^2.

Episodes without an ACTION token, and invalid ones, count nowhere. Rewards may be shaped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxagent.data.batch import Batch, action_mask, episode_sum, episode_token_mean
from jaxagent.losses.base import Loss, Metrics, Outputs, clamp_log_ratio, select
from jaxagent.losses.policy import OldPolicy, old_logprobs, old_scores
from jaxagent.losses.teachers import teacher_gap, teacher_score

_REFERENCE = "reference"


def trajectory_balance(beta: float, length_norm: bool = False) -> Loss:
    """``mean_b (log Z_g - xi_b)^2``, ``xi_b = r_b / beta - S(log p - log p_ref)``.

    ``log Z_g = sg(mean_g xi)`` is the group's own estimate (VarGrad), so d sums to 0 over
    every group and a group of one has d = 0. A group of equal rewards still learns: its
    log-ratios are pulled together. No importance weight: the loss holds for the tokens of
    any policy. ``length_norm`` takes S / n_b, which the source does not. Needs whole groups
    in the batch.

    Source: Bartoldson et al. 2025 (TBA), ``tba_trainer_gsm8k.py``; Richter et al. 2020.
    """
    _check_positive("beta", beta)

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        sums = _episode_sums(outputs, batch, length_norm)
        worth = jnp.where(sums.some, jnp.asarray(batch.rewards) / beta, 0.0)
        log_z = jax.lax.stop_gradient(_group_mean(batch, worth - sums.log_ratio, sums.some))
        return _squares(log_z + sums.log_ratio - worth, log_z, sums)

    return Loss(frozenset({"logprobs"}), frozenset({_REFERENCE}), fn)


def trajectory_balance_learned_z(beta: float, length_norm: bool = False) -> Loss:
    """``mean_b (log Z_b + S(log p - log p_ref) - r_b / beta)^2`` with a learned log Z.

    ``outputs["log_z"]`` [R,T] estimates log Z at each token; the episode's is their mean
    over its ACTION tokens, and gradients reach it.

    Source: Malkin et al. 2022 (trajectory balance); no code of a language-model version was
    compared.
    """
    _check_positive("beta", beta)

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        sums = _episode_sums(outputs, batch, length_norm)
        worth = jnp.where(sums.some, jnp.asarray(batch.rewards) / beta, 0.0)
        log_z = episode_token_mean(batch, outputs["log_z"], action_mask(batch))
        return _squares(log_z + sums.log_ratio - worth, log_z, sums)

    return Loss(frozenset({"logprobs", "log_z"}), frozenset({_REFERENCE}), fn)


def flow_rl(beta: float = 15.0, is_clip: float | None = 0.2, old: OldPolicy = "behavior") -> Loss:
    """``mean_b w_b d_b^2``, ``d_b = log Z_b + (S(log p) - S(log p_ref)) / n_b - beta A_b``.

    ``w_b = sg(exp(S(log p - log p_old)))`` is clipped to 1 +- ``is_clip``; None is what the
    released code does: it computes the clipped weight and uses the other. log Z_b is the
    mean of ``outputs["log_z"]`` [R,T] over the episode's ACTION tokens (gradients reach it),
    A_b that of ``batch.advantages``: use :func:`jaxagent.credit.group_relative`. A group
    without signal has A = 0 and is pulled to the reference, its log Z to 0.

    Source: Zhu et al. 2025 (FlowRL), ``workers/actor/dp_actor.py``, where beta is 15
    whatever its comment says.
    """
    _check_positive("beta", beta)
    if is_clip is not None and not is_clip > 0:
        raise ValueError(f"is_clip must be above 0 (or None for no clipping), got {is_clip}")
    scores = old_scores(old) | {_REFERENCE}

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask = action_mask(batch)
        sums = _episode_sums(outputs, batch, length_norm=True)
        log_z = episode_token_mean(batch, outputs["log_z"], mask)
        since = select(mask, outputs["logprobs"]) - select(mask, old_logprobs(batch, old))
        weight = jnp.exp(clamp_log_ratio(jax.lax.stop_gradient(episode_sum(batch, since))))
        if is_clip is not None:
            weight = jnp.clip(weight, 1 - is_clip, 1 + is_clip)
        gap = log_z + sums.log_ratio - beta * _advantages(batch)
        weight = select(sums.some, weight)
        numerator, denominator, metrics = _squares(gap, log_z, sums, weight)
        metrics = {**metrics, "importance_weight": (jnp.sum(weight), denominator)}
        return numerator, denominator, metrics

    return Loss(frozenset({"logprobs", "log_z"}), scores, fn)


def flow_balance(
    teacher: str,
    eta: float = 15.0,
    guidance: float = 1.0,
    skip_flat_groups: bool = False,
    old: OldPolicy = "behavior",
) -> Loss:
    """Trajectory balance whose energy is the advantage, sharpened by a teacher. Derived.

    ``E_b = eta (A_b + guidance sign(A_b) g_b)`` with ``g_b`` the mean of
    ``sg(log p_teacher - log p_old)`` over the ACTION tokens the teacher covers (0 where it
    covers none); ``xi_b = E_b - (S(log p) - S(log p_ref)) / n_b``, and the rest as in
    :func:`trajectory_balance`: ``mean_b (sg(mean_g xi) - xi_b)^2``. sign(0) = 0. A_b is the
    mean of ``batch.advantages``: use ``group_relative(scale="none")``. A group without
    signal is only pulled to the reference, or left out with ``skip_flat_groups``.

    Derived from the abstract of FlowBalance: the means over tokens, ``eta`` and ``guidance``
    are readings of ours, and no reproduction is claimed.
    """
    _check_positive("eta", eta)
    if not guidance >= 0:
        raise ValueError(f"guidance must be at least 0, got {guidance}")
    scores = old_scores(old) | {_REFERENCE, teacher_score(teacher)}

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        told = episode_token_mean(batch, *teacher_gap(batch, teacher, old))
        advantages = _advantages(batch)
        energy = eta * (advantages + guidance * jnp.sign(advantages) * told)
        sums = _episode_sums(outputs, batch, length_norm=True)
        if skip_flat_groups:
            signal = _group_mean(batch, jnp.abs(advantages), sums.some) > 0
            sums = sums._replace(some=sums.some & signal)
        log_z = _group_mean(batch, energy - sums.log_ratio, sums.some)
        log_z = jax.lax.stop_gradient(log_z)
        numerator, denominator, metrics = _squares(log_z + sums.log_ratio - energy, log_z, sums)
        energies = (jnp.sum(select(sums.some, energy)), denominator)
        return numerator, denominator, {**metrics, "energy": energies}

    return Loss(frozenset({"logprobs"}), scores, fn)


class _EpisodeSums(NamedTuple):
    """``log_ratio`` [E] = S(log p - log p_ref), by n_b if normalised; ``some`` [E]: n_b > 0."""

    log_ratio: jax.Array
    some: jax.Array


def _episode_sums(outputs: Outputs, batch: Batch, length_norm: bool) -> _EpisodeSums:
    mask = action_mask(batch)
    reference = jax.lax.stop_gradient(jnp.asarray(batch.scores[_REFERENCE]))
    difference = select(mask, outputs["logprobs"]) - select(mask, reference)
    counts = episode_sum(batch, mask.astype(difference.dtype))
    total = episode_sum(batch, difference)
    if length_norm:
        total = total / jnp.maximum(counts, 1)
    return _EpisodeSums(total, counts > 0)


def _squares(
    gap: jax.Array, log_z: jax.Array, sums: _EpisodeSums, weight: jax.Array | float = 1.0
) -> tuple[jax.Array, jax.Array, Metrics]:
    gap = select(sums.some, gap)
    count = jnp.sum(sums.some)
    metrics = {
        "log_z": (jnp.sum(select(sums.some, log_z)), count),
        "log_ratio": (jnp.sum(select(sums.some, sums.log_ratio)), count),
    }
    return jnp.sum(weight * gap**2), count, metrics


def _group_mean(batch: Batch, values: jax.Array, some: jax.Array) -> jax.Array:
    """Mean of ``values`` [E] over the episodes of each group that are in ``some``: [E]."""
    ids, bins = jnp.asarray(batch.group_ids), batch.num_episodes + 1
    total = jax.ops.segment_sum(select(some, values), ids, num_segments=bins)
    count = jax.ops.segment_sum(some.astype(values.dtype), ids, num_segments=bins)
    return (total / jnp.maximum(count, 1))[ids]


def _advantages(batch: Batch) -> jax.Array:
    mask = action_mask(batch)
    return jax.lax.stop_gradient(episode_token_mean(batch, jnp.asarray(batch.advantages), mask))


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {value}")
