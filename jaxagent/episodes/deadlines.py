"""Environment calls that end: deadlines, and a close that nothing interrupts."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from jaxagent.episodes.environment import Environment

T = TypeVar("T")

# How long a cancelled environment call may take to unwind before it is abandoned.
CANCEL_GRACE = 5.0


class EnvironmentTimeout(Exception):
    """An environment call outlived its deadline."""


class EnvironmentContractError(Exception):
    """An environment returned something the protocol does not allow."""


async def with_deadline(call: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
    """The call's result. Raises EnvironmentTimeout after ``seconds``.

    Unlike ``asyncio.wait_for`` it cannot hang on a call that ignores its cancellation:
    after a grace period such a call is left behind.
    """
    task = asyncio.ensure_future(call)
    task.add_done_callback(lambda t: t.cancelled() or t.exception())  # marks it retrieved
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_GRACE)
        raise
    if not done:
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_GRACE)
        raise EnvironmentTimeout(f"{what} took longer than {seconds:g} s")
    if task.cancelled():
        raise EnvironmentContractError(f"{what} was cancelled from within")
    return task.result()


async def close_environment(environment: Environment, seconds: float) -> str | None:
    """Closes, to the end even when cancelled meanwhile. Returns an error, if any."""
    closing = asyncio.ensure_future(with_deadline(environment.close(), seconds, "close"))
    cancelled = False
    while not closing.done():
        try:
            await asyncio.wait({closing})
        except asyncio.CancelledError:
            cancelled = True
    error = closing.exception()
    if cancelled:
        raise asyncio.CancelledError
    return None if error is None else describe(error)


def describe(error: BaseException) -> str:
    """``"Class: first line of the message"``."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def error_cause(error: str | None) -> str:
    """The class name an ``Episode.error`` begins with; ``"unknown"`` without one."""
    return error.split(":", 1)[0].strip() if error else "unknown"
