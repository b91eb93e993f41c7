"""The module and the calls that a command is asked about: the user's own, or a built-in one."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from hookgraph.cli.errors import CommandError

if TYPE_CHECKING:
    from torch import nn

    from hookgraph.doctor import Calls

_WANTED = "it has to return (module, calls), calls being a list of (args, kwargs)"
_TIMESTEP = 500.0  # of 1000: the middle of a denoising loop


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--module`` to a command."""
    parser.add_argument(
        "--module",
        metavar="PACKAGE.MODULE:FACTORY",
        help="a function without arguments that returns (module, calls), calls being a list of (args, kwargs); "
        "without it a small Qwen-Image transformer",
    )


def load(address: str | None, device: torch.device | None = None) -> tuple[nn.Module, Calls]:
    """The module and the calls at an address; without one, one step of a small Qwen-Image transformer.

    Args:
        address: ``package.module:factory``.
        device: Where the built-in one is put; a factory puts its own where it likes.

    Raises:
        CommandError: There is no such thing, or it does not give what it has to.
    """
    return _load(address) if address is not None else _qwen_image(device or torch.device("cpu"))


def _load(address: str) -> tuple[nn.Module, Calls]:
    name, separator, attribute = address.partition(":")
    if not (separator and name and attribute):
        raise CommandError(f"--module {address!r}: expected PACKAGE.MODULE:FACTORY, such as my_model.cases:small")
    made = _call(address, _find(name, attribute))
    if not (isinstance(made, tuple) and len(made) == 2):
        seen = f"{len(made)} things" if isinstance(made, (tuple, list)) else f"a {type(made).__name__}"
        raise CommandError(f"{address} returned {seen}; {_WANTED}")
    return made


def _find(name: str, attribute: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with python -m: what lies in the current folder
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise CommandError(f"cannot import {name!r}: {error}. Run it where that can be imported.") from error
    except Exception as error:
        raise CommandError(f"importing {name!r} raised {type(error).__name__}: {error}") from error
    for step in attribute.split("."):
        if not hasattr(found, step):
            near = difflib.get_close_matches(step, dir(found), n=3)
            hint = f"; nearest are {', '.join(map(repr, near))}" if near else ""
            raise CommandError(f"{name} has no {attribute!r}{hint}")
        found = getattr(found, step)
    return found


def _call(address: str, factory: Any) -> Any:
    if not callable(factory):
        raise CommandError(f"{address} is a {type(factory).__name__}, not a function; {_WANTED}")
    try:
        return factory()
    except Exception as error:
        raise CommandError(f"{address}() raised {type(error).__name__}: {error}") from error


def _qwen_image(device: torch.device) -> tuple[nn.Module, Calls]:
    """One denoising step: the prompt, and the negative prompt."""
    try:
        from hookgraph.cli import qwen_image
    except ImportError as error:
        raise CommandError(f"without --module it needs diffusers: pip install 'hookgraph[models]' ({error})") from error
    job = qwen_image.build(device, steps=1)
    timestep = torch.tensor(_TIMESTEP, device=device)
    return job.transformer, [((), qwen_image.arguments(job.latents, timestep, prompt)) for prompt in job.prompts]


def positive(text: str) -> int:
    """A whole number of at least one, for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)
