"""Credit from teachers: OPID, SEED, DiffGate, AdviSD."""

from typing import Any

import numpy as np
import pytest

from jaxagent import credit
from tests.credit.cases import (
    batch_of_turns,
    by_turn,
    constant_base,
    lay_tokens,
    random_batch,
    run,
    turns_of,
)

pytestmark = pytest.mark.usefixtures("x64")


def test_vector_of_teacher_shift(vectors: dict[str, Any]) -> None:
    episodes = vectors["episodes"]
    batch = batch_of_turns([[len(e["old"])] for e in episodes], [1.0] * 4, vectors["group"])
    batch = batch.with_score("teacher/hint", lay_tokens(batch, [e["teacher"] for e in episodes]))
    wanted = lay_tokens(batch, vectors["expected"]["teacher_shift_w0.1_clip0.3"], 0.0)
    old = lay_tokens(batch, [e["old"] for e in episodes], -np.inf)
    base = credit.group_relative()
    for kind, given in (
        ("behavior", batch.replace(behavior_logprobs=np.where(np.isfinite(old), old, 0.0))),
        ("proximal", batch.with_score("proximal", old)),
    ):
        shift = credit.teacher_shift("hint", 0.1, 0.3, kind)  # type: ignore[arg-type]
        found = run(credit.chain(base, shift), given)
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_printed_numbers_of_opid() -> None:
    batch = batch_of_turns([[1]], [0.0])
    batch = batch.replace(behavior_logprobs=lay_tokens(batch, [[np.log(0.5)]], 0.0))
    base = constant_base(lay_tokens(batch, [[1.0]], 0.0))
    for p, wanted in ((0.8, 1.0470004), (0.2, 0.9083709)):
        scored = batch.with_score("teacher/step", lay_tokens(batch, [[np.log(p)]]))
        scored = scored.with_score("teacher/whole", lay_tokens(batch, [[-7.0]]))
        for transform in (
            credit.teacher_shift("step", 0.1),
            credit.routed_teacher_shift("whole", "step", 0.5, 0.1),
            credit.routed_teacher_shift("whole", "step", 0.0, 0.1, "additive"),
        ):
            found = by_turn(batch, run(credit.chain(base, transform), scored))
            assert found == [[pytest.approx(wanted, abs=1e-7)]]


def test_printed_number_of_diffgate() -> None:
    batch = batch_of_turns([[1], [1], [1], [1], [1]], [0.0, 1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0, 1])
    ones = [[1.0]] * 5
    batch = batch.replace(behavior_logprobs=lay_tokens(batch, ones, 0.0) * np.log(0.5))
    batch = batch.with_score("teacher/x", lay_tokens(batch, ones) * np.log(0.25))
    nothing = constant_base(np.zeros(batch.tokens.shape))
    gate = credit.chain(nothing, credit.gated_difficulty("x"))
    found = by_turn(batch, run(gate, batch))
    np.testing.assert_allclose(found, [[-0.45], [0], [-0.45], [-0.45], [0]], atol=1e-7)
    # A group that only fails has no other signal; one that only passes has none at all.
    failed = batch.replace(rewards=batch.rewards * 0)
    whole = run(credit.chain(credit.group_relative(), credit.gated_difficulty("x")), failed)
    np.testing.assert_allclose(by_turn(batch, whole), [[-0.6]] * 5, atol=1e-7)
    passed = batch.replace(rewards=batch.rewards * 0 + 1)
    assert not run(gate, passed).any()


def test_select_advice() -> None:
    plain = [np.zeros(2), np.zeros(1), np.zeros(0)]
    advised = [np.asarray([0.10, 0.0]), np.asarray([-0.40]), np.zeros(0)]
    assert credit.select_advice(advised[:2], plain[:2], 0.5).tolist() == [False, True]
    assert credit.select_advice(advised, plain, 0.5).tolist() == [True, True, False]
    assert credit.select_advice(advised, plain, 0.0).tolist() == [False] * 3
    ties = [np.ones(1)] * 30
    assert np.flatnonzero(credit.select_advice(ties, [np.zeros(1)] * 30, 0.1)).tolist() == [0, 1, 2]
    assert credit.select_advice([], [], 0.5).size == 0
    with pytest.raises(ValueError, match="keep must lie"):
        credit.select_advice([], [], 1.5)
    with pytest.raises(ValueError, match="1 advised responses, but 0"):
        credit.select_advice([np.zeros(1)], [], 0.5)


def test_equal_contexts_shift_nothing() -> None:
    batch = random_batch(0)
    base = credit.group_relative()
    same = batch.scores | {"teacher/whole": batch.scores["proximal"]}
    same |= {"teacher/step": batch.scores["proximal"]}
    plain = run(base, batch)
    for transform in (
        credit.teacher_shift("whole", 2.0, old="proximal"),
        credit.routed_teacher_shift("whole", "step", 1.0, 1.0, old="proximal"),
        credit.gated_difficulty("whole", old="proximal"),
    ):
        shifted = run(credit.chain(base, transform), batch.replace(scores=same))
        np.testing.assert_array_equal(shifted, plain)
        assert np.abs(run(credit.chain(base, transform), batch) - plain).max() > 0.1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("old", ["behavior", "proximal"])
