"""The error with which a command says that it cannot run as asked."""

from __future__ import annotations


class CommandError(Exception):
    """A command cannot run: a wrong combination of options, or something that is not installed."""
