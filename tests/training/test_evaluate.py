import itertools

import pytest

from jaxagent.training import evaluate


def test_wilson_interval_against_published_values() -> None:
    # Newcombe (1998), Statistics in Medicine 17:857, table I, method 3.
    for successes, count, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        rate = evaluate.success_rate(successes, count)
        assert rate.low == pytest.approx(low, abs=5e-5)
        assert rate.high == pytest.approx(high, abs=5e-5)


def test_no_tries_and_bad_counts() -> None:
    assert evaluate.success_rate(0, 0) == (0.0, 0.0, 1.0, 0)
    with pytest.raises(ValueError, match="3 of 2"):
        evaluate.success_rate(3, 2)


def test_pass_at_k_equals_enumeration() -> None:
    tries = [True, False, False, True, False]
    for k in range(1, 6):
        subsets = list(itertools.combinations(tries, k))
        expected = sum(any(s) for s in subsets) / len(subsets)
        assert evaluate.pass_at_k(5, 2, k) == pytest.approx(expected)
    assert evaluate.mean_pass_at_k([[True, False], [False, False]], 1) == pytest.approx(0.25)
    with pytest.raises(ValueError, match=r"1\.\.5"):
        evaluate.pass_at_k(5, 2, 6)
