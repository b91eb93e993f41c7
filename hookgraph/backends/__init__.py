"""What the runner asks of a thing that captures and replays, and which one serves a device."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from hookgraph.private_torch import autocast_noted, autocast_weights_uncached
from hookgraph.reasons import Fallback


class Graph(Protocol):
    """One captured forward.  Not safe to use from two threads at once: hold the backend's turn."""

    @property
    def operators(self) -> int | None:
        """How many nodes or recorded operators it has, where known."""
        ...

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether each launch writes this static output."""
        ...

    def reads_beside(self, known: Collection[int]) -> str | None:
        """Memory from outside that a launch reads and that is not among these storages, where the backend can tell."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that this graph alone holds, beside its static inputs and a shared pool."""
        ...

    def launch(self) -> None:
        """Run it once, on the caller's current stream."""
        ...

    def release(self) -> None:
        """Give back its memory; calling it twice is fine."""
        ...


class Clock(Protocol):
    """Times the work inside ``with``; it may be entered again, and then forgets what was."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wall_ns(self) -> int:
        """The longer of the host's time and of the device's, in nanoseconds; waits for the device."""
        ...


class Backend(Protocol):
    """Captures forwards on one device."""

    name: str
    promises_speed: bool  # whether a replay may be expected to take less time than eager

    def refuses(self, module: torch.nn.Module) -> Fallback | None:
        """Why no forward of this module can be captured here, whatever its arguments."""
        ...

    def capture(
        self, call: Callable[[], Any], static_inputs: Sequence[torch.Tensor], draws_random_numbers: bool
    ) -> tuple[Graph, Any]:
        """Record one call without lasting effects.

        Returns:
            The graph and what ``call`` returned, whose tensors each launch overwrites.

        Raises:
            CaptureError: The forward did something that a graph cannot hold.

        Restores: stream, autocast cache, garbage collector and random state, also on failure.
        """
        ...

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """Holds other users of the pool off, on the host and in the order of device work.

        One object, entered again and again, also from inside itself.
        """
        ...

    def clock(self) -> Clock:
        """A clock for work on the caller's current stream."""
        ...

    @property
    def pool_bytes(self) -> int:
        """Memory that the graphs of this device share."""
        ...


_KINDS = {"cuda": "cuda", "cpu": "tape"}  # device type -> backend
_capturing = threading.RLock()  # one capture at a time in a process: they hold the garbage collector


class Backends:
    """The backends of one attachment, one for each device, made when first needed.

    Graphs of one attachment share a pool, and nothing with other attachments: so ``detach`` gives
    everything back, and graphs of different attachments may run at once.

    Args:
        name: ``"cuda"``, ``"tape"`` or ``"auto"``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._made: dict[torch.device, Backend] = {}
        self._lock = threading.Lock()

    def serves(self, device: torch.device) -> bool:
        """Whether there is a backend for a device under the name that was asked for."""
        kind = _KINDS.get(device.type)
        return kind is not None and self._name in ("auto", kind)

    def on(self, device: torch.device) -> Backend:
        """The backend of a device that is served."""
        with self._lock:
            backend = self._made.get(device)
            if backend is None:
                backend = self._made[device] = _make(_KINDS[device.type], device)
        return backend

    @property
    def pool_bytes(self) -> int:
        return sum(backend.pool_bytes for backend in list(self._made.values()))


def _make(kind: str, device: torch.device) -> Backend:
    if kind == "tape":
        from hookgraph.backends.tape import TapeBackend

        return TapeBackend()
    from hookgraph.backends.cuda import CudaBackend

    return CudaBackend(device)


@contextmanager
def capture_surroundings() -> Iterator[None]:
    """Hold still what must not move while a forward is recorded.

    A collection could destroy another graph in the middle of a capture.

    Restores: the garbage collector and the autocast cache as they were found.
    """
    with _capturing, autocast_weights_uncached(), autocast_noted():
        collecting = gc.isenabled()
        try:  # a KeyboardInterrupt may come right after the next line
            gc.disable()
            yield
        finally:
            if collecting:
                gc.enable()
