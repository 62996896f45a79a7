"""Every loss once more, in float64 with plain loops, from its equation.

A reference is ``f(live, held, batch)``: ``held`` holds the same outputs as ``live``, and is
read where the equation stops the gradient. So f(x, x, batch) is the loss and the derivative
with respect to ``live`` alone its gradient.
"""

from collections.abc import Callable
from math import exp, log
from typing import Any

import numpy as np

from jaxagent.data.kinds import Kind

Spot = tuple[int, int]
Reference = Callable[[Any, Any, Any], float]
# (live, held, batch, spots of the episode, spot) -> the token's loss, None where masked.
Item = Callable[[Any, Any, Any, list[Spot], Spot], float | None]
# (held, batch, spots of the episode, spot) -> weight and whether to keep.
Weigh = Callable[[Any, Any, list[Spot], Spot], tuple[float, bool]]


def episodes(batch: Any, kind: Kind = Kind.ACTION) -> dict[int, list[Spot]]:
    """Valid episodes that have tokens of ``kind`` after the first action, and where."""
    found: dict[int, list[Spot]] = {}
    for r in range(batch.num_rows):
        for t in range(batch.row_length):
            e = int(batch.episode_ids[r, t])
            if batch.kind[r, t] == kind and batch.turn_ids[r, t] >= 0 and batch.valid[e]:
                found.setdefault(e, []).append((r, t))
    return found


def by_token(item: Item, aggregate: str = "token", kind: Kind = Kind.ACTION) -> Reference:
    def reference(live: Any, held: Any, batch: Any) -> float:
        sums, counts = [], []
        for spots in episodes(batch, kind).values():
            own = [item(live, held, batch, spots, spot) for spot in spots]
            kept = [x for x in own if x is not None]
            if kept:
                sums.append(sum(kept))
                counts.append(len(kept))
        if not counts:
            return 0.0
        if aggregate == "token":
            return sum(sums) / sum(counts)
        if aggregate == "episode":
            return float(np.mean([s / n for s, n in zip(sums, counts, strict=True)]))
        assert aggregate == "episode_sum"
        return float(np.mean(sums))

    return reference


def score(name: str) -> Callable[[Any, Any, Spot], float]:
    if name == "behavior":
        return lambda held, batch, s: batch.behavior_logprobs[s]
    return lambda held, batch, s: batch.scores[name][s]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def clipped(low: float, high: float, old: Any) -> Item:
    def item(live: Any, held: Any, batch: Any, spots: list[Spot], s: Spot) -> float:
        adv, rho = batch.advantages[s], exp(live["logprobs"][s] - old(held, batch, s))
        return max(-adv * rho, -adv * clip(rho, 1 - low, 1 + high))

    return item


def reinforce(live: Any, held: Any, batch: Any, spots: list[Spot], s: Spot) -> float:
    return -batch.advantages[s] * live["logprobs"][s]


def cispo(low: float, high: float, old: Any) -> Item:
    def item(live: Any, held: Any, batch: Any, spots: list[Spot], s: Spot) -> float:
        weight = clip(exp(held["logprobs"][s] - old(held, batch, s)), 1 - low, 1 + high)
        return -weight * batch.advantages[s] * live["logprobs"][s]

    return item


def gspo(low: float, high: float, old: Any) -> Item:
    def item(live: Any, held: Any, batch: Any, spots: list[Spot], s: Spot) -> float:
        mean = np.mean([held["logprobs"][x] - old(held, batch, x) for x in spots])
        ratio = exp(live["logprobs"][s] - held["logprobs"][s] + mean)
        adv = batch.advantages[s]
        return max(-adv * ratio, -adv * clip(ratio, 1 - low, 1 + high))

    return item


def dppo(low: float, high: float, drift: float) -> Item:
    def item(live: Any, held: Any, batch: Any, spots: list[Spot], s: Spot) -> float:
        adv, sampler = batch.advantages[s], batch.behavior_logprobs[s]
        change = exp(held["logprobs"][s]) - exp(sampler)
        drop = change > high if adv > 0 else change < -low
        log_ratio = live["logprobs"][s] - sampler
        return (0.0 if drop else -adv * exp(log_ratio)) + drift * log_ratio**2

    return item


def proximal(held: Any, batch: Any, s: Spot) -> float:
    return batch.scores["proximal"][s]


def current(held: Any, batch: Any, s: Spot) -> float:
    return held["logprobs"][s]


def loglinear(held: Any, batch: Any, s: Spot) -> float:
    version, sampler = int(batch.policy_versions[s]), batch.behavior_logprobs[s]
    now = held["step"]
    share = 0.0
    if 0 <= version < now:
        share = clip((now - 1 - version) / (now - version), 0.0, 1.0)
    return sampler + share * (held["logprobs"][s] - sampler)


