"""Batches and plain loops that the credit tests share."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxagent import credit
from jaxagent.data.kinds import Kind
from jaxagent.data.packing import pack
from jaxagent.data.synthetic import random_episodes
from jaxagent.episodes.episode import Context, Episode

A = Kind.ACTION
Token = tuple[int, int]


def batch_of_turns(
    tokens: Sequence[Sequence[int]],
    rewards: Sequence[float],
    groups: Sequence[int] | None = None,
    turn_rewards: Sequence[Sequence[float]] | None = None,
    valid: Sequence[bool] | None = None,
    truncated: Sequence[bool] | None = None,
) -> Any:
    """A float64 batch; ``tokens[e][k]`` counts the ACTION tokens of turn k, and each turn is
    followed by one observation token."""
    episodes = []
    for index, (counts, reward) in enumerate(zip(tokens, rewards, strict=True)):
        kinds, turns = [Kind.PROMPT], [-1]
        for turn, count in enumerate(counts):
            kinds += [A] * count + [Kind.OBSERVATION]
            turns += [turn] * (count + 1)
        size = len(kinds)
        context = Context(
            tokens=np.arange(size, dtype=np.int32),
            kinds=np.asarray(kinds, np.uint8),
            turn_ids=np.asarray(turns, np.int32),
            logprobs=np.zeros(size, np.float32),
            versions=np.zeros(size, np.int32),
        )
        group = 0 if groups is None else groups[index]
        ok = valid is None or valid[index]
        cut = truncated is not None and truncated[index]
        own = (0.0,) * len(counts) if turn_rewards is None else tuple(turn_rewards[index])
        episodes.append(
            Episode("task", f"g{group}", (context,), reward, own, ok, "turns" if cut else None)
        )
    return as_float64(pack(episodes, buckets=(32,), num_episodes=len(tokens) + 2), episodes)


def as_float64(batch: Any, episodes: Sequence[Episode]) -> Any:
    """The same rewards without the rounding to float32."""
    rewards = np.zeros(batch.rewards.shape)
    turn_rewards = np.zeros(batch.turn_rewards.shape)
    for index, episode in enumerate(episodes):
        if batch.valid[index]:
            rewards[index] = episode.reward
            turn_rewards[index, : len(episode.turn_rewards)] = episode.turn_rewards
    return batch.replace(
        rewards=rewards,
        turn_rewards=turn_rewards,
        behavior_logprobs=batch.behavior_logprobs.astype(float),
        advantages=np.zeros(batch.tokens.shape),
    )


def random_batch(
    seed: int,
    order: int = 1,
    buckets: Sequence[int] = (64,),
    **sizes: int,
) -> Any:
    """A packed float64 batch with several contexts, invalid and truncated episodes, a group
    of one, a group of equal rewards, turns without a sampled token, and all scores and extras.

    Every value belongs to a token or episode, whatever the packing (``order`` -1 reverses
    the episodes). What no method may read is NaN or -inf.
    """
    rng = np.random.default_rng(seed)
    episodes = random_episodes(
        seed, groups=4, group_size=4, max_contexts=2, invalid=0.2, truncated=0.4
    )
    episodes = episodes[:-3]  # the last group has one member
    for index in range(4):  # the first has equal rewards
        episodes[index] = Episode(
            "t", "group-0", episodes[index].contexts, 0.0, truncated=episodes[index].truncated
        )
    silent = [(e, 1) for e in range(5, 9) if episodes[e].num_turns > 2]
    count = len(episodes)
    batch = as_float64(pack(episodes[::order], buckets=buckets, **sizes), episodes[::order])
    index_of = [i if order > 0 else count - 1 - i for i in range(count)]

    kind = batch.kind.copy()
    scores = {
        name: np.full(batch.tokens.shape, junk)
        for name, junk in (
            ("values", np.nan),
            ("proximal", -np.inf),
            ("teacher/whole", -np.inf),
            ("teacher/whole/mask", 0.0),
            ("teacher/step", np.nan),
            ("teacher/step/mask", 0.0),
        )
    }
    for r, t in zip(*np.nonzero(batch.segment_ids), strict=True):
        episode = index_of[int(batch.episode_ids[r, t])]
        turn, place = int(batch.turn_ids[r, t]), int(batch.positions[r, t])
        if (episode, turn) in silent and kind[r, t] == A:
            kind[r, t] = Kind.TEMPLATE
        if kind[r, t] != A:
            continue
        own = np.random.default_rng([seed, episode, turn, place])
        scores["values"][r, t] = own.normal()
        scores["proximal"][r, t] = -own.exponential()
        for name, chance in (("teacher/whole", 0.8), ("teacher/step", 0.4)):
            # The episode's skill does not parse now and then; a step's covers parts of a turn.
            unit = [seed, episode] if name == "teacher/whole" else [seed, episode, turn]
            covered = np.random.default_rng(unit).random() < chance and own.random() < 0.8
            if covered:
                scores[f"{name}/mask"][r, t] = 1.0
                scores[name][r, t] = -own.exponential()

    num_turns = batch.turn_rewards.shape[1]
    floats = rng.normal(size=(count, 40, 6))
    ints = rng.integers(-1, 3, size=(count, 40, 4))
    many = np.full((batch.num_episodes, num_turns + 1, 3), np.nan)
    whole = np.full((batch.num_episodes, 4), -1)
    by_turn = np.full((batch.num_episodes, num_turns, 4), -1)
    for slot, episode in enumerate(index_of):
        # One more boundary than turns; beyond them no method may look.
        turns = episodes[episode].num_turns
        many[slot, : turns + 1] = floats[episode, : turns + 1, :3]
        by_turn[slot, :turns] = ints[episode, :turns]
        whole[slot] = ints[episode, -1]
    imagined = np.full((batch.num_episodes, num_turns, 3), np.nan)
    for slot, episode in enumerate(index_of):
        imagined[slot, : episodes[episode].num_turns] = floats[
            episode, : episodes[episode].num_turns, 3:6
        ]
    support = np.full(batch.num_episodes, np.nan)
    last = np.full(batch.num_episodes, np.nan)
    for slot, episode in enumerate(index_of):
        support[slot], last[slot] = floats[episode, -1, :2]
    # A chain of nodes a turn deep: the same id at the same depth is the same node.
    depth = np.arange(num_turns) * 10
    nodes = np.where(by_turn[..., 3] >= 0, by_turn[..., 3] + depth, -1)
    return batch.replace(
        kind=kind,
        scores=scores,
        extras={
            "gold_logprobs": -np.abs(many[..., 0]),
            "meter": 30 * many[..., 1],
            "evidence": np.abs(many[..., 2]),
            "support": support,
            "last_values": last,
            "outcome_ids": whole[:, 0],
            "state_ids": by_turn[..., 0],
            "window_ids": by_turn[..., 1],
            "roles": by_turn[..., 2],
            "node_ids": nodes,
            "parent_ids": np.pad(nodes, ((0, 0), (1, 0)), constant_values=-1)[:, :-1],
            "imagined_values": imagined,
            "imagined_gates": np.clip(imagined[..., 0], 0, 1),
        },
    )


def run(transform: Any, batch: Any) -> np.ndarray:
    """The advantages [R,T] that ``transform`` gives, jitted."""
    filled, _ = jax.jit(lambda b: credit.assign(transform, b))(batch)
    return np.asarray(filled.advantages)


def shape_rewards(transform: Any, batch: Any) -> Any:
    """The batch as a reward transform leaves it, on the host."""
    shaped, _ = jax.jit(transform)(batch)
    return jax.tree.map(np.asarray, shaped)


def turns_of(batch: Any) -> dict[int, dict[int, list[Token]]]:
    """Valid episode -> turn -> its ACTION tokens (row, column), all in order."""
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    for r in range(batch.tokens.shape[0]):
        for t in range(batch.tokens.shape[1]):
            e = int(batch.episode_ids[r, t])
            if batch.kind[r, t] == A and batch.valid[e]:
                key = (int(batch.turn_ids[r, t]), int(batch.positions[r, t]), r, t)
                found.setdefault(e, []).append(key)
    out: dict[int, dict[int, list[Token]]] = {}
    for e, keys in found.items():
        for turn, _, r, t in sorted(keys):
            out.setdefault(e, {}).setdefault(turn, []).append((r, t))
    return out


def by_turn(batch: Any, values: np.ndarray) -> list[list[float]]:
    """``values`` [R,T] as one number a turn; all tokens of a turn must agree."""
    found = []
    for _, turns in sorted(turns_of(batch).items()):
        found.append([])
        for tokens in turns.values():
            own = [float(values[at]) for at in tokens]
            np.testing.assert_allclose(own, own[0], atol=1e-12)
            found[-1].append(own[0])
    return found


def lay_turns(batch: Any, value: Callable[[int, int], float]) -> np.ndarray:
    """[R,T] with ``value(episode, turn)`` on the turn's ACTION tokens."""
    out = np.zeros(batch.tokens.shape)
    for e, turns in turns_of(batch).items():
        for k, tokens in turns.items():
            for at in tokens:
                out[at] = value(e, k)
    return out


