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
from jaxagent.credit.redistribute import belief_redistribution, progress_redistribution
from jaxagent.credit.rewards import drop_flat_groups, has_signal, kl_in_reward, overlong_penalty
from jaxagent.credit.state_groups import gigpo_state, state_ids
from jaxagent.credit.teachers import (
    gated_difficulty,
    routed_teacher_shift,
    select_advice,
    teacher_shift,
)
from jaxagent.credit.turns import turn_returns

__all__ = [
    "Credit",
    "assign",
    "belief_redistribution",
    "chain",
    "clip",
    "drop_flat_groups",
    "evidence_gain",
    "gae",
    "gated_difficulty",
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
    "progress_redistribution",
    "routed_teacher_shift",
    "select_advice",
    "state_ids",
    "teacher_shift",
    "turn_returns",
    "value_targets",
]
