"""Group-relative credit: vectors, degenerate groups, invalid episodes, order."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxagent import credit
from jaxagent.data.kinds import Kind
from jaxagent.data.packing import pack
from jaxagent.data.synthetic import random_episodes

A = Kind.ACTION


def advantages(
    laid: Callable[..., Any],
    transform: Any,
    rewards: list[float],
    groups: list[int] | None = None,
    valid: list[bool] | None = None,
) -> tuple[list[float], dict[str, float]]:
    """One advantage an episode, through a packed batch of two action tokens each."""
    groups = groups or [0] * len(rewards)
    case = laid([[A, A]] * len(rewards), rewards, groups, valid=valid)
    batch, metrics = jax.jit(lambda b: credit.assign(transform, b))(case.batch)
    ids, values = case.batch.episode_ids, np.asarray(batch.advantages)
    found = []
    for index in range(len(rewards)):
        own = values[(ids == index) & (case.batch.kind == A)]
        assert len(set(own.tolist())) <= 1
        found.append(float(own[0]) if own.size else 0.0)
    assert not values[case.batch.kind != A].any()
    return found, {name: float(metric) for name, metric in metrics.items()}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("key", "transform"),
    [
        ("group_relative_std_ddof1", credit.group_relative()),
        ("group_relative_std_ddof0", credit.group_relative(ddof=0)),
        ("group_relative_none", credit.group_relative(scale="none")),
        ("leave_one_out", credit.leave_one_out()),
    ],
)
def test_vectors(laid: Any, vectors: dict[str, Any], key: str, transform: Any) -> None:
    found, metrics = advantages(laid, transform, vectors["reward"], vectors["group"])
    np.testing.assert_allclose(found, vectors["expected"][key], atol=1e-6)
    assert metrics["groups/count"] == 2 and metrics["groups/no_signal"] == 0
    assert metrics["groups/reward_mean"] == pytest.approx(np.mean(vectors["reward"]))


@pytest.mark.usefixtures("x64")
def test_printed_numbers(laid: Any) -> None:
    for transform, wanted in (
        (credit.group_relative(), 0.7071058),
        (credit.group_relative(ddof=0), 0.999998),
        (credit.group_relative(scale="none"), 0.5),
        (credit.leave_one_out(), 1.0),
    ):
        found, _ = advantages(laid, transform, [1.0, 0.0])
        np.testing.assert_allclose(found, [wanted, -wanted], atol=1e-7)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6, 1 / 3])
@pytest.mark.parametrize("transform", [credit.group_relative(), credit.leave_one_out()])
def test_equal_rewards_give_exactly_zero(
    laid: Any, vectors: dict[str, Any], reward: float, transform: Any
) -> None:
    # In float32 the mean of three times 0.1 is not 0.1: the trap.
    found, metrics = advantages(laid, transform, [reward] * 3)
    assert found == vectors["expected"]["all_equal_group"]
    assert metrics["groups/no_signal"] == 1
    found, metrics = advantages(laid, transform, [reward])
    assert found == vectors["expected"]["group_of_one"]
    assert metrics["groups/no_signal"] == 1


def test_a_group_of_one_can_keep_its_raw_reward(laid: Any) -> None:
    raw = credit.group_relative(singleton="reward")
    assert advantages(laid, raw, [0.75, 1.0, 1.0], [0, 1, 1])[0] == [0.75, 0.0, 0.0]


@pytest.mark.usefixtures("x64")
def test_invalid_episodes_take_no_part(laid: Any, vectors: dict[str, Any]) -> None:
    rewards, valid = [1.0, 0.0, 0.0, 9.0], [True, True, True, False]
    found, metrics = advantages(laid, credit.group_relative(), rewards, valid=valid)
    np.testing.assert_allclose(found, vectors["expected"]["invalid_masked"], atol=1e-6)
    assert metrics["groups/reward_mean"] == pytest.approx(1 / 3)
    alone, metrics = advantages(laid, credit.group_relative(), [1.0, 5.0], valid=[True, False])
    assert alone == [0.0, 0.0] and metrics["groups/no_signal"] == 1
    _, metrics = advantages(laid, credit.group_relative(), [1.0, 5.0], valid=[False, False])
    assert metrics["groups/count"] == 0 and metrics["groups/no_signal"] == 0


def test_shift_and_order_do_not_matter(laid: Any) -> None:
    rng = np.random.default_rng(0)
    rewards, groups = rng.random(9).tolist(), [0, 1, 2] * 3
    transform = credit.chain(credit.group_relative())
    base = np.asarray(advantages(laid, transform, rewards, groups)[0])
    for group in range(3):
        own = base[np.asarray(groups) == group]
        assert own.sum() == pytest.approx(0, abs=1e-5)
    shifted = advantages(laid, transform, [r + 5 for r in rewards], groups)[0]
    np.testing.assert_allclose(shifted, base, rtol=2e-5, atol=1e-5)
    order = rng.permutation(9)
    shuffled = [rewards[i] for i in order], [groups[i] for i in order]
    moved = advantages(laid, transform, *shuffled)
    np.testing.assert_allclose(moved[0], base[order], rtol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", range(4))
def test_random_packed_batches_match_numpy(seed: int) -> None:
    episodes = random_episodes(seed, groups=4, group_size=4, max_contexts=2, invalid=0.3)
    order = np.random.default_rng(seed).permutation(len(episodes))
    episodes = [episodes[i] for i in order]
    batch: Any = pack(episodes, buckets=(64,))
    batch = batch.replace(rewards=batch.rewards.astype(float), advantages=batch.advantages * 1.0)
    for transform, formula in (
        (credit.group_relative(), lambda r, own: (r - own.mean()) / (own.std(ddof=1) + 1e-6)),
        (credit.leave_one_out(), lambda r, own: r - (own.sum() - r) / (own.size - 1)),
    ):
        found = np.asarray(credit.assign(transform, batch)[0].advantages)
        for index, episode in enumerate(episodes):
            group = [
                np.float32(e.reward).item()
                for e in episodes
                if e.valid and e.group_id == episode.group_id
            ]
            if not episode.valid:
                assert not (batch.episode_ids == index).any()
                continue
            own = found[(batch.episode_ids == index) & (batch.kind == A)]
            reward = np.float32(episode.reward).item()
            wanted = formula(reward, np.asarray(group)) if len(group) > 1 else 0.0
            assert own.size == episode.num_action_tokens
            np.testing.assert_allclose(own, wanted, rtol=1e-6, atol=1e-7)


def test_contexts_of_an_episode_count_once_and_share_its_advantage() -> None:
    episodes = random_episodes(2, groups=1, group_size=3, max_contexts=3)
    batch, _ = credit.assign(credit.group_relative(), pack(episodes, buckets=(64,)))
    rewards = np.asarray([e.reward for e in episodes])
    wanted = (rewards - rewards.mean()) / rewards.std(ddof=1)
    values = np.asarray(batch.advantages)
    for index in range(3):
        own = values[(batch.episode_ids == index) & (batch.kind == A)]
        assert own.size == episodes[index].num_action_tokens
        np.testing.assert_allclose(own, wanted[index], rtol=1e-4)


def test_chain_runs_in_order_and_clips(laid: Any) -> None:
    def double(batch: Any, values: Any) -> Any:
        return 2 * values, {"double/ran": 1.0}

    base = credit.group_relative(scale="none")
    first = advantages(laid, credit.chain(base, double, credit.clip(0.6)), [1.0, 0.0])
    assert first[0] == pytest.approx([0.6, -0.6])
    assert first[1]["advantages/clipped_fraction"] == 1.0 and first[1]["double/ran"] == 1.0
    second = advantages(laid, credit.chain(base, credit.clip(0.6), double), [1.0, 0.0])
    assert second[0] == pytest.approx([1.0, -1.0])


def test_scores_are_declared_and_checked(laid: Any) -> None:
    case = laid([[A]], [1.0], [0])
    needy = credit.chain(credit.Credit(lambda b, a: (a, {}), frozenset({"teacher/x"})))
    assert needy.scores == {"teacher/x"}
    with pytest.raises(ValueError, match="needs the score teacher/x"):
        credit.assign(needy, case.batch)


def test_misuse_fails_at_construction() -> None:
    with pytest.raises(ValueError, match="scale"):
        credit.group_relative(scale="var")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ddof"):
        credit.group_relative(ddof=2)
    with pytest.raises(ValueError, match="eps"):
        credit.group_relative(eps=0.0)
    with pytest.raises(ValueError, match="singleton"):
        credit.group_relative(singleton="raw")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bound"):
        credit.clip(0.0)
    with pytest.raises(ValueError, match="at least one"):
        credit.chain()


@pytest.mark.usefixtures("x64")
def test_lowered_baseline_runs_from_successes_only_to_dr_grpo(laid: Any) -> None:
    rewards, groups = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0], [0, 0, 1, 1, 2, 2, 0]
    valid = [True] * 6 + [False]
    for share, wanted in (
        (0.0, [1, 0, 1, 1, 0, 0, 0]),
        (0.2, [0.9, -0.1, 0.8, 0.8, 0, 0, 0]),
        (1.0, [0.5, -0.5, 0, 0, 0, 0, 0]),
    ):
        found, metrics = advantages(laid, credit.lowered_baseline(share), rewards, groups, valid)
        np.testing.assert_allclose(found, wanted, atol=1e-9)
        assert metrics["groups/no_signal"] == 2
    with pytest.raises(ValueError, match="share must lie"):
        credit.lowered_baseline(1.5)
