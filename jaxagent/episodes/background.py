"""The episode loop beside a blocking learner, and leaving in good order."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, TypeVar

from jaxagent.episodes.loop import Collected, EpisodeLoop

T = TypeVar("T")


class EventLoopThread:
    """An asyncio event loop in a thread of its own; leaving the context ends it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="episodes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def __enter__(self) -> "EventLoopThread":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs ``work`` in the thread and returns its result.

        An exception while waiting (Ctrl-C) cancels the work and waits for it to unwind.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                self.run(_settle(self.loop))
            raise

    def close(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


async def _settle(loop: asyncio.AbstractEventLoop) -> None:
    """Waits until everything that was cancelled has ended."""
    me = asyncio.current_task()
    others = [task for task in asyncio.all_tasks(loop) if task is not me and task.cancelling()]
    if others:
        await asyncio.wait(others)


class LoopThread:
    """An EpisodeLoop for a learner that is not asynchronous.

    ``make_loop`` is called in ``thread`` (by default one of its own), where the episodes
    then run: with ``max_staleness > 0`` they go on while the caller trains. Use as ``with
    LoopThread(...) as loop``; leaving closes every environment.
    """

    def __init__(
        self, make_loop: Callable[[], EpisodeLoop], thread: EventLoopThread | None = None
    ) -> None:
        self._owned = thread is None
        self._thread = thread or EventLoopThread()
        self._closed = False
        try:
            self._loop = self._call(make_loop)
        except BaseException:
            self._end()
            raise

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        async def call() -> Any:
            return function(*args)

        return self._thread.run(call())

    def _end(self) -> None:
        self._closed = True
        if self._owned:
            self._thread.close()

    def __enter__(self) -> "LoopThread":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def collect(self) -> Collected:
        """See ``EpisodeLoop.collect``; blocks."""
        return self._thread.run(self._loop.collect())

    def set_version(self, version: int) -> None:
        """See ``EpisodeLoop.set_version``."""
        self._call(self._loop.set_version, version)

    def state(self) -> dict[str, Any]:
        """See ``EpisodeLoop.state``."""
        state: dict[str, Any] = self._call(self._loop.state)
        return state

    def request_stop(self) -> None:
        """Makes ``collect`` raise LoopStopped once all is closed; safe in a signal handler."""
        if not self._closed:
            self._thread.loop.call_soon_threadsafe(self._loop.request_stop)

    def close(self) -> None:
        """Returns once every environment is closed."""
        if not self._closed:
            self._thread.run(self._loop.close())
            self._end()


class StopSignal:
    """Whether, and by which signal, the process was asked to leave."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._callbacks: list[Callable[[], object]] = []

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def on_request(self, callback: Callable[[], object]) -> None:
        """Calls ``callback`` when the signal comes, or now if it has come."""
        self._callbacks.append(callback)
        if self.requested:
            callback()

    def _receive(self, number: int) -> None:
        self.signal = signal.Signals(number)
        for callback in self._callbacks:
            callback()


@contextmanager
def graceful_signals(*callbacks: Callable[[], object]) -> Iterator[StopSignal]:
    """SIGINT and SIGTERM ask to stop instead of killing; a second one kills at once.

    ``with graceful_signals(loop.request_stop) as stop``: the loop then raises LoopStopped,
    and the caller writes its checkpoint and leaves. Handlers are put back on leaving. Only
    usable in the main thread (ValueError elsewhere).
    """
    stop = StopSignal()
    for callback in callbacks:
        stop.on_request(callback)

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        stop._receive(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
