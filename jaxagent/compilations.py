"""Counts XLA compilations, so that a run can show that it makes none in steady state."""

import threading

import jax


class _Count(threading.local):
    value = 0


# A listener cannot be taken away again, so there is one for the process; it runs in the
# thread that compiles.
_count = _Count()


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _count.value += 1


jax.monitoring.register_event_duration_secs_listener(_on_duration)


def compilations() -> int:
    """How many XLA programs the current thread has compiled so far (cached ones count, too)."""
    return _count.value
