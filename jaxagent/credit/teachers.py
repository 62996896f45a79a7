"""Credit from a teacher: the same tokens scored with more context, or by another model."""

import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxagent.credit.base import Credit, CreditMetrics
from jaxagent.credit.group import group_stats
from jaxagent.data.batch import Batch, per_token, per_turn_token, turn_sum
from jaxagent.losses.policy import OldPolicy, old_scores
from jaxagent.losses.teachers import teacher_gap, teacher_score


def teacher_shift(
    name: str, weight: float, clip: float | None = None, old: OldPolicy = "behavior"
) -> Credit:
    """Adds ``weight * clip(H - O, -clip, clip)`` on the tokens the teacher covers.

    H = ``scores["teacher/<name>"]``, O the old policy's log-probability of the same token.
    Tokens that the teacher, knowing more, finds likelier gain advantage. Where both have the
    same context it is 0. With one skill an episode this is SEED's term.

    Source: OPID, ``gigpo/core_gigpo.py``; SEED derived from its abstract (weight unknown).
    """
    _check_weight("weight", weight)
    _check_clip(clip)

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        gap, _ = teacher_gap(batch, name, old)
        return advantages + weight * _clipped(gap, clip), {}

    return Credit(fn, old_scores(old) | {teacher_score(name)}, stage="additive")


def routed_teacher_shift(
    episode: str,
    step: str,
    episode_weight: float = 1e-3,
    step_weight: float = 1e-3,
    mode: Literal["critical_first", "additive"] = "critical_first",
    clip: float | None = None,
    old: OldPolicy = "behavior",
) -> Credit:
    """Shifts by two teachers, one told a skill for the episode, one a skill for a turn (OPID).

    ``A += episode_weight q_e (H_e - O) + step_weight q_s (H_s - O)``. ``"critical_first"``: a
    turn of which the teacher ``step`` covers a token listens to it alone (q_s = 1, q_e = 0),
    every other turn to ``episode``; with ``step_weight`` 0 all turns do. ``"additive"``
    listens to both. Tokens that neither covers, such as those of an episode whose analysis
    did not parse, are left as they are. ``clip`` bounds each difference.

    Source: OPID, ``gigpo/core_gigpo.py`` (``step_priority``), with its script's weights.
    """
    for field, value in (("episode_weight", episode_weight), ("step_weight", step_weight)):
        if not value >= 0:
            raise ValueError(f"{field} must be at least 0, got {value}")
    if not episode_weight + step_weight > 0:
        raise ValueError("episode_weight and step_weight are both 0: nothing to shift by")
    if mode not in ("critical_first", "additive"):
        raise ValueError(f"mode must be 'critical_first' or 'additive', got {mode!r}")
    if episode == step:
        raise ValueError(f"episode and step must name two teachers, both are {step!r}")
    _check_clip(clip)
    scores = old_scores(old) | {teacher_score(episode), teacher_score(step)}

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        whole, _ = teacher_gap(batch, episode, old)
        critical, covered = teacher_gap(batch, step, old)
        whole, critical = _clipped(whole, clip), _clipped(critical, clip)
        if mode == "critical_first" and step_weight > 0:
            has_step = per_turn_token(batch, turn_sum(batch, covered.astype(jnp.int32))) > 0
            whole = jnp.where(has_step, 0.0, whole)
        return advantages + episode_weight * whole + step_weight * critical, {}

    return Credit(fn, scores, stage="additive")


def gated_difficulty(
    name: str,
    weight: float = 1.0,
    bound: float = 1.0,
    success: float = 1.0,
    old: OldPolicy = "behavior",
) -> Credit:
    """A bounded teacher shift on failed episodes, stronger the harder the task (DiffGate).

    ``A += weight * 1[fail] * d_g * bound * tanh((H - O) / bound)``, where an episode fails with
    a reward below ``success`` and ``d_g`` is 1 minus the pass rate of its group's valid
    episodes. A group that only fails is guided fully, one that only passes not at all.

    Derived from the abstract of DiffGate.
    """
    _check_weight("weight", weight)
    if not bound > 0:
        raise ValueError(f"bound must be above 0, got {bound}")
    if not math.isfinite(success):
        raise ValueError(f"success must be a finite reward, got {success}")

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        gap, _ = teacher_gap(batch, name, old)
        failed = jnp.asarray(batch.rewards) < success
        difficulty = group_stats(batch, failed.astype(gap.dtype)).mean
        gate = per_token(batch, jnp.where(failed, difficulty, 0.0))
        return advantages + weight * gate * bound * jnp.tanh(gap / bound), {}

    return Credit(fn, old_scores(old) | {teacher_score(name)}, stage="additive")


def select_advice(
    advised: Sequence[NDArray[np.floating]],
    plain: Sequence[NDArray[np.floating]],
    keep: float,
) -> NDArray[np.bool_]:
    """Which responses to teach: those whose likelihood the advice changed most (AdviSD).

    ``advised`` and ``plain`` hold the advisor's log-probabilities of each recorded response,
    token by token, with and without its advice; the score is
    ``|mean_t(advised - plain)|`` (0 for an empty response). Keeps the highest ``keep``
    fraction, rounded up; of equal scores the first. On the host: multiply a teacher's mask
    by it. Derived from the abstract of AdviSD.
    """
    if not 0 <= keep <= 1:
        raise ValueError(f"keep must lie in 0..1, got {keep}")
    if len(advised) != len(plain):
        raise ValueError(f"{len(advised)} advised responses, but {len(plain)} plain ones")
    scores = np.zeros(len(plain))
    for index, (with_advice, without) in enumerate(zip(advised, plain, strict=True)):
        gaps = np.asarray(with_advice, np.float64) - np.asarray(without, np.float64)
        scores[index] = abs(gaps.mean()) if gaps.size else 0.0
    # The small term keeps 0.1 * 10 from counting as 1.0000000000000002.
    count = math.ceil(keep * len(scores) - 1e-9)
    kept = np.zeros(len(scores), np.bool_)
    kept[np.argsort(-scores, kind="stable")[:count]] = True
    return kept


def _clipped(gap: jax.Array, clip: float | None) -> jax.Array:
    return gap if clip is None else jnp.clip(gap, -clip, clip)


def _check_weight(field: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{field} must be above 0, got {value}")


def _check_clip(clip: float | None) -> None:
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be above 0 (or None), got {clip}")
