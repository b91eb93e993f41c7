"""Attach to a model and detach from it: everything or nothing."""

from __future__ import annotations

import difflib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from hookgraph import ahead
from hookgraph.backends import Backends
from hookgraph.counters import Counters
from hookgraph.errors import AttachError, HookgraphError, warn
from hookgraph.explain import Explanation
from hookgraph.hooks import ModuleHooks
from hookgraph.options import Options
from hookgraph.recording import Recording
from hookgraph.runner import Runner
from hookgraph.stats import Stats
from hookgraph.switch import disabled_by_environment
from hookgraph.targets import Target, select

_attached: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


class Attachment:
    """The handle that ``attach`` returns.

    Use it as a context manager to detach at the end of a block.

    Example:
        >>> import torch, hookgraph
        >>> model = torch.nn.Linear(4, 4).eval()
        >>> with torch.no_grad(), hookgraph.attach(model) as handle:
        ...     for _ in range(3):
        ...         out = model(torch.ones(2, 4))
        >>> handle.stats.replays
        1
    """

    def __init__(self, model: nn.Module, targets: dict[str, nn.Module], options: Options) -> None:
        self.options = options
        self._model = weakref.ref(model)
        self._targets = [weakref.ref(module) for module in targets.values()]
        self._hooks: list[ModuleHooks] = []
        self._backends = Backends(options.backend)
        self._detached = False
        try:
            for name, module in targets.items():
                runner = Runner(module, name, options, self._backends)
                self._hooks.append(ModuleHooks(module, runner))
        except BaseException:
            self.detach()
            raise

    def __repr__(self) -> str:
        names = ", ".join(runner.label for runner in self._runners)
        return f"<hookgraph.Attachment to {names}{' (detached)' if self._detached else ''}>"

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    @property
    def _runners(self) -> list[Runner]:
        return [hooks.runner for hooks in self._hooks]

    @property
    def attached(self) -> bool:
        """Whether the hooks are still in place."""
        return not self._detached

    @property
    def stats(self) -> Stats:
        """What became of every call so far; it stays readable after ``detach``."""
        return _stats_of([self])

    def explain(self, /, *args: Any, module: str | None = None, **kwargs: Any) -> Explanation:
        """Foretell what a call with these arguments would do now, and why; nothing is run, counted or remembered.

        A warm-up or a capture may still find that the forward forbids a graph, and the first replays are
        compared with eager: that is seen when it happens.  Forward pre-hooks are not run on the arguments, and
        a library that replaced the module's forward since is not noticed.

        Args:
            args: As the module would be called.
            module: The name of the attached module; needed where there are several.
            kwargs: As the module would be called.

        Returns:
            The plan, the reason for eager, and each difference from the nearest retained signature;
            ``print`` shows it, ``to_dict()`` gives it as data.

        Raises:
            HookgraphError: Nothing is attached any more, or no attached module has that name.
            TypeError: The forward does not take these arguments.

        Cost: about one flattening of the arguments, and a comparison with each retained signature.

        Example:
            >>> import torch, hookgraph
            >>> model = torch.nn.Linear(4, 4).eval()
            >>> with hookgraph.attach(model) as handle:
            ...     handle.explain(torch.ones(2, 4)).fallback.reason.value
            'needs_grad'
        """
        if self._detached or not self._hooks:
            raise HookgraphError(
                "explain(): nothing is attached here, so every call is a plain one. Use attach() first."
            )
        named = {runner.name: runner for runner in self._runners}
        if module is None and len(named) == 1:
            return self._runners[0].explain(args, kwargs)
        if module not in named:
            names = difflib.get_close_matches(str(module), list(named), n=3, cutoff=0.0)
            raise HookgraphError(f"explain(module={module!r}): give the name of an attached module, such as {names}")
        return named[module].explain(args, kwargs)

    def warmup(self, calls: Iterable[Any], progress: bool = True) -> None:
        """Capture ahead of traffic: make example calls of the model until each is served from a trusted graph.

        Make it in the surroundings of the later calls (``no_grad`` or ``inference_mode``, autocast), and before
        other threads start.  Each call is made on copies of its arguments, the largest first.

        Args:
            calls: What the model is called with: each ``(args, kwargs)``, or a dict of keyword arguments.
            progress: Whether to show a progress bar.

        Raises:
            HookgraphError: Nothing is attached any more, or a call has another form.

        Warns:
            HookgraphWarning: A call still runs eager afterwards.

        Restores: the state of the default random generators.  Buffers that the forward advances do advance.
        Cost: for each call about two eager calls under watch, the capture, and two comparisons with eager.

        Example:
            >>> import torch, hookgraph
            >>> model = torch.nn.Linear(4, 4).eval()
            >>> with torch.no_grad(), hookgraph.attach(model) as handle:
            ...     handle.warmup([((torch.ones(rows, 4),), {}) for rows in (1, 2)], progress=False)
            ...     [signature.state for signature in handle.stats.modules[0].signatures]
            ['trusted', 'trusted']
        """
        model = self._model()
        if self._detached or model is None:
            raise HookgraphError("warmup(): nothing is attached here. Use attach() first.")
        pairs = ahead.largest_first(calls)
        if not self._hooks:  # HOOKGRAPH_DISABLE
            return
        from hookgraph import tables

        with ahead.random_numbers_kept(model), tables.progress(pairs, "warm up", progress) as steps:
            for call in steps:
                reasons = self._settle(model, call)
                if reasons:
                    words = f"warmup: a call runs eager ({', '.join(reasons)}); explain() says more"
                    warn(words)

    def _settle(self, model: nn.Module, call: ahead.Arguments) -> list[str]:
        """Make one call until nothing is learned from it; why its last run was eager, where it was."""
        for _ in range(ahead.MOST_RUNS):
            before = self.stats
            args, kwargs = ahead.copy_of(call)
            model(*args, **kwargs)
            after = self.stats
            on_probation = any(runner.on_probation for runner in self._runners)
            if (before.warmups, before.captures) == (after.warmups, after.captures) and not on_probation:
                break
        return [reason for reason, count in after.reasons.items() if count > before.reasons.get(reason, 0)]

    def detach(self) -> None:
        """Leave every module as it was found, and give back all memory.  Twice is fine."""
        with _lock:
            self._detached = True
            for hooks in self._hooks:
                hooks.remove()
            for reference in self._targets:
                module = reference()
                if module is not None and _attached.get(module) is self:
                    del _attached[module]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run eager inside the block, on every thread, and keep the graphs."""
        for runner in self._runners:
            runner.pause(1)
        try:
            yield
        finally:
            for runner in self._runners:
                runner.pause(-1)

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Hold other threads' calls off while a sampling loop runs, and its ``read_only`` tensors for unchanged.

        Inside, a ``read_only`` tensor is copied in once, also one made in ``inference_mode``, which counts no
        versions and is copied on each call elsewhere.  Do not write to one inside the block.

        Example:
            >>> import torch, hookgraph
            >>> model = torch.nn.Bilinear(4, 4, 2).eval()
            >>> with torch.inference_mode(), hookgraph.attach(model, read_only=("input2",)) as handle:
            ...     prompt = torch.ones(2, 4)
            ...     with handle.loop():
            ...         for step in range(5):
            ...             out = model(torch.full((2, 4), step / 5), prompt)
        """
        with ExitStack() as stack:
            for runner in self._runners:
                stack.enter_context(runner.loop())
            yield

    def invalidate(self, reason: str = "asked for by the user") -> None:
        """Drop every graph and every verdict; the next calls warm up and capture anew.

        Args:
            reason: Goes into the log.
        """
        for runner in self._runners:
            runner.invalidate(reason)

    def reset_counters(self) -> None:
        """Set every count to zero; graphs stay."""
        for runner in self._runners:
            runner.reset_counters()

    @contextmanager
    def live(self, refresh_seconds: float = 0.5) -> Iterator[None]:
        """Show the stats as a table that follows a long loop, in a terminal or a notebook.

        It goes to standard error.  Where that is neither, the table is written once, at the end.

        Args:
            refresh_seconds: How long a table stands before it is drawn anew.

        Cost: a thread that reads the stats so often; nothing in the calls.
        """
        from hookgraph import tables  # rich is imported when something is shown

        if refresh_seconds <= 0:
            raise HookgraphError(f"live(refresh_seconds={refresh_seconds!r}): give a number of seconds above 0")
        with tables.live(lambda: self.stats, refresh_seconds):
            yield

    @contextmanager
    def recording(self, most: int = 100_000) -> Iterator[Recording]:
        """Keep a record of each call that starts inside the block, on every thread.

        Args:
            most: How many records to keep; beyond that the oldest go.  One takes about 200 bytes.

        Returns:
            What is recorded; it stays readable after the block.

        Cost: a few microseconds a call inside the block; none outside of it.
        """
        recording = Recording(most)
        for hooks in self._hooks:
            hooks.begin(recording)
        try:
            yield recording
        finally:
            for hooks in self._hooks:
                hooks.end(recording)


