"""The shared vectors and printed numbers of losses beyond the clipped surrogate."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent import credit, losses
from jaxagent.data.kinds import Kind
from jaxagent.losses.base import ratio

pytestmark = pytest.mark.usefixtures("x64")
A = Kind.ACTION


@pytest.mark.parametrize(
    ("key", "loss"),
    [
        ("gspo_3e-4_4e-4_episode", losses.gspo()),
        ("cispo_1_0.2_token", losses.cispo()),
        ("reinforce_token", losses.reinforce()),
        ("trajectory_balance_beta0.5", losses.trajectory_balance(0.5)),
        (
            "trajectory_balance_beta0.5_length_normalised",
            losses.trajectory_balance(0.5, length_norm=True),
        ),
    ],
)
def test_vectors(laid: Callable[..., Any], vectors: dict[str, Any], key: str, loss: Any) -> None:
    episodes = vectors["episodes"]
    case = laid([[A] * len(e["lp"]) for e in episodes], vectors["reward"], vectors["group"])
    batch = case.batch.replace(behavior_logprobs=case.lay([e["old"] for e in episodes]))
    batch = batch.with_score("reference", case.lay([e["ref"] for e in episodes]))
    batch, _ = credit.assign(credit.group_relative(), batch)
    logprobs = jnp.asarray(case.lay([e["lp"] for e in episodes]))
    numerator, denominator, _ = loss.fn({"logprobs": logprobs}, batch)
    wanted = vectors["expected"][key]
    wanted = wanted["loss"] if isinstance(wanted, dict) else wanted
    assert float(ratio(numerator, denominator)) == pytest.approx(wanted, abs=1e-5)


def test_printed_numbers_on_the_fixture(laid: Callable[..., Any]) -> None:
    case = laid([[A, A], [A, A, A]], [1.0, 0.0], [0, 0])
    logprobs = case.lay([np.log([0.6, 0.5]), np.log([0.25, 0.5, 0.9])], fill=-3.0)
    old = case.lay([np.log([0.4, 0.5]), np.log([0.5, 0.5, 1.0])], fill=-1.0)
    batch = case.batch.replace(behavior_logprobs=old, advantages=case.spread([1.0, -1.0]))
    for loss, wanted in (
        (losses.gspo(), -0.00035),
        (losses.cispo(0.2, 0.2), -0.1181738),
        (losses.cispo(), -0.0349962),
    ):
        found = ratio(*loss.fn({"logprobs": jnp.asarray(logprobs)}, batch)[:2])
        assert float(found) == pytest.approx(wanted, abs=1e-6)
