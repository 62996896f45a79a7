"""The critic, the monitor, the meter, and weights of observation tokens, on small numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxagent import losses
from jaxagent.data.kinds import Kind
from tests.losses.helpers import gradients, value

pytestmark = pytest.mark.usefixtures("x64")

A, OBS = Kind.ACTION, Kind.OBSERVATION


def test_value_loss_takes_the_worse_of_the_two_squares(laid: Callable[..., Any]) -> None:
    case = laid([[A, OBS, A, A]], [1.0], [0])
    junk = np.nan
    batch = case.batch.with_score("returns", case.lay([[1.0, junk, 1.0, 0.0]])).with_score(
        "values", case.lay([[0.0, junk, 0.5, 0.0]])
    )
    # 0 to .8: the clip leaves it at .2. .5 to .6: inside. 0 to .8 away from 0: the plain one.
    outputs = {"values": case.lay([[0.8, junk, 0.6, 0.8]], junk)}
    loss = losses.value_loss(0.2)
    assert value(loss, outputs, batch) == pytest.approx((0.64 + 0.16 + 0.64) / 6)
    wanted = case.lay([[0.0, 0.0, -0.4 / 3, 0.8 / 3]])
    np.testing.assert_allclose(gradients(loss, outputs, batch)["values"], wanted, atol=1e-12)
    plain = losses.value_loss(None)
    assert value(plain, outputs, batch) == pytest.approx((0.04 + 0.16 + 0.64) / 6)
    assert plain.scores == {"returns"} and loss.scores == {"returns", "values"}
    assert loss.needs == {"values"}


def test_failure_prediction_labels_every_token_by_the_end(laid: Callable[..., Any]) -> None:
    case = laid([[A, A], [A], [A]], [1.0, 0.0, 0.0], [0, 0, 0], valid=[True, True, False])
    outputs = {"failure": case.lay([[0.0, np.log(3)], [np.log(3)], [5.0]], np.nan)}
    wanted = (-np.log(0.5) - np.log(0.25) - np.log(0.75)) / 3
    loss = losses.failure_prediction()
    assert value(loss, outputs, case.batch) == pytest.approx(wanted)
    slopes = case.lay([[0.5 / 3, 0.75 / 3], [-0.25 / 3], [0.0]])
    np.testing.assert_allclose(gradients(loss, outputs, case.batch)["failure"], slopes, atol=1e-12)


def test_progress_counts_the_tokens_still_to_come(laid: Callable[..., Any]) -> None:
    case = laid([[A, A, OBS, A], [A, A]], [1.0, 1.0], [0, 0])
    turns = case.lay([[0, 0, 0, 1], [0, 0]], -1.0).astype(np.int32)
    batch = case.batch.replace(turn_ids=turns)
    right = {"progress": case.lay([np.log([3.0, 2.0, 1.0, 1.0]), np.log([2.0, 1.0])], np.nan)}
    loss = losses.progress_regression()
    assert value(loss, right, batch) == pytest.approx(0.0, abs=1e-24)
    off = {"progress": right["progress"] + case.lay([[1.0, 0.0, 9.0, 0.0], [2.0, 0.0]])}
    assert value(loss, off, batch) == pytest.approx(5 / 5)
    cut = batch.replace(truncated=np.arange(batch.num_episodes) == 1)
    assert value(loss, off, cut) == pytest.approx(1 / 3)


def test_observation_weights_enter_the_numerator_only(laid: Callable[..., Any]) -> None:
    case = laid([[A, OBS, OBS], [A, OBS, OBS]], [0.0, 1.0], [0, 0])
    outputs = {"logprobs": case.lay([[-9.0, -1.0, -2.0], [-9.0, -np.inf, -4.0]], -np.inf)}
    weights = case.lay([[5.0, 2.0, 0.5], [5.0, 0.0, 1.0]])
    batch = case.batch.with_score("observation_weight", weights)
    token = losses.observation_prediction(weighted=True)
    assert value(token, outputs, batch) == pytest.approx((2 + 1 + 4) / 3)
    episode = losses.observation_prediction("episode", weighted=True)
    assert value(episode, outputs, batch) == pytest.approx((1.5 + 4) / 2)
    doubled = batch.with_score("observation_weight", 2 * weights)
    assert value(token, outputs, doubled) == pytest.approx(2 * 7 / 3)
    assert token.scores == {"observation_weight"}
    ones = batch.with_score("observation_weight", np.ones_like(weights))
    finite = {"logprobs": np.maximum(outputs["logprobs"], -6.0)}
    assert value(token, finite, ones) == value(losses.observation_prediction(), finite, ones)


def test_misuse_fails_at_construction() -> None:
    with pytest.raises(ValueError, match="clip must be above 0"):
        losses.value_loss(0.0)
    with pytest.raises(ValueError, match="aggregate must be one of"):
        losses.failure_prediction("mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs constant"):
        losses.progress_regression("constant")