def attach(
    model: nn.Module,
    targets: Target | Iterable[Target] = None,
    *,
    max_graphs: int = 4,
    max_batch_size: int | None = None,
    max_bytes: int | None = None,
    min_speedup: float | None = None,
    warmup: int = 1,
    verify: int = 1,
    verify_every: int | None = None,
    guards: str = "full",
    read_only: Iterable[str] = (),
    outputs: str = "clone",
    child_hooks: str = "refuse",
    on_fallback: str = "ignore",
    backend: str = "auto",
    calls: Sequence[Any] | None = None,
) -> Attachment:
    """Give a module CUDA-graph speed at inference, without touching its source.

    The first call of a signature runs eager and is watched, the second is captured, and further
    ones replay.  Whatever a graph cannot do right runs eager, with a counted reason.

    Args:
        model: Any module, in place on its device.
        targets: Which of its submodules get graphs: None is ``model`` itself; a dotted name, a
            glob over names, a compiled regex (searched in names), a class, a function of name and
            module, a submodule, or a list of these; ``"auto"`` is what ``diagnose`` finds with ``calls``.
        max_graphs: Signatures retained for each target; further ones run eager.
        max_batch_size: Larger batches run eager.  The batch size is dimension 0 of the first
            floating-point tensor argument.
        max_bytes: A capture that would make a target retain more runs eager.
        min_speedup: A graph that was compared with eager and is not so many times as fast is given
            up: further calls of its signature run eager, counted as ``not_worth_it``.  The tape
            promises no speed, and drops nothing.
        warmup: Watched eager calls of a signature before it is captured.
        verify: How many replays with new inputs are compared with eager bit for bit, after the
            first; 0 trusts a capture unseen.
        verify_every: Compare every so many replays later on, too.
        guards: ``"full"``; ``"weights"`` checks only the addresses of parameters and buffers and
            the module tree; ``"off"`` nothing.
        read_only: Names of arguments, such as ``("past_key_values",)``, whose containers keep what they hold:
            what a call puts into them is dropped, replayed or eager, and their tensors are copied in only
            when they changed (another tensor, or another version of it).  A driver that cuts a cache back by
            a fixed number after each call must not do so then.
        outputs: ``"clone"``, or ``"view"`` for static outputs that the next replay overwrites.
        child_hooks: ``"refuse"`` runs eager while a submodule has forward hooks, which a replay
            would not run; ``"ignore"`` accepts that.
        on_fallback: ``"ignore"`` counts, ``"warn"`` also warns once for each reason, ``"raise"``
            raises ``FallbackError`` instead of running eager.
        backend: ``"cuda"``, ``"tape"`` (the CPU rehearsal), or ``"auto"`` by the module's device.
        calls: Calls as your loop makes them, such as ``record_calls`` gives; for ``targets="auto"`` alone.

    Returns:
        The handle; attaching again with the same options returns the same one.

    Raises:
        AttachError: A wrong option or target, or a target that is attached otherwise.  Nothing
            has been changed then.

    Aliasing: outputs have memory of their own, unless ``outputs="view"``.
    Restores: ``detach`` leaves no trace on any module.
    Cost: nothing until a call; then about one more eager call for each signature.

    Example:
        >>> import torch, hookgraph
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
        >>> handle = hookgraph.attach(model, max_graphs=2)
        >>> hookgraph.is_attached(model)
        True
        >>> handle.detach()
    """
    if not isinstance(model, nn.Module):
        raise AttachError(f"attach() needs a torch.nn.Module, got {type(model).__module__}.{type(model).__qualname__}")
    options = Options(
        max_graphs, max_batch_size, max_bytes, min_speedup, warmup, verify, verify_every, guards, outputs, child_hooks, on_fallback,
        backend, (read_only,) if isinstance(read_only, str) else tuple(read_only),
    )  # fmt: skip
    if calls is not None:
        targets = _targets_for(model, targets, calls, options)
    chosen = select(model, targets)
    if backend == "cuda" and not torch.cuda.is_available():
        raise AttachError("backend='cuda': this PyTorch sees no CUDA device; backend='tape' rehearses on the CPU")
    with _lock:
        known = _existing(chosen, options)
        if known is not None:
            return known
        if disabled_by_environment():
            return Attachment(model, {}, options)
        _refuse_around(chosen)
        _warn_of_compiled(chosen)  # first, since a warning may be an error, and then nothing is attached
        handle = Attachment(model, chosen, options)
        for module in chosen.values():
            _attached[module] = handle
    return handle