def lay_tokens(batch: Any, values: Sequence[Sequence[float]], fill: float = np.nan) -> np.ndarray:
    """[R,T] with one list of numbers an episode on its ACTION tokens, in order."""
    out = np.full(batch.tokens.shape, fill)
    for e, turns in turns_of(batch).items():
        at = [token for tokens in turns.values() for token in tokens]
        for token, number in zip(at, values[e], strict=True):
            out[token] = number
    return out


def constant_base(values: np.ndarray) -> Callable[[Any, Any], Any]:
    """A base that gives these advantages."""
    return lambda batch, advantages: (values, {})


def source(batch: Any, rewards: str) -> dict[int, dict[int, float]]:
    """Each turn's reward, by the description of ``rewards``."""
    found: dict[int, dict[int, float]] = {}
    for e, turns in turns_of(batch).items():
        last = max(turns)
        found[e] = {
            k: (batch.turn_rewards[e, k] if rewards in ("turns", "both") else 0.0)
            + (batch.rewards[e] if k == last and rewards in ("outcome", "both") else 0.0)
            for k in turns
        }
    return found


def returns(rewards: dict[int, float], gamma: float) -> dict[int, float]:
    """Discounted sums over the turns that exist."""
    turns = sorted(rewards)
    return {
        k: sum(gamma ** (j - i) * rewards[turns[j]] for j in range(i, len(turns)))
        for i, k in enumerate(turns)
    }


def zscore(values: Sequence[float]) -> tuple[float, float]:
    """Mean and deviation to normalise with; all-equal or single values become 0."""
    if len(values) < 2 or max(values) == min(values):
        return values[0], np.inf
    return float(np.mean(values)), float(np.std(values, ddof=1)) + 1e-6
