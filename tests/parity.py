"""An eager twin beside an attached module: every call on both, everything compared bit for bit.

    with Twins.build(lambda: nn.Linear(4, 4), max_graphs=2) as twins:
        for _ in range(4):
            y = twins(torch.randn(3, 4))
        assert twins.outcomes == ["warmups", "captures", "replays", "replays"]

Arguments are copied for each side, with what they share.  ``twins(...)`` returns a ``Both``: the
eager result and the attached one.  A ``Both`` given as an argument goes to its own side as it is,
which is how an output is fed back in (``h = twins(h)``) and how a cache lives through many calls
(``cache = twins.keep(cache)``).  ``twins.apply(f)`` does something to both modules between calls.

Compared after each call: the output (values, dtype, shape, strides of dimensions larger than one, class,
``requires_grad``, ``is_leaf``, ``is_inference``), the arguments with all that they hold, parameters, buffers,
gradients and plain attributes of all submodules, which memory is shared with what (and from which
offset), which objects are the same object, and the state of the random generators.  At the end
every output that was ever handed out is compared again.

Needs torch only, so that a script without pytest can use it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType, SimpleNamespace, TracebackType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import hookgraph
from tests.residue import Snapshot, Watch

WATCH: Watch | None = None  # set by the no_residue fixture

OUTCOMES = ("warmups", "captures", "replays", "eager", "errors")

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, slice)
_SEALED = (type, FunctionType, MethodType, ModuleType, nn.Module, torch.Generator, property)
_BOOKKEEPING = {  # the last four hold something of ours while attached
    "_parameters", "_buffers", "_modules", "forward", "_old_forward", "__reduce_ex__", "_replicate_for_data_parallel",
}  # fmt: skip


class ParityError(AssertionError):
    """The attached module and the plain one differ; says where and in what."""


@dataclasses.dataclass
class Both:
    """One value of the eager side, and the value in its place on the attached side."""

    eager: Any
    attached: Any

    def map(self, function: Callable[[Any], Any]) -> Both:
        """Do the same on both sides."""
        return Both(function(self.eager), function(self.attached))

    def __getitem__(self, key: Any) -> Both:
        return self.map(lambda value: value[key])

    def __iter__(self) -> Iterator[Both]:
        return iter([Both(a, b) for a, b in zip(self.eager, self.attached, strict=True)])


# -- walking ---------------------------------------------------------------------------------


def walk(value: Any, path: str = "", open_objects: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield ``(path, value)`` for every container and leaf, containers first; each object is entered once."""
    return _walk(value, path, open_objects, set())


def _walk(value: Any, path: str, open_objects: bool, entered: set[int]) -> Iterator[tuple[str, Any]]:
    yield path, value
    if isinstance(value, (torch.Tensor, *_SCALARS, _SEALED)):
        return
    if not isinstance(value, tuple):  # equal tuples may be one object or several; nobody can tell
        if id(value) in entered:
            return
        entered.add(id(value))
    for step, item in _children(value, open_objects):
        yield from _walk(item, path + step, open_objects, entered)


def _children(value: Any, open_objects: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple, deque)):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in dict.items(value))
    if not open_objects and not isinstance(value, (UserDict, SimpleNamespace)) and not dataclasses.is_dataclass(value):
        return
    if dataclasses.is_dataclass(value):
        names = [spec.name for spec in dataclasses.fields(value)]
        yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))
    if hasattr(value, "__dict__"):
        yield from ((f".{name}", item) for name, item in vars(value).items())


