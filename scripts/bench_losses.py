"""Each method's update over plain GRPO's, on a 41 M-parameter model: time and memory.

    python scripts/bench_losses.py --json losses.json

One process measures all methods in turns, so that a machine's drift hits all alike, and
reports the ratio of medians; an update is packing, further forward passes, credit and the
step itself. Memory: what the compiled update needs beside its arguments, and how much more
of that a doubled vocabulary takes, over what the parameters of the
added words take themselves (their gradient alone makes it 1).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxagent import credit, losses
from jaxagent.data.hindsight import told
from jaxagent.data.kinds import Kind
from jaxagent.episodes.episode import Context, Episode
from jaxagent.models.config import ModelConfig
from jaxagent.models.heads import LOG_Z_HEAD, HeadConfig, add_heads
from jaxagent.models.transformer import Params, init
from jaxagent.training.heads import head_outputs, head_pass
from jaxagent.training.learner import Learner, Shapes
from jaxagent.training.optimizer import adamw
from jaxagent.training.passes import Pass, boundary_answer, derived, own_tokens, teacher
from jaxagent.training.state import create_state
from jaxagent.training.step import make_update

MODEL = ModelConfig(
    vocab_size=32000,
    hidden_size=512,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    mlp_size=1536,
    qk_norm=True,
    remat="dots",
)
ROWS, LENGTH, EPISODE, TURNS, ADVICE = 4, 512, 256, 3, 48
HEADS = {"values": HeadConfig(), "log_z": LOG_Z_HEAD}


@dataclass(frozen=True)
class Method:
    """What an update is made of; ``passes`` counts forward passes beside the update's own."""

    objective: losses.Objective
    credit: Any
    passes: Sequence[Pass] = ()


def one_teacher(name: str, hidden: bool = False) -> Pass:
    """The policy itself, told as many tokens as there is room for."""
    return teacher(
        name,
        told(lambda text: [7] * ADVICE, lambda episode: "x", max_tokens=ADVICE),
        max_advice=ADVICE,
        hidden=hidden,
        rows=ROWS,
    )


def methods(reference: Params) -> dict[str, Method]:
    """GRPO first; the others are compared with it."""
    clipped = losses.clipped_policy_gradient
    group = credit.group_relative()
    policy = (1.0, clipped(0.2, 0.28))
    frozen = own_tokens("reference", reference)
    targets = derived(["returns"], lambda batch: {"returns": credit.value_targets(batch)})
    combine = losses.combine
    return {
        "grpo": Method(combine(policy=(1.0, clipped())), group),
        "dr_grpo": Method(
            combine(policy=(1.0, clipped(aggregate="constant", constant=64.0, episode_mean=True))),
            credit.group_relative(scale="none"),
        ),
        "rloo": Method(
            combine(policy=(1.0, losses.reinforce("episode_sum"))), credit.leave_one_out()
        ),
        "dapo": Method(combine(policy=policy), group),
        "gspo": Method(combine(policy=(1.0, losses.gspo())), group),
        "cispo": Method(combine(policy=(1.0, losses.cispo())), group),
        "dppo": Method(combine(policy=(1.0, losses.dppo())), group),
        "truncated_importance": Method(
            combine(
                policy=(1.0, losses.corrected(losses.reinforce(), losses.truncated_importance()))
            ),
            group,
        ),
        "echo": Method(
            combine(policy=policy, world=(0.05, losses.observation_prediction())), group
        ),
        "entropy": Method(combine(policy=policy, bonus=(0.01, losses.entropy_bonus())), group),
        "gtpo": Method(combine(policy=policy), credit.turn_returns(0.9, normalise="group")),
        "kl_to_reference": Method(
            combine(policy=policy, kl=(1e-3, losses.kl_to_reference("k3"))), group, [frozen]
        ),
        "tba": Method(combine(tb=(0.1, losses.trajectory_balance(0.5))), group, [frozen]),
        "ppo": Method(
            combine(policy=policy, value=(0.5, losses.value_loss())),
            credit.gae(whiten=True),
            [head_pass(HEADS, ["values"]), targets],
        ),
        "flow_rl": Method(combine(flow=(0.01, losses.flow_rl())), group, [frozen]),
        "seed": Method(
            combine(policy=policy),
            credit.chain(group, credit.teacher_shift("told", 1e-3)),
            [one_teacher("told")],
        ),
        "pbsd": Method(
            combine(policy=policy),
            credit.chain(group, credit.belief_redistribution("told")),
            [one_teacher("told")],
        ),
        "sdpo": Method(
            combine(distil=(1.0, losses.divergence("told", "jsd"))),
            group,
            [one_teacher("told", hidden=True)],
        ),
        "sd_search": Method(
            combine(policy=policy, distil=(0.1, losses.divergence("told", "jsd"))),
            group,
            [one_teacher("told", hidden=True)],
        ),
        "flow_balance": Method(
            combine(flow=(0.01, losses.flow_balance("told"))),
            credit.group_relative(scale="none"),
            [frozen, one_teacher("told")],
        ),
        "igpo": Method(
            combine(policy=policy),
            credit.turn_returns(normalise="group_rewards"),
            [boundary_answer("gold_logprobs", lambda e: [5] * 16, max_answer=16, rows=ROWS)],
        ),
    }


