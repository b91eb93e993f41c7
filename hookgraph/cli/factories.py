"""The module and the calls that a command is asked about: the user's own, or a built-in one."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import os
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from hookgraph import audit, tables
from hookgraph.cli.errors import CommandError
from hookgraph.errors import HookgraphError
from hookgraph.words import with_article

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookgraph.doctor import Calls

Answer = TypeVar("Answer", bound="Any")  # has to_dict(), and a table
_WANTED = "it has to return (module, calls), calls being a list of (args, kwargs)"
_TIMESTEP = 500.0  # of 1000: the middle of a denoising loop


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--module`` to a command; its value may stand alone, too."""
    address = "PACKAGE.MODULE:FACTORY"
    parser.add_argument("address", nargs="?", metavar=address, help="the same as --module")
    parser.add_argument(
        "--module",
        metavar=address,
        help="a function without arguments that returns (module, calls), calls being a list of (args, kwargs); "
        "without it a small Qwen-Image transformer",
    )


def load(options: argparse.Namespace, device: torch.device | None = None) -> tuple[nn.Module, Calls]:
    """The module and the calls at an address; without one, one step of a small Qwen-Image transformer.

    Args:
        options: Those of the command line; ``package.module:factory`` is in ``module`` or ``address``.
        device: Where the built-in one is put; a factory puts its own where it likes.

    Raises:
        CommandError: There is no such thing, or it does not give what it has to.
    """
    if options.module is not None and options.address is not None:
        raise CommandError(f"two factories are given, {options.address!r} and --module {options.module!r}; give one")
    address = options.module if options.module is not None else options.address
    return _load(address) if address is not None else _qwen_image(device or torch.device("cpu"))


def answer(
    options: argparse.Namespace, ask: Callable[[nn.Module, Calls], Answer], device: torch.device | None = None
) -> Answer:
    """Ask something of the module that a command was given, and print what came of it.

    Args:
        options: As for ``load``; ``json`` prints one object instead of tables.
        ask: What gives the answer.
        device: As for ``load``.

    Raises:
        CommandError: It could not be asked.
    """
    # Standard output belongs to the answer: whatever a library prints meanwhile goes to standard error.
    with contextlib.redirect_stdout(sys.stderr):
        module, calls = load(options, device)
        try:
            found = ask(module, calls)
        except (HookgraphError, ValueError) as error:
            raise CommandError(str(error)) from error
    if options.json:
        print(json.dumps(found.to_dict()))
    else:
        tables.show(found)
    return found


def best_device() -> torch.device:
    """Where a built-in module is timed or soaked."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _load(address: str) -> tuple[nn.Module, Calls]:
    name, separator, attribute = address.partition(":")
    if not (separator and name and attribute):
        raise CommandError(f"--module {address!r}: expected PACKAGE.MODULE:FACTORY, such as my_model.cases:small")
    if name.endswith(".py") or os.sep in name:
        raise CommandError(_not_a_file(name, attribute))
    made = _call(address, _find(name, attribute))
    if not (isinstance(made, tuple) and len(made) == 2):
        seen = f"{len(made)} things" if isinstance(made, (tuple, list)) else with_article(type(made).__name__)
        raise CommandError(f"{address} returned {seen}; {_WANTED}")
    if not isinstance(made[0], nn.Module):
        kinds = f"({', '.join(type(one).__name__ for one in made)})"
        swapped = ": the other way round" if isinstance(made[1], nn.Module) else ""
        raise CommandError(f"{address} returned {kinds}{swapped}; {_WANTED}")
    return made


def _not_a_file(file: str, attribute: str) -> str:
    """What to type in place of a file: its name as a module, and the folder to type it in."""
    path = PurePath(file).with_suffix("")
    where = f" in the folder {path.parent}" if path.is_absolute() or ".." in path.parts else ""
    module = path.name if where else ".".join(path.parts)
    return f"--module '{file}:{attribute}': give the module by name, not by file: {module}:{attribute}{where}"


def _find(name: str, attribute: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with python -m: what lies in the current folder
    found = _import(name)
    for step in attribute.split("."):
        if not hasattr(found, step):
            near = difflib.get_close_matches(step, dir(found), n=3)
            hint = f"; nearest are {', '.join(map(repr, near))}" if near else ""
            raise CommandError(f"{name} has no {attribute!r}{hint}")
        found = getattr(found, step)
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            where = f"looked in {os.getcwd()} and in what is installed; run it in the folder that holds {error.name}"
            raise CommandError(f"cannot import {name!r}: {error}; {where}") from error
        raise CommandError(f"importing {name!r} {_raised(error)}") from error


def _call(address: str, factory: Any) -> Any:
    if not callable(factory):
        raise CommandError(f"{address} is {with_article(type(factory).__name__)}, not a function; {_WANTED}")
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise CommandError(f"{address}() {_raised(error)}") from error


def _raised(error: BaseException) -> str:
    """What came out of a user's code, and from which line of it."""
    what = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {audit.said(error)}"
    place = audit.place_of(error)
    return f"{what}, at {place}" if place else what


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
