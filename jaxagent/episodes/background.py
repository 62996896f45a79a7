"""The episode loop beside a blocking learner, and leaving in good order."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from jaxagent.episodes.loop import Collected, EpisodeLoop


class LoopThread:
    """An EpisodeLoop in a thread of its own, for a learner that is not asynchronous.

    ``make_loop`` is called in that thread. With ``max_staleness > 0`` episodes go on while
    the caller trains. Use as ``with LoopThread(...) as loop``; leaving closes every
    environment.
    """

    def __init__(self, make_loop: Callable[[], EpisodeLoop]) -> None:
        self._asyncio = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="episodes", daemon=True)
        self._thread.start()
        try:
            self._loop = self._call(make_loop)
        except BaseException:
            self._end()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._asyncio)
        self._asyncio.run_forever()

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        async def call() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(call(), self._asyncio).result()

    def _end(self) -> None:
        if self._thread.is_alive():
            self._asyncio.call_soon_threadsafe(self._asyncio.stop)
            self._thread.join()
            self._asyncio.close()

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
        return asyncio.run_coroutine_threadsafe(self._loop.collect(), self._asyncio).result()

    def set_version(self, version: int) -> None:
        """See ``EpisodeLoop.set_version``."""
        self._call(self._loop.set_version, version)

    def state(self) -> dict[str, Any]:
        """See ``EpisodeLoop.state``."""
        return self._call(self._loop.state)

    def request_stop(self) -> None:
        """Makes ``collect`` raise LoopStopped once all is closed; safe in a signal handler."""
        if not self._asyncio.is_closed():
            self._asyncio.call_soon_threadsafe(self._loop.request_stop)

    def close(self) -> None:
        """Returns once every environment is closed and the thread has ended."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._loop.close(), self._asyncio).result()
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
