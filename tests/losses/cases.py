"""Every loss beside its reference: what the general tests run over."""

from typing import NamedTuple

from jaxagent import losses
from jaxagent.data.kinds import Kind
from jaxagent.losses import corrected, rejection, truncated_importance
from tests.losses import references as ref

BEHAVIOR = ref.score("behavior")
PROXIMAL = ref.proximal


class Pair(NamedTuple):
    loss: losses.Loss
    reference: ref.Reference


def _ppo(old: str = "proximal") -> losses.Loss:
    return losses.clipped_policy_gradient(0.2, 0.28, old=old)  # type: ignore[arg-type]


PPO = ref.clipped(0.2, 0.28, PROXIMAL)

POLICY = {
    "ppo": Pair(_ppo("behavior"), ref.by_token(ref.clipped(0.2, 0.28, BEHAVIOR))),
    "reinforce": Pair(losses.reinforce("episode"), ref.by_token(ref.reinforce, "episode")),
    "cispo": Pair(losses.cispo(), ref.by_token(ref.cispo(1.0, 0.2, BEHAVIOR))),
    "cispo_both": Pair(
        losses.cispo(0.1, 0.2, old="proximal"), ref.by_token(ref.cispo(0.1, 0.2, PROXIMAL))
    ),
    "gspo": Pair(losses.gspo(0.1, 0.2), ref.by_token(ref.gspo(0.1, 0.2, BEHAVIOR), "episode")),
    "gspo_token": Pair(
        losses.gspo(0.05, 0.05, "token", old="proximal"),
        ref.by_token(ref.gspo(0.05, 0.05, PROXIMAL)),
    ),
    "dppo": Pair(losses.dppo(0.05, 0.07, 0.1), ref.by_token(ref.dppo(0.05, 0.07, 0.1))),
}

CORRECTED = {
    "token_tis": Pair(
        corrected(_ppo(), truncated_importance(1.2)),
        ref.by_token(ref.corrected(PPO, ref.token_tis(1.2, PROXIMAL))),
    ),
    "token_tis_low": Pair(
        corrected(_ppo(), truncated_importance(1.2, low=0.9, normalise=True)),
        ref.by_token(ref.corrected(PPO, ref.token_tis(1.2, PROXIMAL, 0.9, normalise=True))),
    ),
    "sequence_tis": Pair(
        corrected(_ppo(), truncated_importance(1.5, "sequence")),
        ref.by_token(ref.corrected(PPO, ref.sequence_tis(1.5, PROXIMAL))),
    ),
    "sequence_tis_live": Pair(
        corrected(losses.reinforce(), truncated_importance(1.5, "sequence", normalise=True)),
        ref.by_token(
            ref.corrected(ref.reinforce, ref.sequence_tis(1.5, ref.current, normalise=True))
        ),
    ),
    "reinforce_tis": Pair(
        corrected(losses.reinforce(), truncated_importance(1.2)),
        ref.by_token(ref.corrected(ref.reinforce, ref.token_tis(1.2, ref.current))),
    ),
    "gspo_icepop": Pair(
        corrected(losses.gspo(0.1, 0.1, old="proximal"), losses.icepop(0.8, 1.25)),
        ref.by_token(
            ref.corrected(ref.gspo(0.1, 0.1, PROXIMAL), ref.icepop(0.8, 1.25, PROXIMAL)), "episode"
        ),
    ),
    "rejection_behavior": Pair(
        corrected(_ppo("behavior"), rejection("k3", "token", high=0.05)),
        ref.by_token(
            ref.corrected(
                ref.clipped(0.2, 0.28, BEHAVIOR),
                ref.rejection("k3", "token", 0, 0.05, ref.current),
            )
        ),
    ),
    "sequence_mis": Pair(
        corrected(
            _ppo(),
            truncated_importance(1.5, "sequence"),
            rejection("k1", "sequence_sum", low=0.3, high=3.0),
            rejection("k2", "sequence_mean", high=0.06),
            denominator="kept",
        ),
        ref.by_token(
            ref.corrected(
                PPO,
                ref.sequence_tis(1.5, PROXIMAL),
                ref.rejection("k1", "sequence_sum", 0.3, 3.0, PROXIMAL),
                ref.rejection("k2", "sequence_mean", 0, 0.06, PROXIMAL),
                kept_only=True,
            )
        ),
    ),
    "twice": Pair(
        corrected(
            corrected(_ppo(), rejection("k2", high=0.1), denominator="kept"),
            truncated_importance(1.2),
        ),
        ref.by_token(
            ref.corrected(
                PPO,
                ref.token_tis(1.2, PROXIMAL),
                ref.rejection("k2", "token", 0, 0.1, PROXIMAL),
                kept_only=True,
            )
        ),
    ),
    "decoupled": Pair(
        losses.decoupled_policy_gradient(0.2, 0.28, cap=1.2),
        ref.by_token(ref.corrected(PPO, ref.icepop(0.0, 1.2, PROXIMAL))),
    ),
    "decoupled_loglinear": Pair(
        losses.decoupled_policy_gradient(
            0.02, 0.02, cap=1.1, mode="clamp", proximal="loglinear", aggregate="episode"
        ),
        ref.by_token(
            ref.corrected(
                ref.clipped(0.02, 0.02, ref.loglinear), ref.token_tis(1.1, ref.loglinear)
            ),
            "episode",
        ),
    ),
}

