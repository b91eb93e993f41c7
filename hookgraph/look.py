"""One look at each call of a list: all that forbids a graph, and what a graph would rely on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hookgraph import audit, contrast, guards, signature, tree
from hookgraph.ahead import Arguments, copy_of
from hookgraph.audit import Audit, Findings, source_line, watch
from hookgraph.errors import HookgraphError
from hookgraph.private_torch import ThreadPatch, compiled_part, storage_key
from hookgraph.reasons import Fallback, FallbackReason
from hookgraph.signature import Call, Signature
from hookgraph.stats import plural


class Look:
    """Watch each call of a list once, and remember what was seen.

    Args:
        model: In the state in which the calls are to be made; they change it.
        calls: Each is made with a copy of its own.
        hint: What may be wrong with the calls, for the error.

    Raises:
        HookgraphError: The model itself raises.
    """

    def __init__(self, model: nn.Module, calls: list[Arguments], hint: str = "") -> None:
        self.blockers: Counter[Fallback] = Counter()  # in how many calls
        self.signatures: list[Signature] = []
        self.lengthened: list[str] = []  # arguments in which the forward makes a tensor longer
        self._moves: dict[str, None] = {}
        self._written: dict[str, None] = {}
        self._side: dict[str, None] = {}
        self._random = False
        self._constants = 0
        for index, given in enumerate(calls):
            try:
                self._watch(model, given)
            except Exception as error:
                place = audit.place_of(error)
                parts = [audit.said(error), f", at {place}" if place else "", f". {hint}" if hint else ""]
                raise HookgraphError(f"calls[{index}]: the model itself raises {''.join(parts)}") from error

    def _watch(self, model: nn.Module, given: Arguments) -> None:
        args, kwargs = copy_of(given, model)
        home = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
        call = signature.read(args, kwargs, home)
        if isinstance(call, Fallback):  # the rehearsal names it
            model(*args, **kwargs)
            return
        found = _EveryFinding()
        compiled = compiled_part(model) is not None
        # From the last to the first, so that the first of two arguments in one memory is the one that is named.
        arguments = {storage_key(call.leaves[position]): position for position in reversed(call.tensors)}
        watching = Audit(call.device, arguments, guards.own_tensors(model), compiled)
        watching.findings = found
        moves: dict[str, None] = {}
        with watch(watching), _noted_moves(moves, call.device.type == "cpu" and not compiled):
            output = model(*args, **kwargs)
        watching.finish((output, args, kwargs))
        blockers = [*found.every, *([found.blocker] if found.blocker else [])]
        self.blockers.update(dict.fromkeys(blockers, 1))
        places = [blocker.detail.partition(": ")[0] for blocker in blockers]
        self._moves.update(dict.fromkeys(place for place in moves if place not in places))
        self._compare(call, signature.read(args, kwargs, home))
        self._add(model, call, found)

    def _compare(self, before: Call, after: Call | Fallback) -> None:
        self.signatures.append(signature.of(before, ()))
        if isinstance(after, Call):
            longer = contrast.lengthened(self.signatures[-1], signature.of(after, ()))
            self.lengthened += [path for path in longer if path not in self.lengthened]

    def _add(self, model: nn.Module, call: Call, found: Findings) -> None:
        paths = tree.paths(call.spec)
        names = {storage_key(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        written = [paths[position] for position in sorted(found.written_arguments)]
        self._written.update(dict.fromkeys(map(contrast.argument_of, written)))
        self._written.update(dict.fromkeys(names.get(key, "a tensor from outside") for key in found.written_outside))
        self._side.update(dict.fromkeys(found.side_lines[key] for key in found.side))
        self._random |= found.draws_random_numbers
        self._constants = max(self._constants, len(found.constants.on_host))

    def notes(self) -> Iterator[str]:
        """What graphs of these calls would rely on; each place once, in the order of its first use."""
        if self._written:
            yield f"It writes in place to {', '.join(self._written)}: a replay does so, too"
        if self._side:
            places = ", ".join(self._side)
            yield f"It reads tensors that it was not given and that are no buffers, guarded by their places: {places}"
        if self._random:
            yield "It draws random numbers from the default generator: a replay advances it as eager does"
        if self._constants:
            yield f"It copies {plural(self._constants, 'constant')} from the host: a graph keeps them on the device"
        if self._moves:
            places = ", ".join(self._moves)
            yield f"It moves a tensor to the CPU, which is nothing here and a read_back on a GPU: {places}"


class _EveryFinding(Findings):
    """Keeps all that forbids a graph, where the audit of a warm-up needs the first only.

    One for each line: what an f-string shows of a tensor, say, arrives as several operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.every: list[Fallback] = []
        self._lines: set[tuple[FallbackReason, str]] = set()

    def block(self, reason: FallbackReason, what: str) -> None:
        line = (reason, source_line())
        if line not in self._lines:
            self._lines.add(line)
            self.every.append(Fallback(reason, f"{line[1]}: {what}"))
        super().block(reason, what)


# -- moves to the CPU, which a rehearsal there does not see ---------------------------------------

_noting = threading.local()


def _tell(names_the_host: Callable[..., bool]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def tell(*args: Any, **kwargs: Any) -> Any:
            if names_the_host(*args, **kwargs):
                _noting.moves[source_line()] = None
            return original(*args, **kwargs)

        return tell

    return replace


def _says_cpu(_: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """Whether the word stands there: ``to(x.device)`` names a device, too, and stays on it."""
    return any(type(value) is str and value == "cpu" for value in (*args, *kwargs.values()))


_moves = ThreadPatch(torch.Tensor, {"cpu": _tell(lambda *args, **kwargs: True), "to": _tell(_says_cpu)})


@contextmanager
def _noted_moves(found: dict[str, None], wanted: bool) -> Iterator[None]:
    """Collect the lines that move a tensor to the CPU.

    Args:
        wanted: Whether to do so at all: on another device the audit sees them, and compiled code may not be
            traced through our functions.

    Restores: the methods of ``torch.Tensor``, once no thread looks any more.
    """
    if not wanted:
        yield
        return
    before = getattr(_noting, "moves", None)
    _noting.moves = found
    try:
        with _moves.active():
            yield
    finally:
        _noting.moves = before
