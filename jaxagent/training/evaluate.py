"""Success rates with their uncertainty."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxagent.episodes.episode import Episode

_Z95 = 1.959963984540054


class Rate(NamedTuple):
    """A success rate over a number of tries, and its 95 % interval."""

    rate: float
    low: float
    high: float
    tries: int


def success_rate(successes: int, count: int) -> Rate:
    """Wilson's score interval for a binomial rate (Wilson, 1927, JASA 22:209).

    Treats the tries as independent: give it one try per task, or few tries of many tasks.
    No try at all gives the rate 0 with the interval (0, 1).
    """
    if not 0 <= successes <= count:
        raise ValueError(f"successes must lie in 0..count, got {successes} of {count}")
    if count == 0:
        return Rate(0.0, 0.0, 1.0, 0)
    p, z2 = successes / count, _Z95**2
    centre = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z95 / (1 + z2 / count) * math.sqrt(p * (1 - p) / count + z2 / (4 * count**2))
    return Rate(p, max(0.0, centre - half), min(1.0, centre + half), count)


def is_success(episode: Episode, threshold: float = 1.0) -> bool:
    """Whether a valid episode reached the full reward."""
    return episode.valid and episode.reward >= threshold


def episode_success(episodes: Iterable[Episode]) -> Rate:
    """The success rate over the valid episodes; an environment failure is no failure."""
    outcomes = [is_success(e) for e in episodes if e.valid]
    return success_rate(sum(outcomes), len(outcomes))


def pass_at_k(count: int, successes: int, k: int) -> float:
    """Unbiased estimate of the chance that one of ``k`` tries succeeds.

    ``1 - C(n - c, k) / C(n, k)`` from n tries with c successes (Chen et al., 2021,
    arXiv:2107.03374). Raises ValueError when ``k`` exceeds the number of tries.
    """
    if not 1 <= k <= count:
        raise ValueError(f"k must lie in 1..{count} (the number of tries), got {k}")
    if not 0 <= successes <= count:
        raise ValueError(f"successes must lie in 0..{count}, got {successes}")
    return 1.0 - math.comb(count - successes, k) / math.comb(count, k)


def mean_pass_at_k(outcomes: Sequence[Sequence[bool]], k: int) -> float:
    """``pass_at_k`` averaged over tasks; ``outcomes`` holds the tries of each task."""
    if not outcomes:
        raise ValueError("outcomes is empty: no task was tried")
    return sum(pass_at_k(len(tries), sum(tries), k) for tries in outcomes) / len(outcomes)