def _targets_for(model: nn.Module, targets: Any, calls: Sequence[Any], options: Options) -> tuple[str, ...]:
    """What a doctor would attach to."""
    from hookgraph.doctor import diagnose  # it attaches itself, to rehearse

    if not isinstance(targets, str) or targets != "auto":
        raise AttachError(f"calls are for targets='auto' alone, not for targets={targets!r}")
    if disabled_by_environment():  # nothing will be attached, and nothing can be rehearsed
        return ("",)
    found = diagnose(model, calls, **{spec.name: getattr(options, spec.name) for spec in fields(options)})
    if not found.targets:
        raise AttachError(f"targets='auto': {found.advice}")
    return found.targets


def _warn_of_compiled(chosen: dict[str, nn.Module]) -> None:
    """Tell which targets have calls that run compiled code and pass us by, without hooks."""
    for name, module in chosen.items():
        if module._compiled_call_impl:
            what = "is compiled in place by module.compile(): its calls run"
            remedy = "Attach to a module above it, or compile its submodules instead."
        elif "_is_torch_compile" in vars(module):  # the wrapper hands this mark on to the module that it wraps
            what = "was given to torch.compile(): calls of the result run"
            remedy = "Attach to what torch.compile() returned, or call the module itself."
        else:
            continue
        what = f"{name or 'the module itself'} {what} compiled code, right but not through hookgraph. {remedy}"
        warn(what)


