"""CUDA-graph speed for any PyTorch module at inference, without touching its source."""

from hookgraph.attach import Attachment, attach, detach, is_attached, stats
from hookgraph.containers import register_container
from hookgraph.errors import AttachError, CaptureError, FallbackError, HookgraphError, HookgraphWarning
from hookgraph.reasons import FallbackReason
from hookgraph.signature import Signature
from hookgraph.stats import ModuleStats, SignatureStats, Stats
from hookgraph.switch import disabled

__version__ = "0.1.0"

__all__ = [
    "AttachError",
    "Attachment",
    "CaptureError",
    "FallbackError",
    "FallbackReason",
    "HookgraphError",
    "HookgraphWarning",
    "ModuleStats",
    "Signature",
    "SignatureStats",
    "Stats",
    "__version__",
    "attach",
    "detach",
    "disabled",
    "is_attached",
    "register_container",
    "stats",
]
