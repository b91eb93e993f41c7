"""Numbers that change from call to call: noticed, named, and kept from eating the bound."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from hookgraph import tree
from hookgraph.signature import Signature

_MOST_SKELETONS = 64  # bounds the memory of a module that sees ever new shapes


class _Record:
    __slots__ = ("churning", "last", "replaced")

    def __init__(self) -> None:
        self.churning = False
        self.replaced = 0
        self.last: Signature | None = None


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

    def changing_leaf(self, signature: Signature) -> str | None:
        """Where the number is that changes on every call; None while this signature may try.

        Two equal calls in a row end the state.
        """
        if not signature.scalars:
            return None
        record = self._record(signature.skeleton)
        before, record.last = record.last, signature
        if not record.churning:
            return None
        if before is not None and before == signature:
            record.churning, record.replaced = False, 0
            return None
        return _difference(before, signature)

    def replace(self, signature: Signature) -> bool:
        """Note that ``signature`` takes the place of one that never came back.

        Returns:
            Whether that is one too many.
        """
        record = self._record(signature.skeleton)
        record.replaced += 1
        record.churning = record.replaced >= self._patience
        return record.churning

    def _record(self, skeleton: Any) -> _Record:
        record = self._records.setdefault(skeleton, _Record())
        self._records.move_to_end(skeleton)
        while len(self._records) > _MOST_SKELETONS:
            self._records.popitem(last=False)
        return record


def _difference(before: Signature | None, now: Signature) -> str:
    """The path of the first scalar in which two signatures of one skeleton differ."""
    paths = tree.paths(now.spec)
    old = dict(before.scalars) if before is not None else {}
    for position, leaf in now.scalars:
        if old.get(position) != leaf:
            return paths[position]
    return paths[now.scalars[0][0]]
