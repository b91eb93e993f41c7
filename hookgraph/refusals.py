"""What forbids a graph: of a call, of a module, of what a warm-up found, of one replay."""

from __future__ import annotations

import torch
from torch import nn

from hookgraph import foreign, guards
from hookgraph.audit import Findings
from hookgraph.backends import Backends
from hookgraph.graphs import CapturedForward, frozen_argument
from hookgraph.options import Options
from hookgraph.private_torch import storage_key
from hookgraph.reasons import Fallback, FallbackReason
from hookgraph.signature import Call
from hookgraph.state import attribute_tensors


def of_weights(module: nn.Module, home: torch.device | None) -> Fallback | None:
    """Why a module without weights in memory cannot be served: another library loads them for each call."""
    if home is None or home.type != "meta":
        return None
    feature = foreign.recognise(module)
    if feature is not None:
        return Fallback(FallbackReason.FOREIGN_HOOK, feature)
    return Fallback(FallbackReason.NO_DEVICE, "the weights are on the meta device")


def of_call(module: nn.Module, call: Call, options: Options, backends: Backends) -> Fallback | None:
    """Why this call is not for a graph, whatever was captured."""
    limit = options.max_batch_size
    if limit is not None and call.batch is not None and call.batch > limit:
        return Fallback(FallbackReason.BATCH_SIZE, f"{call.batch} > {limit}")
    if torch.is_grad_enabled():
        for tensor in (*(leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)), *module.parameters()):
            if tensor.requires_grad:
                return Fallback(FallbackReason.NEEDS_GRAD)
    elif torch.is_inference_mode_enabled() and any(key[0] == "tensor" and key[4] for key in call.keys):
        # Watched by a dispatch mode, a view of such a tensor would lose the flag.
        return Fallback(FallbackReason.NEEDS_GRAD, "an argument requires gradients, in inference mode")
    if not backends.serves(call.device):
        return Fallback(FallbackReason.NO_DEVICE, f"backend={options.backend!r} cannot serve {call.device}")
    return None


def of_module(module: nn.Module, device: torch.device, options: Options, backends: Backends) -> Fallback | None:
    """What forbids a graph of this module before any forward has been watched; the next call may find it gone."""
    if options.child_hooks == "refuse":
        hook = guards.child_hooks(module)
        if hook is not None:
            return Fallback(FallbackReason.CHILD_HOOKS, hook)
    feature = foreign.recognise(module)
    if feature is not None:
        return Fallback(FallbackReason.FOREIGN_HOOK, feature)
    refused = backends.on(device).refuses(module)
    if refused is not None:
        return refused
    devices = {tensor.device for tensor in guards.own_tensors(module).values() if tensor.device.type != "cpu"}
    if len(devices) > 1:
        return Fallback(FallbackReason.MIXED_DEVICES, "weights on " + ", ".join(sorted(map(str, devices))))
    return None


def of_findings(findings: Findings, call: Call) -> Fallback | None:
    """A tensor on the host that is keyed by value cannot be written by a replay."""
    if not call.read_only.isdisjoint(findings.written_arguments):
        what = "the forward writes in place to a tensor of a read_only argument, which cannot be dropped"
        return Fallback(FallbackReason.UNSUPPORTED_ARGUMENT, what)
    host = findings.written_arguments - set(call.tensors)
    leaves = [call.leaves[position] for position in host]
    if any(leaf.device != call.device for leaf in leaves):
        return Fallback(FallbackReason.HOST_TENSOR, "the forward writes to a tensor argument on the CPU")
    return None


def of_capture(module: nn.Module, findings: Findings, call: Call) -> Fallback | None:
    """Why copies of the arguments would not behave like the arguments."""
    storages = [storage_key(call.leaves[position]) for position in call.tensors]
    frozen = frozen_argument([call.leaves[position] for position in findings.written_arguments])
    if frozen is not None:
        return frozen
    written = [storage_key(call.leaves[position]) for position in findings.written_arguments]
    if call.shares_containers:
        return Fallback(FallbackReason.ALIASED_ARGUMENTS, "one container is given twice")
    if any(storages.count(key) > 1 for key in written) or not set(findings.written_outside).isdisjoint(storages):
        return Fallback(FallbackReason.ALIASED_ARGUMENTS)
    tensors = (*module.parameters(), *module.buffers(), *(tensor for _, _, tensor in attribute_tensors(module)))
    if not {storage_key(tensor) for tensor in tensors}.isdisjoint(storages):
        return Fallback(FallbackReason.ALIASED_ARGUMENTS, "with a tensor of the module")
    return None


def of_replay(graph: CapturedForward, call: Call) -> Fallback | None:
    """Why a graph cannot serve these arguments now, whether or not the module has changed."""
    if graph.at_work:
        return Fallback(FallbackReason.BUSY, "called from inside its own replay")
    return graph.aliasing(call.leaves)
