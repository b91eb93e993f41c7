"""What hookgraph asks of PyTorch's private surface, in one place, feature-detected.

Everything here is read-only, except ``hide_capture``, which puts back what it changed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._device import DeviceContext

_C: Any = torch._C
_opt_einsum: Any = getattr(torch.backends.opt_einsum, "m", torch.backends.opt_einsum)
_guards: Any = getattr(getattr(_C, "_dynamo", None), "guards", None)


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


# Operators made of others that choose a kernel by their surroundings, copy, draw, or read back.  Not those that
# multiply: what ``matmul`` is made of depends on flags of its arguments that a dispatch mode changes.
_TAKEN_APART = {
    "scaled_dot_product_attention", "to", "type_as", "one_hot", "allclose", "item", "is_nonzero", "repeat_interleave",
    "tensor_split", "dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_",
    "feature_alpha_dropout", "feature_alpha_dropout_",
}  # fmt: skip


@functools.cache
def taken_apart(func: Any) -> Callable[..., Any] | None:
    """What runs an operator of these by its parts; None for any other, and for one that has a kernel of its own."""
    name, has_kernel = func.name(), _C._dispatch_has_kernel_for_dispatch_key
    if name.partition(".")[0].removeprefix("aten::") not in _TAKEN_APART:
        return None
    if not has_kernel(name, "CompositeImplicitAutograd") or has_kernel(name, "CPU"):
        return None
    return functools.partial(func._op_dk, _C.DispatchKey.CompositeImplicitAutograd)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided, no subclass, and not nested."""
    known = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    return known and tensor.layout is torch.strided and not tensor.is_nested


# Operators that autocast does not cast for, and that call others for which it does.
_CAST_INSIDE = {
    "einsum", "tensordot", "inner", "kron", "matrix_power", "linalg_matrix_power", "linalg_multi_dot", "chain_matmul",
    "pinverse", "linalg_pinv", "bilinear", "_trilinear", "rnn_tanh", "rnn_relu", "gru", "lstm", "rnn_tanh_cell",
    "rnn_relu_cell", "gru_cell", "lstm_cell", "_transformer_encoder_layer_fwd",
}  # fmt: skip
_AUTOCAST_KEYS = {"cpu": _C.DispatchKey.AutocastCPU, "cuda": _C.DispatchKey.AutocastCUDA}


class _Autocast(threading.local):
    """Whether autocast is on outside of the handler of a dispatch mode; inside, it looks as if it were off."""

    def __init__(self) -> None:
        self.on: dict[str, bool] = {}


_autocast = _Autocast()


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_autocast_enabled(*args: Any) -> None:
        original(*args)  # the device and whether, or, in the older form, whether alone
        _autocast.on[args[0] if len(args) > 1 else "cuda"] = bool(args[-1])

    return set_autocast_enabled


@contextmanager
def autocast_noted() -> Iterator[None]:
    """Know in the handlers of dispatch modes whether autocast is on around them.

    Restores: the functions of torch that switch it.
    """
    before = _autocast.on
    _autocast.on = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    try:
        with _autocast_switch.active():
            yield
    finally:
        _autocast.on = before


def casts_inside(func: Any) -> bool:
    """Whether autocast is at work inside an operator, which a dispatch mode switches off there."""
    return any(_autocast.on.values()) and func._schema.name.removeprefix("aten::") in _CAST_INSIDE


