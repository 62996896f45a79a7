"""Losses: pure functions of one forward pass and one batch, added up by ``combine``."""

from jaxagent.losses.base import Loss, Objective, aggregate_tokens, combine, select
from jaxagent.losses.observation import observation_prediction
from jaxagent.losses.policy import clipped_policy_gradient, supervised
from jaxagent.losses.regularizers import entropy_bonus, kl_estimate, kl_to_reference

__all__ = [
    "Loss",
    "Objective",
    "aggregate_tokens",
    "clipped_policy_gradient",
    "combine",
    "entropy_bonus",
    "kl_estimate",
    "kl_to_reference",
    "observation_prediction",
    "select",
    "supervised",
]
