from typing import Any

import jax
import pytest

from jaxagent.models.config import ModelConfig, RopeScaling
from jaxagent.models.transformer import init

GOOD: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_size": 40,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 0),
        ("num_layers", 2.0),
        ("num_heads", True),
        ("num_heads", 3),
        ("head_dim", 7),
        ("rope_theta", 0.0),
        ("norm_eps", float("nan")),
        ("compute_dtype", "float16"),
        ("remat", "some"),
        ("attention", "flash"),
    ],
)
def test_a_bad_field_is_named_in_one_line(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as error:
        ModelConfig(**(GOOD | {name: value}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("factor", 0.5), ("low_freq_factor", 4.0), ("original_max_len", 0)],
)
def test_a_bad_rope_scaling_is_named(name: str, value: float) -> None:
    fields: dict[str, Any] = {"factor": 8.0} | {name: value}
    with pytest.raises(ValueError, match=name):
        RopeScaling(**fields)


@pytest.mark.parametrize("flag", [True, False])
def test_num_params_counts_what_init_makes(flag: bool) -> None:
    config = ModelConfig(**GOOD, qk_norm=flag, qkv_bias=flag, tie_embeddings=flag)
    shapes = jax.eval_shape(lambda key: init(key, config), jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == config.num_params
