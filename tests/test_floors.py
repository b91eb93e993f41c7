"""The house rules that a machine can check: floors, rooms of their own, public names and their examples."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hookgraph

PACKAGE = Path(hookgraph.__file__).parent
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
PUBLIC = sorted(set(hookgraph.__all__) - {"__version__"})
each_file = pytest.mark.parametrize("name", FILES)
each_public_name = pytest.mark.parametrize("name", PUBLIC)

# backends/cuda.py asks for two things of torch._C: to take back the pool of a capture that died, and the raw
# handle of the current stream, which the public call costs a microsecond more to read.
PRIVATE_TORCH_IN_CUDA = {"_cuda_endAllocateToPool", "_cuda_releasePool", "_cuda_getCurrentRawStream"}
GRAPHS_OF_CUDA = re.compile(
    r"^(torch\.cuda\.(CUDAGraph|graph|graphs|graph_pool_handle|make_graphed_callables|MemPool|use_mem_pool)|cuda(\.|$))"
)
RICH_FILES = {"tables/__init__.py", "tables/counts.py", "tables/reports.py", "tables/style.py", "cli/demo.py"}
# Values that are read, not made, by a user; an example of theirs is one of the name that makes them.
NO_EXAMPLE = {
    "AttachError", "CallRecord", "CloneIO", "CaptureError", "FallbackError", "HookgraphError", "HookgraphWarning", "ModuleStats", "Signature",
    "SignatureStats",
}  # fmt: skip
WITH_EXAMPLE = [name for name in PUBLIC if name not in NO_EXAMPLE]


@functools.cache
def parsed(name: str) -> ast.Module:
    return ast.parse((PACKAGE / name).read_text(encoding="utf-8"))


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement that can run: not what stands under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from executed(other)
            continue
        yield node
        yield from executed(node)


def file_of(module: str) -> str | None:
    root, _, rest = module.partition(".")
    path = rest.replace(".", "/")
    candidates = [f"{path}.py", f"{path}/__init__.py".lstrip("/")]
    return next((file for file in candidates if root == "hookgraph" and file in FILES), None)


@functools.cache
def imports(name: str, deferred: bool) -> set[str]:
    """The files of the package that a file imports when it is loaded; with ``deferred``, ever."""
    found: set[str | None] = set()
    nodes = executed(parsed(name)) if deferred else iter(_at_load(parsed(name)))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "hookgraph":
            assert node.level == 0
            module = node.module or ""
            found |= {file_of(f"{module}.{alias.name}") or file_of(module) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {file_of(alias.name) for alias in node.names}
    return {file for file in found if file is not None and file != name}


def _at_load(tree: ast.Module) -> list[ast.AST]:
    inside = {
        id(below)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for below in ast.walk(node)
        if below is not node
    }
    return [node for node in executed(tree) if id(node) not in inside]


_FLOORS: dict[str, int] = {}


def floor(name: str, above: tuple[str, ...] = ()) -> int:
    """How many imports lie below a file at most, as docs/design.md counts."""
    assert name not in above, f"imports go round: {' -> '.join((*above[above.index(name) :], name))}"
    if name not in _FLOORS:
        below = imports(name, deferred=False)
        _FLOORS[name] = max((1 + floor(other, (*above, name)) for other in below), default=0)
    return _FLOORS[name]


# -- floors ---------------------------------------------------------------------------------------


@each_file
def test_imports_go_down_only(name: str) -> None:
    for below in imports(name, deferred=False):
        assert floor(below) < floor(name), f"{name} imports {below} from its own floor or above"


# Imported by a function when it runs, upwards; each with its reason.
UPWARDS = {
    ("stats.py", "tables/__init__.py"),  # rich is loaded when something is shown, and a table knows what it shows
    ("attach.py", "doctor.py"),  # targets="auto" asks the doctor, who attaches to rehearse
    ("backends/__init__.py", "backends/cuda.py"),  # a machine without CUDA never loads it
    ("backends/__init__.py", "backends/tape.py"),
}


def test_what_is_imported_upwards_is_known() -> None:
    upwards = {(name, other) for name in FILES for other in imports(name, True) if floor(other) >= floor(name)}
    assert upwards == UPWARDS


def test_the_ground_floor_knows_nothing_of_the_package() -> None:
    ground = {name for name in FILES if floor(name) == 0}
    assert {"errors.py", "reasons.py", "tree.py", "private_torch.py", "switch.py"} <= ground


@pytest.mark.parametrize("name", ["policy.py", "reasons.py", "counters.py", "errors.py", "stats.py", "options.py"])
def test_decisions_and_counts_know_no_torch(name: str) -> None:
    """Decide in one pure function, act in another: it runs where no torch is."""
    modules = {alias.name for node in ast.walk(parsed(name)) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(parsed(name)) if isinstance(node, ast.ImportFrom)}
    assert not {module for module in modules if module.partition(".")[0] == "torch"}


# -- rooms of their own ---------------------------------------------------------------------------


def names_used(name: str) -> set[str]:
    """Every dotted name in a file's code, with those that it imports from elsewhere."""
    found = set()
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@each_file
def test_one_file_captures_with_cuda(name: str) -> None:
    used = {used for used in names_used(name) if GRAPHS_OF_CUDA.match(used)}
    assert bool(used) is (name == "backends/cuda.py"), used


