"""Run with 8 CPU devices: prints, as JSON, how far heads on a mesh are from those on one."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxagent import credit, losses
from jaxagent.data.packing import pack, place
from jaxagent.data.synthetic import random_episodes
from jaxagent.models.config import ModelConfig
from jaxagent.models.heads import LOG_Z_HEAD, HeadConfig, add_heads
from jaxagent.models.sharding import make_mesh
from jaxagent.models.transformer import init
from jaxagent.training.heads import head_outputs, head_pass, meter_pass
from jaxagent.training.passes import Setting, Work
from jaxagent.training.state import create_state
from jaxagent.training.step import make_update

CONFIG = ModelConfig(
    vocab_size=24,
    hidden_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    mlp_size=16,
)
CONFIGS = {"values": HeadConfig(), "log_z": LOG_Z_HEAD, "progress": HeadConfig()}
KEEP = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None: (jax.tree.map(lambda g: -0.1 * g, grads), grads),
)


def difference(found: Any, wanted: Any) -> float:
    pairs = [*zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)]
    largest = max(float(np.abs(w).max()) for _, w in pairs)
    assert largest > 0
    return max(float(np.abs(np.asarray(f) - np.asarray(w)).max()) for f, w in pairs) / largest


def main() -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    objective = losses.combine(
        value=(0.5, losses.value_loss(clip=None)),
        flow=(0.1, losses.flow_rl(beta=1.0)),
        progress=(0.1, losses.progress_regression()),
    )
    params = add_heads(init(jax.random.key(0), CONFIG), jax.random.key(1), CONFIG, CONFIGS)
    rng = np.random.default_rng(0)
    heads = jax.tree.map(
        lambda x: x + jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32), params["heads"]
    )
    params = {**params, "heads": heads}
    episodes = random_episodes(1, groups=4, group_size=4, vocab_size=24, max_contexts=2)
    packed = pack(episodes, buckets=(64,), rows=16)
    work_place = place(episodes, buckets=(64,))

    def run(mesh: Any, cut: int) -> Any:
        state = create_state(params, KEEP, config=CONFIG, mesh=mesh)
        setting = Setting(
            CONFIG, packed.tokens.size, 64, packed.num_episodes, packed.num_turns, 1.0, mesh
        )
        batch: Any = packed
        for one in (head_pass(CONFIGS, ["values", "log_z"]), meter_pass()):
            batch, _ = one.build(setting)(Work(state, episodes, work_place), batch)
        found = jax.device_get((batch.scores, batch.extras))
        batch = batch.with_score("returns", np.full(packed.tokens.shape, 0.7, np.float32))
        batch = batch.with_score("reference", np.full(packed.tokens.shape, -3.0, np.float32))
        batch = jax.jit(lambda given: credit.assign(credit.gae(), given)[0])(batch)
        # As the learner hands it over: what the passes left on the devices stays there.
        step = make_update(
            CONFIG, objective, KEEP, mesh=mesh, micro_batches=cut, outputs=head_outputs(CONFIGS)
        )
        for _ in range(2):
            state, _ = step(state, batch)
        return found, state, step.compilations

    (scores, extras), single, _ = run(None, 1)
    (their_scores, their_extras), state, programs = run(make_mesh(2, 2, 2), 2)
    placed = jax.tree.leaves((state.params["heads"], state.opt_state["heads"]))
    report = {
        "devices": jax.device_count(),
        "gradient": difference(state.opt_state, single.opt_state),
        "params": difference(state.params, single.params),
        "programs": programs,
        "replicated": all(x.sharding.is_fully_replicated for x in placed),
        "scores": difference(their_scores, scores),
        "meter": difference(their_extras, extras),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
