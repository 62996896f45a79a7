"""Corrections: printed numbers, composition, denominators, and weights that would square."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent import losses
from jaxagent.data.batch import action_mask
from jaxagent.data.kinds import Kind
from jaxagent.losses import corrected, icepop, rejection, truncated_importance
from tests.losses.helpers import Case, gradients, value

pytestmark = pytest.mark.usefixtures("x64")

A = Kind.ACTION
NAN = float("nan")


def proximal_ppo(**options: Any) -> losses.Loss:
    return losses.clipped_policy_gradient(0.2, 0.2, old="proximal", **options)


@pytest.fixture
def w(laid: Callable[..., Any]) -> Any:
    """Weights 4, 1, 1/4 of one episode, and how a correction treats them."""
    case = laid([[A, A, A]], [0.0], [0])
    log_ratio = jnp.asarray(case.lay([np.log([4.0, 1.0, 0.25])]))
    where = case.batch.kind == A

    def apply(correction: losses.Correction) -> tuple[list[float], list[bool]]:
        weight, keep = correction.fn(log_ratio, action_mask(case.batch), case.batch)
        return np.asarray(weight)[where].tolist(), np.asarray(keep)[where].tolist()

    return apply


def test_printed_numbers(w: Any) -> None:
    assert w(truncated_importance(2.0)) == (pytest.approx([2, 1, 0.25]), [True] * 3)
    assert w(truncated_importance(2.0, low=0.5))[0] == pytest.approx([2, 1, 0.5])
    assert w(icepop(0.5, 5.0)) == (pytest.approx([4, 1, 0.25]), [True, True, False])
    # Opposite errors cancel over the episode: its ratio and its geometric mean are 1.
    assert w(truncated_importance(2.0, "sequence"))[0] == pytest.approx([1, 1, 1])
    tight = {"low": 1 - 1e-9, "high": 1 + 1e-9}
    assert w(rejection("k1", "sequence_sum", **tight))[1] == [True] * 3
    assert w(rejection("k1", "sequence_mean", **tight))[1] == [True] * 3
    assert w(rejection("k1", **tight)) == ([1, 1, 1], [False, True, False])
    mean = (2 + 1 + 0.25) / 3
    assert w(truncated_importance(2.0, normalise=True))[0] == pytest.approx(
        [2 / mean, 1 / mean, 0.25 / mean]
    )


def test_each_statistic_at_its_threshold(w: Any) -> None:
    x = np.log([4.0, 1.0, 0.25])
    k2, k3 = x**2 / 2, np.exp(x) - 1 - x
    for name, values in (("k2", k2), ("k3", k3)):
        for level, found in (
            ("sequence_sum", values.sum()),
            ("sequence_mean", values.mean()),
            ("sequence_max", values.max()),
        ):
            assert w(rejection(name, level, high=found * 1.001))[1] == [True] * 3
            assert w(rejection(name, level, high=found * 0.999))[1] == [False] * 3
        for index, one in enumerate(values):
            if one > 0:
                assert w(rejection(name, high=one * 1.001))[1][index]
                assert not w(rejection(name, high=one * 0.999))[1][index]


@pytest.mark.parametrize("key", ["tis_cap2", "icepop_0.8_1.25"])
def test_vectors(laid: Callable[..., Any], vectors: dict[str, Any], key: str) -> None:
    episodes = vectors["episodes"]
    case = laid([[A] * len(e["lp"]) for e in episodes], vectors["reward"], vectors["group"])
    batch = case.batch.replace(
        behavior_logprobs=case.lay([e["behavior"] for e in episodes], -np.inf),
        advantages=case.spread([1.0] * len(episodes)),
    ).with_score("proximal", case.lay([e["old"] for e in episodes], -np.inf))
    correction = truncated_importance(2.0) if key == "tis_cap2" else icepop(0.8, 1.25)
    # The gradient of -A log p times its weight, read off token by token.
    loss = corrected(losses.cispo(0.0, 0.0, old="proximal"), correction)
    outputs = {"logprobs": case.lay([e["lp"] for e in episodes], -np.inf)}
    found = -11 * gradients(loss, outputs, batch)["logprobs"]
    np.testing.assert_allclose(found, case.lay(vectors["expected"][key]), atol=1.1e-6)


def test_printed_numbers_of_decoupled(laid: Callable[..., Any]) -> None:
    case = laid([[A, A]], [0.0], [0])
    batch = case.batch.replace(
        behavior_logprobs=case.lay([np.log([0.2, 0.05])]),
        advantages=case.spread([1.0]),
        policy_versions=np.where(case.batch.kind == A, 1, -1),
    ).with_score("proximal", case.lay([np.log([0.4, 0.4])]))
    outputs = {"logprobs": case.lay([np.log([0.6, 0.4])]), "step": 3}
    # The second token's weight of 8 is above the bound: dropped, or set to 5.
    masked = losses.decoupled_policy_gradient()
    clamped = losses.decoupled_policy_gradient(mode="clamp")
    assert value(masked, outputs, batch) == pytest.approx(-2.4 / 2)
    assert value(clamped, outputs, batch) == pytest.approx((-2.4 - 5) / 2)
    assert not gradients(masked, outputs, batch)["logprobs"][batch.kind == A][1]

    # p_M = .2, p = .8, a = (3 - 1 - 1) / (3 - 1): the proximal probability is .4.
    outputs["logprobs"] = case.lay([np.log([0.8, 0.05])])
    loglinear = losses.decoupled_policy_gradient(0.2, 0.2, proximal="loglinear")
    assert value(loglinear, outputs, batch) == pytest.approx(-(2 * 1.2 + 1) / 2)
    wide = losses.decoupled_policy_gradient(9.0, 9.0, proximal="loglinear")
    assert value(wide, outputs, batch) == pytest.approx(-(2 * 2 + 1) / 2)
    for version in (3, 5, 2, -1):  # fresh, from the future, one old, never sampled: a = 0
        fresh = batch.replace(policy_versions=np.full_like(batch.policy_versions, version))
        assert value(wide, outputs, fresh) == pytest.approx(-(4 + 1) / 2)
    objective = losses.combine(policy=(1.0, wide))
    objective.require(outputs=frozenset({"logprobs"}))
    assert objective.needs == {"logprobs"}
    given = {"logprobs": jnp.asarray(outputs["logprobs"])}
    assert float(objective(given, batch, 3)[0]) == pytest.approx(-2.5)


def test_weights_that_would_square_are_one_clear_error() -> None:
    tis, pop = truncated_importance(), icepop()
    for loss, weights in (
        (losses.decoupled_policy_gradient(), (tis,)),
        (losses.decoupled_policy_gradient(proximal="loglinear"), (rejection("k3", high=1.0), tis)),
        (losses.clipped_policy_gradient(), (tis,)),
        (losses.dppo(), (pop,)),
        (losses.gspo(), (truncated_importance(level="sequence"),)),
        (corrected(proximal_ppo(), tis), (tis,)),
    ):
        with pytest.raises(ValueError, match="would square the weight"):
            corrected(loss, *weights)
    with pytest.raises(ValueError, match="truncated_importance and icepop both weigh"):
        corrected(proximal_ppo(), tis, pop)
    # Masks may be added to anything.
    corrected(losses.decoupled_policy_gradient(), rejection("k3", high=1.0))
    corrected(losses.dppo(), rejection("k1", low=0.5, high=2.0), rejection("k2", high=1.0))


@pytest.mark.parametrize("aggregate", ["token", "episode", "episode_sum"])
def test_denominators_before_and_after_rejection(aggregate: Any) -> None:
    case = Case(0)
    reject = rejection("k2", "sequence_mean", high=0.05)
    loss = proximal_ppo(aggregate=aggregate)
    before, after = corrected(loss, reject), corrected(loss, reject, denominator="kept")
    (n0, d0, _), (n1, d1, m) = (x.fn(case.outputs, case.batch) for x in (before, after))
    kept = float(m["kept_fraction"][0] / m["kept_fraction"][1])
    assert 0 < kept < 1 and float(n0) == pytest.approx(float(n1))
    assert float(d0) == float(loss.fn(case.outputs, case.batch)[1]) > float(d1) > 0
    if aggregate == "token":
        assert float(d1) == pytest.approx(kept * float(d0))


def test_everything_rejected_is_zero() -> None:
    case = Case(0)
    none = rejection("k2", high=1e-30)
    for denominator in ("all", "kept"):
        loss = corrected(proximal_ppo(), none, denominator=denominator)  # type: ignore[arg-type]
        assert value(loss, case.outputs, case.batch) == 0
        assert not gradients(loss, case.outputs, case.batch)["logprobs"].any()


def test_without_mismatch_nothing_changes() -> None:
    case = Case(1)
    batch = case.batch.with_score("proximal", case.batch.behavior_logprobs)
    plain = value(proximal_ppo(), case.outputs, batch)
    for correction in (
        truncated_importance(normalise=True),
        truncated_importance(level="sequence", normalise=True),
        icepop(),
        rejection("k3", "sequence_max", high=1e-9),
    ):
        loss = corrected(proximal_ppo(), correction)
        assert value(loss, case.outputs, batch) == pytest.approx(plain, rel=1e-12)


def test_scores_and_needs_pass_through() -> None:
    assert corrected(proximal_ppo(), icepop()).scores == {"proximal"}
    assert corrected(losses.reinforce(), icepop()).scores == frozenset()
    distilled = losses.divergence("t", "reverse_kl")
    assert corrected(distilled, icepop()).needs == {"divergence:t:reverse_kl", "logprobs"}


def test_misuse_fails_at_construction() -> None:
    with pytest.raises(ValueError, match="does not expose its tokens"):
        corrected(losses.trajectory_balance(1.0), icepop())
    with pytest.raises(ValueError, match="does not expose its tokens"):
        corrected(lambda outputs, batch: (0.0, 1.0, {}), icepop())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one correction"):
        corrected(losses.reinforce())
    with pytest.raises(ValueError, match="denominator must be"):
        corrected(losses.reinforce(), icepop(), denominator="left")  # type: ignore[arg-type]
    for make, options, message in (
        (truncated_importance, {"cap": 0.0}, "0 <= low < cap"),
        (truncated_importance, {"cap": NAN}, "0 <= low < cap"),
        (truncated_importance, {"low": 3.0}, "0 <= low < cap"),
        (truncated_importance, {"level": "episode"}, "level must be"),
        (icepop, {"low": 5.0}, "0 <= low < high"),
        (icepop, {"low": -1.0}, "0 <= low < high"),
        (rejection, {"statistic": "k4", "high": 1.0}, "statistic must be"),
        (rejection, {"level": "row", "high": 1.0}, "level must be"),
        (rejection, {"high": 2.0}, "k1 needs ratio bounds"),
        (rejection, {"low": 2.0, "high": 1.0}, "k1 needs ratio bounds"),
        (rejection, {"level": "sequence_max", "low": 0.5, "high": 2.0}, "use k2 or k3"),
        (rejection, {"statistic": "k2"}, "k2 needs high"),
        (rejection, {"statistic": "k3", "low": 0.1, "high": 1.0}, "k3 needs high"),
        (losses.decoupled_policy_gradient, {"mode": "drop"}, "mode must be"),
        (losses.decoupled_policy_gradient, {"proximal": "old"}, "proximal must be"),
        (losses.decoupled_policy_gradient, {"cap": 0.0}, "cap must be"),
        (losses.decoupled_policy_gradient, {"clip_low": -1.0}, "clip_low"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)  # type: ignore[operator]
