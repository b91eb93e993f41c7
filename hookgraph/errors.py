"""Every exception and warning that hookgraph raises itself.

HookgraphError(RuntimeError)
├── AttachError(ValueError)      a wrong option, target or module given to ``attach``
├── CaptureError                 a forward could not be captured
└── FallbackError                a call ran eager while ``on_fallback="raise"``
HookgraphWarning(UserWarning)    something that a user should know, once per module and reason
"""

from __future__ import annotations


class HookgraphError(RuntimeError):
    """Base class of every error that hookgraph raises itself."""


class AttachError(HookgraphError, ValueError):
    """``attach`` was given something that it cannot use; the model is untouched."""


class CaptureError(HookgraphError):
    """A forward could not be captured; it names the cause."""


class FallbackError(HookgraphError):
    """A call would have run eager while ``on_fallback="raise"``."""


class HookgraphWarning(UserWarning):
    """Something about speed or coverage that would otherwise be silent."""
