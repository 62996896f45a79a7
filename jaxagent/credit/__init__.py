"""Credit assignment: who gets how much of the reward, as composable pure functions."""

from jaxagent.credit.base import Credit, assign, chain, clip
from jaxagent.credit.gae import gae, value_targets
from jaxagent.credit.group import group_relative, group_stats, leave_one_out, lowered_baseline
from jaxagent.credit.information import (
    evidence_gain,
    information_gain,
    log_ratio_td,
    position_relative,
)
from jaxagent.credit.rewards import drop_flat_groups, has_signal, kl_in_reward, overlong_penalty
from jaxagent.credit.state_groups import gigpo_state, state_ids
from jaxagent.credit.turns import turn_returns

__all__ = [
    "Credit",
    "assign",
    "chain",
    "clip",
    "drop_flat_groups",
    "evidence_gain",
    "gae",
    "gigpo_state",
    "group_relative",
    "group_stats",
    "has_signal",
    "information_gain",
    "kl_in_reward",
    "leave_one_out",
    "log_ratio_td",
    "lowered_baseline",
    "overlong_penalty",
    "position_relative",
    "state_ids",
    "turn_returns",
    "value_targets",
]
