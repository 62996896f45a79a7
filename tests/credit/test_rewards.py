"""Reward transforms and dynamic sampling."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxagent import credit
from jaxagent.data.kinds import Kind
from jaxagent.data.synthetic import random_episodes

A, OBS = Kind.ACTION, Kind.OBSERVATION


def test_overlong_penalty_prints_its_numbers(laid: Any) -> None:
    lengths = [80, 90, 100]
    case = laid([[A] * n + [OBS] * 20 for n in lengths], [1.0, 1.0, 1.0], [0, 0, 0], row_length=128)
    shaped, metrics = credit.overlong_penalty(100, 20)(case.batch)
    np.testing.assert_allclose(np.asarray(shaped.rewards)[:3], [1.0, 0.5, 0.0], atol=1e-6)
    assert float(metrics["rewards/overlong_fraction"]) == pytest.approx(2 / 3)
    assert not np.asarray(shaped.rewards)[3:].any()


@pytest.mark.usefixtures("x64")
def test_kl_in_reward_sums_k1_over_the_actions(laid: Any, vectors: dict[str, Any]) -> None:
    episodes = vectors["episodes"]
    case = laid([[*([A] * len(e["lp"])), OBS] for e in episodes], vectors["reward"], [0, 0, 1, 1])
    batch = case.batch.replace(
        behavior_logprobs=case.lay([[*e["lp"], 0.0] for e in episodes])
    ).with_score("reference", case.lay([[*e["ref"], -np.inf] for e in episodes], fill=-np.inf))
    shaped, metrics = credit.kl_in_reward(0.1)(batch)
    k1 = vectors["expected"]["kl_k1"]
    wanted = [r - 0.1 * sum(k) for r, k in zip(vectors["reward"], k1, strict=True)]
    np.testing.assert_allclose(np.asarray(shaped.rewards)[:4], wanted, atol=1e-6)
    assert float(metrics["rewards/kl"]) == pytest.approx(np.mean(np.concatenate(k1)), abs=1e-6)
    with pytest.raises(ValueError, match="needs the score proximal"):
        credit.kl_in_reward(0.1, old="proximal")(batch)


def test_flat_groups_are_dropped_and_counted() -> None:
    group = random_episodes(0, groups=1, group_size=3)
    flat = [replace(e, reward=1.0) for e in group]
    broken = [replace(group[0], valid=False), *flat[1:]]
    kept, dropped = credit.drop_flat_groups([group, flat, broken, group[:1], []])
    assert kept == [group] and dropped == 4
    assert not credit.has_signal([0.0, 1.0], [True, False])


def test_misuse_fails_at_construction() -> None:
    with pytest.raises(ValueError, match="buffer"):
        credit.overlong_penalty(10, 20)
    with pytest.raises(ValueError, match="factor"):
        credit.overlong_penalty(20, 10, factor=0.0)
    with pytest.raises(ValueError, match="beta"):
        credit.kl_in_reward(0.0)
    with pytest.raises(ValueError, match="old must be"):
        credit.kl_in_reward(0.1, old="reference")  # type: ignore[arg-type]
