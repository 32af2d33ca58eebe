"""Imports point one way, loading never reaches the passes, and `import ciuic_cli` stays light.

All imports count, those inside functions and under TYPE_CHECKING too: what a function imports late is still a
dependency. The package's front door, `ciuic_cli/__init__.py`, is looked at by itself: it names the public API
lazily, and every module runs it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ciuic_cli

ROOT = Path(ciuic_cli.__file__).parent
PACKAGE = "ciuic_cli"

FLOORS = (
    ("errors", "_version"),
    ("process",),
    ("checkpoint", "codecs"),
    ("text", "kernels", "artifact", "passes", "layerwise"),
    ("statistics", "runtime"),
    ("allocation", "evaluation"),
    ("recovery",),
    ("cost", "report"),
    ("compression",),
    ("cli",),
    ("__main__",),
)
"""The rooms of the package from the lowest floor to the highest. A room imports only from the floors below it."""

FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = (PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = _modules()


def _imports(module: str) -> dict[str, set[str]]:
    """Modules of the package that `module` imports, each with the names taken from it."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    found.setdefault(alias.name, set())
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively, line {node.lineno}"
            source = node.module or ""
            if source.split(".")[0] != PACKAGE:
                continue
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                if inner in MODULES:
                    found.setdefault(inner, set())
                else:
                    found.setdefault(source, set()).add(alias.name)
    return found


def _attributes_of_the_package(module: str) -> set[str]:
    """What `module` takes from the package by `ciuic_cli.name`."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == PACKAGE
    }


IMPORTS = {module: _imports(module) for module in MODULES}


def _part(module: str) -> str:
    """The module's first part below the package: "runtime" of ciuic_cli.runtime.ops."""
    return module.split(".")[1]


def _reached(start: str) -> set[str]:
    """All modules that running `start` can import, packages' own __init__ included."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module in found or module == PACKAGE:
            continue
        found.add(module)
        waiting += IMPORTS.get(module, ())  # a folder without __init__.py runs nothing
        waiting.append(module.rpartition(".")[0])
    return found


INNER = [module for module in MODULES if module != PACKAGE]


def test_every_room_has_its_floor() -> None:
    rooms = {_part(module) for module in INNER}
    assert rooms - FLOOR.keys() == set(), "give the new room its floor in FLOORS"
    assert FLOOR.keys() - rooms == set(), "FLOORS names a room that is gone"


def test_the_house_is_small_enough_to_find_things_in() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 8
    for folder in (ROOT, *(path for path in ROOT.rglob("*") if path.is_dir() and path.name != "__pycache__")):
        files = [path for path in folder.iterdir() if path.is_file()]
        assert len(files) <= 15, f"{folder} has {len(files)} files"


@pytest.mark.parametrize("module", INNER)
def test_imports_point_one_way(module: str) -> None:
    own = _part(module)
    for target, names in IMPORTS[module].items():
        if target == PACKAGE:
            # The front door imports the top lazily, so only what it defines itself may be taken from it.
            taken = names | _attributes_of_the_package(module)
            assert taken <= {"__path__"}, f"{module} imports {taken} from the package itself"
            continue
        other = _part(target)
        assert other == own or FLOOR[other] < FLOOR[own], f"{module} imports {target}, which is not below it"


def test_no_cycles() -> None:
    graph = {module: set(IMPORTS[module]) - {PACKAGE, module} for module in INNER}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    assert set(order) == set(INNER)


def test_nothing_but_the_terminal_imports_the_command_line() -> None:
    assert {
        module
        for module in INNER
        if _part(module) != "cli" and any(m.startswith(f"{PACKAGE}.cli.") for m in IMPORTS[module])
    } == {f"{PACKAGE}.__main__"}


def test_loading_never_reaches_what_compresses() -> None:
    compressing = {"passes", "statistics", "layerwise", "allocation", "recovery", "compression"}
    for module in INNER:
        if _part(module) in ("runtime", "kernels") or module == f"{PACKAGE}.artifact.reader":
            reached = {_part(found) for found in _reached(module)}
            assert reached & compressing == set(), module
    assert "codecs" in {_part(found) for found in _reached(f"{PACKAGE}.runtime.loading")}  # the walk walks


def test_the_passes_touch_no_files_models_or_terminal() -> None:
    """They are functions of arrays: besides each other they know only codecs, threads, interruption, errors."""
    for module in INNER:
        if _part(module) == "passes" or module == f"{PACKAGE}.allocation.knapsack":
            reached = {_part(found) for found in _reached(module)}
            assert reached <= {"passes", "allocation", "codecs", "process", "errors"}, module


AT_HAND = {
    f"{PACKAGE}.{module}"
    for module in ("cli.app", "compression.in_place", "runtime.loading", "runtime.plugin")
}
"""Modules with which `make test` begins too; a process for each of the others takes minutes."""


@pytest.mark.parametrize(
    "module", [m if m in AT_HAND else pytest.param(m, marks=pytest.mark.campaign) for m in MODULES]
)
def test_any_module_may_be_imported_first(module: str) -> None:
    """Unpickling in a new process does: it imports the module that has the class, whichever that is."""
    found = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False, timeout=120
    )
    assert found.returncode == 0, found.stderr


def test_the_front_door_imports_nothing_heavy_but_registers() -> None:
    top_level = {
        node.module
        for node in ast.parse(MODULES[PACKAGE].read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
    }
    assert top_level == {f"{PACKAGE}._version", f"{PACKAGE}.runtime.registration"}


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, ciuic_cli; assert ciuic_cli.__version__; "
        "heavy = {'torch', 'transformers', 'numpy', 'safetensors', 'huggingface_hub', 'rich', 'typer'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"


def test_loading_a_model_runs_without_the_passes() -> None:
    """The same in a real process: what `ciuic_cli.load` imports."""
    code = (
        "import sys, ciuic_cli; ciuic_cli.load; "
        "from ciuic_cli.runtime.registration import register; register(); "
        "print(sorted(name for name in sys.modules if name.startswith('ciuic_cli.')))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = ast.literal_eval(found.stdout)
    assert "ciuic_cli.runtime.loading" in loaded
    forbidden = {"passes", "statistics", "layerwise", "allocation", "recovery", "compression"}
    assert {_part(name) for name in loaded} & forbidden == set()