def episodes() -> list[Episode]:
    """Two a row: a prompt of 64 tokens, then turns of 48 action and 16 observation tokens."""
    rng = np.random.default_rng(0)
    at = np.arange(EPISODE)
    turns = np.where(at < 64, -1, (at - 64) // 64).astype(np.int32)
    acts = (turns >= 0) & ((at - 64) % 64 < 48)
    kinds = np.where(turns < 0, Kind.PROMPT, np.where(acts, Kind.ACTION, Kind.OBSERVATION))
    found = []
    for index in range(ROWS * LENGTH // EPISODE):
        drawn = -10.4 + 0.2 * rng.random(EPISODE)
        context = Context(
            tokens=rng.integers(0, MODEL.vocab_size, EPISODE).astype(np.int32),
            kinds=kinds.astype(np.uint8),
            turn_ids=turns,
            logprobs=np.where(acts, drawn, 0).astype(np.float32),
            versions=np.where(acts, 0, -1).astype(np.int32),
        )
        rewards = (0.0, 0.0, float(index % 2))
        found.append(Episode("task", f"group {index // 4}", (context,), rewards[-1], rewards))
    return found


def build(model: ModelConfig, method: Method, state: Any) -> Learner:
    """A learner of its own around the shared state."""
    optimizer = adamw(1e-4)
    shapes = Shapes(LENGTH, rows=(ROWS,), episodes=ROWS * LENGTH // EPISODE, turns=TURNS)
    update = make_update(model, method.objective, optimizer, outputs=head_outputs(HEADS))
    return Learner(state, update, shapes, model, credit=method.credit, passes=method.passes)


def fresh_state(model: ModelConfig) -> tuple[Any, Params]:
    params = init(jax.random.key(0), model)
    headed = add_heads(params, jax.random.key(1), model, HEADS)
    return create_state(headed, adamw(1e-4)), params


def temporary_bytes(model: ModelConfig, method: Method) -> int:
    """What the compiled update holds at its peak, beside arguments and results."""
    shapes = Shapes(LENGTH, rows=(ROWS,), episodes=ROWS * LENGTH // EPISODE, turns=TURNS)
    batch = shapes.pack(episodes())
    for one in method.passes:
        for name in one.scores:
            batch = batch.with_score(name, np.zeros(batch.tokens.shape, np.float32))
        for name in one.hidden:
            states = np.zeros((*batch.tokens.shape, model.hidden_size), np.float32)
            batch = batch.with_hidden(name, states)
    update = make_update(model, method.objective, adamw(1e-4), outputs=head_outputs(HEADS))
    state = jax.eval_shape(lambda: fresh_state(model)[0])
    lowered = jax.jit(update._step, donate_argnums=0).lower(state, batch, {})
    return int(lowered.compile().memory_analysis().temp_size_in_bytes)  # type: ignore[union-attr]


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - began


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="methods to compare with grpo")
    parser.add_argument("--memory", action="store_true", help="also compile for the memory")
    options = parser.parse_args()
    state, params = fresh_state(MODEL)
    chosen = methods(params)
    if options.only:
        chosen = {name: m for name, m in chosen.items() if name in ("grpo", *options.only)}
    learners = {name: build(MODEL, method, state) for name, method in chosen.items()}
    data = episodes()
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    for round_ in range(options.rounds + 1):
        for name, learner in learners.items():
            # One state for all: updates donate it, so it moves from hand to hand.
            learner.state = state
            took = timed(lambda learner=learner: learner.learn(data))  # type: ignore[misc]
            state = learner.state
            if round_:  # the first compiles
                seconds[name].append(took)
    base = statistics.median(seconds["grpo"])
    results: dict[str, Any] = {"rows": ROWS, "row_length": LENGTH, "grpo_seconds": base}
    for name in learners:
        results[f"time_ratio_{name}_over_grpo"] = statistics.median(seconds[name]) / base
    if options.memory:
        wide = replace(MODEL, vocab_size=2 * MODEL.vocab_size)
        growth = 4 * (wide.num_params - MODEL.num_params)
        for name, method in chosen.items():
            one, two = temporary_bytes(MODEL, method), temporary_bytes(wide, method)
            results[f"temporary_mb_{name}"] = one / 1e6
            results[f"memory_growth_ratio_{name}"] = (two - one) / growth
    print(json.dumps(results, indent=1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
