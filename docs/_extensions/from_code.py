"""What the pages take from the code itself, so that it cannot go stale: rooms and docstrings."""

import ast
import functools
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import hookgraph

PACKAGE = Path(hookgraph.__file__).parent
# The four lines that a library like this owes its readers beside Args, Returns and Raises.
FOUR_LINES = re.compile(r"^(Streams|Aliasing|Restores|Cost):(?= )")


class Rooms(SphinxDirective):
    """One row for each file of the package, the top floor first, with the first line of its docstring."""

    def run(self) -> list[nodes.Node]:
        names = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")]
        for name in names:
            self.env.note_dependency(PACKAGE / name)
        in_order = sorted(names, key=lambda name: (-floor(name), name))
        rows = [f"| {floor(name)} | `{name}` | {story(name)} |" for name in in_order]
        return self.parse_text_to_nodes("\n".join(["| floor | file | story |", "|---|---|---|", *rows]))


@functools.cache
def parsed(name: str) -> ast.Module:
    return ast.parse((PACKAGE / name).read_text(encoding="utf-8"))


def story(name: str) -> str:
    return (ast.get_docstring(parsed(name)) or "").partition("\n")[0]


@functools.cache
def floor(name: str) -> int:
    """How many imports lie below a file at most: 0 imports nothing of the package when it is loaded."""
    return max((1 + floor(below) for below in imports(name) if below != name), default=0)


def imports(name: str) -> set[str]:
    """The files of the package that a file imports when it is loaded."""
    found = set()
    for statement in parsed(name).body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").partition(".")[0] == "hookgraph":
            inside = [f"{statement.module}.{alias.name}" for alias in statement.names]
            found |= {file_of(module) or file_of(statement.module) for module in inside}
        elif isinstance(statement, ast.Import):
            found |= {file_of(alias.name) for alias in statement.names}
    return found - {None}


def file_of(module: str) -> str | None:
    """The file of a module of the package; None for a name in a module, or another package."""
    root, _, rest = module.partition(".")
    path = rest.replace(".", "/")
    files = [f"{path}.py", f"{path}/__init__.py".lstrip("/")]
    return next((file for file in files if root == "hookgraph" and (PACKAGE / file).is_file()), None)


def four_lines(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Give the four lines the form of a field, beside the parameters."""
    lines[:] = [FOUR_LINES.sub(r":\1:", line) for line in lines]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("rooms", Rooms)
    app.connect("autodoc-process-docstring", four_lines, priority=600)  # after napoleon, which makes the other fields
    return {"parallel_read_safe": True, "parallel_write_safe": True}
