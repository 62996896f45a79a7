"""Run with 8 CPU devices: prints, as JSON, how far each mesh's gradient is from one device's."""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxagent import credit, losses
from jaxagent.data.batch import action_mask, episode_sum
from jaxagent.data.hindsight import group_summary
from jaxagent.data.packing import pack, place
from jaxagent.data.synthetic import random_episodes
from jaxagent.models.config import ModelConfig
from jaxagent.models.sharding import make_mesh, shard_params
from jaxagent.models.transformer import init
from jaxagent.training.checkpoint import Checkpoints
from jaxagent.training.optimizer import adamw
from jaxagent.training.passes import Setting, Work, teacher
from jaxagent.training.state import create_state
from jaxagent.training.step import make_scorer, make_update

CONFIG = ModelConfig(
    vocab_size=24,
    hidden_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    mlp_size=16,
)
KEEP = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None: (jax.tree.map(lambda g: -0.1 * g, grads), grads),
)


def balance(outputs: Any, batch: Any) -> Any:
    logprobs = losses.select(action_mask(batch), outputs["logprobs"])
    gap = jnp.where(batch.valid, episode_sum(batch, logprobs) - batch.rewards, 0.0)
    return jnp.sum(gap**2), jnp.sum(batch.valid), {}


def difference(found: Any, wanted: Any) -> float:
    pairs = [*zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)]
    largest = max(float(np.abs(w).max()) for _, w in pairs)
    return max(float(np.abs(np.asarray(f) - np.asarray(w)).max()) for f, w in pairs) / largest


def main(directory: str) -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    policy = losses.clipped_policy_gradient(0.2, 0.28, aggregate="episode")
    world = losses.observation_prediction()
    local = losses.combine(policy=(1.0, policy), world=(0.05, world))
    whole = losses.combine(
        policy=(1.0, policy),
        world=(0.05, world),
        balance=(0.01, balance),
        distil=(0.1, losses.divergence("told", "jsd")),
    )
    params = init(jax.random.key(0), CONFIG)
    episodes = random_episodes(1, groups=4, group_size=4, vocab_size=24, max_contexts=2)
    batch = pack(episodes, buckets=(64,), rows=16)
    batch, _ = credit.assign(credit.group_relative(), batch)
    told = np.random.default_rng(0).normal(size=(16, 64, CONFIG.hidden_size))
    batch = batch.with_hidden("told", told.astype(np.float32))
    batch = jax.tree.map(np.asarray, batch)

    def run(objective: Any, mesh: Any, cut: int) -> Any:
        step = make_update(CONFIG, objective, KEEP, mesh=mesh, micro_batches=cut)
        # Placed as the state will be, so that a state which shared buffers would show.
        given = params if mesh is None else shard_params(params, CONFIG, mesh)
        state = create_state(given, KEEP, config=CONFIG, mesh=mesh)
        for _ in range(2):
            state, metrics = step(state, batch)
        assert difference(given, params) == 0.0, "an update reached the parameters it began from"
        return jax.device_get((state, metrics)), step.compilations, state

    single = {o: run(o, None, 1)[0] for o in (local, whole)}
    report: dict[str, Any] = {"devices": jax.device_count(), "meshes": {}}
    for shape, objective, cut in (
        ((8, 1, 1), whole, 2),
        ((2, 2, 2), local, 2),
    ):
        mesh = make_mesh(*shape)
        (state, metrics), programs, live = run(objective, mesh, cut)
        wanted, wanted_metrics = single[objective]
        report["meshes"][f"{shape} cut {cut}"] = {
            "gradient": difference(state.opt_state, wanted.opt_state),
            "params": difference(state.params, wanted.params),
            "metrics": max(
                abs(float(metrics[k]) - float(v)) / (1 + abs(float(v)))
                for k, v in wanted_metrics.items()
            ),
            "programs": programs,
            "spec": str(live.params["layers"]["q"].sharding.spec),
            "moment_spec": str(live.opt_state["layers"]["q"].sharding.spec),
        }
    mesh = make_mesh(2, 2, 2)
    scored = make_scorer(CONFIG, mesh=mesh, micro_batches=2)(params, batch)
    report["scorer"] = difference(scored, make_scorer(CONFIG)(params, batch))

    def taught(mesh: Any) -> Any:
        setting = Setting(CONFIG, 16 * 64, 64, 16, 4, 1.0, mesh)
        one = teacher(
            "t", group_summary(lambda text: [1], max_tokens=16), max_advice=16, hidden=True, rows=3
        )
        state = create_state(params, KEEP, config=CONFIG, mesh=mesh)
        work = Work(state, episodes, place(episodes, buckets=(64,)))
        found, _ = one.build(setting)(work, batch)
        return found.scores, found.hidden["t"]

    report["teacher"] = difference(taught(mesh), taught(None))

    # A checkpoint written on (2, 2, 2) continues on (4, 1, 2) and on one device.
    adam = adamw(0.1)
    state = create_state(params, adam, config=CONFIG, mesh=mesh)
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(state)
        template = jax.eval_shape(lambda: create_state(params, adam))
        other, _ = checkpoints.restore(template, config=CONFIG, mesh=make_mesh(4, 1, 2))
        alone, _ = checkpoints.restore(template)
    report["restored"] = [difference(x, state) for x in (other, alone)]
    report["restored_spec"] = str(other.opt_state[1].mu["layers"]["q"].sharding)
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