def corrected(item: Item, *weighs: Weigh, kept_only: bool = False) -> Item:
    def found(live: Any, held: Any, batch: Any, spots: list[Spot], s: Spot) -> float | None:
        loss = item(live, held, batch, spots, s)
        for weigh in weighs:
            weight, keep = weigh(held, batch, spots, s)
            if not keep:
                return None if kept_only else 0.0
            assert loss is not None
            loss *= weight
        return loss

    return found


def gap(trainer: Any, held: Any, batch: Any, s: Spot) -> float:
    return trainer(held, batch, s) - batch.behavior_logprobs[s]


def token_tis(cap: float, trainer: Any, low: float = 0.0, normalise: bool = False) -> Weigh:
    def weigh(held: Any, batch: Any, spots: list[Spot], s: Spot) -> tuple[float, bool]:
        weight = clip(exp(gap(trainer, held, batch, s)), low, cap)
        if normalise:
            everything = [x for own in episodes(batch).values() for x in own]
            weight /= np.mean(
                [clip(exp(gap(trainer, held, batch, x)), low, cap) for x in everything]
            )
        return weight, True

    return weigh


def sequence_tis(cap: float, trainer: Any, normalise: bool = False) -> Weigh:
    def weigh(held: Any, batch: Any, spots: list[Spot], s: Spot) -> tuple[float, bool]:
        def own(tokens: list[Spot]) -> float:
            return min(exp(sum(gap(trainer, held, batch, x) for x in tokens)), cap)

        mean = np.mean([own(tokens) for tokens in episodes(batch).values()]) if normalise else 1
        return own(spots) / mean, True

    return weigh


def icepop(low: float, high: float, trainer: Any) -> Weigh:
    def weigh(held: Any, batch: Any, spots: list[Spot], s: Spot) -> tuple[float, bool]:
        weight = exp(gap(trainer, held, batch, s))
        return weight, low <= weight <= high

    return weigh


def rejection(statistic: str, level: str, low: float, high: float, trainer: Any) -> Weigh:
    def of(x: float) -> float:
        return {"k1": -x, "k2": x * x / 2, "k3": exp(x) - 1 - x}[statistic]

    def weigh(held: Any, batch: Any, spots: list[Spot], s: Spot) -> tuple[float, bool]:
        values = [of(gap(trainer, held, batch, x)) for x in (spots if level != "token" else [s])]
        reduce = {"token": sum, "sequence_sum": sum, "sequence_mean": np.mean, "sequence_max": max}
        found = float(reduce[level](values))  # type: ignore[operator]
        return 1.0, low <= exp(-found) <= high if statistic == "k1" else found <= high

    return weigh


