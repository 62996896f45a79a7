"""Losses: pure functions of one forward pass and one batch, added up by ``combine``."""

from jaxagent.losses.balance import (
    flow_balance,
    flow_rl,
    trajectory_balance,
    trajectory_balance_learned_z,
)
from jaxagent.losses.base import (
    Loss,
    Objective,
    TokenLoss,
    aggregate_tokens,
    combine,
    select,
    token_loss,
)
from jaxagent.losses.corrections import (
    Correction,
    corrected,
    decoupled_policy_gradient,
    icepop,
    rejection,
    truncated_importance,
)
from jaxagent.losses.critic import failure_prediction, progress_regression, value_loss
from jaxagent.losses.distillation import (
    auxiliary_distillation,
    divergence,
    sampled_reverse_kl,
    teacher_policy_gradient,
)
from jaxagent.losses.divergences import jensen_shannon, kl_divergence, renormalised, with_tail
from jaxagent.losses.forecast import forecast
from jaxagent.losses.observation import observation_prediction
from jaxagent.losses.policy import (
    cispo,
    clipped_policy_gradient,
    dppo,
    gspo,
    reinforce,
    supervised,
)
from jaxagent.losses.preference import marked_cross_entropy, preference
from jaxagent.losses.regularizers import entropy_bonus, kl_estimate, kl_to_reference
from jaxagent.losses.teachers import teacher_logprobs, teacher_mask, teacher_score

__all__ = [
    "Correction",
    "Loss",
    "Objective",
    "TokenLoss",
    "aggregate_tokens",
    "auxiliary_distillation",
    "cispo",
    "clipped_policy_gradient",
    "combine",
    "corrected",
    "decoupled_policy_gradient",
    "divergence",
    "dppo",
    "entropy_bonus",
    "failure_prediction",
    "flow_balance",
    "flow_rl",
    "forecast",
    "gspo",
    "icepop",
    "jensen_shannon",
    "kl_divergence",
    "kl_estimate",
    "kl_to_reference",
    "marked_cross_entropy",
    "observation_prediction",
    "preference",
    "progress_regression",
    "reinforce",
    "rejection",
    "renormalised",
    "sampled_reverse_kl",
    "select",
    "supervised",
    "teacher_logprobs",
    "teacher_mask",
    "teacher_policy_gradient",
    "teacher_score",
    "token_loss",
    "trajectory_balance",
    "trajectory_balance_learned_z",
    "truncated_importance",
    "value_loss",
    "with_tail",
]
