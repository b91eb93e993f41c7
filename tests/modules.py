"""Small modules that the tests attach to, in eval mode; at module level, so that they can be pickled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the name that everyone uses)


def mlp(width: int = 4) -> nn.Sequential:
    """Two layers with something in between: the plainest thing worth a graph."""
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).eval()


class Block(nn.Module):
    """A residual block with named parts."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Blocks(nn.Module):
    """A small transformer's skeleton: a list of blocks and a head."""

    def __init__(self, width: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 2)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Shared(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Scaled(nn.Module):
    """Takes a number beside its tensor, by position or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.eval()

    def forward(self, x: torch.Tensor, t: Any = 1.0, scale: float = 7.5) -> torch.Tensor:
        """Multiply by ``t`` and shift by ``scale``."""
        return self.linear(x) * t + scale


class Returns(nn.Module):
    """Returns what a function makes of its result and its input."""

    def __init__(self, make: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make = make
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.linear(x), x)


class Does(nn.Module):
    """Runs a function of itself and its arguments: one line of forward per test."""

    def __init__(self, function: Callable[..., Any], **state: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Pair(NamedTuple):
    sample: torch.Tensor
    rest: Any = None


@dataclass
class Sample:
    """A plain dataclass, which pytrees take for a leaf."""

    sample: torch.Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class FrozenSample:
    sample: torch.Tensor
    extra: tuple[torch.Tensor, ...] = ()


class AttributeDict(OrderedDict):  # type: ignore[type-arg]
    """Like ``ModelOutput``: a dict whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Norms(nn.Module):
    """Batch normalisation, whose buffers advance with each call in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.linear(x))


class Drops(nn.Module):
    """Draws random numbers in each call, whatever its mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, training=True) + torch.randn_like(x)


class Rope(nn.Module):
    """A table that grows when it is too short, with values that depend on its length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cos: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[0]
        if self.cos is None or self.cos.shape[0] < length:
            self.cos = torch.cos(torch.arange(length) / length)[:, None]
        return self.linear(x) * self.cos[:length]


class StepCache(nn.Module):
    """Reuses a stored residual when the input is small: a branch on a value of the device."""

    def __init__(self, threshold: float = 1.0) -> None:
        super().__init__()
        self.block = mlp()
        self.threshold = threshold
        self.residual: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.residual is not None and (x.abs().mean() < self.threshold).item():
            return x + self.residual
        self.residual = self.block(x) - x
        return x + self.residual


class Parent(nn.Module):
    """Calls its expert's ``forward`` directly, as policies do."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert.forward(x) + 1


class Fragile(nn.Module):
    """Raises in chosen executions of ``forward``; eager runs and captures both count as one.

    The count lives outside of the module: state of the module would be a reason of its own.
    """

    runs: dict[str, int] = {}  # noqa: RUF012 (shared on purpose)

    def __init__(self, name: str, fail_at: tuple[int, ...] = (), error: type[BaseException] = RuntimeError) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.name, self.fail_at, self.error = name, fail_at, error
        self.runs[name] = 0
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.runs[self.name] += 1
        if self.runs[self.name] in self.fail_at:
            raise self.error(f"run {self.runs[self.name]} fails")
        return y.relu()


class Tagged(torch.Tensor):
    """A subclass that adds nothing but its name."""
