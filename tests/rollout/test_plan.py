"""Prefill planning and the static shapes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.rollout.options import EngineConfig
from jaxagent.rollout.plan import Chunk, bucket_for, prefill_calls, split_rows


def test_bucket_for_rounds_up_and_ends_at_the_largest():
    assert [bucket_for(n, (4, 16)) for n in (1, 4, 5, 16, 40)] == [4, 4, 16, 16, 16]


@given(st.integers(1, 200), st.sets(st.integers(1, 32), min_size=1, max_size=3))
def test_split_rows_covers_the_count_with_compiled_sizes(count, sizes):
    options = sorted(sizes)
    calls = split_rows(count, options)
    assert set(calls) <= set(options)
    assert sum(calls[:-1]) < count <= sum(calls)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12))
def test_prefill_calls_append_every_token_once_and_in_order(sizes):
    chunks = [
        Chunk(slot, start, list(range(100 * slot + 1, 100 * slot + 1 + n)))
        for slot, (n, start) in enumerate(sizes)
    ]
    held = {chunk.slot: [0] * chunk.start for chunk in chunks}
    for call in prefill_calls(chunks, (4, 16), (1, 4), 32):
        assert call.tokens.shape in {(1, 4), (4, 4), (1, 16)}
        for tokens, (slot, start, count) in zip(call.tokens, call.rows, strict=True):
            if count:
                assert len(held[slot]) == start
                held[slot] += tokens[:count].tolist()
    for chunk in chunks:
        assert held[chunk.slot] == [0] * chunk.start + list(chunk.tokens)


def test_default_shapes_fit_max_len():
    config = EngineConfig(slots=4, max_len=1000)
    assert config.prefill_lengths == (32, 128, 512)
    assert config.context_lengths == (512, 1000)
    assert config.row_counts == (1,)
    assert EngineConfig(slots=4, max_len=20).prefill_lengths == (20,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"slots": 0}, "slots"), ({"max_len": 1}, "max_len"), ({"decode_block": 0}, "decode_block"),
     ({"prefill_buckets": (8, 4)}, "prefill_buckets"), ({"context_buckets": (16, 32)}, "max_len"),
     ({"prefill_buckets": (128,)}, "context"), ({"prefill_rows": ()}, "prefill_rows")],
)  # fmt: skip
def test_impossible_shapes_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"slots": 2, "max_len": 64, **changes})


def test_chunk_tokens_may_be_any_sequence():
    (call,) = prefill_calls([Chunk(3, 2, (7, 8))], (4,), (1,), 64)
    np.testing.assert_array_equal(call.tokens, [[7, 8, 0, 0]])
    np.testing.assert_array_equal(call.rows, [[3, 2, 2]])
