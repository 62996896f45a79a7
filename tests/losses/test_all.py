"""What must hold of every loss: its reference, gradients, edges, layout, and sums."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent import losses
from jaxagent.data.batch import action_mask, observation_mask
from jaxagent.data.kinds import Kind
from jaxagent.training.metric_names import find_metric
from tests.losses.cases import BALANCE, CASES
from tests.losses.helpers import Case, gradients, value

pytestmark = pytest.mark.usefixtures("x64")
each = pytest.mark.parametrize("name", CASES)
# They square or exponentiate sums over an episode that may lie in several rows, or weigh by
# what the forward pass says of other rows.
NOT_LOCAL = {*BALANCE, "gspo", "gspo_token", "gspo_icepop", "sequence_tis_live", "preference"}


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [Case(seed) for seed in range(3)]


@each
def test_values_match_the_loop(name: str, cases: list[Case]) -> None:
    loss, reference = CASES[name]
    for case in cases:
        wanted = reference(case.outputs, case.outputs, case.batch)
        assert abs(wanted) > 1e-4
        assert value(loss, case.outputs, case.batch) == pytest.approx(wanted, rel=1e-10), name


@each
def test_gradients_match_finite_differences(name: str, cases: list[Case]) -> None:
    """Of the reference, with what it stops the gradient at held fixed."""
    loss, reference = CASES[name]
    case, rng = cases[1], np.random.default_rng(0)
    for output, exact in gradients(loss, case.outputs, case.batch).items():
        assert exact.any() or (name, output) == ("divergence_capped", "logprobs")
        nonzero = np.argwhere(exact)
        zeros = np.argwhere(exact == 0)
        for r, t in [*rng.permutation(nonzero)[:8], *rng.permutation(zeros)[:4]]:
            slope = 0.0
            for sign in (1, -1):
                moved = case.outputs[output].copy()
                moved[r, t] += sign * 1e-5
                live = {**case.outputs, output: moved}
                slope += sign * reference(live, case.outputs, case.batch) / 2e-5
            assert exact[r, t] == pytest.approx(slope, rel=1e-5, abs=1e-8), (output, r, t)


@each
@pytest.mark.parametrize("junk", [-np.inf, np.nan])
def test_masked_positions_may_hold_anything(name: str, junk: float, cases: list[Case]) -> None:
    loss, case = CASES[name].loss, cases[0]
    read = observation_mask if name.startswith("observation") else action_mask
    used = np.asarray(read(case.batch))
    outputs = {k: np.where(used, v, junk) if np.ndim(v) else v for k, v in case.outputs.items()}
    batch = case.batch.replace(
        scores={
            k: v if k.endswith("/mask") else np.where(used, v, junk)
            for k, v in case.batch.scores.items()
        },
        behavior_logprobs=np.where(used, case.batch.behavior_logprobs, junk),
        advantages=np.where(used, case.batch.advantages, junk),
    )
    assert value(loss, outputs, batch) == value(loss, case.outputs, case.batch)
    clean = gradients(loss, case.outputs, case.batch)
    for output, found in gradients(loss, outputs, batch).items():
        np.testing.assert_array_equal(found, clean[output])


@each
@pytest.mark.parametrize("shift", [-100.0, 100.0])
def test_far_log_ratios_stay_finite(name: str, shift: float, cases: list[Case]) -> None:
    loss, case = CASES[name].loss, cases[0]
    for dtype in (np.float32, np.float64):
        outputs = {
            k: (v + shift).astype(dtype) if np.ndim(v) else v for k, v in case.outputs.items()
        }
        cast = case.batch.replace(
            behavior_logprobs=case.batch.behavior_logprobs.astype(dtype),
            advantages=case.batch.advantages.astype(dtype),
            rewards=case.batch.rewards.astype(dtype),
            scores={k: v.astype(dtype) for k, v in case.batch.scores.items()},
        )
        for batch in (cast, cast.replace(advantages=0 * cast.advantages)):
            assert np.isfinite(value(loss, outputs, batch))
            for found in gradients(loss, outputs, batch).values():
                assert np.isfinite(found).all()


@each
def test_nothing_to_learn_from_is_zero_not_nan(name: str, cases: list[Case]) -> None:
    loss, case = CASES[name].loss, cases[0]
    outputs = {k: jnp.asarray(v) for k, v in case.outputs.items()}
    for batch in (
        case.batch.replace(valid=np.zeros_like(case.batch.valid)),
        case.batch.replace(kind=np.full_like(case.batch.kind, Kind.TEMPLATE)),
        case.batch.replace(kind=np.zeros_like(case.batch.kind)),
    ):
        assert value(loss, outputs, batch) == 0.0
        assert not any(found.any() for found in gradients(loss, outputs, batch).values())
        _, metrics = losses.combine(term=(1.0, loss))(outputs, batch)
        assert all(np.isfinite(float(metric)) for metric in metrics.values())


@each
def test_order_padding_and_packing_do_not_matter(name: str, cases: list[Case]) -> None:
    loss = CASES[name].loss
    wanted = value(loss, cases[2].outputs, cases[2].batch)
    for other in layouts():
        assert value(loss, other.outputs, other.batch) == pytest.approx(wanted, rel=1e-11)


_LAYOUTS: list[Case] = []


def layouts() -> list[Case]:
    if not _LAYOUTS:
        _LAYOUTS.extend([Case(2, order=-1), Case(2, buckets=(200,), rows=10)])
        spread = [
            any((c.batch.episode_ids == e).any(1).sum() > 1 for e in range(c.batch.num_episodes))
            for c in (Case(2), *_LAYOUTS)
        ]
        assert any(spread)
    return _LAYOUTS


@each
def test_token_local_losses_ignore_the_outputs_of_other_rows(name: str, cases: list[Case]) -> None:
    loss, case = CASES[name].loss, cases[0]
    assert loss.token_local == (name not in NOT_LOCAL)
    others = {k: v.copy() if np.ndim(v) else v for k, v in case.outputs.items()}
    own = np.arange(case.batch.num_rows) % 2 == 0
    for array in others.values():
        if np.ndim(array):
            array[~own] = 0.0
    found, wanted = (gradients(loss, x, case.batch) for x in (others, case.outputs))
    same = all(np.array_equal(found[k][own], wanted[k][own]) for k in found)
    assert same == loss.token_local


@each
def test_metrics_are_named_and_jit_agrees(name: str, cases: list[Case]) -> None:
    loss, case = CASES[name].loss, cases[0]
    objective = losses.combine(term=(1.0, loss))
    given = {k: jnp.asarray(v) for k, v in case.outputs.items() if k != "step"}
    total, metrics = jax.jit(objective)(given, case.batch, case.outputs["step"])
    assert float(total) == pytest.approx(value(loss, case.outputs, case.batch), rel=1e-12)
    for metric, number in metrics.items():
        find_metric(metric)
        assert np.isfinite(float(number)), metric


def test_together_they_are_the_weighted_sum_of_gradients(cases: list[Case]) -> None:
    case, rng = cases[0], np.random.default_rng(0)
    given = {k: jnp.asarray(v) for k, v in case.outputs.items() if k != "step"}
    terms: dict[str, Any] = {name: (rng.random(), pair.loss) for name, pair in CASES.items()}

    def gradient(objective: losses.Objective) -> Any:
        return jax.jit(jax.grad(lambda x: objective(x, case.batch, case.outputs["step"])[0]))(given)

    together = gradient(losses.combine(**terms))
    apart: Any = {k: np.zeros(v.shape) for k, v in given.items()}
    for weight, loss in terms.values():
        for k, found in gradients(loss, case.outputs, case.batch).items():
            apart[k] = apart[k] + weight * found
    for k in given:
        np.testing.assert_allclose(together[k], apart[k], rtol=1e-9, atol=1e-12)


def test_all_declared_inputs_are_needed(cases: list[Case]) -> None:
    case = cases[0]
    for name, (loss, _) in CASES.items():
        for missing in loss.scores:
            scores = {k: v for k, v in case.batch.scores.items() if k != missing}
            with pytest.raises(KeyError):
                value(loss, case.outputs, case.batch.replace(scores=scores))
        kept = {k: v for k, v in case.outputs.items() if k in loss.needs}
        optional = {"teacher/t/mask"} & set(case.batch.scores)
        only = {k: v for k, v in case.batch.scores.items() if k in loss.scores | optional}
        assert np.isfinite(value(loss, kept, case.batch.replace(scores=only))), name