# -- comparing -------------------------------------------------------------------------------


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit; any NaN equals any NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.layout is not torch.strided:
        if a.layout is not torch.sparse_coo:
            return bool(torch.equal(a, b))
        a, b = a.coalesce(), b.coalesce()
        return same_bits(a.indices(), b.indices()) and same_bits(a.values(), b.values())
    if a.device.type == "meta" or not a.numel():
        return True
    a, b = (t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format) for t in (a, b))
    if torch.equal(_bytes(a), _bytes(b)):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    nan = a.isnan()
    if not torch.equal(nan, b.isnan()):
        return False
    return torch.equal(_bytes(a.masked_fill(nan, 0)), _bytes(b.masked_fill(nan, 0)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


def _is_leaf(tensor: torch.Tensor) -> bool | str:
    """Whether it is a leaf; PyTorch raises for a view made in no_grad whose base was written with gradients since."""
    try:
        return tensor.is_leaf
    except RuntimeError as error:
        return str(error)


def facts(tensor: torch.Tensor) -> dict[str, Any]:
    """All that a caller can see of a tensor beside its values."""
    dense = tensor.layout is torch.strided and tensor.numel() > 0
    return {
        "class": type(tensor).__name__,
        "shape": tuple(tensor.shape),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "layout": tensor.layout,
        "strides": tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1) if dense else None,
        "requires_grad": tensor.requires_grad,
        "is_leaf": _is_leaf(tensor),
        "is_inference": tensor.is_inference(),
        "conjugate": tensor.is_conj(),
        "negative": tensor.is_neg(),
    }


def difference(eager: Any, attached: Any) -> str | None:
    """How two leaves or two containers (not their contents) differ, in words, or None."""
    if isinstance(eager, torch.Tensor) and isinstance(attached, torch.Tensor):
        mine, theirs = facts(eager), facts(attached)
        notes = [f"{key} is {theirs[key]}, eager gives {mine[key]}" for key in mine if mine[key] != theirs[key]]
        if not notes and not same_bits(eager, attached):
            notes = [f"values differ{_largest_difference(eager, attached)}"]
        return "; ".join(notes) or None
    if type(eager) is not type(attached):
        return f"class is {type(attached).__name__}, eager gives {type(eager).__name__}"
    if isinstance(eager, _SCALARS) and repr(eager) != repr(attached):
        return f"is {attached!r}, eager gives {eager!r}"
    if isinstance(eager, (np.ndarray, np.generic)):
        equal = eager.dtype == attached.dtype and eager.tobytes() == attached.tobytes()
        return None if equal else f"is {attached!r}, eager gives {eager!r}"
    if isinstance(eager, (set, frozenset)) and eager != attached:
        return f"is {attached!r}, eager gives {eager!r}"
    if isinstance(eager, (list, tuple, dict)) and len(eager) != len(attached):
        return f"has {len(attached)} items, eager gives {len(eager)}"
    return None


def _largest_difference(eager: torch.Tensor, attached: torch.Tensor) -> str:
    if eager.layout is not torch.strided or eager.is_complex() or not eager.numel():
        return ""
    gap = (eager.detach().double() - attached.detach().double()).abs()
    where = int(gap.nan_to_num(nan=float("inf")).argmax())
    pair = attached.detach().reshape(-1)[where].item(), eager.detach().reshape(-1)[where].item()
    return f" by up to {gap.max().item():.3g} (element {where} is {pair[0]!r}, eager gives {pair[1]!r})"


def compare(eager: Any, attached: Any, where: str, open_objects: bool = True) -> None:
    """Raise ``ParityError`` at the first path at which two values differ."""
    mine, theirs = walk(eager, where, open_objects), walk(attached, where, open_objects)
    end = ("<end>", None)
    while True:
        (path, a), (other, b) = next(mine, end), next(theirs, end)
        if path != other:
            raise ParityError(f"{where}: has {other} where eager has {path}")
        if path == "<end>":
            return
        note = difference(a, b)
        if note is not None:
            raise ParityError(f"{path}: {note}")


class Identities:
    """Names memory and objects by where they were first seen; two sides agree if the names do.

    Tensors are held weakly: memory that eager would have freed by now must be freed here too,
    or a graph that reads freed memory would look healthy.
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, str, int]] = {}
        self._tensors: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._objects: dict[int, tuple[Any, str]] = {}

    def start_call(self) -> None:
        """Forget the objects of the last call, which may hold tensors."""
        self._objects.clear()

    def name(self, path: str, value: Any) -> tuple[Any, ...] | None:
        """Which object and which memory this is, or None where that means nothing."""
        if isinstance(value, torch.Tensor):
            return self._tensor(path, value), self._memory(path, value)
        if isinstance(value, (_SCALARS, tuple, *_SEALED)):
            return None
        return (self._objects.setdefault(id(value), (value, path))[1],)

    def _tensor(self, path: str, tensor: torch.Tensor) -> str:
        seen = self._tensors.get(id(tensor))
        if seen is None or seen[0]() is not tensor:
            seen = self._tensors[id(tensor)] = weakref.ref(tensor), path
        return seen[1]

    def _memory(self, path: str, tensor: torch.Tensor) -> tuple[str, int] | None:
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        start = tensor.storage_offset() * tensor.element_size()
        # A weak reference keeps the key from being used again, and not the memory.
        _, first, base = self._storages.setdefault(storage._cdata, (StorageWeakRef(storage), path, start))
        return first, start - base


# -- the twins -------------------------------------------------------------------------------


class Twins:
    """A plain module and an attached one that get the same calls.

    Args:
        eager: stays plain.
        attached: equal to it in everything; gets attached here.
        attributes: whether plain attributes of the submodules are compared too.
        options: for ``hookgraph.attach``.
    """

    default_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, eager: nn.Module, attached: nn.Module, *, attributes: bool = True, **options: Any) -> None:
        self.modules = Both(eager, attached)
        self.outcomes: list[str] = []
        self._attributes = attributes
        self._before = Snapshot(eager), Snapshot(attached)
        self._sides = Both(Identities(), Identities())
        self._kept: list[tuple[str, Any, Any]] = []
        self.handle = hookgraph.attach(attached, **self.default_options | options)
        self._name_everything("before the first call", Both(None, None))

    @classmethod
    def build(cls, make: Callable[[], nn.Module], *, evaluate: bool = True, **options: Any) -> Twins:
        """Two modules from one recipe and one seed."""
        sides = []
        for _ in range(2):
            torch.manual_seed(0)
            module = make()
            sides.append(module.eval() if evaluate else module)
        return cls(*sides, **options)

    @classmethod
    def of(cls, module: nn.Module, **options: Any) -> Twins:
        """A module and its deep copy."""
        return cls(copy.deepcopy(module), module, **options)

    # -- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Both:
        """Call both modules; arguments are copied for each."""
        return self.run(self.modules, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Both:
        """As ``module.forward(...)``, past the hooks."""
        return self.run(self.modules.map(lambda module: module.forward), *args, **kwargs)

    def run(self, functions: Both, *args: Any, **kwargs: Any) -> Both:
        """Call a function of each side with its own arguments, and compare all there is."""
        __tracebackhide__ = True
        where = f"call {len(self.outcomes)}"
        sides = self.split((args, kwargs))
        for identities in _pair(self._sides):
            identities.start_call()
        self._compare_all(f"{where}, before it", Both(None, None), sides)
        counted = self.handle.stats
        random = _random_state()
        expected = _result(functions.eager, sides.eager)
        random_after = _random_state()
        _set_random_state(random)
        got = _result(functions.attached, sides.attached)
        self.outcomes.append(self._outcome(counted))
        _check_result(where, expected, got)
        for device, state in _random_state().items():
            if not torch.equal(state, random_after[device]):
                raise ParityError(f"{where}: the random generator of {device} was not advanced as in eager")
        out = Both(expected.value, got.value)
        self._compare_all(where, out, sides)
        if got.error is not None:
            raise got.error
        self._kept.append((where, out.eager, out.attached))
        return out

    def split(self, value: Any) -> Both:
        """A copy for each side; a ``Both`` inside gives each side its own."""
        sides = []
        for side in ("eager", "attached"):
            memo = {id(both): getattr(both, side) for both in _find_both(value)}
            with torch.inference_mode():
                inference = [leaf for _, leaf in walk(value) if isinstance(leaf, torch.Tensor) and leaf.is_inference()]
                memo |= {id(leaf): leaf.clone() for leaf in inference}
            with torch.inference_mode(False):
                sides.append(copy.deepcopy(value, memo))
        return Both(*sides)

    def keep(self, value: Any) -> Both:
        """An argument that lives through several calls."""
        return self.split(value)

    def apply(self, event: Callable[[Any], Any] | Both) -> Both:
        """Do something to both modules: an event between two calls."""
        if isinstance(event, Both):
            return Both(event.eager(), event.attached())
        return self.modules.map(event)

    def backward(self, out: Both) -> None:
        """Backpropagate the sum of a tensor on both sides and compare all gradients."""
        out.map(lambda tensor: tensor.sum().backward())
        self._compare_modules("after backward")

    # -- comparisons

    def _compare_all(self, where: str, out: Both, sides: Both) -> None:
        __tracebackhide__ = True
        compare(out.eager, out.attached, f"{where}: output")
        for i, (a, b) in enumerate(zip(sides.eager[0], sides.attached[0], strict=True)):
            compare(a, b, f"{where}: args[{i}]")
        compare(sides.eager[1], sides.attached[1], f"{where}: kwargs")
        self._compare_modules(where)
        self._name_everything(where, out, sides)

    def _compare_modules(self, where: str) -> None:
        __tracebackhide__ = True
        compare(*(dict(m.named_parameters()) for m in _pair(self.modules)), f"{where}: parameters")
        compare(*({n: p.grad for n, p in m.named_parameters()} for m in _pair(self.modules)), f"{where}: gradients")
        compare(*(dict(m.named_buffers()) for m in _pair(self.modules)), f"{where}: buffers")
        if self._attributes:
            compare(*(_plain_state(m) for m in _pair(self.modules)), f"{where}: attributes", open_objects=False)

    def _name_everything(self, where: str, out: Both, sides: Both | None = None) -> None:
        """Shared memory and identities have to be shared in the same way on both sides."""
        walks = []
        for side in ("eager", "attached"):
            module = getattr(self.modules, side)
            values: dict[str, Any] = {f"parameter {name}": p for name, p in module.named_parameters()}
            values |= {f"buffer {name}": b for name, b in module.named_buffers()}
            if sides is not None:
                args, kwargs = getattr(sides, side)
                values |= {f"args[{i}]": value for i, value in enumerate(args)}
                values |= {f"kwargs[{key!r}]": value for key, value in kwargs.items()}
            values["output"] = getattr(out, side)
            names = getattr(self._sides, side)
            walks.append(
                [
                    (path, names.name(f"{path} of {where}", leaf))
                    for label, value in values.items()
                    for path, leaf in walk(value, label)
                ]
            )
        for (path, mine), (_, theirs) in zip(*walks, strict=True):
            if mine is None or theirs is None or mine == theirs:
                continue
            if mine[0] != theirs[0]:
                raise ParityError(f"{where}: {path} is the object {theirs[0]}; in eager it is {mine[0]}")
            raise ParityError(
                f"{where}: {path} lies in the memory of {_place(theirs)}, in eager in that of {_place(mine)}"
            )

    def compare_kept(self) -> None:
        """Every output ever handed out is still what eager's is."""
        __tracebackhide__ = True
        for where, eager, attached in self._kept:
            compare(eager, attached, f"{where}: output, looked at again after the last call")

    # -- counting

    def _outcome(self, before: Any) -> str:
        """What became of the one call since ``before``, as ``replays`` or ``eager:limit``."""
        stats = self.handle.stats
        check_balance(stats)
        changed = [name for name in OUTCOMES for _ in range(getattr(stats, name) - getattr(before, name))]
        reasons = [reason for reason, n in stats.reasons.items() for _ in range(n - before.reasons.get(reason, 0))]
        return ",".join(changed) + (":" + ",".join(reasons) if reasons else "")

    def count(self, outcome: str) -> int:
        """How many calls had this outcome, ``eager`` or ``eager:limit`` say."""
        return sum(o == outcome or o.startswith(f"{outcome}:") for o in self.outcomes)

    # -- the end

    def __enter__(self) -> Twins:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        else:
            with contextlib.suppress(Exception):
                self.handle.detach()

    def finish(self) -> None:
        """Detach; what has changed on the module since must be what has changed on the plain one."""
        __tracebackhide__ = True
        self.compare_kept()
        check_balance(self.handle.stats)
        self.handle.detach()
        self.compare_kept()
        allowed = self._before[0].changes(Snapshot(self.modules.eager))
        left = self._before[1].changes(Snapshot(self.modules.attached)) - allowed
        if left:
            raise ParityError(f"detach() left on the module: {sorted(left)}")
        if WATCH is not None:
            WATCH.allow(self.modules.attached, *allowed)


def _place(name: tuple[Any, ...]) -> str:
    if len(name) < 2 or name[1] is None:
        return "nothing"
    first, offset = name[1]
    return f"{first}, {offset} bytes further on" if offset else first


def check_balance(stats: Any) -> None:
    """Every call has one outcome and every eager call one reason, in the sum and in each module."""
    for counted in (stats, *stats.modules):
        outcomes = {name: getattr(counted, name) for name in OUTCOMES}
        assert counted.calls == sum(outcomes.values()), f"{counted.calls} calls, {outcomes}"
        assert counted.eager == sum(counted.reasons.values()), f"{counted.eager} eager, {counted.reasons}"
    for name in ("calls", *OUTCOMES):
        assert getattr(stats, name) == sum(getattr(m, name) for m in stats.modules), name


@dataclasses.dataclass
class _Result:
    value: Any = None
    error: BaseException | None = None


def _result(function: Callable[..., Any], call: tuple[tuple[Any, ...], dict[str, Any]]) -> _Result:
    try:
        return _Result(value=function(*call[0], **call[1]))
    except (Exception, KeyboardInterrupt) as error:
        return _Result(error=error)


def _check_result(where: str, expected: _Result, got: _Result) -> None:
    """Both returned, or both raised the same."""
    if expected.error is None and got.error is not None:
        raise ParityError(f"{where}: raised {got.error!r}; eager returns") from got.error
    if expected.error is not None and got.error is None:
        raise ParityError(f"{where}: returned; eager raises {expected.error!r}") from expected.error
    if type(expected.error) is not type(got.error) or str(expected.error) != str(got.error):
        raise ParityError(f"{where}: raised {got.error!r}; eager raises {expected.error!r}") from got.error


def _pair(both: Both) -> tuple[Any, Any]:
    return both.eager, both.attached


def _find_both(value: Any) -> list[Both]:
    if isinstance(value, Both):
        return [value]
    if isinstance(value, dict):
        return [both for item in value.values() for both in _find_both(item)]
    if isinstance(value, (list, tuple)):
        return [both for item in value for both in _find_both(item)]
    return []


def _plain_state(module: nn.Module) -> dict[str, Any]:
    """Plain attributes of every submodule, without hooks and without what the walk cannot compare."""
    return {
        f"{name}.{key}": value
        for name, child in module.named_modules()
        for key, value in vars(child).items()
        if key not in _BOOKKEEPING and "_hooks" not in key and "_hook_" not in key
    }


def _random_state() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{i}": torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}
    return states


def _set_random_state(states: dict[str, torch.Tensor]) -> None:
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)
