"""Random episodes of the right shape, for tests, benchmarks and trying out a loss."""

import numpy as np
from numpy.typing import NDArray

from jaxagent.data.kinds import Kind
from jaxagent.episodes.episode import Context, Episode


def random_context(
    rng: np.random.Generator,
    *,
    vocab_size: int = 50,
    turns: int = 2,
    max_run: int = 5,
    first_turn: int = 0,
    version: int = 0,
) -> Context:
    """A prompt, then ``turns`` turns of action, template and observation tokens.

    Runs of a kind have 1 to ``max_run`` tokens (an observation may be empty); log-probs are
    uniform in [-3, 0), versions at most ``version``.
    """
    kinds = [Kind.PROMPT] * int(rng.integers(1, max_run + 1))
    turn_ids = [-1] * len(kinds)
    for turn in range(first_turn, first_turn + turns):
        for kind, least in ((Kind.ACTION, 1), (Kind.TEMPLATE, 1), (Kind.OBSERVATION, 0)):
            size = int(rng.integers(least, max_run + 1))
            kinds += [kind] * size
            turn_ids += [turn] * size
    kind_array: NDArray[np.uint8] = np.asarray(kinds, np.uint8)
    sampled = kind_array == Kind.ACTION
    size = len(kinds)
    return Context(
        tokens=rng.integers(0, vocab_size, size).astype(np.int32),
        kinds=kind_array,
        turn_ids=np.asarray(turn_ids, np.int32),
        logprobs=np.where(sampled, -3 * rng.random(size), 0).astype(np.float32),
        versions=np.where(sampled, rng.integers(0, version + 1, size), -1).astype(np.int32),
    )


def random_episodes(
    seed: int,
    *,
    groups: int = 2,
    group_size: int = 3,
    vocab_size: int = 50,
    max_turns: int = 3,
    max_run: int = 5,
    max_contexts: int = 1,
    invalid: float = 0.0,
    truncated: float = 0.0,
    version: int = 0,
) -> list[Episode]:
    """``groups`` x ``group_size`` episodes, reproducible from ``seed``.

    ``invalid`` and ``truncated`` are the chances of either; ``max_contexts`` above 1 gives
    episodes whose history was rewritten.
    """
    rng = np.random.default_rng(seed)
    episodes = []
    for group in range(groups):
        for _ in range(group_size):
            contexts: list[Context] = []
            turn = 0
            for _ in range(int(rng.integers(1, max_contexts + 1))):
                turns = int(rng.integers(1, max_turns + 1))
                contexts.append(
                    random_context(
                        rng,
                        vocab_size=vocab_size,
                        turns=turns,
                        max_run=max_run,
                        first_turn=turn,
                        version=version,
                    )
                )
                turn += turns
            valid = bool(rng.random() >= invalid)
            cut = bool(rng.random() < truncated)
            episodes.append(
                Episode(
                    task_id=f"task-{group}",
                    group_id=f"group-{group}",
                    contexts=tuple(contexts),
                    reward=float(rng.random()) if valid else 0.0,
                    turn_rewards=tuple(float(r) for r in rng.random(turn)),
                    valid=valid,
                    truncated="tokens" if cut else None,
                    error=None if valid else "sandbox died",
                )
            )
    return episodes