BALANCE = {
    "balance": Pair(losses.trajectory_balance(0.5), ref.trajectory_balance(0.5)),
    "balance_norm": Pair(
        losses.trajectory_balance(0.5, length_norm=True), ref.trajectory_balance(0.5, True)
    ),
    "learned_z": Pair(losses.trajectory_balance_learned_z(0.7), ref.learned_z(0.7)),
    "flow_rl": Pair(losses.flow_rl(2.0), ref.flow_rl(2.0, 0.2, BEHAVIOR)),
    "flow_rl_released": Pair(
        losses.flow_rl(is_clip=None, old="proximal"), ref.flow_rl(15.0, None, PROXIMAL)
    ),
    "flow_balance": Pair(
        losses.flow_balance("t", 2.0, 0.5), ref.flow_balance("t", 2.0, 0.5, BEHAVIOR)
    ),
    "flow_balance_u": Pair(
        losses.flow_balance("u", old="proximal"), ref.flow_balance("u", 15.0, 1.0, PROXIMAL)
    ),
}

DISTILLATION = {
    "reverse_kl": Pair(
        losses.sampled_reverse_kl("t"), ref.by_token(ref.taught(ref.reverse_kl("t"), "t"))
    ),
    "reverse_kl_sdpo": Pair(
        corrected(
            losses.sampled_reverse_kl("u", ratio_cap=1.2, old="proximal"),
            truncated_importance(1.2),
        ),
        ref.by_token(
            ref.corrected(
                ref.capped(ref.reverse_kl("u"), 1.2, PROXIMAL), ref.token_tis(1.2, PROXIMAL)
            )
        ),
    ),
    "divergence": Pair(
        losses.divergence("t", aggregate="episode"),
        ref.by_token(ref.taught(ref.output("divergence:t:jsd"), "t"), "episode"),
    ),
    "divergence_capped": Pair(
        losses.divergence("u", "forward_kl", ratio_cap=1.1),
        ref.by_token(ref.capped(ref.output("divergence:u:forward_kl"), 1.1, BEHAVIOR)),
    ),
    "opsd": Pair(
        losses.teacher_policy_gradient("t", 0.02, 0.1),
        ref.by_token(ref.taught(ref.teacher_policy_gradient("t", 0.02, 0.1), "t")),
    ),
    "opid": Pair(
        losses.auxiliary_distillation("t", clip=0.3),
        ref.by_token(ref.taught(ref.auxiliary("t", "logprob", 0.3, BEHAVIOR), "t")),
    ),
    "opid_importance": Pair(
        losses.auxiliary_distillation("u", "importance", old="proximal"),
        ref.by_token(ref.auxiliary("u", "importance", None, PROXIMAL)),
    ),
    "preference": Pair(losses.preference(0.5), ref.preference(0.5)),
    "suffix": Pair(losses.marked_cross_entropy("suffix"), ref.by_token(ref.marked("suffix"))),
}

OTHER = {
    "observation": Pair(
        losses.observation_prediction(weighted=True),
        ref.by_token(ref.observation, kind=Kind.OBSERVATION),
    ),
    "observation_episode": Pair(
        losses.observation_prediction("episode", weighted=True),
        ref.by_token(ref.observation, "episode", Kind.OBSERVATION),
    ),
    "value": Pair(losses.value_loss(0.1), ref.by_token(ref.value(0.1))),
    "value_plain": Pair(
        losses.value_loss(None, "episode_sum"), ref.by_token(ref.value(None), "episode_sum")
    ),
    "failure": Pair(losses.failure_prediction(), ref.by_token(ref.failure)),
    "progress": Pair(losses.progress_regression(), ref.by_token(ref.progress)),
}

CASES: dict[str, Pair] = {**POLICY, **CORRECTED, **BALANCE, **DISTILLATION, **OTHER}
