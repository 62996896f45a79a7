"""DeltaTTG and PBSD: credit moves between turns, sign and sum stay."""

from typing import Any

import numpy as np
import pytest

from jaxagent import credit
from tests.credit.cases import (
    batch_of_turns,
    by_turn,
    constant_base,
    lay_tokens,
    lay_turns,
    random_batch,
    run,
    turns_of,
)

pytestmark = pytest.mark.usefixtures("x64")

NAN = float("nan")


def after(batch: Any, advantage: float, transform: Any) -> list[float]:
    """The turns' advantages of a batch of one episode."""
    base = constant_base(lay_turns(batch, lambda e, k: advantage))
    return by_turn(batch, run(credit.chain(base, transform), batch))[0]


def with_meter(batch: Any, progress: list[float]) -> Any:
    meter = np.full((batch.num_episodes, batch.num_turns + 1), NAN)
    meter[0, : len(progress) + 1] = 1000 - np.cumsum([0.0, *progress])
    return batch.with_extra("meter", meter)


def test_vector_of_progress_redistribution(vectors: dict[str, Any]) -> None:
    wanted = vectors["expected"]["redistribute_tau1"]
    batch = with_meter(batch_of_turns([wanted["tokens"]], [0.0]), wanted["progress"])
    found = after(batch, wanted["advantage"], credit.progress_redistribution(1.0))
    np.testing.assert_allclose(found, wanted["turn_advantages"], atol=1e-5)


def test_printed_numbers_of_deltattg_and_pbsd() -> None:
    batch = with_meter(batch_of_turns([[2, 1, 1]], [0.0]), [40, -10, 70])
    for advantage, wanted in (
        (1.0, [0.954654, 0.351198, 1.739494]),
        (-1.0, [-0.759432, -2.064351, -0.416785]),
    ):
        found = after(batch, advantage, credit.progress_redistribution(50.0))
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    batch = batch_of_turns([[1, 1]], [0.0])
    batch = batch.replace(behavior_logprobs=lay_tokens(batch, [[-1, -1]], 0.0))
    batch = batch.with_score("teacher/hint", lay_tokens(batch, [[-0.8, -1.1]]))
    for advantage, wanted in ((1.0, [1.14888, 0.85112]), (-1.0, [-0.85112, -1.14888])):
        found = after(batch, advantage, credit.belief_redistribution("hint"))
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def reference(batch: Any, base: np.ndarray, factor: Any) -> np.ndarray:
    """``A * u``: u = ``factor(e, k, sign)``, scaled within each sign of an episode."""
    wanted = np.zeros(base.shape)
    for e, turns in turns_of(batch).items():
        for sign in (1, -1):
            own = [(k, at) for k, tokens in turns.items() for at in tokens if sign * base[at] > 0]
            mass = sum(abs(base[at]) for _, at in own)
            moved = sum(abs(base[at]) * factor(e, k, sign) for k, at in own)
            for k, at in own:
                wanted[at] = base[at] * factor(e, k, sign) * mass / moved
    return wanted


@pytest.mark.parametrize("kind", ["episode", "token"])
@pytest.mark.parametrize("seed", range(2))
def test_random_batches_match_a_loop(seed: int, kind: str) -> None:
    batch = random_batch(seed)
    rng = np.random.default_rng(seed)
    by_episode = rng.normal(size=batch.num_episodes)
    base = lay_turns(batch, lambda e, k: by_episode[e])
    if kind == "token":
        base = np.where(base != 0, rng.normal(size=base.shape), 0.0)
    meter, turns = batch.extras["meter"], turns_of(batch)

    def evidence(e: int, k: int, norm: bool) -> float:
        own = [at for at in turns[e][k] if batch.scores["teacher/whole/mask"][at] > 0]
        gaps = [batch.scores["teacher/whole"][at] - batch.scores["proximal"][at] for at in own]
        return sum(gaps) / (len(gaps) if norm and gaps else 1)

    for transform, factor in (
        (
            credit.progress_redistribution(25.0),
            lambda e, k, sign: np.exp(sign * (meter[e, k] - meter[e, k + 1]) / 25.0),
        ),
        (
            credit.belief_redistribution("whole", 0.7, 0.4, 3.0, old="proximal"),
            lambda e, k, sign: np.clip(np.exp(sign * 0.7 * evidence(e, k, False)), 0.4, 3.0),
        ),
        (
            credit.belief_redistribution("whole", length_norm=True, old="proximal"),
            lambda e, k, sign: np.clip(np.exp(sign * evidence(e, k, True)), 0.5, 2.0),
        ),
    ):
        found = run(credit.chain(constant_base(base), transform), batch)
        np.testing.assert_allclose(found, reference(batch, base, factor), atol=1e-10)
        assert np.abs(found - base).max() > 0.1
        # Sign and token mean of every episode stay.
        np.testing.assert_array_equal(np.sign(found), np.sign(base))
        for own in turns.values():
            at = tuple(np.asarray([at for tokens in own.values() for at in tokens]).T)
            assert found[at].mean() == pytest.approx(base[at].mean(), abs=1e-12)


@pytest.mark.parametrize("progress", [[1e6, -1e6], [0.0, 5e5], [-1e9, -1e9]])
@pytest.mark.parametrize("advantage", [-1.0, 1.0, 0.0])
def test_extreme_progress_stays_finite(progress: list[float], advantage: float) -> None:
    batch = with_meter(batch_of_turns([[2, 3]], [0.0]), progress)
    for dtype in (np.float64, np.float32):
        small = batch.with_extra("meter", batch.extras["meter"].astype(dtype))
        found = after(small, advantage, credit.progress_redistribution(1.0))
        assert np.isfinite(found).all()
        assert 2 * found[0] + 3 * found[1] == pytest.approx(5 * advantage, rel=1e-6)


@pytest.mark.parametrize("gap", [-100.0, 100.0])
def test_extreme_evidence_is_clipped(gap: float) -> None:
    batch = batch_of_turns([[1, 1]], [0.0])
    batch = batch.with_score("teacher/x", lay_tokens(batch, [[gap, 0.0]], -np.inf))
    ratio = np.divide(*after(batch, 1.0, credit.belief_redistribution("x")))
    assert ratio == pytest.approx(2.0 if gap > 0 else 0.5)


def test_misuse_fails_at_construction() -> None:
    for make, message in (
        (lambda: credit.progress_redistribution(0.0), "tau must"),
        (lambda: credit.belief_redistribution("x", beta=0.0), "beta must"),
        (lambda: credit.belief_redistribution("x", low=1.0), "low < 1 < high"),
        (lambda: credit.belief_redistribution("x", high=0.9), "low < 1 < high"),
        (lambda: credit.belief_redistribution("x", old="ref"), "old must be"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            make()
    assert credit.belief_redistribution("x", old="proximal").scores == {"teacher/x", "proximal"}
