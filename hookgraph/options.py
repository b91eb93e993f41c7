"""The options of ``attach``, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hookgraph.errors import AttachError

_CHOICES = {
    "outputs": ("clone", "view"),
    "child_hooks": ("refuse", "ignore"),
    "on_fallback": ("ignore", "warn", "raise"),
    "backend": ("auto", "cuda", "tape"),
    "guards": ("full", "weights", "off"),
}
_LEAST = {"max_graphs": 1, "max_batch_size": 1, "max_bytes": 0, "warmup": 1, "verify": 0, "verify_every": 1}
_MAY_BE_NONE = {"max_batch_size", "max_bytes", "verify_every"}


@dataclass(frozen=True, slots=True)
class Options:
    """How one attachment behaves; see ``attach`` for each."""

    max_graphs: int = 4
    max_batch_size: int | None = None
    max_bytes: int | None = None
    min_speedup: float | None = None
    warmup: int = 1
    verify: int = 1
    verify_every: int | None = None
    guards: str = "full"
    outputs: str = "clone"
    child_hooks: str = "refuse"
    on_fallback: str = "ignore"
    backend: str = "auto"
    read_only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise AttachError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if type(value) is not int or value < least:
                allowed_none = " or None" if name in _MAY_BE_NONE else ""
                raise AttachError(f"{name}={value!r}: expected an int of at least {least}{allowed_none}")

        if self.min_speedup is not None:
            if type(self.min_speedup) not in (int, float) or not 0 < self.min_speedup < float("inf"):
                raise AttachError(f"min_speedup={self.min_speedup!r}: expected a positive number, such as 1.1, or None")
            if not self.verify:
                raise AttachError(
                    "min_speedup needs verify=1 or more: graphs are timed while they are compared with eager"
                )
        if not all(type(name) is str for name in self.read_only):
            raise AttachError(
                f"read_only={self.read_only!r}: expected names of arguments, such as ('past_key_values',)"
            )

    def differences(self, other: Options) -> str:
        """Each option in which two differ, in words."""
        pairs: list[tuple[str, Any, Any]] = [
            (spec.name, getattr(self, spec.name), getattr(other, spec.name)) for spec in fields(self)
        ]
        return ", ".join(f"{name}={mine!r} here, {theirs!r} there" for name, mine, theirs in pairs if mine != theirs)
