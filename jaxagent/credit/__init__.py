"""Credit assignment: who gets how much of the reward, as composable pure functions."""

from jaxagent.credit.base import Credit, assign, chain, clip
from jaxagent.credit.exploration import (
    OutcomeCounts,
    batch_bonus,
    count_outcomes,
    demonstration_prefix,
    historical_bonus,
    stage_groups,
    with_bonus,
)
from jaxagent.credit.gae import gae, value_targets
from jaxagent.credit.group import group_relative, group_stats, leave_one_out, lowered_baseline
from jaxagent.credit.information import (
    evidence_gain,
    information_gain,
    log_ratio_td,
    position_relative,
)
from jaxagent.credit.monitor import failure_scores, should_stop, stop_threshold, stopped
from jaxagent.credit.redistribute import belief_redistribution, progress_redistribution
from jaxagent.credit.rewards import drop_flat_groups, has_signal, kl_in_reward, overlong_penalty
from jaxagent.credit.state_groups import gigpo_state, state_ids
from jaxagent.credit.structure import (
    ComparisonRecord,
    Role,
    best_so_far,
    imagined_advantage,
    imagined_targets,
    role_shift,
    tree_advantage,
    window_advantage,
)
from jaxagent.credit.teachers import (
    gated_difficulty,
    routed_teacher_shift,
    select_advice,
    teacher_shift,
)
from jaxagent.credit.turns import turn_returns

__all__ = [
    "ComparisonRecord",
    "Credit",
    "OutcomeCounts",
    "Role",
    "assign",
    "batch_bonus",
    "belief_redistribution",
    "best_so_far",
    "chain",
    "clip",
    "count_outcomes",
    "demonstration_prefix",
    "drop_flat_groups",
    "evidence_gain",
    "failure_scores",
    "gae",
    "gated_difficulty",
    "gigpo_state",
    "group_relative",
    "group_stats",
    "has_signal",
    "historical_bonus",
    "imagined_advantage",
    "imagined_targets",
    "information_gain",
    "kl_in_reward",
    "leave_one_out",
    "log_ratio_td",
    "lowered_baseline",
    "overlong_penalty",
    "position_relative",
    "progress_redistribution",
    "role_shift",
    "routed_teacher_shift",
    "select_advice",
    "should_stop",
    "stage_groups",
    "state_ids",
    "stop_threshold",
    "stopped",
    "teacher_shift",
    "tree_advantage",
    "turn_returns",
    "value_targets",
    "window_advantage",
    "with_bonus",
]
