"""What hookgraph asks of PyTorch's private surface, in one place, feature-detected.

Everything here is read-only, except ``hide_capture``, which puts back what it changed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._device import DeviceContext

_C: Any = torch._C


def tracer_at_work() -> bool:
    """Whether torch.jit, torch.fx, functorch or forward-mode AD looks at this thread's calls."""
    return (
        _C._get_tracing_state() is not None
        or _C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch.fx._symbolic_trace._is_fx_tracing_flag
    )


def stream_is_capturing() -> bool:
    """Whether this thread's current CUDA stream is captured, also where ``hide_capture`` is active."""
    return bool(torch.cuda.is_initialized() and _C._cuda_isCurrentStreamCapturing())


def dispatch_mode_active() -> bool:
    """Whether a ``TorchDispatchMode`` watches this thread."""
    return bool(_C._len_torch_dispatch_stack() > 0)


def function_modes() -> tuple[Any, ...] | None:
    """The default devices set by active ``torch.device`` contexts; None when another function mode is active."""
    count = _C._len_torch_function_stack()
    if not count:
        return ()
    modes = [_C._get_function_stack_at(index) for index in range(count)]
    if any(type(mode) is not DeviceContext for mode in modes):
        return None
    return tuple(mode.device for mode in modes)


def storage_key(tensor: torch.Tensor) -> int:
    """An identity for the memory behind a tensor, valid while that memory lives."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse layouts and some subclasses have no storage
        return id(tensor)


def compiled_part(module: torch.nn.Module) -> str | None:
    """The name of a submodule that runs compiled code when it is called."""
    for name, child in module.named_modules():
        if child._compiled_call_impl is not None or hasattr(child, "_torchdynamo_orig_callable"):
            return name or type(child).__name__
        if hasattr(child, "_orig_mod"):  # an OptimizedModule
            return name or type(child).__name__
    return None


# -- global numerics flags ------------------------------------------------------------------


def _readers(device_type: str) -> list[Callable[[], Any]]:
    """Cheap readers of every global flag that changes which kernel runs, or how."""
    names = ["_get_deterministic_algorithms", "_get_deterministic_fill_uninitialized_memory"]
    if device_type == "cuda":
        names += [
            "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction",
            "_get_cublas_allow_fp16_accumulation", "_get_cudnn_enabled", "_get_cudnn_benchmark",
            "_get_cudnn_deterministic", "_get_blas_preferred_backend", "_get_linalg_preferred_backend",
        ]  # fmt: skip
    names += ["_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled"]
    names += ["_get_cudnn_sdp_enabled", "_get_overrideable_sdp_enabled", "_get_mkldnn_enabled"]
    readers: list[Callable[[], Any]] = [getattr(_C, name) for name in names if hasattr(_C, name)]
    readers.append(torch.backends.mha.get_fastpath_enabled)
    getter = getattr(_C, "_get_fp32_precision_getter", None)
    if getter is None:  # before torch 2.9
        readers += [torch.get_float32_matmul_precision, _C._get_cudnn_allow_tf32, _C._get_cublas_allow_tf32]
    else:
        # The older getters raise once the newer setters have been used, so ask only the newer ones.
        backend = "cuda" if device_type == "cuda" else "mkldnn"
        for operation in ("matmul", "conv", "rnn"):
            readers.append(lambda operation=operation: getter(backend, operation))  # type: ignore[misc]
    return readers


_READERS: dict[str, list[Callable[[], Any]]] = {}


def numerics_flags(device_type: str) -> tuple[Any, ...]:
    """The global flags that decide which kernels an eager call would use now."""
    readers = _READERS.get(device_type)
    if readers is None:
        readers = _READERS[device_type] = _readers(device_type)
    return tuple([read() for read in readers])


@contextmanager
def autocast_weights_uncached() -> Iterator[None]:
    """Let autocast cast weights anew at each use, where it is on.

    What it keeps cast dies with its context, and a graph would go on reading it.  Where autocast is
    off nothing is touched, since Dynamo compiles anew for another setting.

    Restores: the setting as it was.
    """
    caching = torch.is_autocast_cache_enabled()
    casting = caching and any(torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu"))
    if casting:
        torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        if casting:
            torch.set_autocast_cache_enabled(True)


# -- functions of torch that act differently on one thread ----------------------------------------


class ThreadPatch:
    """Replace functions of a module for the threads that are inside ``active()``.

    Args:
        owner: The module that holds them.
        replacements: For each name, a function that takes the original and returns the other one.

    Restores: the originals, once the last thread has left, unless somebody replaced ours meanwhile.
    """

    def __init__(self, owner: Any, replacements: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]) -> None:
        self._owner, self._replacements = owner, replacements
        self._inside = threading.local()
        self._lock = threading.Lock()
        self._users = 0
        self._saved: dict[str, tuple[Any, Any]] = {}
        self._inherited: set[str] = set()

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._install()
        self._inside.depth = getattr(self._inside, "depth", 0) + 1
        try:
            yield
        finally:
            self._inside.depth -= 1
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._remove()

    def _install(self) -> None:
        for name, replace in self._replacements.items():
            original = getattr(self._owner, name)
            if name not in vars(self._owner):
                self._inherited.add(name)
            ours = self._switch(original, replace(original))
            self._saved[name] = (original, ours)
            setattr(self._owner, name, ours)

    def _switch(self, original: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
        inside = self._inside

        @functools.wraps(original)
        def choose(*args: Any, **kwargs: Any) -> Any:
            return (other if getattr(inside, "depth", 0) else original)(*args, **kwargs)

        return choose

    def _remove(self) -> None:
        for name, (original, ours) in self._saved.items():
            if vars(self._owner).get(name) is not ours:
                continue
            if name in self._inherited:
                delattr(self._owner, name)
            else:
                setattr(self._owner, name, original)
        self._saved.clear()


# transformers asks whether its stream is capturing, and takes another path then, which differs from
# eager in the last bits; a graph has to be the eager path, so its capture is hidden from the model.
hide_capture = ThreadPatch(torch.cuda, {"is_current_stream_capturing": lambda original: functools.partial(bool, False)})