def call_as_outside(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator from a dispatch mode as it would run without one.

    Restores: which dispatch keys are excluded.
    """
    if not casts_inside(func):
        return func(*args, **kwargs)
    with contextlib.ExitStack() as stack:
        for kind, key in _AUTOCAST_KEYS.items():
            if _autocast.on.get(kind):
                stack.enter_context(_C._SetExcludeDispatchKeyGuard(key, False))
        return func(*args, **kwargs)


# A context manager that shows a span in a running profiler.  ``torch.profiler.record_function`` would do
# it by an operator, which audits and tapes would see.
profiler_span: Callable[[str], AbstractContextManager[Any]] = _C._profiler._RecordFunctionFast


def storage_key(tensor: torch.Tensor) -> int:
    """An identity for the memory behind a tensor, valid while that memory lives."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse layouts and some subclasses have no storage
        return id(tensor)


def tensors_alike(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """A test for tensors that look like these: class, dtype, device, shape, strides, flags and lazy bits.

    Dynamo's own guard does it in C, 0.13 µs a tensor; without it, the attributes are read one by one.

    Aliasing: the test keeps none of the tensors alive.
    """
    if _dynamo_guard_is_exact():
        check = _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return lambda others: bool(check(*others))
    looks = [_looks(tensor) for tensor in tensors]
    return lambda others: [_looks(tensor) for tensor in others] == looks


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.shape, tensor.requires_grad,
        tensor.stride() if tensor.layout is torch.strided else None,
        tensor.is_conj(), tensor.is_neg(), tensor.is_quantized, tensor.is_inference(),
    )  # fmt: skip


@functools.cache
def _dynamo_guard_is_exact() -> bool:
    """Whether this release's guard is there and tells apart what has to be told apart."""
    with torch.inference_mode(False):
        probe = torch.empty(2, 3)
        others = (
            torch.empty(2, 4), torch.empty(3, 2).t(), torch.empty(2, 3, dtype=torch.float64),
            torch.empty(2, 3, requires_grad=True), torch.nn.Parameter(torch.empty(2, 3), requires_grad=False),
        )  # fmt: skip
        try:
            guard = _guards.TensorGuards(probe, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            return bool(guard.check(torch.empty(2, 3))) and not any(map(guard.check, others))
        except (AttributeError, TypeError, RuntimeError, SystemError):
            return False


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
    names += ["_get_math_sdp_allow_fp16_bf16_reduction"]
    readers: list[Callable[[], Any]] = [getattr(_C, name) for name in names if hasattr(_C, name)]
    readers.append(torch.backends.mha.get_fastpath_enabled)
    if torch.backends.opt_einsum.is_available():  # else they decide nothing
        readers.append(_einsum_path)
    if hasattr(_C, "_get_sdp_priority_order"):
        readers.append(_sdp_priority_order)
    getter = getattr(_C, "_get_fp32_precision_getter", None)
    if getter is None:  # before torch 2.9
        readers += [torch.get_float32_matmul_precision, _C._get_cudnn_allow_tf32, _C._get_cublas_allow_tf32]
    else:
        # The older getters raise once the newer setters have been used, so ask only the newer ones.
        backend = "cuda" if device_type == "cuda" else "mkldnn"
        for operation in ("matmul", "conv", "rnn"):
            readers.append(lambda operation=operation: getter(backend, operation))  # type: ignore[misc]
    return readers


def _einsum_path() -> tuple[Any, ...]:
    """Whether and how ``einsum`` looks for an order of its products.

    Read where PyTorch keeps it: the public way costs 7 µs, more than all the other flags together.
    """
    return _opt_einsum.enabled, _opt_einsum.strategy


def _sdp_priority_order() -> tuple[int, ...]:
    return tuple(_C._get_sdp_priority_order())


_READERS: dict[str, list[Callable[[], Any]]] = {}


def numerics_flags(device_type: str) -> tuple[Any, ...]:
    """The global flags that decide which kernels an eager call would use now."""
    readers = _READERS.get(device_type)
    if readers is None:
        readers = _READERS[device_type] = _readers(device_type)
    return tuple([read() for read in readers])


def flag_names(device_type: str) -> list[str]:
    """What each of ``numerics_flags`` is called, as far as its reader says."""
    names = [getattr(read, "__name__", "") for read in _READERS.get(device_type) or _readers(device_type)]
    return ["float32 precision" if "<" in name else name.removeprefix("_get_").replace("_", " ") for name in names]


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
        self._lock = threading.RLock()
        self._users: set[object] = set()
        self._saved: dict[str, tuple[Any, Any]] = {}
        self._inherited: set[str] = set()

    @contextmanager
    def active(self) -> Iterator[None]:
        user, depth = object(), getattr(self._inside, "depth", 0)
        try:  # from the first change on: a KeyboardInterrupt may come between any two lines
            with self._lock:
                self._users.add(user)
                if len(self._users) == 1:
                    self._install()
            self._inside.depth = depth + 1
            yield
        finally:
            try:
                self._inside.depth = depth
            finally:
                with self._lock:
                    self._users.discard(user)
                    if not self._users:
                        self._remove()

    def _install(self) -> None:
        for name, replace in self._replacements.items():
            if name in self._saved and vars(self._owner).get(name) is self._saved[name][1]:
                continue  # an interruption came in the middle of the last removal
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

_autocast_switch = ThreadPatch(torch, {"set_autocast_enabled": _noted})
