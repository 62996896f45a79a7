"""What an update carries from one step to the next."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from jaxagent.models.config import ModelConfig
from jaxagent.models.sharding import param_shardings, replicated
from jaxagent.models.transformer import Params


@flax.struct.dataclass
class TrainState:
    """``step`` int32 [] counts finished updates and is the version of ``params``.

    ``params`` and the optimiser's moments are float32. ``rng`` uint32 [2] is the raw key of
    the run; fold the step in for a key of one's own. ``ema``: a moving average of ``params``,
    where a teacher is made of it, else None.
    """

    step: jax.Array
    params: Params
    opt_state: Any
    rng: jax.Array
    ema: Params | None = None


def create_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    *,
    seed: int = 0,
    config: ModelConfig | None = None,
    mesh: Mesh | None = None,
    ema: bool = False,
) -> TrainState:
    """A fresh state at step 0 that owns its buffers; with ``ema``, an average that starts at them.

    ``params`` are copied: the update donates the state, and whoever else holds them (a
    reference model, the sampler) must keep them. With a mesh (``config`` then says the
    sharding) the copy lands sharded.
    """
    if mesh is not None and config is None:
        raise ValueError("create_state with a mesh needs config=..., which names the shardings")

    def build(params: Params) -> TrainState:
        # A real copy: what jit merely passes through would share the caller's buffers.
        params = jax.tree.map(lambda x: jnp.copy(x).astype(jnp.float32), params)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(params),
            rng=jax.random.key_data(jax.random.key(seed)),
            ema=jax.tree.map(jnp.copy, params) if ema else None,
        )

    if mesh is None or config is None:
        state: TrainState = jax.jit(build)(params)
        return state
    shardings = state_shardings(jax.eval_shape(build, params), config, mesh)
    placed = jax.device_put(params, shardings.params)
    state = jax.jit(build, out_shardings=shardings)(placed)
    return state


def state_shardings(state: TrainState, config: ModelConfig, mesh: Mesh) -> Any:
    """The tree of ``state`` (arrays or shapes) with a ``NamedSharding`` at each leaf.

    Moments are sharded as their parameter: a leaf belongs to the parameter whose path ends
    its own. All else (counts, keys, heads the model does not know) is replicated.
    """
    known = {
        _names(path): sharding
        for path, sharding in jax.tree_util.tree_leaves_with_path(param_shardings(config, mesh))
    }

    def place(path: Any, leaf: Any) -> NamedSharding:
        names = _names(path)
        for start in range(len(names)):
            sharding = known.get(names[start:])
            if sharding is not None and len(sharding.spec) == np.ndim(leaf):
                return sharding
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, state)


@jax.jit
def snapshot(params: Params) -> Params:
    """A copy of ``params`` that later updates, which donate their state, cannot reach.

    What the sampler is given, and what a reference model keeps.
    """
    return jax.tree.map(jnp.copy, params)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
