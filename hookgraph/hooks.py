"""One module's pre-hook, seam and post-hook: put in at once, taken out without a trace.

A forward pre-hook cannot skip ``forward``, so the hooks only watch; the seam in the instance's
``forward`` slot acts.  Nothing is held between the two hooks, because a post-hook does not run
when a KeyboardInterrupt passes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler

from hookgraph.counters import Outcome
from hookgraph.observed import Observed, nvtx_asked
from hookgraph.reasons import Fallback, FallbackReason
from hookgraph.recording import Recording
from hookgraph.runner import Runner

_log = logging.getLogger("hookgraph")
_HOOK_DICTIONARIES = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)  # fmt: skip
ABSENT = object()


class Seam:
    """What stands in a module's ``forward`` slot; copies and pickles as the plain forward.

    A plain Python class: Dynamo can trace through it, which it cannot through one written in C.
    Ours lies in slots, since other libraries copy a forward's ``__dict__`` to their wrapper.
    """

    __slots__ = ("__dict__", "__weakref__", "_inner", "_serve")

    def __init__(self, inner: Callable[..., Any], serve: Callable[..., Any]) -> None:
        self._inner, self._serve = inner, serve
        functools.update_wrapper(self, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._inner(*args, **kwargs)
        return self._serve(self._inner, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _plain(self) -> Any:
        return self._inner.__wrapped__ if isinstance(self._inner, BoundForward) else self._inner

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._plain(), memo)

    def __copy__(self) -> Any:
        return self._plain()

    def __reduce__(self) -> Any:
        return self._plain().__reduce__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


def _plain_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


class BoundForward:
    """The class's forward bound to a module that it does not keep alive.

    A bound method in the module's own ``__dict__`` would be a cycle, and the module's memory would
    wait for the garbage collector.
    """

    __slots__ = ("__dict__", "__weakref__", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.__dict__ |= {name: getattr(self.__func__, name) for name in functools.WRAPPER_ASSIGNMENTS}

    @property
    def __func__(self) -> Any:
        return type(self.__self__).forward  # looked up anew: the class may change, or its forward

    @property
    def __self__(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this forward no longer exists")
        return module

    @property
    def __wrapped__(self) -> Any:
        return types.MethodType(self.__func__, self.__self__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)


class _Record:
    """One call through ``module(...)`` on one thread.

    It keeps no module alive: the record of a call that a KeyboardInterrupt ended is never taken away.
    """

    __slots__ = ("module", "served")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.served = weakref.ref(module), False


class _Calls(threading.local):
    """The records of the calls that are under way, innermost last; each thread has its own."""

    def __init__(self) -> None:
        self.stack: list[_Record] = []


class _Watcher:
    """A hook of ours.  If a foreign copy routine copies it, the copy does nothing."""

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            self._act(*args)
        except Exception:  # watching a call must not end it
            _log.warning("a hook of hookgraph failed", exc_info=True)

    def __reduce__(self) -> Any:
        # Accepts anything, returns None, and unpickles where hookgraph is not installed.
        return getattr, (contextlib.nullcontext(), "__exit__")


class ModuleHooks:
    """What hookgraph adds to one module.

    Restores: ``remove`` leaves the module's ``__dict__`` and hook dictionaries as they were found.
    """

    def __init__(self, module: nn.Module, runner: Runner) -> None:
        self._module = weakref.ref(module)
        self.runner = runner
        self._recordings: tuple[Recording, ...] = ()
        self._nvtx = nvtx_asked()
        self._observed = self._nvtx  # whether somebody beside a profiler looks
        self._calls = _Calls()
        self._active = True
        self._lock = threading.Lock()
        self._looked_at: Callable[[], Any] = _nothing
        self._handles: list[Any] = []
        self._end = weakref.finalize(module, runner.release)
        self._end.atexit = False
        self._found: Any = ABSENT
        self._seam: Callable[[], Seam | None] = _nothing  # a weak reference, since the seam holds us
        self._install(module)

    def _put_seam(self, module: nn.Module) -> None:
        slot = _slot(module)
        self._found = module.__dict__.get(slot, ABSENT)
        seam = Seam(BoundForward(module) if self._found is ABSENT else self._found, self._serve)
        self._seam = weakref.ref(seam)
        module.__dict__[slot] = seam

    def _install(self, module: nn.Module) -> None:
        try:
            self._handles.append(module.register_forward_pre_hook(_Watcher(self._before), with_kwargs=True))
            self._handles.append(
                module.register_forward_hook(_Watcher(self._after), with_kwargs=True, always_call=True)
            )
            self._put_seam(module)
            module.__dict__["__reduce_ex__"] = _PlainReduce(module, self)
            module.__dict__["_replicate_for_data_parallel"] = _Replicate(module, self)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take out what is ours, and give back all memory; where another library wrapped on top, switch it off instead."""
        with self._lock:  # the seam is not put back from now on
            self._active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._end.detach()
        module = self._module()
        if module is not None:
            self._restore(module)
        try:
            self.runner.release()  # what it knows of the module includes the seam
        finally:
            seam = self._seam()
            if module is not None and seam is not None:  # somebody else holds it; who takes a pass through the heap
                _replace_references(seam, self._plain(module))

    def _restore(self, module: nn.Module) -> None:
        for name, kind in _ENTRIES.items():
            if isinstance(module.__dict__.get(name), kind):
                del module.__dict__[name]
        seam = self._seam()
        if seam is not None and module.__dict__.get("forward") is seam:
            if self._found is ABSENT:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = self._found

    def _plain(self, module: nn.Module) -> Any:
        return _plain_forward(module) if self._found is ABSENT else self._found

    def begin(self, recording: Recording) -> None:
        """Let a recording have each call that starts from now on."""
        with self._lock:
            self._recordings, self._observed = (*self._recordings, recording), True

    def end(self, recording: Recording) -> None:
        """Let a recording have no more calls."""
        with self._lock:
            self._recordings = tuple(other for other in self._recordings if other is not recording)
            self._observed = self._nvtx or bool(self._recordings)

    # -- the call path -----------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls.stack.append(_Record(module))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        stack = self._calls.stack
        while stack:  # records of calls that a KeyboardInterrupt ended lie on top of ours
            record = stack.pop()
            if record.module() is module:
                break
        else:
            return
        if record.served:
            return
        if output is None and sys.exc_info()[0] is not None:
            self._count_unserved(Outcome.ERROR)
            return
        current = module.__dict__.get("forward")
        what = getattr(current, "__qualname__", type(current).__qualname__)
        self._count_unserved(Outcome.EAGER, Fallback(FallbackReason.DISPLACED, what))
        self._put_back(module)

    def _count_unserved(self, outcome: Outcome, fallback: Fallback | None = None) -> None:
        self.runner.counters.mark(outcome, fallback)
        for recording in self._recordings:
            recording.add(self.runner.label, outcome, fallback)

    def _put_back(self, module: nn.Module) -> None:
        """Stand in again where another library has dropped our seam, as if attached anew.

        That is safe once nobody holds the seam: a wrapper that still does may only have left out
        this call, as a cache that skips a block does.
        """
        current = module.__dict__.get("forward", nn.Module.forward)
        if module is not self._module() or self._looked_at() is current:
            return
        self._looked_at = weakref.ref(current)
        self.runner.invalidate("another library replaced the module's forward")  # guards hold the seam, too
        with self._lock:
            if self._active and self._seam() is None:
                self._put_seam(module)

    def _serve(self, wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._active:
            return wrapped(*args, **kwargs)
        runner = self.runner
        if self._observed or profiler._is_profiler_enabled:
            runner = Observed(runner, self._recordings, self._nvtx)
        stack = self._calls.stack
        record = stack[-1] if stack and not stack[-1].served else None
        if record is not None:
            record.served = True
            called = record.module()
            if called is not None and called is not self._module():
                # A replica shares our hooks and our seam, yet has weights of its own.
                forward = _plain_forward(called) if self._found is ABSENT else wrapped
                return runner.eager(Fallback(FallbackReason.FOREIGN_MODULE), forward, args, kwargs)
        return runner.run(wrapped, args, kwargs)

    def _serve_replica(self, wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stack = self._calls.stack
        if stack and not stack[-1].served:
            stack[-1].served = True
        runner = Observed(self.runner, self._recordings, self._nvtx)
        return runner.eager(Fallback(FallbackReason.FOREIGN_MODULE), wrapped, args, kwargs)

    # -- copies ------------------------------------------------------------------------------------

    def strip(self, state: dict[str, Any]) -> dict[str, Any]:
        """A module's ``__dict__`` without anything of ours, for a copy or a pickle."""
        plain = dict(state)
        for name in _ENTRIES:
            plain.pop(name, None)
        seam = self._seam()
        if seam is not None and plain.get("forward") is seam:
            del plain["forward"]
            if self._found is not ABSENT:
                plain["forward"] = self._found
        ours = {handle.id for handle in self._handles}
        for name in _HOOK_DICTIONARIES:
            if name in plain:
                plain[name] = type(plain[name])((key, hook) for key, hook in plain[name].items() if key not in ours)
        return plain


class _PlainReduce:
    """An instance's ``__reduce_ex__``: ``copy.deepcopy`` and ``pickle`` see a module without us."""

    def __init__(self, module: nn.Module, hooks: ModuleHooks) -> None:
        self._module, self._hooks = weakref.ref(module), hooks

    def __call__(self, protocol: Any) -> Any:
        module = self._module()
        assert module is not None  # it is being copied
        reduced = type(module).__reduce_ex__(module, protocol)
        if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
            return (*reduced[:2], self._hooks.strip(reduced[2]), *reduced[3:])
        return reduced

    def __reduce__(self) -> Any:
        raise TypeError("hookgraph's entry in an attached module's __dict__ cannot be copied by itself")


class _Replicate:
    """An instance's ``_replicate_for_data_parallel``: a replica's ``forward`` runs with its own weights.

    It would get a copy of the ``__dict__``, and with it a seam that is bound to the original.
    """

    def __init__(self, module: nn.Module, hooks: ModuleHooks) -> None:
        self._module, self._hooks = weakref.ref(module), hooks

    def __call__(self) -> Any:
        module = self._module()
        assert module is not None  # it is being replicated
        replica = type(module)._replicate_for_data_parallel(module)
        for name in _ENTRIES:
            replica.__dict__.pop(name, None)
        if isinstance(replica.__dict__.get("forward"), Seam) and self._hooks._found is ABSENT:
            replica.__dict__["forward"] = Seam(BoundForward(replica), self._hooks._serve_replica)
        return replica

    def __reduce__(self) -> Any:
        raise TypeError("hookgraph's entry in an attached module's __dict__ cannot be copied by itself")


_ENTRIES: dict[str, type] = {"__reduce_ex__": _PlainReduce, "_replicate_for_data_parallel": _Replicate}


def _nothing() -> None:
    """What a dead reference gives."""


def _slot(module: nn.Module) -> str:
    """Where the seam goes: inside a wrapper by accelerate, whose hooks then run around a replay."""
    return "_old_forward" if {"_hf_hook", "_old_forward"} <= module.__dict__.keys() else "forward"


def _replace_references(seam: Seam, plain: Any) -> None:
    """Where another library kept our seam as "the original forward", leave the plain one there.

    No comprehension may mention ``seam`` here: it would make a cell of our own variable, which the
    collector then finds among those who refer to it.
    """
    for holder in gc.get_referrers(seam):
        if isinstance(holder, types.CellType):
            holder.cell_contents = plain
            continue
        space = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        if isinstance(space, dict):
            for key, value in list(space.items()):
                if value is seam:
                    space[key] = plain
