"""Run a model case on both sides of the parity harness, as its own driver would; needs no pytest."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.cases import ZooCase
from tests.parity import Both, Twins


def run_case(
    case: ZooCase, device: Any = "cpu", dtype: torch.dtype = torch.float32, kind: type[Twins] = Twins, **options: Any
) -> Twins:
    """Every call of a case, with what the driver does between calls; the twins are not finished yet."""
    eager, attached = case.build(device, dtype), case.build(device, dtype)
    twins = kind(eager.module, attached.module, **{"max_graphs": case.max_graphs} | options)
    entry = twins.modules if eager.entry == "__call__" else twins.modules.map(lambda module: module.forward)
    for (args, kwargs), (attached_args, attached_kwargs) in zip(eager.calls, attached.calls, strict=True):
        twins.run(
            entry,
            *map(Both, args, attached_args),
            **{name: Both(kwargs[name], attached_kwargs[name]) for name in kwargs},
        )
        twins.apply(Both(eager.after, attached.after))
    return twins
