"""Forecasts and demonstrations: sequences packed beside the episodes."""

from typing import Any

import numpy as np
import pytest

from jaxagent import losses
from jaxagent.data.augment import (
    divergence_turn,
    forecast_contexts,
    marked_score,
    verified_demonstrations,
)
from jaxagent.data.batch import action_mask
from jaxagent.data.kinds import Kind
from jaxagent.data.packing import pack, place
from jaxagent.episodes.episode import Context, Episode

BUCKETS = (64,)


def encode(text: str) -> list[int]:
    return [40 + ord(c) % 8 for c in text]


def episode(actions: list[list[int]], reward: float, group: str = "g", answer: int = 5) -> Episode:
    tokens, kinds, turns = [1, 2], [Kind.PROMPT] * 2, [-1, -1]
    for turn, action in enumerate(actions):
        tokens += [*action, answer]
        kinds += [Kind.ACTION] * len(action) + [Kind.OBSERVATION]
        turns += [turn] * (len(action) + 1)
    size = len(tokens)
    context = Context(
        np.array(tokens, np.int32),
        np.array(kinds, np.uint8),
        np.array(turns, np.int32),
        np.zeros(size, np.float32),
        np.zeros(size, np.int32),
    )
    return Episode("task", group, (context,), reward)


def scores(augmented: Any) -> tuple[Any, dict[str, Any]]:
    batch = pack(augmented.episodes, buckets=BUCKETS)
    placement = place(augmented.episodes, buckets=BUCKETS)
    return batch, {
        name: marked_score(placement, marks, batch.tokens.shape)
        for name, marks in augmented.marks.items()
    }


def test_each_turn_forecasts_the_actions_that_followed() -> None:
    actions = [[11, 12], [13], [14, 15], [16]]
    fn = forecast_contexts(encode, max_tokens=64, horizon=3, prompt="?", between=",").fn
    (extended,) = fn([episode(actions, 1.0)]).episodes
    marks = fn([episode(actions, 1.0)]).marks["forecast"]
    assert len(extended.contexts) == 1 + len(actions)
    for turn in range(len(actions)):
        context = extended.contexts[1 + turn]
        assert (context.kinds == Kind.TEMPLATE).all() and (context.turn_ids == -1).all()
        ahead = [token for action in actions[turn : turn + 3] for token in action]
        assert context.tokens[marks[0, 1 + turn] > 0].tolist() == ahead
        history = extended.contexts[0].tokens[
            : np.flatnonzero(extended.contexts[0].turn_ids == turn)[0]
        ]
        np.testing.assert_array_equal(context.tokens[: len(history)], history)


def test_weights_of_groups_with_two_and_one_wins() -> None:
    won = [episode([[11]], 1.0, "a"), episode([[12]], 1.0, "a"), episode([[13]], 1.0, "b")]
    lost = episode([[14]], 0.0, "b")
    augment = forecast_contexts(encode, max_tokens=64)
    marks = augment.fn([*won, lost]).marks["forecast"]
    assert {key: float(values.max()) for key, values in marks.items()} == {
        (0, 1): 0.75,
        (1, 1): 0.75,
        (2, 1): 1.5,
    }
    mixed = forecast_contexts(encode, max_tokens=64, gate="mixed").fn([*won, lost])
    assert list(mixed.marks["forecast"]) == [(2, 1)]
    everyone = forecast_contexts(encode, max_tokens=64, gate="all", group_norm=False)
    assert len(everyone.fn([*won, lost]).marks["forecast"]) == 4


def test_the_printed_loss_and_nothing_without_wins() -> None:
    augment = forecast_contexts(encode, max_tokens=64)
    batch, found = scores(augment.fn([episode([[11, 12]], 1.0)]))
    logprobs = np.full(batch.tokens.shape, np.nan, np.float32)
    logprobs[found["forecast"] > 0] = np.log([0.5, 0.25])
    loss = losses.forecast()
    total, count, _ = loss.fn(
        {"logprobs": logprobs}, batch.with_score("forecast", found["forecast"])
    )
    np.testing.assert_allclose(total / count, 1.0397208, atol=1e-6)

    batch, found = scores(augment.fn([episode([[11, 12]], 0.0)]))
    total, count, _ = loss.fn(
        {"logprobs": logprobs}, batch.with_score("forecast", found["forecast"])
    )
    assert total == 0 and count == 0


def test_no_other_term_sees_a_forecast() -> None:
    plain = pack([episode([[11], [12]], 1.0)], buckets=BUCKETS)
    batch, found = scores(forecast_contexts(encode, max_tokens=64).fn([episode([[11], [12]], 1.0)]))
    assert found["forecast"].any()
    assert action_mask(batch).sum() == action_mask(plain).sum()
    assert not (found["forecast"] > 0)[np.asarray(action_mask(batch))].any()
    assert (batch.kind == Kind.OBSERVATION).sum() == (plain.kind == Kind.OBSERVATION).sum()


def test_long_histories_are_cut_on_the_left_and_skipped_turns_left_out() -> None:
    one = episode([[11], [12], [13]], 1.0)
    fn = forecast_contexts(encode, max_tokens=8, horizon=1, prompt="?", between=",").fn
    contexts = fn([one]).episodes[0].contexts[1:]
    assert all(len(c) <= 8 and c.tokens[-1] == 11 + i for i, c in enumerate(contexts))
    assert fn([episode([[11] * 8], 1.0)]).marks["forecast"] == {}
    skipping = forecast_contexts(encode, max_tokens=64, skip=lambda e, turn: turn == 1).fn([one])
    targets = [
        skipping.episodes[0].contexts[n].tokens[values > 0].tolist()
        for (_, n), values in skipping.marks["forecast"].items()
    ]
    assert targets == [[11, 13], [13]]


def test_a_verified_demonstration_is_preferred_where_the_two_part() -> None:
    student = episode([[11], [12, 13]], 0.0)
    shown = episode([[11], [14], [15]], 1.0)
    augmented = verified_demonstrations(lambda e: shown).fn([student, episode([[9]], 1.0)])
    assert len(augmented.episodes) == 3 and augmented.episodes[2].group_id != "g"
    batch, found = scores(augmented)
    marks = found["preference"]
    assert batch.tokens[marks > 0].tolist() == [14] and batch.tokens[marks < 0].tolist() == [12, 13]
    assert sorted(batch.tokens[found["suffix"] > 0].tolist()) == [14, 15]


@pytest.mark.parametrize(
    "shown",
    [
        None,
        episode([[11], [14]], 0.0),  # not verified
        episode([[11], [12, 13]], 1.0),  # never parts
        episode([[11], [14]], 1.0, answer=6),  # other states
    ],
)
def test_no_pair_without_a_verified_divergence(shown: Episode | None) -> None:
    student = episode([[11], [12, 13]], 0.0)
    augmented = verified_demonstrations(lambda e: shown).fn([student])
    assert augmented.episodes == (student,)
    assert augmented.marks == {"preference": {}, "suffix": {}}


def test_the_first_divergence() -> None:
    one = episode([[11], [12]], 0.0)
    assert divergence_turn(one, episode([[10]], 1.0)) == 0
    assert divergence_turn(one, episode([[11], [12, 1]], 1.0)) == 1
    assert divergence_turn(one, one) is None


def test_misuse_is_named() -> None:
    with pytest.raises(ValueError, match="horizon"):
        forecast_contexts(encode, max_tokens=8, horizon=0)
    with pytest.raises(ValueError, match="gate"):
        forecast_contexts(encode, max_tokens=8, gate="some")  # type: ignore[arg-type]
