"""CUDA-graph speed for any PyTorch module at inference, without touching its source."""

from hookgraph.attach import Attachment, attach, detach, is_attached, stats
from hookgraph.clone_io import CloneIO, clone_io
from hookgraph.containers import register_container
from hookgraph.diagnosis import Diagnosis
from hookgraph.doctor import diagnose
from hookgraph.errors import AttachError, CaptureError, FallbackError, HookgraphError, HookgraphWarning
from hookgraph.explain import Explanation
from hookgraph.reasons import FallbackReason
from hookgraph.recorder import record_calls
from hookgraph.recording import CallRecord, Recording
from hookgraph.signature import Signature
from hookgraph.stats import ModuleStats, SignatureStats, Stats
from hookgraph.switch import disabled

__version__ = "0.1.0"

__all__ = [
    "AttachError",
    "Attachment",
    "CallRecord",
    "CaptureError",
    "CloneIO",
    "Diagnosis",
    "Explanation",
    "FallbackError",
    "FallbackReason",
    "HookgraphError",
    "HookgraphWarning",
    "ModuleStats",
    "Recording",
    "Signature",
    "SignatureStats",
    "Stats",
    "__version__",
    "attach",
    "clone_io",
    "detach",
    "diagnose",
    "disabled",
    "is_attached",
    "record_calls",
    "register_container",
    "stats",
]
