"""The rollout engine: many sessions sampled in one static-shaped, batched decode loop.

A session owns a slot of the key/value cache while its terminal works, so a turn costs the
prefill of the observation only. With more sessions than slots the least recently used idle
one gives up its slot and is prefilled again when it returns. Tokens of one session depend on
its key and its own tokens, never on what it was batched with (beyond float rounding between
differently shaped programs).

All device work runs in one thread. It dispatches a decode block, does the host's work for
the previous block (stop strings, futures) while the device runs, and then waits for the
block: one wait a block, none a token.

Weights can be replaced between two blocks. Keys and values of earlier tokens stay as the
weights of their time made them, as in other in-flight schemes; ``refresh_after_swap`` makes
a session's next turn start from a fresh prefill instead.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxagent.compilations import compilations
from jaxagent.models.config import ModelConfig
from jaxagent.models.layers import Params
from jaxagent.models.sharding import make_mesh
from jaxagent.rollout import plan, programs
from jaxagent.rollout.device import DeviceState
from jaxagent.rollout.options import EngineConfig
from jaxagent.rollout.sampling import SamplingConfig
from jaxagent.rollout.session import (
    Decode,
    Generation,
    Job,
    Record,
    Session,
    SessionClosedError,
    key_words,
)
from jaxagent.rollout.stats import Stats

__all__ = ["Engine", "EngineConfig", "Generation", "SamplingConfig", "Session"]


class Engine:
    """Samples from one model; thread-safe. See the module's text for how it works.

    ``decode`` turns token ids into text and is needed for stop strings only. ``params`` may
    be donated by a trainer once the constructor or ``set_params`` has returned. An exception
    in the engine's thread fails every future, and every later call, with that exception.

    ``mesh`` holds one replica: weights and cache are split over its ``tensor`` axis (by
    default, the first local device has them whole). A mesh of several devices must not
    share them with a learner that updates meanwhile: programs over the same devices that two
    threads dispatch can each wait for the other.
    """

    def __init__(
        self,
        params: Params,
        model_config: ModelConfig,
        config: EngineConfig,
        *,
        version: int = 0,
        decode: Decode | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        if config.max_len > model_config.max_len:
            raise ValueError(
                f"EngineConfig.max_len={config.max_len} exceeds "
                f"ModelConfig.max_len={model_config.max_len}; lower it or raise the model's"
            )
        self.model_config = model_config
        self.config = config
        self._decode = decode
        mesh = make_mesh(devices=jax.local_devices()[:1]) if mesh is None else mesh
        self._target = mesh.devices.flat[0]
        self._stats = Stats(version=version)

        # Shared with callers, under the condition's lock.
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._failure: BaseException | None = None
        self._futures: set[Future[Any]] = set()

        # Owned by the engine's thread.
        self._device = DeviceState(params, version, model_config, config, mesh, self._stats)
        self._owners: list[Record | None] = [None] * config.slots
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._host_work: list[Callable[[], object]] = []
        self._prompts: dict[tuple[bytes, int], Record] = {}
        self._sessions = 0
        self._clock = 0

        self._thread = threading.Thread(target=self._main, name="rollout-engine", daemon=True)
        self._thread.start()

    # ---- called from any thread ----

    def open_session(self, key: int | jax.Array | np.ndarray) -> Session:
        """Return a new, empty session; equal keys and equal tokens give equal draws."""
        record = Record(key_words(key))
        self._submit(self._opened)
        return Session(record, self._generate, self._close_session)

    def set_params(self, params: Params, version: int) -> None:
        """Use ``params`` from the next decode block on; does not wait for the swap."""
        # Dispatched here, so that the caller may donate its buffers afterwards.
        weights = self._device.pack(params, version)

        def swap() -> None:
            self._device.weights = weights
            self._prompts.clear()
            self._stats.swaps += 1
            self._stats.version = version

        self._submit(swap)

    def warmup(self) -> None:
        """Compile every program the engine can need; returns when done. Call it while idle."""
        self._call(self._warm_up)

    def stats(self) -> dict[str, float]:
        """Return counters since the start; their names are the fields of ``Stats``."""
        return self._stats.as_dict()

    def close(self) -> None:
        """Stop the thread; generations under way fail with ``SessionClosedError``."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate(
        self, record: Record, new_tokens: Sequence[int], sampling: SamplingConfig
    ) -> "Future[Generation]":
        self._check_open()
        tokens = [int(token) for token in new_tokens]
        if not tokens and not record.tokens:
            raise ValueError("generate: new_tokens must hold at least 1 token in a new session")
        vocab = self.model_config.vocab_size
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab):
            raise ValueError(f"generate: new_tokens must lie in [0, {vocab}), got {tokens}")
        if sampling.stop_strings and self._decode is None:
            raise ValueError("SamplingConfig.stop_strings need Engine(decode=...), tokens to text")
        if len(sampling.stop_tokens) > self.config.max_stop_tokens:
            raise ValueError(
                f"SamplingConfig.stop_tokens has {len(sampling.stop_tokens)} ids; raise "
                f"EngineConfig.max_stop_tokens={self.config.max_stop_tokens}"
            )
        if record.closed:
            raise SessionClosedError("generate: the session is closed; open another")
        if record.job is not None:
            raise RuntimeError("generate: the session's previous generation has not ended")
        job = Job(record, tokens, sampling)
        record.job = job
        job.future.add_done_callback(self._untrack)
        self._submit(lambda: self._begin(job), job.future)
        return job.future

    def _close_session(self, record: Record) -> None:
        if record.closed:
            return
        record.closed = True
        # After a failure there is nothing left to free.
        with contextlib.suppress(RuntimeError):
            self._submit(lambda: self._forget(record))

    def _check_open(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine has stopped: {self._failure}") from self._failure
        if self._closing:
            raise RuntimeError("the engine is closed")

    def _submit(self, command: Callable[[], None], future: "Future[Any] | None" = None) -> None:
        """Queue a command; ``future`` fails if the engine does before it is done."""
        with self._wake:
            self._check_open()
            if future is not None:
                self._futures.add(future)
            self._commands.append(command)
            self._wake.notify()

    def _untrack(self, future: "Future[Any]") -> None:
        with self._wake:
            self._futures.discard(future)

    def _call(self, work: Callable[[], None]) -> None:
        future: Future[None] = Future()

        def run() -> None:
            try:
                work()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        future.add_done_callback(self._untrack)
        self._submit(run, future)
        future.result()

    # ---- the engine's thread ----

    def _main(self) -> None:
        failure: BaseException
        try:
            with jax.default_device(self._target):
                while self._next_commands():
                    self._turn()
            failure = SessionClosedError("the engine was closed")
        except BaseException as error:
            failure = error
        with self._wake:
            self._failure = failure
            self._commands.clear()
            futures = list(self._futures)
        for future in futures:
            _fail(future, failure)

    def _next_commands(self) -> bool:
        """Apply what callers asked for, waiting while there is nothing to run."""
        with self._wake:
            busy = self._running or self._waiting or self._host_work
            if not (busy or self._commands or self._closing):
                began = time.perf_counter()
                while not (self._commands or self._closing):
                    self._wake.wait()
                self._stats.waited(time.perf_counter() - began, self._sessions > 0)
            if self._closing:
                return False
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        return True

    def _turn(self) -> None:
        """Admit and prefill, run one decode block, and do the last block's host work meanwhile."""
        began = time.perf_counter()
        self._admit()
        block = self._dispatch() if self._running else None
        work, self._host_work = self._host_work, []
        for task in work:
            task()
        if block is not None:
            self._collect(*block)
            self._stats.device_seconds += time.perf_counter() - began
        self._stats.compilations = compilations()

    def _opened(self) -> None:
        self._sessions += 1

    def _begin(self, job: Job) -> None:
        record = job.record
        if job.future.done():
            return
        if record.closed:
            self._end(job, SessionClosedError("the session was closed"))
            return
        room = self.config.max_len - len(record.tokens) - len(job.new_tokens)
        if room <= 0:
            self._end(job, job.generation("context"))
            return
        job.base = len(record.tokens)
        job.limit = min(job.sampling.max_new_tokens, room)
        record.tokens += job.new_tokens
        self._waiting.append(job)

    def _forget(self, record: Record) -> None:
        self._sessions -= 1
        if record.job is not None:
            self._end(record.job, SessionClosedError("the session was closed"))
        self._release(record)
        record.tokens.clear()

    def _end(self, job: Job, outcome: Generation | BaseException) -> None:
        """Take the job off its session and resolve its future."""
        record = job.record
        job.done = True
        record.job = None
        self._clock += 1
        record.last_used = self._clock
        if record.slot is not None and self._running.get(record.slot) is job:
            del self._running[record.slot]
        if isinstance(outcome, BaseException):
            _fail(job.future, outcome)
        else:
            with contextlib.suppress(InvalidStateError):
                job.future.set_result(outcome)

    def _release(self, record: Record) -> None:
        if record.slot is not None:
            self._owners[record.slot] = None
            record.slot = None
        record.cached = 0
        if record.prompt is not None and self._prompts.get(record.prompt) is record:
            del self._prompts[record.prompt]
        record.prompt = None

    # ---- admission and prefill ----

    def _admit(self) -> None:
        """Give waiting jobs slots, and prefill all but the last of their tokens."""
        admitted, waiting = [], deque[Job]()
        for job in self._waiting:
            if job.done:
                continue
            if job.future.cancelled():
                self._roll_back(job)
            elif job.record.slot is not None or self._take_slot(job.record):
                admitted.append(job)
            else:
                waiting.append(job)
        self._waiting = waiting
        if not admitted:
            return
        if self.config.refresh_after_swap:
            for job in admitted:
                if job.record.version != self._device.weights.version:
                    job.record.cached = 0
        chunks, copies = self._shared_prompts(admitted)
        for job in admitted:
            slot = job.record.slot
            assert slot is not None
            self._running[slot] = job
        self._fit_cache()
        self._device.prefill(chunks)
        if copies:
            self._device.copy(copies)

    def _take_slot(self, record: Record) -> bool:
        slot = next((i for i, owner in enumerate(self._owners) if owner is None), None)
        if slot is None:
            idle = [owner for owner in self._owners if owner is not None and owner.job is None]
            if not idle:
                return False
            victim = min(idle, key=lambda owner: owner.last_used)
            slot = victim.slot
            assert slot is not None
            self._release(victim)
            self._stats.evictions += 1
        self._owners[slot] = record
        record.slot = slot
        return True

    def _shared_prompts(
        self, jobs: Sequence[Job]
    ) -> tuple[list[plan.Chunk], list[tuple[int, int]]]:
        """Return what to prefill and which slots to copy; sessions count as cached after it.

        A session that starts with the tokens another one started with, under the same
        weights, copies that one's slot.
        """
        chunks: list[plan.Chunk] = []
        copies: list[tuple[int, int]] = []
        for job in jobs:
            record = job.record
            assert record.slot is not None
            end = len(record.tokens) - 1
            if record.cached == 0 and end > 0:
                start = np.array(record.tokens[:end], np.int32).tobytes()
                prompt = (start, self._device.weights.version)
                source = self._prompts.get(prompt)
                # A source that was rolled back since then may hold other tokens now.
                usable = source is not None and source.prompt == prompt and source.cached >= end
                if source is not None and source.slot is not None and usable:
                    copies.append((source.slot, record.slot))
                else:
                    self._prompts[prompt] = record
                    chunks.append(plan.Chunk(record.slot, 0, record.tokens[:end]))
                record.prompt = prompt
                record.version = self._device.weights.version
            elif end > record.cached:
                tokens = record.tokens[record.cached : end]
                chunks.append(plan.Chunk(record.slot, record.cached, tokens))
            record.cached = end
        return chunks, copies

    def _fit_cache(self) -> None:
        """Give the cache a length that all sessions in slots and one more block fit in."""
        longest = max((owner.cached for owner in self._owners if owner is not None), default=0)
        self._device.fit(longest)

    # ---- decode ----

    def _dispatch(self) -> tuple[list[Job], programs.Drawn, int]:
        self._fit_cache()
        jobs = list(self._running.values())
        drawn = self._device.decode(jobs)
        self._stats.blocks += 1
        return jobs, drawn, self._device.weights.version

    def _collect(self, jobs: Sequence[Job], drawn: programs.Drawn, version: int) -> None:
        """Wait for a block and record its tokens; what can wait goes to the host work."""
        tokens, logprobs, counts = (np.asarray(x) for x in drawn)
        self._stats.rows(int(counts.sum()), len(jobs))
        for job in jobs:
            if job.done:
                continue
            record = job.record
            slot = record.slot
            count = int(counts[slot])
            fresh = tokens[:count, slot].tolist()
            record.tokens += fresh
            record.cached += count
            job.tokens += fresh
            job.logprobs += logprobs[:count, slot].tolist()
            job.versions += [version] * count
            stopped = fresh[-1] in job.sampling.stop_tokens
            ended = stopped or len(job.tokens) == job.limit
            if job.future.cancelled():
                self._roll_back(job)
            elif ended:
                assert slot is not None
                del self._running[slot]
                self._host_work.append(partial(self._finish, job))
            elif job.sampling.stop_strings:
                self._host_work.append(partial(self._search, job))

    def _finish(self, job: Job) -> None:
        if job.done:
            return
        if job.future.cancelled():
            self._roll_back(job)
            return
        if job.sampling.stop_strings and self._search(job):
            return
        if job.tokens[-1] in job.sampling.stop_tokens:
            self._end(job, job.generation("stop_token"))
        elif len(job.tokens) == job.sampling.max_new_tokens:
            self._end(job, job.generation("length"))
        else:
            self._end(job, job.generation("context"))

    def _search(self, job: Job) -> bool:
        """End the job if a stop string was completed; what came after is forgotten."""
        if job.done:
            return True
        assert self._decode is not None
        drawn = len(job.tokens)
        try:
            found = job.cut_at_stop_string(self._decode)
        except Exception as error:
            self._end(job, error)
            return True
        if not found:
            return False
        record, dropped = job.record, drawn - len(job.tokens)
        if dropped:
            del record.tokens[-dropped:]
            record.cached = min(record.cached, len(record.tokens) - 1)
        exact = not dropped and job.tokens[-1] in job.sampling.stop_tokens
        self._end(job, job.generation("stop_token" if exact else "stop_string"))
        return True

    def _roll_back(self, job: Job) -> None:
        """Undo a job whose future its caller cancelled."""
        record = job.record
        del record.tokens[job.base :]
        record.cached = max(0, min(record.cached, len(record.tokens) - 1))
        self._end(job, SessionClosedError("the generation was cancelled"))

    # ---- warm-up ----

    def _warm_up(self) -> None:
        if self._running or self._waiting or any(self._owners):
            raise RuntimeError("warmup: sessions hold slots; call it before the first generate")
        self._device.warm_up()
        self._stats.compilations = compilations()
        self._stats.compilations_in_warmup = self._stats.compilations


def _fail(future: "Future[Any]", error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
