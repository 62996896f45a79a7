"""The engine's state on the device: weights and cache, and the calls that change them."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxagent.models.cache import Cache
from jaxagent.models.config import ModelConfig
from jaxagent.models.decoding import Packed
from jaxagent.models.layers import Params
from jaxagent.models.sharding import sampling_shardings
from jaxagent.rollout import plan, programs
from jaxagent.rollout.options import EngineConfig
from jaxagent.rollout.session import Job
from jaxagent.rollout.stats import Stats

# Blocks for which a shorter cache would have been enough before the cache is cut to it.
_SHRINK_AFTER = 64


class Weights(NamedTuple):
    """Parameters laid out for sampling, and their version."""

    packed: Packed
    version: int


class DeviceState:
    """Owned by the engine's thread, except ``pack``, which any thread may call."""

    def __init__(
        self,
        params: Params,
        version: int,
        model_config: ModelConfig,
        config: EngineConfig,
        mesh: Mesh,
        stats: Stats,
    ) -> None:
        self._model_config = model_config
        self._config = config
        self._mesh = mesh
        self._shardings = sampling_shardings(model_config, mesh)
        self._stats = stats
        self._roomy_blocks = 0
        self.weights = self.pack(params, version)
        self._cache: Cache = programs.empty_cache(
            config=model_config,
            mesh=mesh,
            slots=config.slots,
            length=config.context_lengths[0],
        )

    def pack(self, params: Params, version: int) -> Weights:
        """Lay out new weights in buffers of their own; dispatched by the calling thread.

        What the decoder does not read (heads) stays where it is.
        """
        params = {name: params[name] for name in self._shardings}
        params = jax.device_put(params, self._shardings)
        packed = programs.pack(params, config=self._model_config, mesh=self._mesh)
        return Weights(packed, version)

    def prefill(self, chunks: Sequence[plan.Chunk]) -> None:
        """Append tokens to slots."""
        config = self._config
        for call in plan.prefill_calls(
            chunks, config.prefill_lengths, config.row_counts, config.prefill_tokens
        ):
            self._prefill(call.tokens, call.rows)
            self._stats.prefilled(int(call.rows[:, 2].sum()), call.tokens.size)

    def _prefill(self, tokens: np.ndarray, rows: np.ndarray) -> None:
        self._cache = programs.prefill(
            self.weights.packed,
            self._cache,
            tokens,
            rows,
            config=self._model_config,
            mesh=self._mesh,
        )

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy slots: pairs of (source, target), in order."""
        pairs = np.zeros((self._config.slots, 2), np.int32)
        pairs[: len(copies)] = np.reshape(copies, (-1, 2))
        self._cache = programs.copy(self._cache, pairs, np.int32(len(copies)), mesh=self._mesh)
        self._stats.copies += len(copies)

    def decode(self, jobs: Sequence[Job]) -> programs.Drawn:
        """Dispatch one block that draws for the jobs, each in its session's slot."""
        rows = programs.Rows.idle(self._config.slots, self._config.max_stop_tokens)
        for job in jobs:
            record, sampling = job.record, job.sampling
            row = rows.ints[record.slot]
            row[0], row[1] = record.tokens[-1], record.cached
            row[2] = job.limit - len(job.tokens)
            row[3:5] = record.key_data
            row[5] = sampling.top_k
            row[6 : 6 + len(sampling.stop_tokens)] = sampling.stop_tokens
            rows.floats[record.slot] = sampling.temperature, sampling.top_p, sampling.min_p
        self._cache, drawn = programs.decode_block(
            self.weights.packed,
            self._cache,
            rows,
            config=self._model_config,
            mesh=self._mesh,
            steps=self._config.decode_block,
        )
        return drawn

    def fit(self, longest: int) -> None:
        """Give the cache the shortest length that ``longest`` tokens and a block fit in."""
        need = min(longest + self._config.decode_block, self._config.max_len)
        length = plan.bucket_for(need, self._config.context_lengths)
        self._roomy_blocks = self._roomy_blocks + 1 if length < self._cache.length else 0
        if length > self._cache.length or self._roomy_blocks > _SHRINK_AFTER:
            self._resize(length)
            self._roomy_blocks = 0

    def _resize(self, length: int) -> None:
        # Bucket by bucket, which takes few programs; it happens rarely.
        lengths = self._config.context_lengths
        now, then = lengths.index(self._cache.length), lengths.index(length)
        step = 1 if then > now else -1
        for index in range(now + step, then + step, step):
            self._cache = programs.resized(self._cache, mesh=self._mesh, length=lengths[index])
            self._stats.resizes += 1

    def warm_up(self) -> None:
        """Run every program once, with rows that all sit out: the cache keeps its content."""
        config = self._config
        for length in config.context_lengths:
            self._resize(length)
            self.decode(())
            for bucket in config.prefill_lengths:
                for size in plan.prefill_row_options(
                    bucket, config.row_counts, config.prefill_tokens
                ):
                    self._prefill(np.zeros((size, bucket), np.int32), np.zeros((size, 3), np.int32))
            self.copy(())
        self._resize(config.context_lengths[0])
