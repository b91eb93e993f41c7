"""Counts, reasons and retained bytes of attached modules, frozen at one moment."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hookgraph.errors import HookgraphError
from hookgraph.frames import frame
from hookgraph.worth import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

STATS_SCHEMA = 3  # raised whenever a field is added, removed or changes its meaning

_MIB = 1 << 20
_OUTCOMES = ("warmups", "captures", "replays", "eager", "errors")


class Shown:
    """Shows itself as a table: ``rich.print(x)``, ``print(x)``, or the last line of a notebook cell."""

    __slots__ = ()

    # rich is imported when something is shown, so that a service that only reads numbers never loads it.
    def __rich__(self) -> object:
        from hookgraph import tables

        return tables.view(self)

    def __str__(self) -> str:
        from hookgraph import tables

        return tables.render_text(self)

    def _repr_mimebundle_(
        self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None, **_: object
    ) -> dict[str, str]:
        from hookgraph import tables

        return tables.mimebundle(self, include, exclude)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureStats:
    """Count what became of the calls of one signature.

    Args:
        summary: the arguments in one line, such as ``hidden_states bf16 (1,256,64)``.
        state: ``"warm"``, ``"captured"``, ``"trusted"`` or ``"blocked"``.
        detail: why it is blocked, else empty.
        input_bytes: retained static inputs.
        output_bytes: retained static outputs.
        capture_ns: time that the capture took; None before it.
        nodes: operators on the tape; None where the backend does not know.
        eager_ms: the shortest time that the call took eager while its graph was compared with it, the longer of
            the host's and the device's; None before the graph is trusted.
        replay_ms: the same of a replay.
        verdict: ``"worth it"``, ``"not worth it"`` (less than 5 % faster), ``"rehearsal"`` (the tape promises no
            speed) or ``"not measured"``.
    """

    summary: str
    state: str
    calls: int
    warmups: int
    captures: int
    replays: int
    eager: int
    errors: int
    detail: str = ""
    input_bytes: int = 0
    output_bytes: int = 0
    capture_ns: int | None = None
    nodes: int | None = None
    eager_ms: float | None = None
    replay_ms: float | None = None
    verdict: str = Verdict.UNKNOWN.value

    @property
    def speedup(self) -> float | None:
        """How many times as fast as eager a replay is; None where it was not measured."""
        return self.eager_ms / self.replay_ms if self.eager_ms is not None and self.replay_ms else None

    @property
    def bytes_per_ms_saved(self) -> float | None:
        """What a saved millisecond costs in static inputs and outputs; None where nothing is saved."""
        if self.eager_ms is None or self.replay_ms is None or self.eager_ms <= self.replay_ms:
            return None
        return (self.input_bytes + self.output_bytes) / (self.eager_ms - self.replay_ms)

    @property
    def saved_ms(self) -> float:
        """What the replays saved in all, by these times."""
        if self.eager_ms is None or self.replay_ms is None:
            return 0.0
        return self.replays * (self.eager_ms - self.replay_ms)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModuleStats(Shown):
    """Count what became of the calls of one attached module.

    Args:
        name: qualified name in the model; empty for the model itself.
        backend: ``"cuda"`` or ``"tape"``.
        reasons: how many calls ran eager, by reason.
        details: for each reason, examples of what was seen and how often.
        invalidations: how often retained graphs were given up because the module changed.
        bytes: static inputs, static outputs and what of the pool belongs to this module alone.
        unretained: signatures that ``max_graphs`` kept out, each with its calls, the most frequent first; beyond 32
            the others are one entry, the last.
        varied: for each path, in how many calls it differed from the nearest retained signature, of those that ran
            eager for ``limit`` or ``scalar_churn``.
    """

    name: str
    class_name: str
    backend: str
    calls: int
    warmups: int
    captures: int
    replays: int
    eager: int
    errors: int
    reasons: dict[str, int] = field(default_factory=dict)
    details: dict[str, dict[str, int]] = field(default_factory=dict)
    invalidations: int = 0
    bytes: int = 0
    signatures: tuple[SignatureStats, ...] = ()
    unretained: tuple[tuple[str, int], ...] = ()
    varied: dict[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name; for the model itself, that of its class."""
        return self.name or self.class_name

    @property
    def balanced(self) -> bool:
        """Whether every call has one outcome, and every eager one a reason."""
        return _balances(self)

    def __repr__(self) -> str:
        return f"ModuleStats({self.label}: {_counts_line(self)}; {_holdings(self.signatures, self.bytes)})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Stats(Shown):
    """Count what became of every call of the attached modules.

    ``print(stats)`` and a notebook show it as a table; ``to_dict()`` gives it to a service.

    Args:
        reasons: how many calls ran eager, by reason, the most frequent first.
        bytes: everything retained: static inputs, static outputs, pool.
        pool_bytes: the part of ``bytes`` that the modules share.
        modules: one entry for each attached module.

    Example:
        >>> Stats.of([])
        Stats(0 calls; 0 modules, 0 signatures, 0.00 MiB)
    """

    calls: int
    warmups: int
    captures: int
    replays: int
    eager: int
    errors: int
    reasons: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    pool_bytes: int = 0
    modules: tuple[ModuleStats, ...] = ()

    @classmethod
    def of(cls, modules: Iterable[ModuleStats], pool_bytes: int = 0) -> Stats:
        """Sum the modules; ``pool_bytes`` is what they share and none of them counts."""
        modules = tuple(modules)
        reasons: Counter[str] = Counter()
        for module in modules:
            reasons.update(module.reasons)
        return cls(
            calls=sum(module.calls for module in modules),
            warmups=sum(module.warmups for module in modules),
            captures=sum(module.captures for module in modules),
            replays=sum(module.replays for module in modules),
            eager=sum(module.eager for module in modules),
            errors=sum(module.errors for module in modules),
            reasons=dict(reasons.most_common()),
            bytes=sum(module.bytes for module in modules) + pool_bytes,
            pool_bytes=pool_bytes,
            modules=modules,
        )

    @property
    def balanced(self) -> bool:
        """Whether every call has one outcome, and every eager one a reason; in each module as well."""
        return _balances(self) and all(module.balanced for module in self.modules)

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain dicts, lists, strings and ints, with the ``schema`` they follow."""
        return {"schema": STATS_SCHEMA} | asdict(self) | {"modules": list(map(_module_to_dict, self.modules))}

    def to_json(self, indent: int | None = None) -> str:
        """Give ``to_dict()`` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_frame(self, rows: str = "signatures") -> Any:
        """Give the counts as a ``pandas.DataFrame``.

        Args:
            rows: ``"signatures"`` for one row a signature, or ``"modules"`` for one row a module.

        Raises:
            HookgraphError: pandas is not installed, or ``rows`` is something else.
        """
        if rows not in ("signatures", "modules"):
            raise HookgraphError(f"to_frame(rows={rows!r}): one row is one of 'signatures' or 'modules'")
        if rows == "modules":
            modules = [{"module": module.label, **asdict(module)} for module in self.modules]
            return frame([{name: module[name] for name in _MODULE_COLUMNS} for module in modules], _MODULE_COLUMNS)
        signatures = [
            {"module": module.label, **asdict(signature), "speedup": signature.speedup}
            for module in self.modules
            for signature in module.signatures
        ]
        return frame(signatures, ["module", *SignatureStats.__dataclass_fields__, "speedup"])

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Stats:
        """Read what ``to_dict()`` gave.

        Raises:
            HookgraphError: the data follow another schema, or are not stats at all.
        """
        schema = data.get("schema")
        if schema != STATS_SCHEMA:
            newer = isinstance(schema, int) and schema > STATS_SCHEMA
            raise HookgraphError(
                f"stats: cannot read schema {schema!r}, this version reads {STATS_SCHEMA}. "
                + ("Upgrade hookgraph" if newer else "Read it with the hookgraph that wrote it")
                + ", or record it again."
            )
        try:
            fields = {key: value for key, value in data.items() if key != "schema"}
            _check_counts(fields)
            return cls(**fields | {"modules": tuple(map(_module_from_dict, fields["modules"]))})
        except (KeyError, TypeError) as error:
            raise HookgraphError(f"stats: not what to_dict() gives for schema {STATS_SCHEMA}: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Stats:
        """Read what ``to_json()`` gave.

        Raises:
            HookgraphError: as ``from_dict``, or the text is not a JSON object.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise HookgraphError(f"stats: not JSON: {error}") from error
        if not isinstance(data, dict):
            raise HookgraphError(f"stats: a JSON object is expected, not a {type(data).__name__}")
        return cls.from_dict(data)

    def __repr__(self) -> str:
        signatures = [signature for module in self.modules for signature in module.signatures]
        modules = plural(len(self.modules), "module")
        return f"Stats({_counts_line(self)}; {modules}, {_holdings(signatures, self.bytes)})"


_MODULE_COLUMNS = ["module", "class_name", "backend", "calls", *_OUTCOMES, "invalidations", "bytes"]


def format_mib(size: int) -> str:
    """Write a number of bytes in MiB, without the unit."""
    return f"{size / _MIB:,.2f}"


def _balances(counted: Stats | ModuleStats) -> bool:
    outcomes = sum(getattr(counted, outcome) for outcome in _OUTCOMES)
    return counted.calls == outcomes and counted.eager == sum(counted.reasons.values())


def _counts_line(counted: Stats | ModuleStats) -> str:
    """``40 calls = 2 warmups + 2 captures + 36 replays``; outcomes that never happened are left out."""
    shown = [f"{getattr(counted, outcome)} {outcome}" for outcome in _OUTCOMES if getattr(counted, outcome)]
    calls = plural(counted.calls, "call")
    return f"{calls} = {' + '.join(shown)}" if shown else calls


def _holdings(signatures: Iterable[SignatureStats], size: int) -> str:
    return f"{plural(len(tuple(signatures)), 'signature')}, {format_mib(size)} MiB"


def plural(count: int, noun: str) -> str:
    """``1 call``, ``2 calls``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _check_counts(data: Mapping[str, Any]) -> None:
    """Raise TypeError for a count that is no whole number, in stats or in what they hold."""
    for name in ("calls", *_OUTCOMES, "bytes"):
        if name in data and type(data[name]) is not int:
            raise TypeError(f"{name} is {data[name]!r}, not a whole number")
    for inner in (*data.get("modules", ()), *data.get("signatures", ())):
        _check_counts(inner)


def _module_to_dict(module: ModuleStats) -> dict[str, Any]:
    lists = {
        "signatures": [asdict(s) for s in module.signatures],
        "unretained": [list(pair) for pair in module.unretained],
    }
    return asdict(module) | lists


def _module_from_dict(data: Mapping[str, Any]) -> ModuleStats:
    signatures = tuple(SignatureStats(**signature) for signature in data["signatures"])
    unretained = tuple((summary, calls) for summary, calls in data["unretained"])
    return ModuleStats(**{**data, "signatures": signatures, "unretained": unretained})
