"""What all dispatch modes of hookgraph do alike, before each looks at an operator in its own way."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hookgraph.errors import CaptureError
from hookgraph.operators import tensors
from hookgraph.private_torch import is_plain, taken_apart


class OperatorMode(TorchDispatchMode):
    """Sees the operators of a forward one by one; a subclass says in ``meet`` what becomes of each.

    In inference mode PyTorch hands an operator that is made of others over whole.  Where what it does inside matters, it is
    run here, inside the mode, which then sees its parts: which kernel an attention chose, what ``to`` copied.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code alone.

        Without this, Dynamo gives up on its frames for good, and the user's next call fails.
        """
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self.meet_higher_order(func, args, kwargs)
        given = tensors(args, kwargs)
        inside = taken_apart(func)
        # A tensor of another kind may have a kernel of its own for the whole.
        if inside is not None and all(map(is_plain, given)):
            with self:
                return inside(*args, **kwargs)
        return self.meet(func, args, kwargs, given)

    def meet(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """Run one operator, in whatever way.

        Args:
            given: The tensors among its arguments.
        """
        raise NotImplementedError

    def meet_higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a higher-order operator, such as ``cond``, or not: nothing sees what it does inside."""
        raise CaptureError(f"{func.name()} is a higher-order operator, which the warm-up did not see")
