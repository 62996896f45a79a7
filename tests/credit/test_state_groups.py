"""GiGPO: turns against turns from the same state."""

import difflib
from typing import Any

import numpy as np
import pytest

from jaxagent import credit
from tests.credit.cases import (
    batch_of_turns,
    by_turn,
    constant_base,
    lay_turns,
    random_batch,
    returns,
    run,
    source,
    zscore,
)

pytestmark = pytest.mark.usefixtures("x64")


def zero(batch: Any) -> Any:
    return constant_base(np.zeros(batch.tokens.shape))


def test_printed_numbers() -> None:
    # The common state comes one turn before the outcome, which 0.95 discounts.
    batch = batch_of_turns([[2, 1], [1, 1]], [1.0, 0.0], None, [[0.0, 1.0], [0.0, 0.0]])
    ids = np.asarray([[4, 5], [4, 6], [4, 5], [-1, -1]])  # rows 2 and 3 are padding
    transform = credit.chain(credit.group_relative(scale="none"), credit.gigpo_state())
    found = by_turn(batch, run(transform, batch.with_extra("state_ids", ids)))
    np.testing.assert_allclose(found, [[0.975, 0.5], [-0.975, -0.5]], atol=1e-12)
    # The outcome alone gives the same: it is in once.
    transform = credit.chain(
        credit.group_relative(scale="none"), credit.gigpo_state(rewards="outcome")
    )
    again = by_turn(batch, run(transform, batch.with_extra("state_ids", ids)))
    np.testing.assert_allclose(again, found, atol=1e-12)


@pytest.mark.parametrize("scale", ["mean_norm", "mean_std_norm"])
@pytest.mark.parametrize("seed", range(3))
def test_random_batches_match_a_loop(seed: int, scale: Any) -> None:
    batch = random_batch(seed)
    given = {e: returns(own, 0.9) for e, own in source(batch, "turns").items()}
    states = batch.extras["state_ids"]
    pools: dict[tuple[int, int], list[float]] = {}
    for e, own in given.items():
        for k, value in own.items():
            if states[e, k] >= 0:
                pools.setdefault((batch.group_ids[e], states[e, k]), []).append(value)
    assert {len(pool) == 1 for pool in pools.values()} == {True, False}

    def wanted(e: int, k: int) -> float:
        if states[e, k] < 0:
            return 0.0
        pool = pools[batch.group_ids[e], states[e, k]]
        mean, std = zscore(pool)
        return 0.5 * (given[e][k] - mean) / (std if scale == "mean_std_norm" else 1.0)

    transform = credit.gigpo_state(0.5, 0.9, scale)
    found = run(credit.chain(zero(batch), transform), batch)
    np.testing.assert_allclose(found, lay_turns(batch, wanted), atol=1e-10)
    assert np.abs(found).max() > 0.1


def test_state_ids_join_equal_texts_of_a_group() -> None:
    seen = [["$ ls", "a b", "$ ls"], ["a b"], ["$ ls", "c"]]
    found = credit.state_ids(seen, [0, 0, 1], (4, 3))
    np.testing.assert_array_equal(found, [[0, 1, 0], [1, -1, -1], [2, 3, -1], [-1, -1, -1]])


def test_similar_texts_join_the_first_like_them() -> None:
    base = "total 12 drwxr-xr-x user user notes.txt " * 2
    near, far = base + "x", base[: len(base) // 2]
    assert difflib.SequenceMatcher(None, base, near).ratio() >= 0.95
    assert difflib.SequenceMatcher(None, base, far).ratio() < 0.95
    seen = [[base, near, far], [near, base]]
    exact = credit.state_ids(seen, [0, 0], (2, 3))
    np.testing.assert_array_equal(exact, [[0, 1, 2], [1, 0, -1]])
    close = credit.state_ids(seen, [0, 0], (2, 3), similarity=0.95)
    np.testing.assert_array_equal(close, [[0, 0, 1], [0, 0, -1]])
    apart = credit.state_ids(seen, [0, 1], (2, 3), similarity=0.95)
    np.testing.assert_array_equal(apart, [[0, 0, 1], [2, 2, -1]])


def test_similarity_matches_a_plain_greedy_search() -> None:
    rng = np.random.default_rng(0)
    words = ["ls", "cat", "notes.txt", "$", "error:", "no such file"]
    seen = [
        [" ".join(rng.choice(words, size=rng.integers(1, 8))) for _ in range(4)] for _ in range(12)
    ]
    groups = [i % 2 for i in range(12)]
    firsts: list[tuple[int, str]] = []
    wanted = []
    for texts, group in zip(seen, groups, strict=True):
        for text in texts:
            like = [
                i
                for i, (own, first) in enumerate(firsts)
                if own == group and difflib.SequenceMatcher(None, first, text).ratio() >= 0.65
            ]
            wanted.append(like[0] if like else len(firsts))
            if not like:
                firsts.append((group, text))
    found = credit.state_ids(seen, groups, (12, 4), similarity=0.65)
    assert found.reshape(-1).tolist() == wanted and len(firsts) < 40


def test_misuse_fails_at_construction() -> None:
    for options, message in (
        ({"weight": 0.0}, "weight must"),
        ({"gamma": 2.0}, "gamma must lie"),
        ({"scale": "std"}, "scale must be"),
        ({"rewards": "all"}, "rewards must be"),
        ({"eps": -1.0}, "eps must"),
    ):
        with pytest.raises(ValueError, match=message):
            credit.gigpo_state(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="similarity must lie"):
        credit.state_ids([], [], (1, 1), similarity=0.0)
    with pytest.raises(ValueError, match="do not fit the batch"):
        credit.state_ids([["a", "b"]], [0], (1, 1))
    with pytest.raises(ValueError, match="1 episodes of observations, but 2 groups"):
        credit.state_ids([["a"]], [0, 0], (1, 1))
