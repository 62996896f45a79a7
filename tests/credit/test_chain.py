"""The order of a chain is checked when it is built."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent import credit
from jaxagent.data.batch import Batch
from tests.credit.cases import batch_of_turns, run

BASE = credit.group_relative(scale="none")
SCALE = credit.progress_redistribution(tau=1.0)
SHIFT = credit.teacher_shift("x", 1.0)


def plain(batch: Any, advantages: Any) -> Any:
    return advantages + 1, {}


@pytest.mark.parametrize(
    "steps",
    [
        (BASE,),
        (BASE, SCALE, SHIFT),
        (BASE, SCALE, SCALE, credit.clip(1.0), SHIFT, SHIFT, credit.clip(1.0)),
        (plain, SCALE, SHIFT),  # a function of one's own may be a base
        (plain, BASE, SHIFT),
        (credit.chain(BASE, SCALE), SHIFT),
        (credit.chain(BASE), SCALE),
    ],
)
def test_right_orders_are_built(steps: Any) -> None:
    chain = credit.chain(*steps)
    assert chain.scores <= {"teacher/x"} and chain.extras <= {"meter"}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((SCALE,), "progress_redistribution is multiplicative.*put a base before it"),
        ((SHIFT,), "teacher_shift is additive.*put a base before it"),
        ((SHIFT, BASE), "teacher_shift is additive.*put a base before it"),
        ((BASE, SHIFT, SCALE), "right after the base, before the additive teacher_shift"),
        ((credit.chain(BASE, SHIFT), SCALE), "before the additive teacher_shift"),
        ((BASE, credit.clip(1.0), SHIFT, plain, SCALE), "before the additive teacher_shift"),
        ((BASE, credit.gae()), "gae starts afresh and would discard group_relative"),
        ((BASE, SHIFT, credit.chain(BASE)), "discard group_relative, teacher_shift"),
    ],
)
def test_wrong_orders_fail_at_construction(steps: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        credit.chain(*steps)


def test_assign_wants_a_base_too() -> None:
    with pytest.raises(ValueError, match="put a base before it"):
        credit.assign(SHIFT, batch_of_turns([[1]], [1.0]))


def test_every_method_says_its_place() -> None:
    stages = {
        "base": [
            credit.group_relative(),
            credit.leave_one_out(),
            credit.lowered_baseline(),
            credit.turn_returns(),
            credit.gae(),
            credit.position_relative(),
            credit.tree_advantage(),
            credit.window_advantage(),
        ],
        "multiplicative": [SCALE, credit.belief_redistribution("x")],
        "additive": [
            SHIFT,
            credit.routed_teacher_shift("x", "y"),
            credit.gated_difficulty("x"),
            credit.gigpo_state(),
            credit.role_shift(),
            credit.imagined_advantage(),
        ],
        "any": [credit.clip(1.0)],
    }
    for stage, methods in stages.items():
        assert [method.stage for method in methods] == [stage] * len(methods)


def test_scores_and_extras_of_all_steps_are_needed() -> None:
    chain = credit.chain(BASE, SCALE, SHIFT, credit.role_shift())
    assert chain.scores == {"teacher/x"} and chain.extras == {"meter", "roles"}
    batch = batch_of_turns([[1], [1]], [1.0, 0.0])
    batch = batch.with_score("teacher/x", np.zeros(batch.tokens.shape))
    with pytest.raises(ValueError, match="credit needs the extra meter, roles"):
        credit.assign(chain, batch)


def test_a_chain_runs_all_its_steps_once() -> None:
    batch = batch_of_turns([[1], [1]], [1.0, 0.0])
    batch = batch.with_extra("roles", np.asarray([[0], [3], [0], [0]]))
    inner = credit.chain(BASE, plain)
    found = run(credit.chain(inner, credit.role_shift(), plain), batch)
    acted = found[batch.kind == 2]
    np.testing.assert_allclose(sorted(acted), [-0.5 + 2 - 0.5, 0.5 + 2 + 0.5])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda batch: jnp.zeros_like(batch.tokens),
            "returned .*: a credit transform returns",
        ),
        (
            lambda batch: (batch.rewards, {}),
            "returned advantages of shape .* one number a token",
        ),
    ],
)
def test_what_a_transform_returns_is_checked(returned: Any, message: str) -> None:
    def mine(batch: Batch, advantages: Any) -> Any:
        return returned(batch)

    batch = batch_of_turns([[1], [1]], [0.0, 1.0], [0, 0])
    with pytest.raises((TypeError, ValueError), match=message):
        credit.assign(mine, batch)