def groups(batch: Any, some: set[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for e in sorted(some):
        found.setdefault(int(batch.group_ids[e]), []).append(e)
    return found


def log_ratios(live: Any, batch: Any, length_norm: bool) -> dict[int, float]:
    found = {}
    for e, spots in episodes(batch).items():
        total = sum(live["logprobs"][s] - batch.scores["reference"][s] for s in spots)
        found[e] = total / len(spots) if length_norm else total
    return found


def advantage(batch: Any, spots: list[Spot]) -> float:
    return float(np.mean([batch.advantages[s] for s in spots]))


def grouped_balance(worth: Callable[[Any, int, list[Spot]], float], length_norm: bool) -> Reference:
    """mean_b (sg(mean_g xi) - xi_b)^2 with xi_b = worth_b - S(L - R)."""

    def reference(live: Any, held: Any, batch: Any) -> float:
        own = episodes(batch)
        values = {e: worth(batch, e, spots) for e, spots in own.items()}
        now, fixed = (log_ratios(x, batch, length_norm) for x in (live, held))
        total = 0.0
        for members in groups(batch, set(own)).values():
            log_z = np.mean([values[e] - fixed[e] for e in members])
            total += sum((log_z - (values[e] - now[e])) ** 2 for e in members)
        return total / len(own)

    return reference


def trajectory_balance(beta: float, length_norm: bool = False) -> Reference:
    return grouped_balance(lambda batch, e, spots: batch.rewards[e] / beta, length_norm)


def flow_balance(teacher: str, eta: float, lam: float, old: Any) -> Reference:
    def worth(batch: Any, e: int, spots: list[Spot]) -> float:
        mask = batch.scores.get(f"teacher/{teacher}/mask")
        told = [
            batch.scores[f"teacher/{teacher}"][s] - old(None, batch, s)
            for s in spots
            if mask is None or mask[s] > 0
        ]
        a = advantage(batch, spots)
        return eta * (a + lam * np.sign(a) * (np.mean(told) if told else 0.0))

    return grouped_balance(worth, True)


def learned_z(beta: float, length_norm: bool = False) -> Reference:
    def reference(live: Any, held: Any, batch: Any) -> float:
        total = 0.0
        ratios = log_ratios(live, batch, length_norm)
        for e, spots in episodes(batch).items():
            log_z = np.mean([live["log_z"][s] for s in spots])
            total += (log_z + ratios[e] - batch.rewards[e] / beta) ** 2
        return total / len(ratios)

    return reference


def flow_rl(beta: float, is_clip: float | None, old: Any) -> Reference:
    def reference(live: Any, held: Any, batch: Any) -> float:
        total = 0.0
        ratios = log_ratios(live, batch, True)
        for e, spots in episodes(batch).items():
            log_z = np.mean([live["log_z"][s] for s in spots])
            weight = exp(sum(held["logprobs"][s] - old(held, batch, s) for s in spots))
            if is_clip is not None:
                weight = clip(weight, 1 - is_clip, 1 + is_clip)
            total += weight * (log_z + ratios[e] - beta * advantage(batch, spots)) ** 2
        return total / len(ratios)

    return reference


def taught(item: Item, teacher: str) -> Item:
    """``item`` on the tokens the teacher covers."""

    def found(live: Any, held: Any, batch: Any, spots: list[Spot], s: Spot) -> float | None:
        mask = batch.scores.get(f"teacher/{teacher}/mask")
        covered = mask is None or mask[s] > 0
        return item(live, held, batch, spots, s) if covered else None

    return found


def capped(item: Item, cap: float, old: Any) -> Item:
    def found(live: Any, held: Any, batch: Any, spots: list[Spot], s: Spot) -> float | None:
        loss = item(live, held, batch, spots, s)
        weight = min(exp(held["logprobs"][s] - old(held, batch, s)), cap)
        return None if loss is None else weight * loss

    return found


def reverse_kl(teacher: str) -> Item:
    def item(live: Any, held: Any, batch: Any, spots: list[Spot], s: Spot) -> float:
        told = batch.scores[f"teacher/{teacher}"][s]
        return (held["logprobs"][s] - told) * live["logprobs"][s]

    return item


def output(name: str) -> Item:
    return lambda live, held, batch, spots, s: live[name][s]


def teacher_policy_gradient(teacher: str, low: float, drift: float) -> Item:
    def item(live: Any, held: Any, batch: Any, spots: list[Spot], s: Spot) -> float:
        sampler, told = batch.behavior_logprobs[s], batch.scores[f"teacher/{teacher}"][s]
        log_ratio = live["logprobs"][s] - sampler
        loss = drift * log_ratio**2
        if exp(held["logprobs"][s]) - exp(sampler) >= -low:
            loss -= (told - held["logprobs"][s]) * exp(log_ratio)
        return loss

    return item


def auxiliary(teacher: str, form: str, bound: float | None, old: Any) -> Item:
    def item(live: Any, held: Any, batch: Any, spots: list[Spot], s: Spot) -> float:
        anchor = old(held, batch, s)
        shift = batch.scores[f"teacher/{teacher}"][s] - anchor
        shift = shift if bound is None else clip(shift, -bound, bound)
        live_logprob = live["logprobs"][s]
        return -shift * (live_logprob if form == "logprob" else exp(live_logprob - anchor))

    return item


def preference(beta: float) -> Reference:
    def reference(live: Any, held: Any, batch: Any) -> float:
        sides: dict[int, list[float]] = {}
        for spots in episodes(batch).values():
            for s in spots:
                mark = int(batch.scores["preference"][s])
                if mark:
                    sides[mark] = [*sides.get(mark, []), live["logprobs"][s]]
        pairs = [i for i in sides if i > 0 and -i in sides]
        margins = [beta * (sum(sides[i]) - sum(sides[-i])) for i in pairs]
        return float(np.mean([-log(1 / (1 + exp(-m))) for m in margins])) if margins else 0.0

    return reference


def marked(name: str) -> Item:
    def item(live: Any, held: Any, batch: Any, spots: list[Spot], s: Spot) -> float | None:
        return -live["logprobs"][s] if batch.scores[name][s] > 0 else None

    return item


def observation(live: Any, held: Any, batch: Any, spots: list[Spot], s: Spot) -> float | None:
    weight = batch.scores["observation_weight"][s]
    return -weight * live["logprobs"][s] if weight else None


def value(bound: float | None) -> Item:
    def item(live: Any, held: Any, batch: Any, spots: list[Spot], s: Spot) -> float:
        now, target = live["values"][s], batch.scores["returns"][s]
        squares = [(now - target) ** 2]
        if bound is not None:
            old = batch.scores["values"][s]
            squares.append((clip(now, old - bound, old + bound) - target) ** 2)
        return max(squares) / 2

    return item


def failure(live: Any, held: Any, batch: Any, spots: list[Spot], s: Spot) -> float:
    chance = 1 / (1 + exp(-live["failure"][s]))
    failed = batch.rewards[batch.episode_ids[s]] <= 0
    return -log(chance if failed else 1 - chance)


def progress(live: Any, held: Any, batch: Any, spots: list[Spot], s: Spot) -> float | None:
    if batch.truncated[batch.episode_ids[s]]:
        return None
    when = [(batch.turn_ids[x], batch.positions[x]) for x in spots]
    after = sum(x > (batch.turn_ids[s], batch.positions[s]) for x in when)
    return (live["progress"][s] - log(1 + after)) ** 2
