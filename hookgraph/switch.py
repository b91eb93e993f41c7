"""Switch hookgraph off: for a block on this thread, or for a whole process."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Iterator
from contextlib import contextmanager

_disabled: contextvars.ContextVar[bool] = contextvars.ContextVar("hookgraph_disabled", default=False)


@contextmanager
def disabled() -> Iterator[None]:
    """Run every attached module eager inside the block, on this thread or task.

    Example:
        >>> import hookgraph
        >>> with hookgraph.disabled():
        ...     pass
    """
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)


def is_disabled() -> bool:
    """Whether the calling thread or task is inside ``disabled()``."""
    return _disabled.get()


def disabled_by_environment() -> bool:
    """Whether ``HOOKGRAPH_DISABLE`` says so now: set, and neither empty nor ``0``."""
    return os.environ.get("HOOKGRAPH_DISABLE", "") not in ("", "0")
