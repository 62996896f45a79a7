"""Divergences, distillation, preferences: printed numbers, ends, tails, teacher masks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent import losses
from jaxagent.data.kinds import Kind
from jaxagent.losses import jensen_shannon, kl_divergence, renormalised, with_tail
from tests.losses.helpers import Case, gradients, value

pytestmark = pytest.mark.usefixtures("x64")

A, OBS = Kind.ACTION, Kind.OBSERVATION


def logs(*probabilities: float) -> jax.Array:
    return jnp.log(jnp.asarray(probabilities))


def test_printed_divergences(vectors: dict[str, Any]) -> None:
    student, teacher = logs(0.5, 0.5), logs(0.8, 0.2)
    for alpha, wanted in ((0.5, 0.0506718), (0.0, 0.1927448), (1.0, 0.2231436)):
        assert float(jensen_shannon(student, teacher, alpha)) == pytest.approx(wanted, abs=1e-7)
    assert float(kl_divergence(teacher, student)) == pytest.approx(0.1927448, abs=1e-7)
    case = vectors["expected"]["jsd_0.5"]
    found = jensen_shannon(logs(*case["p"]), logs(*case["q"]), 0.5)
    assert float(found) == pytest.approx(case["value"], abs=1e-7)


def test_tail_and_renormalised_top_k() -> None:
    found = jensen_shannon(with_tail(logs(0.7)), with_tail(logs(0.4)))
    assert float(found) == pytest.approx(0.0462008, abs=1e-7)
    p = logs(0.5, 0.3, 0.2)
    np.testing.assert_allclose(with_tail(p[:2]), p, rtol=1e-12)
    np.testing.assert_allclose(jnp.exp(renormalised(p[:2])), [5 / 8, 3 / 8])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_divergences_match_a_loop_and_their_slope(alpha: float) -> None:
    rng = np.random.default_rng(0)
    s, t = (rng.dirichlet(np.ones(5), size=(2, 3)) for _ in range(2))

    def loop(p: Any, q: Any) -> float:
        m = [(1 - alpha) * a + alpha * b for a, b in zip(p, q, strict=True)]
        if alpha == 0:
            return sum(b * np.log(b / a) for a, b in zip(p, q, strict=True))
        if alpha == 1:
            return sum(a * np.log(a / b) for a, b in zip(p, q, strict=True))
        left = sum(a * np.log(a / c) for a, c in zip(p, m, strict=True))
        right = sum(b * np.log(b / c) for b, c in zip(q, m, strict=True))
        return (1 - alpha) * left + alpha * right

    found = jensen_shannon(jnp.log(s), jnp.log(t), alpha)
    wanted = [[loop(s[i, j], t[i, j]) for j in range(3)] for i in range(2)]
    np.testing.assert_allclose(found, wanted, rtol=1e-10)

    logits = np.log(s[0, 0]) + 1.0

    def of(x: Any) -> Any:
        return jensen_shannon(jax.nn.log_softmax(x), jnp.log(t[0, 0]), alpha)

    exact = jax.grad(of)(jnp.asarray(logits))
    for i in range(5):
        step = np.zeros(5)
        step[i] = 1e-6
        slope = (of(logits + step) - of(logits - step)) / 2e-6
        assert float(exact[i]) == pytest.approx(float(slope), abs=1e-8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_divergences_stay_finite(dtype: Any) -> None:
    sure, other = jnp.asarray([0.0, -np.inf], dtype), jnp.asarray([-np.inf, 0.0], dtype)
    for alpha in (0.0, 0.5, 1.0):
        for p in (sure, other, with_tail(sure[:1]), with_tail(other[:1])):
            both = jax.value_and_grad(lambda x, a=alpha: jensen_shannon(x, sure, a))(p)
            assert all(np.isfinite(x).all() for x in both)
    tail, slope = jax.value_and_grad(lambda x: with_tail(x)[-1])(sure[:1])
    assert float(tail) == pytest.approx(np.log(1e-7), rel=1e-4) and np.isfinite(slope).all()
    assert np.isfinite(jax.grad(lambda x: renormalised(x).sum())(sure)).all()
    assert float(jensen_shannon(sure, other)) == pytest.approx(np.log(2), rel=1e-5)
    with pytest.raises(ValueError, match="alpha must lie"):
        jensen_shannon(sure, other, 1.5)


def test_printed_numbers_of_the_sampled_form(laid: Callable[..., Any]) -> None:
    case = laid([[A, A, OBS]], [0.0], [0])
    batch = case.batch.with_score("teacher/t", case.lay([[np.log(0.25), np.nan, np.nan]]))
    batch = batch.with_score("teacher/t/mask", case.lay([[1.0, 0.0, 1.0]]))
    outputs = {"logprobs": case.lay([[np.log(0.5), -9.0, np.nan]], -np.inf)}
    loss = losses.sampled_reverse_kl("t")
    assert value(loss, outputs, batch) == pytest.approx(-0.4804530, abs=1e-7)
    wanted = case.lay([[0.6931472, 0.0, 0.0]])
    np.testing.assert_allclose(gradients(loss, outputs, batch)["logprobs"], wanted, atol=1e-7)


def test_printed_terms_of_a_preference(laid: Callable[..., Any]) -> None:
    """.2 preferred to .6, then a suffix of .5 and .25, in two episodes."""
    case = laid([[A, A, A, OBS], [A]], [1.0, 0.0], [0, 0])
    outputs = {"logprobs": case.lay([np.log([0.2, 0.5, 0.25, 0.1]), [np.log(0.6)]], -np.inf)}
    batch = case.batch.with_score("preference", case.lay([[1, 0, 0, 1], [-1]])).with_score(
        "suffix", case.lay([[0, 1, 1, 1], [0]])
    )
    pair, suffix = losses.preference(), losses.marked_cross_entropy("suffix")
    assert value(pair, outputs, batch) == pytest.approx(1.3862944, abs=1e-7)
    assert value(suffix, outputs, batch) == pytest.approx(1.0397208, abs=1e-7)
    total, metrics = losses.combine(pair=(1.0, pair), suffix=(1.0, suffix))(
        {k: jnp.asarray(v) for k, v in outputs.items()}, batch
    )
    assert float(total) == pytest.approx(2.4260151, abs=1e-7)
    assert float(metrics["pair/pairs"]) == 1 and float(metrics["pair/accuracy"]) == 0
    # A pair that lost a side counts nowhere.
    alone = batch.with_score("preference", case.lay([[1, 0, 0, 0], [-2]]))
    assert value(pair, outputs, alone) == 0.0
    assert not gradients(pair, outputs, alone)["logprobs"].any()


@pytest.mark.parametrize(
    "loss",
    [
        losses.sampled_reverse_kl("t"),
        losses.teacher_policy_gradient("t"),
        losses.auxiliary_distillation("t"),
        losses.divergence("t"),
        losses.preference(),
        losses.marked_cross_entropy("suffix"),
    ],
)
def test_no_covered_token_is_zero(loss: losses.Loss) -> None:
    case = Case(0)
    nothing = np.zeros(case.batch.tokens.shape)
    scores = {"teacher/t/mask": nothing, "preference": nothing, "suffix": nothing}
    batch = case.batch.replace(scores={**case.batch.scores, **scores})
    assert value(loss, case.outputs, batch) == 0.0
    assert not any(x.any() for x in gradients(loss, case.outputs, batch).values())


def test_a_teacher_that_agrees_leaves_the_policy_alone() -> None:
    case = Case(0)
    same = case.batch.behavior_logprobs
    outputs = {"logprobs": same}
    batch = case.batch.with_score("teacher/u", same)
    for loss in (
        losses.sampled_reverse_kl("u"),
        losses.teacher_policy_gradient("u"),
        losses.auxiliary_distillation("u", "importance"),
    ):
        assert not gradients(loss, outputs, batch)["logprobs"].any()


def test_gradient_descent_moves_towards_the_teacher(laid: Callable[..., Any]) -> None:
    case = laid([[A, A]], [0.0], [0])
    batch = case.batch.replace(behavior_logprobs=case.lay([[-1.0, -1.0]])).with_score(
        "teacher/t", case.lay([[-0.5, -3.0]])
    )
    outputs = {"logprobs": case.lay([[-1.0, -1.0]])}
    for loss in (
        losses.sampled_reverse_kl("t"),
        losses.teacher_policy_gradient("t"),
        losses.auxiliary_distillation("t"),
        losses.auxiliary_distillation("t", "importance"),
    ):
        up, down = gradients(loss, outputs, batch)["logprobs"][batch.kind == A]
        assert up < 0 < down


def test_misuse_fails_at_construction() -> None:
    for make, options, message in (
        (losses.sampled_reverse_kl, {"teacher": "a/b"}, "teacher must be a name"),
        (losses.sampled_reverse_kl, {"teacher": "t", "ratio_cap": 0.0}, "ratio_cap"),
        (losses.sampled_reverse_kl, {"teacher": "t", "old": "now"}, "old must be"),
        (losses.divergence, {"teacher": ""}, "teacher must be a name"),
        (losses.divergence, {"teacher": "t", "kind": "tv"}, "kind must be one of"),
        (losses.teacher_policy_gradient, {"teacher": "t", "drop_low": 0.0}, "drop_low"),
        (losses.teacher_policy_gradient, {"teacher": "t", "drift_weight": -1}, "drift_weight"),
        (losses.auxiliary_distillation, {"teacher": "t", "form": "kl"}, "form must be"),
        (losses.auxiliary_distillation, {"teacher": "t", "clip": 0.0}, "clip must be"),
        (losses.preference, {"beta": 0.0}, "beta must be above 0"),
        (losses.marked_cross_entropy, {"score": ""}, "score must name"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)  # type: ignore[operator]
    assert losses.divergence("t", "jsd").needs == {"divergence:t:jsd"}
    assert losses.sampled_reverse_kl("t", 2.0, "proximal").scores == {"teacher/t", "proximal"}