@pytest.mark.parametrize("clip", [None, 0.4])
def test_random_batches_match_a_loop(seed: int, old: Any, clip: float | None) -> None:
    batch = random_batch(seed)
    base = np.random.default_rng(seed).normal(size=batch.tokens.shape)
    turns = turns_of(batch)
    priors = batch.behavior_logprobs if old == "behavior" else batch.scores["proximal"]

    def gap(name: str, at: tuple[int, int], bound: float | None = clip) -> float:
        if not batch.scores[f"teacher/{name}/mask"][at] > 0:
            return 0.0
        found = batch.scores[f"teacher/{name}"][at] - priors[at]
        return found if bound is None else float(np.clip(found, -bound, bound))

    def steps(e: int, k: int) -> bool:
        return any(batch.scores["teacher/step/mask"][at] > 0 for at in turns[e][k])

    def gate(e: int) -> float:
        mates = [f for f in np.flatnonzero(batch.valid) if batch.group_ids[f] == batch.group_ids[e]]
        failed = [batch.rewards[f] < 0.5 for f in mates]
        return float(np.mean(failed)) if batch.rewards[e] < 0.5 else 0.0

    routed = credit.routed_teacher_shift
    for transform, formula in (
        (credit.teacher_shift("whole", 0.3, clip, old), lambda e, k, at: 0.3 * gap("whole", at)),
        (
            routed("whole", "step", 0.3, 0.7, clip=clip, old=old),
            lambda e, k, at: 0.7 * gap("step", at) if steps(e, k) else 0.3 * gap("whole", at),
        ),
        (
            routed("whole", "step", 0.3, 0.0, clip=clip, old=old),
            lambda e, k, at: 0.3 * gap("whole", at),
        ),
        (
            routed("whole", "step", 0.3, 0.7, "additive", clip, old),
            lambda e, k, at: 0.7 * gap("step", at) + 0.3 * gap("whole", at),
        ),
        (
            credit.gated_difficulty("whole", 0.8, 0.5, success=0.5, old=old),
            lambda e, k, at: 0.8 * gate(e) * 0.5 * np.tanh(gap("whole", at, None) / 0.5),
        ),
    ):
        wanted = np.zeros(base.shape)
        for e, own in turns.items():
            for k, tokens in own.items():
                for at in tokens:
                    wanted[at] = base[at] + formula(e, k, at)
        found = run(credit.chain(constant_base(base), transform), batch)
        np.testing.assert_allclose(found, wanted, atol=1e-12)
        assert np.abs(found - np.where(wanted != 0, base, 0)).max() > 0.1


def test_a_teacher_without_a_mask_covers_every_action() -> None:
    batch = batch_of_turns([[2]], [0.0])
    batch = batch.with_score("teacher/x", lay_tokens(batch, [[-1.0, -2.0]], -np.inf))
    nothing = constant_base(np.zeros(batch.tokens.shape))
    shift = credit.chain(nothing, credit.teacher_shift("x", 1.0))
    np.testing.assert_allclose(run(shift, batch), lay_tokens(batch, [[-1, -2]], 0.0))
    masked = batch.with_score("teacher/x/mask", lay_tokens(batch, [[0.0, 1.0]]))
    np.testing.assert_allclose(run(shift, masked), lay_tokens(batch, [[0, -2]], 0.0))


def test_misuse_fails_at_construction() -> None:
    for make, message in (
        (lambda: credit.teacher_shift("x", 0.0), "weight must"),
        (lambda: credit.teacher_shift("x", 1.0, clip=0.0), "clip must"),
        (lambda: credit.teacher_shift("x", 1.0, old="ref"), "old must"),  # type: ignore[arg-type]
        (lambda: credit.routed_teacher_shift("x", "y", -1.0), "episode_weight must"),
        (lambda: credit.routed_teacher_shift("x", "y", 0.0, 0.0), "both 0"),
        (lambda: credit.routed_teacher_shift("x", "x"), "two teachers"),
        (lambda: credit.routed_teacher_shift("x", "y", mode="first"), "mode must"),  # type: ignore[arg-type]
        (lambda: credit.gated_difficulty("x", 0.0), "weight must"),
        (lambda: credit.gated_difficulty("x", bound=0.0), "bound must"),
        (lambda: credit.gated_difficulty("x", success=float("inf")), "success must"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    routed = credit.routed_teacher_shift("x", "y", old="proximal")
    assert routed.scores == {"teacher/x", "teacher/y", "proximal"}
