"""What ``max_graphs`` kept out: which signatures, how often, and in which arguments they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hookgraph import explain
from hookgraph.reasons import Fallback, FallbackReason
from hookgraph.signature import Signature
from hookgraph.words import names_in

_MOST_SIGNATURES = 32  # beyond these calls are only counted: shapes that never come back need no list
_MOST_PATHS = 64
OTHERS = "(further signatures)"


class _Seen:
    __slots__ = ("calls", "paths", "summary")

    def __init__(self, summary: str, paths: tuple[str, ...]) -> None:
        self.summary, self.paths, self.calls = summary, paths, 0


class Unretained:
    """Counts the calls that ran eager because their signature was not retained; holds no tensors.

    Cost: one look into a dict for each such call, and a comparison with the retained signatures for
    the first call of each.
    """

    def __init__(self) -> None:
        self._seen: dict[Signature, _Seen] = {}
        self._others = 0
        self._churned: Counter[str] = Counter()

    def note(self, fallback: Fallback, signature: Signature, retained: Iterable[Signature]) -> None:
        """Count one call, if it ran eager for want of a place.

        Args:
            fallback: Why the call ran eager; for numbers that change, its detail names their paths.
            signature: That of the call.
            retained: The signatures that have a place.
        """
        if fallback.reason is FallbackReason.SCALAR_CHURN:
            for path in names_in(fallback.detail):
                if path in self._churned or len(self._churned) < _MOST_PATHS:
                    self._churned[path] += 1
        elif fallback.reason is FallbackReason.LIMIT:
            seen = self._seen.get(signature)
            if seen is None and len(self._seen) < _MOST_SIGNATURES:
                nearest = explain.nearest(signature, retained)
                paths = dict.fromkeys(one.path for one in nearest[1]) if nearest is not None else {}
                seen = self._seen[signature] = _Seen(signature.summary(), tuple(paths))
            if seen is None:
                self._others += 1
            else:
                seen.calls += 1

    def signatures(self) -> tuple[tuple[str, int], ...]:
        """Each signature that found no place, with its calls, the most frequent first; then the rest as one."""
        counted = sorted(((seen.summary, seen.calls) for seen in self._seen.values()), key=lambda pair: -pair[1])
        return (*counted, *([(OTHERS, self._others)] if self._others else []))

    def varied(self) -> dict[str, int]:
        """In how many of these calls each path differed from the nearest retained signature."""
        counts = Counter(self._churned)
        for seen in self._seen.values():
            counts.update(dict.fromkeys(seen.paths, seen.calls))
        return dict(counts.most_common(_MOST_PATHS))
