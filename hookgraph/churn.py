"""Numbers that change from call to call: noticed, named, and kept from eating the bound."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hookgraph import tree
from hookgraph.signature import Signature
from hookgraph.words import first_few

_MOST_SKELETONS = 64  # bounds the memory of a module that sees ever new shapes


@dataclass(slots=True)
class _Record:
    churning: bool = False
    replaced: int = 0
    last: Signature | None = None
    calls: int = 0
    changed: dict[int, int] = field(default_factory=dict)  # by position: in how many calls another value came


class ScalarChurn:
    """Watches signatures that differ from each other only in Python values.

    Args:
        patience: How many values may come and go without any coming back.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._records: OrderedDict[Any, _Record] = OrderedDict()

    def repeated(self, signature: Signature) -> None:
        """Note that a signature came back: its values do recur."""
        record = self._records.get(signature.skeleton) if signature.scalars else None
        if record is not None:
            record.replaced = 0
            record.calls += 1

    def changing_leaf(self, signature: Signature) -> str | None:
        """Where the numbers are that change on every call; None while this signature may try.

        Two equal calls in a row end the state.
        """
        if not signature.scalars:
            return None
        record = self._record(signature.skeleton)
        before, record.last = record.last, signature
        record.calls += 1
        changed = _changed(before, signature)
        for position in changed:
            record.changed[position] = record.changed.get(position, 0) + 1
        if not record.churning:
            return None
        if not changed:
            record.churning, record.replaced = False, 0
            return None
        return _named(signature, record.changed)

    def replace(self, signature: Signature, rival: Signature) -> str | None:
        """Note that ``signature`` takes the place of a rival that never came back.

        Returns:
            Where they differ, when that is one too many.
        """
        record = self._record(signature.skeleton)
        record.replaced += 1
        record.churning = record.replaced >= self._patience
        changed = record.changed or dict.fromkeys(_changed(rival, signature), 1)
        return _named(signature, changed) if record.churning else None

    def before(self, signature: Signature) -> Signature | None:
        """The last call without a graph that differs from this one at most in Python values."""
        record = self._records.get(signature.skeleton)
        return record.last if record is not None else None

    def history(self, signature: Signature) -> tuple[dict[str, int], int]:
        """How often each number changed from one call without a graph to the next, by path, and in how many calls."""
        record = self._records.get(signature.skeleton)
        if record is None:
            return {}, 0
        paths = tree.paths(signature.spec)
        return {paths[position]: count for position, count in record.changed.items()}, record.calls

    def copy(self) -> ScalarChurn:
        """Another one that knows the same."""
        other = ScalarChurn(self._patience)
        for key, record in self._records.items():
            other._records[key] = dataclasses.replace(record, changed=dict(record.changed))
        return other

    def _record(self, skeleton: Any) -> _Record:
        record = self._records.setdefault(skeleton, _Record())
        self._records.move_to_end(skeleton)
        while len(self._records) > _MOST_SKELETONS:
            self._records.popitem(last=False)
        return record


def _changed(before: Signature | None, now: Signature) -> list[int]:
    """The positions of the scalars in which two signatures of one skeleton differ."""
    if before is None:
        return []
    old = dict(before.scalars)
    return [position for position, leaf in now.scalars if old.get(position) != leaf]


def _named(signature: Signature, changed: Mapping[int, int]) -> str:
    """The first few of the numbers that change, and how many more; one that changed a while ago is left out.

    Args:
        changed: By position, in how many calls another value came.
    """
    everywhere = tree.paths(signature.spec)
    often = max(changed.values()) / 2
    return first_few([everywhere[position] for position, count in sorted(changed.items()) if count >= often])
