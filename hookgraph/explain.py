"""Why a call would not replay: how its signature differs from one that is retained, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hookgraph import ambient, private_torch, tree
from hookgraph.policy import Plan
from hookgraph.reasons import Fallback
from hookgraph.signature import Signature
from hookgraph.stats import Shown

_STRUCTURE_WEIGHS = 1000  # another structure is further away than any number of other shapes
_OFTEN = 3  # changes of a number before it is called one that changes from call to call


_PLANS = {
    Plan.WARM_UP: "warm up, a watched eager call",
    Plan.CAPTURE: "be captured; the next ones like it replay",
    Plan.REPLAY: "replay its graph",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two signatures differ.

    Args:
        path: Where: an argument such as ``kwargs['x'][0]``, or a setting such as ``grad mode``.
        aspect: What of it: ``dim 1``, ``dtype``, ``strides``, ``structure``; empty for its value.
        here: How this call has it.
        there: How the signature that it is compared with has it.
        hint: What to do about it, where that is known.
    """

    path: str
    aspect: str
    here: str
    there: str
    hint: str = ""

    def words(self, against: str = "captured") -> str:
        """One line for people."""
        where = f"{self.path} {self.aspect}".strip()
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}: {self.here} here, {self.there} {against}{hint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Shown):
    """Foretell what a call would do: the plan, the reason, and each difference from what is retained.

    Args:
        module: Name of the attached module; its class for the model itself.
        plan: ``"replay"``, ``"capture"``, ``"warm up"`` or ``"eager"``.
        fallback: Why it would run eager; None otherwise.
        change: What has changed in the module since the graph, or the warm-up, of this signature.
        signature: The call in one line; empty where it has no signature.
        nearest: The retained signature that is most like it; empty where it is itself retained, or
            nothing is.
        against: What became of the nearest one: ``"captured"``, ``"warmed up"`` or ``"in the call before"``.
        differences: In what the two differ.
        changing: Numbers among its arguments that changed from call to call, and how often, in words.

    Example:
        >>> import torch, hookgraph
        >>> model = torch.nn.Linear(4, 4).eval()
        >>> with torch.no_grad(), hookgraph.attach(model) as handle:
        ...     out = model(torch.ones(2, 4)), model(torch.ones(2, 4))
        ...     print(handle.explain(torch.ones(1, 4)))
        Linear: this call would warm up, a watched eager call.
        It differs from the nearest signature, args[0] float32[2, 4], in:
          args[0] dim 0: 1 here, 2 captured (pad to 2?)
    """

    module: str
    plan: Plan
    fallback: Fallback | None = None
    change: str | None = None
    signature: str = ""
    nearest: str = ""
    against: str = ""
    differences: tuple[Difference, ...] = ()
    changing: tuple[str, ...] = ()

    @property
    def would_replay(self) -> bool:
        """Whether the call would be served from a graph that exists."""
        return self.plan is Plan.REPLAY

    def __str__(self) -> str:
        lines = [f"{self.module}: this call would {self._headline()}"]
        if self.differences:
            lines.append(f"It differs from the nearest signature, {self.nearest}, in:")
            lines += [f"  {difference.words(self.against)}" for difference in self.differences]
        hinted = tuple(f"{difference.path} " for difference in self.differences if difference.hint)
        untold = [words for words in self.changing if not words.startswith(hinted)]
        if self.plan is Plan.WARM_UP and untold:
            lines.append("These values would be one more signature; pass as a tensor what changes:")
            lines += [f"  {words}" for words in untold]
        return "\n".join(lines)

    def _headline(self) -> str:
        changed = f" The module changed: {self.change}." if self.change is not None else ""
        if self.fallback is not None:
            return f"run eager. {self.fallback}.{changed}"
        return f"{_PLANS[self.plan]}.{changed}"

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain dicts, lists and strings."""
        data = asdict(self) | {"plan": self.plan.value, "differences": [asdict(one) for one in self.differences]}
        data["changing"] = list(self.changing)
        if self.fallback is not None:
            reason = self.fallback.reason
            data["fallback"] = {"reason": reason.value, "detail": self.fallback.detail, "remedy": reason.remedy}
        return data


def with_history(found: Iterable[Difference], changes: Mapping[str, int], calls: int) -> tuple[Difference, ...]:
    """Say of each number that keeps changing how often it did.

    Args:
        changes: For the path of a number, in how many of ``calls`` it was not what it was before.
    """
    often = _often(changes, calls)
    return tuple(
        replace(one, hint=f"{often[one.path]}; pass it as a tensor") if one.path in often else one for one in found
    )


def changing(changes: Mapping[str, int], calls: int) -> tuple[str, ...]:
    """Each number that keeps changing, and how often it did, in words; the arguments are as of ``with_history``.

    Example:
        >>> changing({"args[1]": 9, "args[2]": 1}, calls=10)
        ('args[1] changed in 9 of 10 calls without a graph',)
    """
    return tuple(f"{path} {words}" for path, words in _often(changes, calls).items())


def _often(changes: Mapping[str, int], calls: int) -> dict[str, str]:
    return {
        path: f"changed in {count} of {calls} calls without a graph"
        for path, count in changes.items()
        if count >= _OFTEN
    }


# -- comparing two signatures -----------------------------------------------------------------------


def nearest(here: Signature, others: Iterable[Signature]) -> tuple[Signature, tuple[Difference, ...]] | None:
    """The signature that is most like ``here``, and in what they differ; None where there is none.

    Cost: tens of microseconds for each of the others.
    """
    compared = [(other, differences(here, other)) for other in others]
    return min(compared, key=lambda pair: _distance(pair[1])) if compared else None


def _distance(found: tuple[Difference, ...]) -> tuple[int, int]:
    """How many things differ; among equals, by how many elements the sizes do."""
    gap = sum(abs(int(one.here) - int(one.there)) for one in found if one.aspect.startswith("dim "))
    return sum(_STRUCTURE_WEIGHS if one.aspect == "structure" else 1 for one in found), gap


def differences(here: Signature, there: Signature) -> tuple[Difference, ...]:
    """Everything in which two signatures differ; empty exactly when they are equal.

    Example:
        >>> import torch
        >>> from hookgraph import signature
        >>> def of(x): return signature.of(signature.read((x,), {}, None), ())
        >>> [one.words() for one in differences(of(torch.ones(7, 4)), of(torch.ones(9, 4)))]
        ['args[0] dim 0: 7 here, 9 captured (pad to 9?)']
    """
    if here == there:
        return ()
    found = _structure(here, there)
    mine, theirs = dict(_by_path(here)), dict(_by_path(there))
    for path, leaf in mine.items():
        if path in theirs and leaf != theirs[path]:
            found += _leaf(path, leaf, theirs[path])
    extra, other_extra = here.leaves[len(mine) :], there.leaves[len(theirs) :]
    if extra != other_extra and not found:
        found.append(Difference("the arguments", "identity", "other containers are one and the same", "not so"))
    found += _surroundings(here.ambient, there.ambient)
    return tuple(found) or (Difference("the arguments", "structure", str(here.spec), str(there.spec)),)


def _by_path(signature: Signature) -> Iterable[tuple[str, Any]]:
    return zip(tree.paths(signature.spec), signature.leaves, strict=False)


def _structure(here: Signature, there: Signature) -> list[Difference]:
    """Arguments that only one of two calls has, and containers of other classes; the outermost only."""
    if here.spec == there.spec:
        return []
    mine, theirs = tree.classes(here.spec), tree.classes(there.spec)
    told: list[str] = []
    found = []
    for path in [*mine, *(path for path in theirs if path not in mine)]:
        one, other = mine.get(path, "absent"), theirs.get(path, "absent")
        if one != other and not any(_lies_in(path, outer) for outer in told):
            told.append(path)
            found.append(Difference(path, "structure", one, other))
    if not found and list(mine) != list(theirs):
        found.append(Difference("the keys of a dict", "structure", "in this order", "in another order"))
    return found


def _lies_in(path: str, outer: str) -> bool:
    return path.startswith(outer) and path[len(outer) :][:1] in ("[", ".")


def _leaf(path: str, here: Any, there: Any) -> list[Difference]:
    if here[0] == there[0] == "tensor":
        return _tensor(path, here, there)
    if here[0] == there[0] == "scalar":
        return [Difference(path, "", *_values(here, there))]
    return [Difference(path, "", _kind(here), _kind(there))]


def _tensor(path: str, here: Any, there: Any) -> list[Difference]:
    _, shape, strides, dtype, requires_grad, kind, aligned = here
    _, other_shape, other_strides, other_dtype, other_requires_grad, other_kind, other_aligned = there
    found = []
    if len(shape) != len(other_shape):
        found.append(Difference(path, "shape", str(list(shape)), str(list(other_shape))))
    else:
        for dim, (size, other) in enumerate(zip(shape, other_shape, strict=True)):
            if size != other:
                hint = f"pad to {other}?" if size < other else ""
                found.append(Difference(path, f"dim {dim}", str(size), str(other), hint))
    pairs: list[tuple[str, str, str, str]] = [
        ("dtype", _dtype(dtype), _dtype(other_dtype), f"cast it to {_dtype(other_dtype)}"),
        ("requires_grad", str(requires_grad), str(other_requires_grad), "detach() it" if requires_grad else ""),
        ("class", kind.__name__, other_kind.__name__, ""),
    ]
    if list(shape) == list(other_shape):  # with other sizes other strides say nothing of their own
        pairs.append(
            ("strides", _strides(strides), _strides(other_strides), "" if strides is None else "contiguous()?")
        )
    pairs.append(
        ("offset from aligned memory in bytes", str(aligned), str(other_aligned), "clone()?" if aligned else "")
    )
    found += [Difference(path, *pair) for pair in pairs if pair[1] != pair[2]]
    return found or [Difference(path, "layout", _strides(strides), _strides(other_strides))]


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _strides(strides: Any) -> str:
    return "contiguous" if strides is None else str(strides).replace("_", " ")


def _values(here: Any, there: Any) -> tuple[str, str]:
    """Two Python values, with their classes where these differ: 1, 1.0 and True are three."""
    one, other = _value(here), _value(there)
    if here[1] is there[1]:
        return one, other
    return f"{here[1].__name__} {one}", f"{there[1].__name__} {other}"


def _value(leaf: Any) -> str:
    """A Python value as its signature keeps it, in words."""
    kind, key = leaf[1], leaf[2]
    if kind is float:
        return repr(float.fromhex(key))
    if kind is complex:
        return repr(complex(*map(float.fromhex, key)))
    if isinstance(key, bytes) and kind is not bytes:
        return f"{kind.__name__} of other bits"
    text = repr(key)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _kind(leaf: Any) -> str:
    if leaf[0] == "tensor":
        return f"a {_dtype(leaf[3])} tensor {list(leaf[1])}"
    if leaf[0] == "host":
        return f"a CPU tensor {list(leaf[1][0])} of value {leaf[2]}"
    return "a tensor that is given twice" if leaf[0] == "same" else f"{leaf[1].__name__} {_value(leaf)}"


def _surroundings(here: tuple[Any, ...], there: tuple[Any, ...]) -> list[Difference]:
    found = []
    for name, mine, theirs in zip(ambient.PARTS, here, there, strict=False):
        if mine != theirs and name == "numerics flags":
            device = "cuda" if here[ambient.PARTS.index("current CUDA device")] is not None else "cpu"
            flags = zip(private_torch.flag_names(device), mine, theirs, strict=True)
            found += [Difference(flag, "", str(one), str(other)) for flag, one, other in flags if one != other]
        elif mine != theirs:
            found.append(Difference(name, "", _setting(mine), _setting(theirs)))
    return found


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(_dtype(part) for part in value if not isinstance(part, bool)) or "none"
    return "off" if value is None else _dtype(value)
