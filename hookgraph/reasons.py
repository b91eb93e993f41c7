"""Why a call ran eager: one word to count, a meaning, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FallbackReason(StrEnum):
    """A reason for which a call runs eager.

    The value is the name under which it is counted; ``meaning`` says what was seen and
    ``remedy`` what a user can do.

    Example:
        >>> FallbackReason.LIMIT.value
        'limit'
    """

    meaning: str
    remedy: str

    def __new__(cls, value: str, meaning: str, remedy: str) -> FallbackReason:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        member.remedy = remedy
        return member

    # The caller or the surroundings ask for eager.
    DISABLED = "disabled", "inside hookgraph.disabled()", "leave the context to use graphs again"
    PAUSED = "paused", "inside handle.paused()", "leave the context to use graphs again"
    TRAINING = "training", "the module is in training mode", "call module.eval() for inference"
    NEEDS_GRAD = (
        "needs_grad", "gradients are enabled and an argument or a parameter requires them",
        "call it under torch.no_grad() or torch.inference_mode()",
    )  # fmt: skip
    TRACING = "tracing", "torch.jit, torch.fx or a functorch transform is at work", "nothing to do"
    MODE_ACTIVE = (
        "mode_active", "a torch function or dispatch mode watches this call (a profiler, FLOP counter or fake tensors)",
        "leave the mode: a replay would hide the operators from it",
    )  # fmt: skip
    CAPTURING = (
        "capturing", "another capture is under way on this stream, and would swallow ours",
        "nothing to do: the outer capture records the plain forward",
    )  # fmt: skip
    BUSY = (
        "busy", "another thread is warming up or capturing this signature right now",
        "nothing to do: it is short; warm up before threads start to avoid it",
    )  # fmt: skip
    FOREIGN_MODULE = (
        "foreign_module", "the call runs for a replica or with swapped parameters, not for the attached module",
        "attach to the replica itself",
    )  # fmt: skip
    DISPLACED = (
        "displaced", "another library replaced the module's forward and does not call ours",
        "detach(), apply the other library first, then attach()",
    )  # fmt: skip

    # The arguments.
    UNSUPPORTED_ARGUMENT = (
        "unsupported_argument", "an argument is an object whose contents are not known",
        "pass tensors, numbers, strings or containers of these, or use register_container()",
    )  # fmt: skip
    TENSOR_KIND = (
        "tensor_kind", "a tensor argument is a subclass, sparse, quantized, or overlaps itself",
        "pass a plain strided torch.Tensor",
    )  # fmt: skip
    HOST_TENSOR = (
        "host_tensor", "a tensor on the CPU takes part in a forward on another device",
        "move it to the module's device before the call",
    )  # fmt: skip
    MIXED_DEVICES = "mixed_devices", "tensors live on more than one device", "move arguments to the module's device"
    NO_DEVICE = (
        "no_device",
        "neither the module nor the arguments have a device that the backend serves",
        "use backend='auto', or move the module",
    )
    ALIASED_ARGUMENTS = (
        "aliased_arguments", "the forward writes to an argument whose memory another argument shares",
        "pass separate tensors",
    )  # fmt: skip
    BATCH_SIZE = "batch_size", "the batch is larger than max_batch_size", "raise max_batch_size, or split the batch"
    LIMIT = "limit", "max_graphs signatures are retained already", "raise max_graphs, or pad inputs to fewer shapes"
    MEMORY = "memory", "retaining another graph would pass max_bytes", "raise max_bytes"
    NOT_WORTH_IT = (
        "not_worth_it", "a replay is not min_speedup times as fast as eager, and the graph was dropped",
        "lower min_speedup; where the device is busy already, a graph buys nothing",
    )  # fmt: skip
    SCALAR_CHURN = (
        "scalar_churn", "a number that is not a tensor changes from call to call",
        "pass it as a tensor on the module's device",
    )  # fmt: skip

    # The forward.
    READ_BACK = (
        "read_back", "the forward reads a device value back to the host",
        "keep the value on the device (torch.where), print it elsewhere, or attach to the submodules around it",
    )  # fmt: skip
    HOST_COPY = (
        "host_copy", "the forward copies a tensor from the host to the device",
        "make the tensor once and keep it on the device",
    )  # fmt: skip
    CHANGES_STATE = (
        "changes_state", "the forward changes Python state of the module on each call",
        "keep the state in a buffer that is written in place, or attach to submodules",
    )  # fmt: skip
    SIDE_TENSOR = (
        "side_tensor", "the forward reads a tensor that reaches it neither as an argument nor from the module",
        "make it a buffer of the module, or pass it as an argument",
    )  # fmt: skip
    GENERATOR = (
        "generator", "random numbers are drawn from a generator of the user's own",
        "draw outside and pass the tensor, or use the default generator",
    )  # fmt: skip
    COLLECTIVE = (
        "collective", "the forward talks to other processes",
        "attach to submodules without collectives",
    )  # fmt: skip
    HIGHER_ORDER = (
        "higher_order", "the forward uses a higher-order operator (cond, while_loop, flex_attention), inside which nothing can be watched",
        "compile the part that uses it, which the cuda backend can capture, or attach to the parts around it",
    )  # fmt: skip
    OUTPUT_KIND = (
        "output_kind", "the output holds something that cannot be rebuilt after a replay",
        "return tensors, numbers and containers of these",
    )  # fmt: skip
    CHILD_HOOKS = (
        "child_hooks", "a submodule has forward hooks, which a replay would not run",
        "remove them, or let replays skip them with attach(..., child_hooks='ignore')",
    )  # fmt: skip
    FOREIGN_HOOK = (
        "foreign_hook", "another library moves, casts or caches inside the module",
        "turn that feature off for this module",
    )  # fmt: skip

    COMPILED_PART = (
        "compiled_part", "a submodule is compiled, and the tape cannot look into compiled code",
        "use the cuda backend, which captures compiled code, or rehearse without torch.compile",
    )  # fmt: skip

    # What capture and replay showed.
    CAPTURE_FAILED = "capture_failed", "the capture raised an error", "see the detail; the call got its eager value"
    INTERNAL_ERROR = (
        "internal_error", "hookgraph itself failed, beside the forward",
        "report it with the logged traceback; the call got its eager value",
    )  # fmt: skip
    PARITY = "parity", "a replay differed from eager", "report it: the signature is blocked and calls are eager"
    UNSTABLE = (
        "unstable", "the module changes between calls so often that graphs never pay",
        "avoid changing weights, adapters or flags between calls, or detach()",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fallback:
    """One reason with what was seen: an argument path, a source line, an error text."""

    reason: FallbackReason
    detail: str = ""

    def __str__(self) -> str:
        seen = f": {self.detail}" if self.detail else ""
        return f"{self.reason.value}: {self.reason.meaning}{seen} ({self.reason.remedy})"