@each_file
def test_one_file_asks_private_torch(name: str) -> None:
    private = {used for used in names_used(name) if re.match(r"torch\._C(\.|$)", used)}
    if name == "private_torch.py":
        assert private
    elif name == "backends/cuda.py":
        assert {used.split(".")[2] for used in private if used.count(".") >= 2} <= PRIVATE_TORCH_IN_CUDA
    else:
        assert not private


@each_file
def test_two_files_draw_with_rich(name: str) -> None:
    drawn = {used for used in names_used(name) if used.partition(".")[0] == "rich"}
    assert not drawn or name in RICH_FILES, drawn


@each_file
def test_one_file_flattens(name: str) -> None:
    flattening = {used for used in names_used(name) if used.startswith(("optree", "torch.utils._pytree"))}
    assert not flattening or name == "tree.py", flattening


@each_file
def test_a_file_says_what_it_is_in_one_line(name: str) -> None:
    lines = (ast.get_docstring(parsed(name)) or "").splitlines()
    assert lines, "no docstring"
    assert lines[0].endswith((".", "?")), lines[0]
    assert len(lines) == 1 or not lines[1]


# -- public names ---------------------------------------------------------------------------------


def test_public_names_are_sorted_and_whole() -> None:
    assert hookgraph.__all__ == sorted(hookgraph.__all__)
    assert len(set(hookgraph.__all__)) == len(hookgraph.__all__)
    imported = {
        alias.asname or alias.name
        for node in parsed("__init__.py").body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hookgraph")
        for alias in node.names
    }
    assert set(hookgraph.__all__) == imported | {"__version__"}


@each_public_name
def test_a_public_name_says_what_it_does(name: str) -> None:
    text = inspect.getdoc(getattr(hookgraph, name))
    assert text
    first = text.splitlines()[0]
    assert re.match(r"(``\w+`` |[A-Z]).*[.:]$", first), first


@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_a_public_name_shows_itself(name: str) -> None:
    """The examples are run by tests/test_docs.py."""
    text = inspect.getdoc(getattr(hookgraph, name)) or ""
    assert "Example:" in text
    assert ">>> " in text.partition("Example:")[2]


@each_public_name
def test_public_functions_are_annotated(name: str) -> None:
    thing = getattr(hookgraph, name)
    members = [thing] if inspect.isfunction(thing) else [m for k, m in vars(thing).items() if not k.startswith("_")]
    for function in filter(inspect.isfunction, members):
        signature = inspect.signature(inspect.unwrap(function))
        assert signature.return_annotation is not inspect.Signature.empty, function
        bare = [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty]
        assert set(bare) <= {"self", "cls"}, (function, bare)


@each_public_name
def test_methods_of_public_classes_are_told(name: str) -> None:
    thing = getattr(hookgraph, name)
    if not inspect.isclass(thing):
        return
    for key, member in vars(thing).items():
        if not key.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            assert inspect.getdoc(member), f"{name}.{key} has no docstring"


# -- style that ruff does not check ---------------------------------------------------------------


@each_file
def test_words(name: str) -> None:
    stem = name.removesuffix(".py").rpartition("/")[2]
    assert not re.search(r"util|helper|manager|misc|common", stem)
    for node in ast.walk(parsed(name)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            assert not re.search(r"(?i)(utils?|helper|manager|misc)$", node.name), node.name


def test_type_ignores_carry_a_code() -> None:
    for name in FILES:
        for line in (PACKAGE / name).read_text(encoding="utf-8").splitlines():
            assert not re.search(r"type: ignore(?!\[)", line), f"{name}: {line}"


def test_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
