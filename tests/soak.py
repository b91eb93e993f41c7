"""Random modules, random calls and random changes in between, beside an eager twin: the adversary.

    python -m tests.soak --sequences 100000 --seed 0      # soak; the last line is JSON
    python -m tests.soak --sequences 1 --seed 4711 -v     # replay one sequence
    python -m tests.soak --shrink 4711                    # the smallest plan that still fails, as text

A sequence is a ``Plan``: plain data, drawn from its seed alone.  It says which steps the forward
takes, what it returns, and what happens to the module from call to call.  ``Generated`` interprets
the steps, so that its branches read attributes, shapes and scalars as those of a real model do.

Every sequence fails on any difference from eager, and also on a ``parity`` fallback: then capture
got it wrong, and only the proof saved the caller.

Left out, since ``docs/limits.md`` names them: numbers in globals, closures and class attributes, and
forwards that count or log outside of the module.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import random
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the name that everyone uses)

import hookgraph
from tests import parity
from tests.modules import FrozenSample, Pair, Sample
from tests.parity import Both, ParityError, Twins, check_balance

WIDTH = 4
Step = tuple[Any, ...]

# -- the plan: everything about one sequence, as data ------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What one call looks like, without the values of its tensors."""

    batch: int = 2
    layout: str = "plain"
    dtype: torch.dtype = torch.float32
    scalar: Any = 1.0
    second: str = "none"
    bag: str = "none"
    mode: str = "no_grad"
    autocast: bool = False
    by_name: bool = False


@dataclass(frozen=True)
class Call:
    shape: Shape
    seed: int
    paused: bool = False


@dataclass(frozen=True)
class Event:
    kind: str
    seed: int


