"""The specification's fixture, which several tests share."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxagent.data.kinds import Kind

A = Kind.ACTION


@pytest.fixture
def f1(laid: Callable[..., Any]) -> Any:
    """Fixture F1 of the specification, plus a builder for its advantages."""
    case = laid([[A, A], [A, A, A]], [1.0, 0.0], [0, 0])
    logprobs = case.lay([np.log([0.6, 0.5]), np.log([0.25, 0.5, 0.9])], fill=-3.0)
    old = case.lay([np.log([0.4, 0.5]), np.log([0.5, 0.5, 1.0])], fill=-1.0)
    batch = case.batch.replace(behavior_logprobs=old, advantages=case.spread([1.0, -1.0]))
    return logprobs, batch, case
