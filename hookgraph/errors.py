"""Every exception and warning that hookgraph raises itself.

HookgraphError(RuntimeError)
├── AttachError(ValueError)      a wrong option, target or module given to ``attach``
├── CaptureError                 a forward could not be captured
└── FallbackError                a call ran eager while ``on_fallback="raise"``
HookgraphWarning(UserWarning)    something that a user should know, once per module and reason
"""

from __future__ import annotations

import sys
import warnings


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


_PASSED_OVER = {"hookgraph", "torch"}


def warn(text: str) -> None:
    """Warn at the line that called the module: the innermost one outside of hookgraph and PyTorch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, HookgraphWarning, stacklevel=level)