@dataclass(frozen=True)
class Plan:
    seed: int
    options: tuple[tuple[str, Any], ...]
    build: frozenset[str]
    steps: tuple[Step, ...]
    output: tuple[Any, ...]
    acts: tuple[Call | Event, ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, options {dict(self.options)}, module {sorted(self.build)}"]
        lines += [f"  step {step}" for step in self.steps] + [f"  returns {self.output}"]
        return "\n".join(lines + [f"  {act}" for act in self.acts])


# -- the module -----------------------------------------------------------------------------------


@dataclass
class Config:
    """A configuration object, as libraries hang them on modules."""

    gain: float = 1.5
    switch: bool = False


@dataclass(slots=True)
class SlotsConfig:
    """The same without a ``__dict__``."""

    gain: float = 1.5


class Holder:
    """A plain object that holds a tensor, as attention processors do."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def closure_over(tensor: torch.Tensor) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]:
    def read() -> torch.Tensor:
        return tensor

    def rebind(new: torch.Tensor) -> None:
        nonlocal tensor
        tensor = new

    return read, rebind


def _read_global() -> torch.Tensor:
    return TABLE  # type: ignore[name-defined]  # noqa: F821 (in the globals that each module gets of its own)


def global_reader(tensor: torch.Tensor) -> types.FunctionType:
    return types.FunctionType(_read_global.__code__, {"__name__": "generated", "TABLE": tensor})


def cached_table(scale: float) -> Callable[[int], torch.Tensor]:
    @functools.lru_cache(maxsize=8)
    def table(length: int) -> torch.Tensor:
        return torch.arange(length * WIDTH, dtype=torch.float32).reshape(length, WIDTH).cos() * scale

    return table


class Generated(nn.Module):
    """Runs the steps of a plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.steps, self.output = plan.steps, plan.output
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.register_buffer("buf", torch.randn(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        both = torch.randn(2, WIDTH)
        self.register_buffer("low", both[0] if "shared_buffers" in plan.build else both[0].clone())
        self.register_buffer("high", both[1] if "shared_buffers" in plan.build else both[1].clone())
        self.scale, self.number, self.flag, self.mode = 1.5, 2, True, "a"
        self.gains, self.pair = [1.0, 0.5], (1.0, 2.0)
        self.cfg = {"gain": 1.5, "shift": 0.5, "more": {"deep": [2.0, {"deeper": 1.0}]}}
        self.config, self.slots = Config(), SlotsConfig()
        tables: Any = torch.randn(6, 3, WIDTH)
        views = "view_tables" in plan.build  # all in one memory, as the chunks of one table are
        tables = tables.unbind() if views else [table.clone() for table in tables]
        self.table, self.other = tables[0], tables[0] if "two_names" in plan.build else tables[1]
        self.tables, self.bank = [tables[2], tables[3]], {"k": tables[4]}
        self.holder = Holder(tables[5])
        self.square_view = self.square.detach().t() if "parameter_view" in plan.build else torch.randn(WIDTH, WIDTH)
        self.ref = torch.zeros(2)
        self.lazy: torch.Tensor | None = None
        if "outside" in plan.build:
            self.read, self.rebind = closure_over(torch.randn(3, WIDTH))
            self.reader = global_reader(torch.randn(3, WIDTH))
            self.cached = cached_table(1.0)
        if "frozen" in plan.build:
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, t: Any = 1.0, bag: Any = None) -> Any:
        batch = x.shape[0]
        regs = [x] if y is None else [x, y]
        for step in self.steps:
            made = STEPS[step[0]](self, regs, batch, t, bag, *step[1:])
            if made is not None:
                regs.append(made)
        return OUTPUTS[self.output[0]](self, regs, batch, t, bag, *self.output[1:])


def _fit(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    return tensor if tensor.shape == (batch, WIDTH) else tensor.expand(batch, WIDTH)


def _rows(table: torch.Tensor, batch: int) -> torch.Tensor:
    return table[:batch] if table.shape[0] >= batch else table[:1]


def _writable(tensor: torch.Tensor) -> bool:
    spread = all(stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.is_floating_point() and spread and tensor.dim() > 0


def _pick(regs: list[torch.Tensor], index: int) -> torch.Tensor:
    return regs[index % len(regs)]


STEPS: dict[str, Callable[..., torch.Tensor | None]] = {}
DRAWS: dict[str, tuple[int, Callable[[random.Random], Step]]] = {}


def step(weight: int, **draws: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a step, with how often it is drawn and how its parameters are."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.strip("_")
        STEPS[name] = function

        def draw(rng: random.Random) -> Step:
            values = [rng.randrange(8) if d is int else rng.choice(d) for d in draws.values()]
            return (name, *values)

        DRAWS[name] = (weight, draw)
        return function

    return add


@step(6, i=int, which=("first", "second"))
def layer(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int, which: str) -> Any:
    child = getattr(m, which)
    return child(_fit(_pick(regs, i), batch).to(next(child.parameters()).dtype))


_POINTWISE = {"tanh": torch.tanh, "sin": torch.sin, "gelu": F.gelu, "neg": torch.neg, "half": lambda x: x * 0.5}


@step(6, i=int, what=tuple(_POINTWISE))
def pointwise(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int, what: str) -> Any:
    value = _pick(regs, i)
    return _POINTWISE[what](value if value.is_floating_point() else value.float())


_BINARY = {"add": torch.add, "sub": torch.sub, "mul": lambda a, b: torch.tanh(a) * b, "max": torch.maximum}


@step(5, i=int, j=int, what=tuple(_BINARY))
def binary(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int, j: int, what: str) -> Any:
    return _BINARY[what](_pick(regs, i), _pick(regs, j))


@step(3, i=int, j=int)
def matmul(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int, j: int) -> Any:
    a, b = _fit(_pick(regs, i), batch).float(), _fit(_pick(regs, j), batch).float()
    return torch.tanh(a) @ (torch.tanh(b).t() @ torch.tanh(a))


@step(3, i=int)
def square(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    return _fit(_pick(regs, i), batch).to(m.square.dtype) @ m.square


@step(3, i=int)
def square_view(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    return _fit(_pick(regs, i), batch).to(m.square_view.dtype) @ m.square_view


@step(3, i=int, what=("first", "expand", "flip", "double_t", "same", "detach", "alias"))
def view(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int, what: str) -> Any:
    value = _fit(_pick(regs, i), batch)
    if what == "first":
        return value[:1]
    if what == "expand":
        return value[:1].expand(batch, WIDTH)
    if what == "flip":
        return value.reshape(-1).reshape(batch, WIDTH)
    if what == "double_t":
        return value.t().reshape(WIDTH, batch).t()
    if what == "detach":
        return value.detach()
    return value.view_as(value) if what == "alias" else value


@step(3, i=int, j=int)
def cat(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int, j: int) -> Any:
    return torch.cat([_fit(_pick(regs, i), batch)[:, :2], _fit(_pick(regs, j), batch)[:, 2:]], 1)


@step(4, i=int, j=int, part=("all", "middle", "row", "column"))
def write(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int, j: int, part: str) -> None:
    """In place into a register: an argument, an intermediate, a view of one, a side tensor."""
    target = _pick(regs, i)
    if _writable(target):
        _write_into(target, _pick(regs, j), part)


def _write_into(target: torch.Tensor, source: torch.Tensor, part: str) -> None:
    spot = {"all": ..., "middle": (..., slice(1, 3)), "row": slice(0, 1), "column": (..., 0)}[part]
    target[spot].mul_(0.5).add_(torch.tanh(source.float()).mean().to(target.dtype))


@step(1, i=int)
def write_data(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> None:
    target = _pick(regs, i)
    if _writable(target):
        target.data.mul_(0.5)


@step(3, name=("buf", "low", "high"), j=int, part=("all", "middle"))
def write_buffer(m: Any, regs: Any, batch: int, t: Any, bag: Any, name: str, j: int, part: str) -> None:
    _write_into(getattr(m, name), _pick(regs, j), part)


@step(2)
def count(m: Any, regs: Any, batch: int, t: Any, bag: Any) -> Any:
    m.count.add_(1)
    return m.count * torch.ones(WIDTH)


@step(3, where=("table", "other", "tables", "bank", "holder"), j=int, part=("all", "middle", "row"))
def write_side(m: Any, regs: Any, batch: int, t: Any, bag: Any, where: str, j: int, part: str) -> None:
    _write_into(_side(m, where), _pick(regs, j), part)


def _side(m: Any, where: str) -> torch.Tensor:
    if where == "tables":
        return m.tables[1]
    if where == "bank":
        return m.bank["k"]
    return m.holder.tensor if where == "holder" else getattr(m, where)


@step(6, where=("table", "other", "tables", "bank", "holder"), i=int)
def side(m: Any, regs: Any, batch: int, t: Any, bag: Any, where: str, i: int) -> Any:
    return _fit(_pick(regs, i), batch) + _rows(_side(m, where), batch)


@step(1, where=("table", "other", "tables", "bank", "holder"))
def side_raw(m: Any, regs: Any, batch: int, t: Any, bag: Any, where: str) -> Any:
    return _rows(_side(m, where), batch)


@step(4, where=("closure", "global", "cache"), i=int)
def outside(m: Any, regs: Any, batch: int, t: Any, bag: Any, where: str, i: int) -> Any:
    if not hasattr(m, "read"):
        return None
    tensor = m.read() if where == "closure" else m.reader() if where == "global" else m.cached(batch)
    return _pick(regs, i) * _rows(tensor, batch)


@step(2, i=int, where=("table", "tables"))
def side_shape(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int, where: str) -> Any:
    return _pick(regs, i) * _side(m, where).shape[0]


@step(2, i=int)
def side_dtype(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    return _pick(regs, i).to(m.ref.dtype)


@step(3, name=("gain", "buf", "low", "high"), i=int)
def own(m: Any, regs: Any, batch: int, t: Any, bag: Any, name: str, i: int) -> Any:
    return _pick(regs, i) * getattr(m, name)


@step(2, name=("gain", "buf", "low", "high"))
def own_raw(m: Any, regs: Any, batch: int, t: Any, bag: Any, name: str) -> Any:
    return getattr(m, name)


@step(2, i=int)
def norm(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    return m.norm(_fit(_pick(regs, i), batch).to(m.norm.weight.dtype))


@step(1, i=int)
def drop(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    value = _pick(regs, i)
    return m.drop(value if value.is_floating_point() else value.float())


@step(1, i=int)
def noise(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    return _pick(regs, i) + torch.rand(WIDTH)


@step(3, i=int)
def scalar(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    return torch.arange(WIDTH) * t if t == 1 else _pick(regs, i) * t


@step(3, i=int)
def scalar_branch(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    if isinstance(t, bool):
        return -_pick(regs, i)
    return _pick(regs, i) + 1 if t > 1 else None


@step(2, i=int)
def shape_branch(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    return _pick(regs, i) * 2 if batch == 2 else _pick(regs, i)[:1]


_ATTRIBUTES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "scale": lambda m, x: x * m.scale,
    "number": lambda m, x: torch.arange(WIDTH) * m.number,
    "flag": lambda m, x: torch.sin(x.float()) if m.flag else x + 1,
    "mode": lambda m, x: x + {"a": 1, "b": 2}.get(m.mode, 3),
    "gains": lambda m, x: x * sum(m.gains) + len(m.gains),
    "gains_kind": lambda m, x: torch.arange(WIDTH) * m.gains[0],
    "pair": lambda m, x: x * m.pair[0],
    "cfg": lambda m, x: x * m.cfg["gain"],
    "cfg_get": lambda m, x: x * m.cfg.get("extra", 1.0),
    "deep": lambda m, x: x * m.cfg["more"]["deep"][0],
    "deeper": lambda m, x: x * m.cfg["more"]["deep"][1]["deeper"],
    "config": lambda m, x: x * m.config.gain if not m.config.switch else x - 1,
    "slots": lambda m, x: x * m.slots.gain,
    "training": lambda m, x: x + m.first.training,
}


@step(8, what=tuple(_ATTRIBUTES), i=int)
def attribute(m: Any, regs: Any, batch: int, t: Any, bag: Any, what: str, i: int) -> Any:
    return _ATTRIBUTES[what](m, _pick(regs, i))


@step(2, i=int)
def cfg_order(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    value = _pick(regs, i)
    for key, number in m.cfg.items():
        if isinstance(number, float):
            value = value * number if key == "gain" else value + number
    return value


@step(2, i=int)
def constant(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    return _pick(regs, i) + torch.tensor([1.0, 2.0, 3.0, m.scale])


@step(1, i=int)
def constant_written(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    made = torch.tensor([1.0, 2.0, 3.0, 4.0])
    made += torch.tanh(_pick(regs, i).float()).mean()
    return made


@step(2, i=int)
def lazy(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    """A table that grows when it is too short."""
    if m.lazy is None or m.lazy.shape[0] < batch:
        m.lazy = torch.cos(torch.arange(batch) / batch)[:, None] * m.scale
    return _pick(regs, i) * m.lazy[:batch]


@step(1, i=int)
def turned(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    """A geometry that changes in place."""
    made = _fit(_pick(regs, i), batch).float() * 2
    product = made.t() @ made
    made.t_()
    return _fit((made @ product.t()[:batch].t()).mean() if batch != WIDTH else made.mean(), batch)


@step(1, i=int)
def gradient(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    """Guidance: a gradient inside of the forward."""
    if torch.is_inference_mode_enabled():
        return None
    with torch.enable_grad():
        value = _pick(regs, i).detach().clone().float().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(value).pow(2).sum(), value)
    return slope


@step(1, i=int)
def inner_autocast(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return _fit(_pick(regs, i), batch).float() @ m.square.float()


@step(2, i=int)
def foreach(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int) -> Any:
    made = [_pick(regs, i) * 2, m.buf * 2]
    torch._foreach_mul_(made, 0.5)
    return made[0] + made[1]


@step(4, i=int, what=("append", "pop", "set", "number", "write", "read", "nested"))
def bag(m: Any, regs: Any, batch: int, t: Any, bag: Any, i: int, what: str) -> Any:
    """What the forward does to a container of its caller."""
    if bag is None:
        return None
    value = _pick(regs, i)
    if isinstance(bag, list):
        if what == "append":
            bag.append(value)
        elif what == "pop" and len(bag) > 1:
            bag.pop()
        elif what == "set":
            bag[0] = value
        elif what == "write" and _writable(bag[0]):
            bag[0].mul_(0.5)
        elif what == "nested":
            bag.append({"value": value, "again": value})
        return bag[0] + 0 if what == "read" else None
    if what in ("append", "set"):
        bag["h" if what == "set" else "new"] = value
    elif what == "pop":
        bag.pop("new", None)
    elif what == "number":
        bag["n"] = bag["n"] + 1
    elif what == "write" and _writable(bag["h"]):
        bag["h"].mul_(0.5)
    elif what == "nested":
        bag["list"] = [value, bag["n"]]
    return bag["h"] * bag["n"] if what == "read" else None


# -- what a forward returns ---------------------------------------------------------------------------

OUTPUTS: dict[str, Callable[..., Any]] = {
    "last": lambda m, r, b, t, bag, i, j: r[-1],
    "one": lambda m, r, b, t, bag, i, j: _pick(r, i),
    "argument": lambda m, r, b, t, bag, i, j: (r[0], r[-1]),
    "argument_view": lambda m, r, b, t, bag, i, j: (r[0][:1], r[0].t(), r[-1]),
    "tuple": lambda m, r, b, t, bag, i, j: (_pick(r, i), _pick(r, j), r[-1]),
    "list": lambda m, r, b, t, bag, i, j: [_pick(r, i), None, r[-1], m.scale],
    "dict": lambda m, r, b, t, bag, i, j: {"sample": r[-1], "rest": _pick(r, i)},
    "nested": lambda m, r, b, t, bag, i, j: {"a": [r[-1], (_pick(r, i), {"n": b})], "b": Pair(_pick(r, j), t)},
    "twice": lambda m, r, b, t, bag, i, j: (r[-1], r[-1], _pick(r, i)),
    "dataclass": lambda m, r, b, t, bag, i, j: Sample(r[-1], m.scale),
    "frozen": lambda m, r, b, t, bag, i, j: FrozenSample(r[-1], (_pick(r, i),)),
    "views": lambda m, r, b, t, bag, i, j: (r[-1], r[-1][..., :2], r[-1].t()[:1], r[-1].expand(2, *r[-1].shape)),
    "gaps": lambda m, r, b, t, bag, i, j: r[-1][..., ::2],
    "buffer": lambda m, r, b, t, bag, i, j: (m.buf, m.buf[1:3], m.gain, r[-1]),
    "shared": lambda m, r, b, t, bag, i, j: (m.high, m.low[:2], r[-1]),
    "side": lambda m, r, b, t, bag, i, j: (m.table, m.other[:1], r[-1]),
    "bag": lambda m, r, b, t, bag, i, j: (bag, r[-1]),
    "bag_inside": lambda m, r, b, t, bag, i, j: {"bag": bag, "out": [r[-1]]},
    "nothing": lambda m, r, b, t, bag, i, j: None,
}


# -- what happens between calls ---------------------------------------------------------------------------

EVENTS: dict[str, Callable[[Any, torch.Generator], Any]] = {}


def event(function: Callable[[Any, torch.Generator], Any]) -> Callable[[Any, torch.Generator], Any]:
    EVENTS[function.__name__] = function
    return function


def _new(like: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=g).to(like.dtype)


@event
def weight_in_place(m: Any, g: Any) -> None:
    m.first.weight.copy_(_new(m.first.weight, g))


@event
def weight_data(m: Any, g: Any) -> None:
    m.first.weight.data = _new(m.first.weight, g)


@event
def weight_data_turned(m: Any, g: Any) -> None:
    m.square.data = m.square.data.t()


@event
def weight_new(m: Any, g: Any) -> None:
    old = m.first.weight
    m.first.weight = nn.Parameter(_new(old, g), requires_grad=old.requires_grad)


@event
def weight_swapped(m: Any, g: Any) -> None:
    a, b = m.first, m.second[0]
    a.weight, b.weight = b.weight, a.weight


@event
def load(m: Any, g: Any) -> None:
    m.load_state_dict({key: _new(value, g) for key, value in m.state_dict().items()})


@event
def load_assign(m: Any, g: Any) -> None:
    m.load_state_dict({key: _new(value, g) for key, value in m.state_dict().items()}, assign=True)


@event
def buffer_new(m: Any, g: Any) -> None:
    m.buf = _new(m.buf, g)


@event
def buffer_in_place(m: Any, g: Any) -> None:
    m.buf.copy_(_new(m.buf, g))


@event
def shared_buffer_new(m: Any, g: Any) -> None:
    m.high = _new(m.high, g)


@event
def there_and_back(m: Any, g: Any) -> None:
    m.double().float()


@event
def to_double(m: Any, g: Any) -> None:
    m.double()


@event
def to_float(m: Any, g: Any) -> None:
    m.float()


@event
def scale(m: Any, g: Any) -> None:
    m.scale = 0.75 if m.scale == 1.5 else 1.5


@event
def number_kind(m: Any, g: Any) -> None:
    m.number = 2.0 if type(m.number) is int else 2


@event
def flag(m: Any, g: Any) -> None:
    m.flag = not m.flag


@event
def mode(m: Any, g: Any) -> None:
    m.mode = "b" if m.mode == "a" else "a"


@event
def gains_edited(m: Any, g: Any) -> None:
    m.gains[0] += 0.25


@event
def gains_kind(m: Any, g: Any) -> None:
    m.gains[0] = int(m.gains[0]) if type(m.gains[0]) is float else float(m.gains[0])


@event
def gains_grown(m: Any, g: Any) -> None:
    m.gains.append(0.5)


@event
def gains_equal_then_edited(m: Any, g: Any) -> None:
    m.gains = list(m.gains)


@event
def pair(m: Any, g: Any) -> None:
    m.pair = (m.pair[1], m.pair[0])


@event
def cfg_edited(m: Any, g: Any) -> None:
    m.cfg["gain"] += 0.25


@event
def cfg_grown(m: Any, g: Any) -> None:
    if "extra" in m.cfg:
        del m.cfg["extra"]
    else:
        m.cfg["extra"] = 3.0


@event
def cfg_reordered(m: Any, g: Any) -> None:
    m.cfg["gain"] = m.cfg.pop("gain")


@event
def cfg_replaced(m: Any, g: Any) -> None:
    m.cfg = {**m.cfg, "gain": 0.25}


@event
def deep_edited(m: Any, g: Any) -> None:
    m.cfg["more"]["deep"][0] += 1.0


@event
def deeper_edited(m: Any, g: Any) -> None:
    m.cfg["more"]["deep"][1]["deeper"] += 1.0


@event
def config_edited(m: Any, g: Any) -> None:
    m.config.gain += 0.25


@event
def config_switched(m: Any, g: Any) -> None:
    m.config = replace(m.config, switch=not m.config.switch)


@event
def slots_edited(m: Any, g: Any) -> None:
    m.slots.gain += 0.25


@event
def table_rebound(m: Any, g: Any) -> None:
    m.table = _new(m.table, g)


@event
def table_grown(m: Any, g: Any) -> None:
    m.table = torch.randn(m.table.shape[0] + 1, WIDTH, generator=g)


@event
def table_in_place(m: Any, g: Any) -> None:
    m.table.copy_(_new(m.table, g))


@event
def table_data(m: Any, g: Any) -> None:
    m.table.data = _new(m.table, g)


@event
def other_rebound(m: Any, g: Any) -> None:
    m.other = _new(m.other, g)


@event
def tables_edited(m: Any, g: Any) -> None:
    m.tables[1] = _new(m.tables[1], g)


@event
def tables_swapped(m: Any, g: Any) -> None:
    m.tables.reverse()


@event
def tables_grown(m: Any, g: Any) -> None:
    m.tables[1] = torch.randn(4, WIDTH, generator=g)


@event
def bank_edited(m: Any, g: Any) -> None:
    m.bank["k"] = _new(m.bank["k"], g)


@event
def holder_edited(m: Any, g: Any) -> None:
    m.holder.tensor = _new(m.holder.tensor, g)


@event
def holder_replaced(m: Any, g: Any) -> None:
    m.holder = Holder(_new(m.holder.tensor, g))


@event
def square_view_rebound(m: Any, g: Any) -> None:
    m.square_view = _new(m.square_view, g)


@event
def ref_dtype(m: Any, g: Any) -> None:
    m.ref = torch.zeros(2, dtype=torch.float64 if m.ref.dtype is torch.float32 else torch.float32)


@event
def lazy_reset(m: Any, g: Any) -> None:
    m.lazy = None


@event
def closure_rebound(m: Any, g: Any) -> None:
    if hasattr(m, "rebind"):
        m.rebind(torch.randn(3, WIDTH, generator=g))


@event
def global_rebound(m: Any, g: Any) -> None:
    if hasattr(m, "reader"):
        m.reader.__globals__["TABLE"] = torch.randn(3, WIDTH, generator=g)


@event
def global_in_place(m: Any, g: Any) -> None:
    if hasattr(m, "reader"):
        m.reader().mul_(0.5)


@event
def cache_replaced(m: Any, g: Any) -> None:
    if hasattr(m, "cached"):
        m.cached = cached_table(0.5)


@event
def child_replaced(m: Any, g: Any) -> None:
    old = m.first
    with torch.random.fork_rng(devices=[]):
        m.first = nn.Linear(WIDTH, WIDTH).requires_grad_(m.gain.requires_grad).to(old.weight.dtype)
    m.first.load_state_dict({"weight": _new(old.weight, g), "bias": _new(old.bias, g)})
    m.first.train(m.training)


@event
def child_of_another_class(m: Any, g: Any) -> None:
    m.second[1] = nn.ReLU() if type(m.second[1]) is nn.Tanh else nn.Tanh()


def _scaled(module: Any, args: Any, output: Any) -> Any:
    return output * 1.5


@event
def child_hook(m: Any, g: Any) -> None:
    hooks = m.first._forward_hooks
    if hooks:
        hooks.clear()
    else:
        m.first.register_forward_hook(_scaled)


def _sine(module: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


@event
def child_forward(m: Any, g: Any) -> None:
    child = m.second[1]
    if "forward" in vars(child):
        del child.forward
    else:
        child.forward = types.MethodType(_sine, child)


@event
def train(m: Any, g: Any) -> None:
    m.train(not m.training)


@event
def child_train(m: Any, g: Any) -> None:
    m.norm.train(not m.norm.training)


@event
def drop_train(m: Any, g: Any) -> None:
    m.drop.train(not m.drop.training)


@event
def requires_grad(m: Any, g: Any) -> None:
    m.requires_grad_(not m.gain.requires_grad)


@event
def back_to_eval(m: Any, g: Any) -> None:
    m.eval()


WHOLE_EVENTS = ("invalidate", "reattach", "reset_counters")  # of the handle, not of the module

# -- drawing a plan ---------------------------------------------------------------------------------------


def draw_plan(seed: int, without: frozenset[str] = frozenset()) -> Plan:
    """The plan of a seed; names in ``without`` are kinds of steps, outputs, events or builds to leave out."""
    rng = random.Random(seed)
    builds = ("shared_buffers", "view_tables", "two_names", "parameter_view", "outside", "frozen")
    build = frozenset(name for name in builds if rng.random() < 0.35 and name not in without)
    kinds = [name for name in DRAWS if name not in without]
    drawn = rng.choices(kinds, weights=[DRAWS[name][0] for name in kinds], k=rng.randint(2, 7))
    steps = tuple(DRAWS[name][1](rng) for name in drawn)
    output = (rng.choice([name for name in OUTPUTS if name not in without]), rng.randrange(8), rng.randrange(8))
    options = (
        ("verify", rng.choice((0, 0, 1, 1, 2))),
        ("max_graphs", rng.choice((1, 2, 4, 4))),
        ("warmup", rng.choice((1, 1, 1, 2))),
    )
    relevant = _relevant(steps, build, without)
    shapes = [_draw_shape(rng, without)]
    shapes += [_vary(rng, shapes[0], without) for _ in range(rng.choice((0, 1, 1, 2)))]
    acts: list[Call | Event] = []
    current = 0
    for _ in range(rng.randint(4, 8)):
        if len(acts) > 2 and rng.random() < 0.35:
            acts.append(Event(rng.choice(relevant), rng.randrange(1 << 30)))
        if rng.random() < 0.25:
            current = rng.randrange(len(shapes))
        acts.append(Call(shapes[current], rng.randrange(1 << 30), rng.random() < 0.03))
    return Plan(seed, options, build, steps, output, tuple(acts))


def _relevant(steps: tuple[Step, ...], build: frozenset[str], without: frozenset[str]) -> list[str]:
    """The events to draw from: those that can matter to these steps, more often."""
    all_events = [name for name in (*EVENTS, *WHOLE_EVENTS) if name not in without]
    words = " ".join(str(part) for step in steps for part in step)
    about = {
        "layer": ("weight", "load", "child"), "square": ("weight_data_turned", "load", "square_view"),
        "table": ("table", "other"), "other": ("table", "other"), "bank": ("bank",), "holder": ("holder",),
        "closure": ("closure",), "global": ("global",), "cache": ("cache",), "attribute": (
            "scale", "number", "flag", "mode", "gains", "pair", "cfg", "deep", "config", "slots", "child_train",
        ),
        "cfg": ("cfg",), "buf": ("buffer", "load"), "low": ("buffer", "shared"), "high": ("buffer", "shared"),
        "norm": ("child_train",), "drop": ("drop_train",), "lazy": ("lazy", "scale"), "dtype": ("ref",),
    }  # fmt: skip
    starts = tuple(start for word, found in about.items() if word in words for start in found)
    return all_events + [name for name in all_events if name.startswith(starts)] * 6 if starts else all_events


_LAYOUTS = ("plain", "plain", "plain", "strided", "turned", "offset", "expanded", "inference", "gradient")
_SCALARS = (1, 1.0, True, 2.0, 0.5, -0.0)
# A tensor of the module is refused as an argument, and a refused call proves little: draw it seldom.
_SECONDS = ("none",) * 6 + ("apart",) * 8 + ("same", "view") * 2 + ("table", "buf", "gain")


def _draw_shape(rng: random.Random, without: frozenset[str]) -> Shape:
    return Shape(
        batch=rng.choice((1, 2, 2, 3)),
        layout=rng.choice([name for name in _LAYOUTS if name not in without]),
        dtype=rng.choice((torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16)),
        scalar=rng.choice(_SCALARS),
        second=rng.choice([n for n in _SECONDS if n not in without]),
        bag=rng.choice([n for n in ("none", "none", "list", "dict", "with_x") if n not in without]),
        mode=rng.choice(("no_grad", "no_grad", "no_grad", "no_grad", "inference_mode", "grad")),
        autocast=rng.random() < 0.08,
        by_name=rng.random() < 0.2,
    )


def _vary(rng: random.Random, shape: Shape, without: frozenset[str]) -> Shape:
    """Another call of the same module: one or two things differ."""
    other = _draw_shape(rng, without)
    names = rng.sample([spec.name for spec in dataclasses.fields(Shape)], k=rng.choice((1, 1, 2)))
    return replace(shape, **{name: getattr(other, name) for name in names})


# -- comparing, quicker -----------------------------------------------------------------------------


class QuickTwins(Twins):
    """The same comparisons, with a short way for parameters, buffers and attributes that agree."""

    def _compare_all(self, where: str, out: Both, sides: Both) -> None:
        __tracebackhide__ = True
        if not where.endswith("before it"):
            super()._compare_all(where, out, sides)
        elif sides.eager[1].get("bag") is not None:  # what it holds now has to be told from what it will
            self._name_everything(where, out, sides)

    def _compare_modules(self, where: str) -> None:
        __tracebackhide__ = True
        eager, attached = self.modules.eager, self.modules.attached
        for mine, theirs in ((_own(eager), _own(attached)), (_attributes(eager), _attributes(attached))):
            if len(mine) != len(theirs) or not all(map(_agree, mine, theirs)):
                super()._compare_modules(where)
                return

    def finish(self) -> None:
        __tracebackhide__ = True
        super()._compare_modules("at the end")
        super().finish()


def _own(module: nn.Module) -> list[Any]:
    return [*module.parameters(), *module.buffers()]


def _attributes(module: nn.Module) -> list[Any]:
    m: Any = module
    tables = [m.table, m.other, *m.tables, m.bank["k"], m.holder.tensor, m.square_view, m.ref, m.lazy]
    plain = (
        m.scale,
        m.number,
        m.flag,
        m.mode,
        m.gains,
        m.pair,
        m.cfg,
        m.config,
        m.slots,
        set(vars(m)) - {"forward", "__reduce_ex__"},
    )
    return [*tables, repr(plain[:-1]), plain[-1]]


_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _agree(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and a == b
    if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
        return False
    if a.requires_grad != b.requires_grad or a.is_inference() != b.is_inference():
        return False
    a, b = a.detach(), b.detach()
    return torch.equal(a.view(_SAME_SIZE[a.element_size()]), b.view(_SAME_SIZE[b.element_size()]))


# -- running one ---------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What a run of sequences came to."""

    sequences: int = 0
    calls: int = 0
    raised: int = 0
    mismatches: list[tuple[int, str]] = field(default_factory=list)
    replays: int = 0
    captures: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def fail(self, seed: int, note: str) -> None:
        self.mismatches.append((seed, note))
        print(f"seed {seed}: {note}", file=sys.stderr, flush=True)  # at once, for a run that takes hours

    def add(self, outcomes: list[str]) -> None:
        self.calls += len(outcomes)
        for outcome in outcomes:
            name, _, reason = outcome.partition(":")
            self.replays += name == "replays"
            self.captures += name == "captures"
            if reason:
                self.reasons[reason] += 1


def _arguments(twins: Twins, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    shape, g = call.shape, torch.Generator().manual_seed(call.seed)
    x = _tensor(shape, g)
    kwargs: dict[str, Any] = {"t": shape.scalar}
    if shape.second == "same":
        kwargs["y"] = x
    elif shape.second == "view":
        kwargs["y"] = x[:1]
    elif shape.second == "apart":
        kwargs["y"] = _tensor(replace(shape, layout="plain"), g)
    elif shape.second == "table":
        kwargs["y"] = twins.modules.map(lambda module: module.table[:1])
    elif shape.second != "none":
        kwargs["y"] = twins.modules.map(lambda module: getattr(module, shape.second))
    if shape.bag == "list":
        kwargs["bag"] = [torch.randn(WIDTH, generator=g), 1]
    elif shape.bag != "none":
        kwargs["bag"] = {"h": x if shape.bag == "with_x" else torch.randn(WIDTH, generator=g), "n": 1}
    if shape.by_name:
        return (), {"x": x, **kwargs}
    return (x, *([kwargs.pop("y")] if "y" in kwargs else [])), kwargs


def _tensor(shape: Shape, g: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape.batch, WIDTH, generator=g).to(shape.dtype)
    if shape.layout == "strided":
        return torch.stack([values, values + 1], 2)[..., 0]
    if shape.layout == "turned":
        return values.t().contiguous().t()
    if shape.layout == "offset":
        return torch.cat([values[:1], values])[1:]
    if shape.layout == "expanded":
        return values[:1].expand(shape.batch, WIDTH)
    if shape.layout == "inference":
        with torch.inference_mode():
            return values.clone()
    return values.requires_grad_() if shape.layout == "gradient" else values


@contextlib.contextmanager
def _surroundings(shape: Shape, twins: Twins) -> Iterator[None]:
    if shape.mode == "inference_mode" and (shape.layout == "gradient" or twins.modules.eager.gain.requires_grad):
        # There, a dispatch mode alone changes the flag of some views: of x.reshape(8), x.flatten(), x.mT, x.view_as(x).
        shape = replace(shape, mode="no_grad")
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": torch.enable_grad}
    with modes[shape.mode](), torch.autocast("cpu", torch.bfloat16, enabled=shape.autocast):
        yield


class _Outline:
    """The names in each module's ``__dict__`` and its hooks: what a ``Snapshot`` costs too much to tell each time."""

    def __init__(self, model: nn.Module) -> None:
        self.facts = {
            f"{name}.{key}" + (f" of {len(value)}" if isinstance(value, dict) else "")
            for name, module in model.named_modules()
            for key, value in vars(module).items()
        }

    def changes(self, later: _Outline) -> set[str]:
        return self.facts ^ later.facts


@contextlib.contextmanager
def _residue(plan: Plan) -> Iterator[None]:
    """Look for residue in outline, and in every eighth sequence closely."""
    whole = parity.Snapshot
    if plan.seed % 8:
        parity.Snapshot = _Outline  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        parity.Snapshot = whole  # type: ignore[misc]


def run_plan(plan: Plan, tally: Tally, verbose: bool = False) -> None:
    """Run one sequence.

    Raises:
        ParityError: The attached module and its twin differ, or a replay was found to differ.
    """
    with warnings.catch_warnings(), _residue(plan):
        warnings.simplefilter("ignore")
        twins = QuickTwins.build(lambda: Generated(plan), **dict(plan.options))
        try:
            _run_acts(plan, twins, tally, verbose)
            twins.finish()
        finally:
            with contextlib.suppress(Exception):
                twins.handle.detach()
            tally.add(twins.outcomes)


def _run_acts(plan: Plan, twins: Twins, tally: Tally, verbose: bool) -> None:
    for act in plan.acts:
        if isinstance(act, Event):
            _happen(plan, twins, act)
            continue
        with torch.no_grad():
            args, kwargs = _arguments(twins, act)
        with contextlib.ExitStack() as stack:
            if act.paused:
                stack.enter_context(twins.handle.paused())
            stack.enter_context(_surroundings(act.shape, twins))
            try:
                twins(*args, **kwargs)
            except ParityError:
                raise
            except Exception:  # eager raises the same: that was compared
                tally.raised += 1
        if verbose:
            print(f"  {twins.outcomes[-1]:<40} {act}")
        if "parity" in twins.outcomes[-1]:
            details = twins.handle.stats.modules[0].details
            raise ParityError(f"call {len(twins.outcomes) - 1}: only the proof noticed: {details}")


def _happen(plan: Plan, twins: Twins, act: Event) -> None:
    if act.kind == "invalidate":
        twins.handle.invalidate("the adversary says so")
    elif act.kind == "reset_counters":
        check_balance(twins.handle.stats)
        twins.handle.reset_counters()
    elif act.kind == "reattach":
        check_balance(twins.handle.stats)
        twins.handle.detach()
        twins.handle = hookgraph.attach(twins.modules.attached, **dict(plan.options))
    else:
        with torch.no_grad():
            twins.apply(lambda module: EVENTS[act.kind](module, torch.Generator().manual_seed(act.seed)))


# -- shrinking ---------------------------------------------------------------------------------------------


def failure(plan: Plan) -> str | None:
    """What goes wrong with a plan, if anything does."""
    try:
        run_plan(plan, Tally())
    except ParityError as error:
        return str(error)
    except Exception as error:
        return f"crash: {error!r}"
    return None


def shrink(plan: Plan) -> Plan:
    """Leave out whatever the failure does not need."""
    while True:
        for smaller in _smaller(plan):
            if failure(smaller) is not None:
                plan = smaller
                break
        else:
            return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    for i in reversed(range(len(plan.acts))):
        yield replace(plan, acts=plan.acts[:i] + plan.acts[i + 1 :])
    for i in reversed(range(len(plan.steps))):
        yield replace(plan, steps=plan.steps[:i] + plan.steps[i + 1 :])
    for name in sorted(plan.build):
        yield replace(plan, build=plan.build - {name})
    if plan.output[0] != "last":
        yield replace(plan, output=("last", 0, 0))
    plain = Shape()
    for spec in dataclasses.fields(Shape):
        acts = tuple(
            replace(act, shape=replace(act.shape, **{spec.name: getattr(plain, spec.name)}))
            if isinstance(act, Call) else act
            for act in plan.acts
        )  # fmt: skip
        if acts != plan.acts:
            yield replace(plan, acts=acts)
    for name, value in (("verify", 0), ("warmup", 1), ("max_graphs", 4)):
        options = tuple((key, value if key == name else old) for key, old in plan.options)
        if options != plan.options:
            yield replace(plan, options=options)


# -- many ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def quick_referrers() -> Iterator[None]:
    """Keep the garbage collector, and who asks it for referrers, away from what exists already.

    Restores: what was frozen.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run(seeds: range, tally: Tally, without: frozenset[str] = frozenset(), verbose: bool = False) -> Tally:
    """Run the sequences of some seeds; a failure is noted and the next one run."""
    for seed in seeds:
        plan = draw_plan(seed, without)
        if verbose:
            print(plan)
        try:
            run_plan(plan, tally, verbose)
        except ParityError as error:
            tally.fail(seed, str(error))
        except Exception as error:
            tally.fail(seed, f"crash: {error!r}")
        tally.sequences += 1
    return tally


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--without", default="", help="kinds to leave out, with commas between")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="make a failing sequence small, and show it")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    without = frozenset(filter(None, options.without.split(",")))
    if options.shrink is not None:
        plan = shrink(draw_plan(options.shrink, without))
        print(plan)
        print("fails with:", failure(plan))
        return 1
    run(range(options.seed, options.seed + 5), Tally())  # what it imports must exist before the next line
    tally, started = Tally(), time.perf_counter()
    with quick_referrers():
        for first in range(options.seed, options.seed + options.sequences, 500):
            run(range(first, min(first + 500, options.seed + options.sequences)), tally, without, options.verbose)
            print(f"{tally.sequences} sequences, {len(tally.mismatches)} mismatches", file=sys.stderr, flush=True)
    for seed, note in tally.mismatches[:200]:
        print(f"seed {seed}: {note}")
    print(
        json.dumps(
            {
                "sequences": tally.sequences, "calls": tally.calls, "mismatches": len(tally.mismatches),
                "replays": tally.replays, "captures": tally.captures, "raised": tally.raised,
                "reasons": dict(tally.reasons.most_common()), "seconds": round(time.perf_counter() - started, 1),
            }
        )
    )  # fmt: skip
    return bool(tally.mismatches)


if __name__ == "__main__":
    raise SystemExit(main())
