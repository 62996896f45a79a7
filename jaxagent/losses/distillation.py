"""Distillation towards a teacher that scored the same tokens, usually with more context.

The teacher may be the policy itself, shown feedback, a demonstration or a hindsight skill.
None of these terms uses rewards. Each is taken over the tokens the teacher covers
(:func:`jaxagent.losses.teachers.teacher_mask`) and is 0 where it covers none.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxagent.data.batch import Batch
from jaxagent.losses.base import (
    Aggregate,
    Loss,
    Metrics,
    Outputs,
    clamp_log_ratio,
    select,
    token_loss,
)
from jaxagent.losses.policy import (
    OldPolicy,
    old_logprobs,
    old_scores,
    probability_change,
    ratio_metrics,
)
from jaxagent.losses.teachers import (
    teacher_gap,
    teacher_logprobs,
    teacher_mask,
    teacher_score,
)

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")


def sampled_reverse_kl(
    teacher: str,
    ratio_cap: float | None = None,
    old: OldPolicy = "behavior",
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
) -> Loss:
    """``sg(log p - log p_teacher) log p``: the gradient of KL(policy || teacher) from samples.

    Needs no distribution, only the teacher's log-probability of each sampled token.
    ``ratio_cap`` weighs tokens by ``min(sg(p / p_old), ratio_cap)``, as SDPO does (2.0), with
    ``old`` as in :func:`jaxagent.losses.policy.clipped_policy_gradient`.

    Source: SDPO, ``verl/trainer/ppo/core_algos.py``.
    """
    name = teacher_score(teacher)
    scores = frozenset({name}) | _weight_scores(ratio_cap, old)

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask = teacher_mask(batch, teacher)
        logprobs = select(mask, outputs["logprobs"])
        gap = jax.lax.stop_gradient(logprobs) - select(mask, teacher_logprobs(batch, teacher))
        weight = _capped_ratio(mask, outputs, batch, ratio_cap, old)
        return weight * gap * logprobs, mask, {"k1": (jnp.sum(gap), jnp.sum(mask))}

    weighs = None if ratio_cap is None else old
    return token_loss(fn, aggregate, constant, episode_mean, scores=scores, old=weighs)


def divergence(
    teacher: str,
    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "jsd",
    ratio_cap: float | None = None,
    old: OldPolicy = "behavior",
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
) -> Loss:
    """Mean of ``outputs["divergence:<teacher>:<kind>"]`` [R,T] over the teacher's tokens.

    ``"forward_kl"`` is KL(teacher || policy), ``"reverse_kl"`` KL(policy || teacher) and
    ``"jsd"`` their :func:`~jaxagent.losses.divergences.jensen_shannon` with alpha 0.5, of
    the whole next-token distributions. ``ratio_cap`` and ``old``: see
    :func:`sampled_reverse_kl`.

    Source: SDPO, ``verl/trainer/ppo/core_algos.py``; also the term of SD-Search and
    Search-E1, which is derived from their abstracts.
    """
    teacher_score(teacher)
    if kind not in DIVERGENCES:
        raise ValueError(f"kind must be one of {', '.join(DIVERGENCES)}; got {kind!r}")
    output = f"divergence:{teacher}:{kind}"
    scores = _weight_scores(ratio_cap, old)

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask = teacher_mask(batch, teacher)
        weight = _capped_ratio(mask, outputs, batch, ratio_cap, old)
        return weight * select(mask, outputs[output]), mask, {"tokens": jnp.sum(mask)}

    needs = frozenset({output} if ratio_cap is None else {output, "logprobs"})
    weighs = None if ratio_cap is None else old
    return token_loss(fn, aggregate, constant, episode_mean, needs=needs, scores=scores, old=weighs)


def teacher_policy_gradient(
    teacher: str,
    drop_low: float = 0.2,
    drift_weight: float = 1e-3,
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
) -> Loss:
    """``-keep sg(log p_teacher - log p) r + drift_weight (log r)^2``, r the ratio to the sampler.

    The reverse KL to the teacher is the advantage of a policy gradient, taken anew at each
    forward pass. ``keep`` drops the first term where the probability of the token fell by
    more than ``drop_low`` since it was sampled.

    Source: on-policy self-distillation in prime-rl, ``orchestrator/algo/opsd.py`` and
    ``trainer/rl/loss.py`` (ref_kl), where the teacher is the policy with a demonstration
    before its prompt.
    """
    name = teacher_score(teacher)
    if not drop_low > 0:
        raise ValueError(f"drop_low must be above 0, got {drop_low}")
    if not drift_weight >= 0:
        raise ValueError(f"drift_weight must be at least 0, got {drift_weight}")

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask = teacher_mask(batch, teacher)
        old = old_logprobs(batch, "behavior")
        logprobs = select(mask, outputs["logprobs"])
        log_ratio = logprobs - select(mask, old)
        gap = select(mask, teacher_logprobs(batch, teacher)) - jax.lax.stop_gradient(logprobs)
        keep = mask & (probability_change(mask, outputs["logprobs"], old) >= -drop_low)
        policy = -gap * jnp.exp(clamp_log_ratio(log_ratio))
        metrics = {
            "k1": (-jnp.sum(gap), jnp.sum(mask)),
            "trusted_fraction": (jnp.sum(keep), jnp.sum(mask)),
            **ratio_metrics(mask, clamp_log_ratio(log_ratio)),
        }
        return select(keep, policy) + drift_weight * log_ratio**2, mask, metrics

    scores = frozenset({name})
    return token_loss(fn, aggregate, constant, episode_mean, scores=scores, old="behavior")


def auxiliary_distillation(
    teacher: str,
    form: Literal["logprob", "importance"] = "logprob",
    clip: float | None = None,
    old: OldPolicy = "behavior",
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
) -> Loss:
    """The teacher's shift ``d = sg(log p_teacher - log p_old)`` as a term of its own.

    ``form="logprob"`` is ``-clip(d) log p``, ``"importance"`` is ``-clip(d) p / p_old``;
    ``clip`` bounds d to +-clip, None leaves it. As an advantage instead it is
    ``teacher_shift`` of :mod:`jaxagent.credit`. ``old`` as in
    :func:`jaxagent.losses.policy.clipped_policy_gradient`.

    Source: OPID, the auxiliary loss (off by default there); for SEED derived, with one
    skill an episode.
    """
    scores = frozenset({teacher_score(teacher)}) | old_scores(old)
    if form not in ("logprob", "importance"):
        raise ValueError(f"form must be 'logprob' or 'importance', got {form!r}")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be above 0 (or None), got {clip}")

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        shift, mask = teacher_gap(batch, teacher, old)
        logprobs = select(mask, outputs["logprobs"])
        anchor = select(mask, old_logprobs(batch, old))
        bounded = shift if clip is None else jnp.clip(shift, -clip, clip)
        factor = logprobs if form == "logprob" else jnp.exp(clamp_log_ratio(logprobs - anchor))
        metrics = {"teacher_gap": (jnp.sum(shift), jnp.sum(mask))}
        return -select(mask, bounded * factor), mask, metrics

    weighs = old if form == "importance" else None
    return token_loss(fn, aggregate, constant, episode_mean, scores=scores, old=weighs)


def _weight_scores(ratio_cap: float | None, old: str) -> frozenset[str]:
    needed = old_scores(old)
    if ratio_cap is None:
        return frozenset()
    if not ratio_cap > 0:
        raise ValueError(f"ratio_cap must be above 0 (or None), got {ratio_cap}")
    return needed


def _capped_ratio(
    mask: jax.Array, outputs: Outputs, batch: Batch, ratio_cap: float | None, old: OldPolicy
) -> jax.Array | float:
    """``min(sg(p / p_old), ratio_cap)`` [R,T], 1 without a cap."""
    if ratio_cap is None:
        return 1.0
    log_ratio = select(mask, outputs["logprobs"]) - select(mask, old_logprobs(batch, old))
    ratio = jnp.exp(clamp_log_ratio(jax.lax.stop_gradient(log_ratio)))
    return jnp.minimum(ratio, ratio_cap)