def _existing(chosen: dict[str, nn.Module], options: Options) -> Attachment | None:
    """The handle that these modules have already, if it is the same request."""
    owners = {name: _attached[module] for name, module in chosen.items() if module in _attached}
    if not owners:
        return None
    name, owner = next(iter(owners.items()))
    if owner.options != options:
        raise AttachError(
            f"{name or 'the module'} is attached already with other options: {options.differences(owner.options)}. "
            "Call detach() first."
        )
    if set(map(id, owners.values())) == {id(owner)} and len(owners) == len(chosen) == len(owner._targets):
        return owner
    raise AttachError(f"{name or 'the module'} is attached already, with other targets. Call detach() first.")


def _refuse_around(chosen: dict[str, nn.Module]) -> None:
    """Refuse what lies around or inside of a module that is attached: the graph of one would hold the other."""
    for name, module in chosen.items():
        label = name or type(module).__name__
        for inner, child in module.named_modules():
            if child is not module and child in _attached:
                raise AttachError(
                    f"{label} holds {inner}, which is attached already; a graph of {label} would replay it, too. "
                    f"Call detach() on {inner} first."
                )
        for outer in list(_attached):
            if outer is not module and any(child is module for child in outer.modules()):
                raise AttachError(
                    f"{label} lies inside {type(outer).__name__}, which is attached already and whose graphs replay it, "
                    "too. Call detach() on that first."
                )


# -- by model ---------------------------------------------------------------------------------------


def _handles_below(model: nn.Module) -> list[Attachment]:
    with _lock:
        handles = {id(handle): handle for child in model.modules() if (handle := _attached.get(child)) is not None}
    return list(handles.values())


def detach(model: nn.Module) -> None:
    """Detach everything that is attached to a model or to its submodules; fine when nothing is.

    Example:
        >>> import torch, hookgraph
        >>> hookgraph.detach(torch.nn.Linear(2, 2))
    """
    for handle in _handles_below(model):
        handle.detach()


def is_attached(model: nn.Module) -> bool:
    """Whether a module or one of its submodules is attached.

    Example:
        >>> import torch, hookgraph
        >>> hookgraph.is_attached(torch.nn.Linear(2, 2))
        False
    """
    return bool(_handles_below(model))


def stats(model: nn.Module | None = None) -> Stats:
    """What became of the calls of everything attached to a model, or in the whole process.

    Args:
        model: None for everything that is attached now.

    Example:
        >>> import torch, hookgraph
        >>> hookgraph.stats(torch.nn.Linear(2, 2)).calls
        0
    """
    return _stats_of(_all_handles() if model is None else _handles_below(model))


def counting() -> list[tuple[str, Counters]]:
    """The live counts of everything that is attached in the process, each with its module's name."""
    return [(runner.label, runner.counters) for handle in _all_handles() for runner in handle._runners]


def _all_handles() -> list[Attachment]:
    with _lock:
        return list({id(handle): handle for handle in _attached.values()}.values())


def _stats_of(handles: list[Attachment]) -> Stats:
    modules = [runner.describe() for handle in handles for runner in handle._runners]
    return Stats.of(modules, sum(handle._backends.pool_bytes for handle in handles))
