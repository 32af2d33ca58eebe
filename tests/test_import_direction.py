"""Imports point one way, loading never reaches the passes, and `import ciuic_cli` stays light.

All imports count, also those inside functions and under TYPE_CHECKING. `ciuic_cli/__init__.py` has tests of its own:
every module runs it, and it imports the public API lazily.
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
    ("integers", "source_code"),
    ("process",),
    ("profiling",),
    ("hub",),
    ("checkpoint", "codecs", "recipes"),
    ("text", "kernels", "artifact", "passes", "layerwise"),
    ("statistics", "runtime"),
    ("allocation", "evaluation"),
    ("recovery",),
    ("cost", "report"),
    ("compression", "serving"),
    ("export",),
    ("train",),
    ("cli",),
    ("__main__",),
)
"""The subpackages ("rooms") in layers ("floors"), lowest first. A room imports only from floors below its own."""

FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = (PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = _modules()


def _imports(module: str) -> dict[str, set[str]]:
    """Modules of the package that `module` imports, each with the names imported from it."""
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
    """Attributes that `module` uses as `ciuic_cli.name`."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == PACKAGE
    }


IMPORTS = {module: _imports(module) for module in MODULES}


def _room(module: str) -> str:
    """The room of a module: "runtime" for ciuic_cli.runtime.ops."""
    return module.split(".")[1]


def _reached(start: str) -> set[str]:
    """All modules that `start` imports directly or indirectly, the __init__ of their packages included."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module in found or module == PACKAGE:
            continue
        found.add(module)
        waiting += IMPORTS.get(module, ())  # a folder without __init__.py imports nothing
        waiting.append(module.rpartition(".")[0])
    return found


INNER = [module for module in MODULES if module != PACKAGE]


def test_every_room_has_its_floor() -> None:
    rooms = {_room(module) for module in INNER}
    assert rooms - FLOOR.keys() == set(), "give the new room its floor in FLOORS"
    assert FLOOR.keys() - rooms == set(), "FLOORS names a room that does not exist"


def test_folders_have_at_most_15_files() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 8
    for folder in (ROOT, *(path for path in ROOT.rglob("*") if path.is_dir() and path.name != "__pycache__")):
        files = [path for path in folder.iterdir() if path.is_file()]
        assert len(files) <= 15, f"{folder} has {len(files)} files"


def test_files_have_at_most_400_lines() -> None:
    for path in (*ROOT.rglob("*.py"), *ROOT.rglob("*.cpp"), *ROOT.rglob("*.h")):
        lines = path.read_text(encoding="utf-8").count("\n")
        assert lines <= 400, f"{path} has {lines} lines"


@pytest.mark.parametrize("module", INNER)
def test_imports_point_one_way(module: str) -> None:
    room = _room(module)
    for target, names in IMPORTS[module].items():
        if target == PACKAGE:
            # `ciuic_cli/__init__.py` imports the highest floors lazily, so only its own names may be used.
            used = names | _attributes_of_the_package(module)
            assert used <= {"__path__"}, f"{module} imports {used} from the package itself"
            continue
        other = _room(target)
        assert other == room or FLOOR[other] < FLOOR[room], (
            f"{module} imports {target}, which is not below it"
        )


def test_no_cycles() -> None:
    graph = {module: set(IMPORTS[module]) - {PACKAGE, module} for module in INNER}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle
    assert set(order) == set(INNER)


def test_only_main_imports_the_command_line() -> None:
    assert {
        module
        for module in INNER
        if _room(module) != "cli" and any(m.startswith(f"{PACKAGE}.cli.") for m in IMPORTS[module])
    } == {f"{PACKAGE}.__main__"}


def test_loading_never_reaches_what_compresses() -> None:
    compressing = {"passes", "statistics", "layerwise", "allocation", "recovery", "compression"}
    for module in INNER:
        if _room(module) in ("runtime", "kernels") or module == f"{PACKAGE}.artifact.reader":
            reached = {_room(found) for found in _reached(module)}
            assert reached & compressing == set(), module
    assert "codecs" in {
        _room(found) for found in _reached(f"{PACKAGE}.runtime.loading")
    }  # _reached follows imports


def test_the_passes_touch_no_files_models_or_terminal() -> None:
    """Passes are functions of arrays: they import only each other, codecs, threads, interruption, integers, errors and
    the account, in which their steps are counted."""
    for module in INNER:
        if _room(module) == "passes" or module == f"{PACKAGE}.allocation.knapsack":
            reached = {_room(found) for found in _reached(module)}
            assert reached <= {
                "passes",
                "allocation",
                "codecs",
                "process",
                "profiling",
                "integers",
                "errors",
            }, module


CHECKED_BY_MAKE_TEST = {
    f"{PACKAGE}.{module}"
    for module in ("cli.app", "compression.in_place", "runtime.loading", "runtime.plugin")
}
"""Modules imported first in `make test`. All others, which take minutes, are left to `make faults`."""


NEED_VLLM = f"{PACKAGE}.serving.vllm."
"""Modules of vLLM's plug-in import vLLM, which only the environment of `make vllm-check` has; those of
NEED_NO_VLLM do not."""
NEED_NO_VLLM = ("names", "local_experts", "inductor")


def _importable(module: str) -> bool:
    return not module.startswith(NEED_VLLM) or module.removeprefix(NEED_VLLM) in NEED_NO_VLLM


@pytest.mark.parametrize(
    "module",
    [
        m if m in CHECKED_BY_MAKE_TEST else pytest.param(m, marks=pytest.mark.campaign)
        for m in filter(_importable, MODULES)
    ],
)
def test_any_module_may_be_imported_first(module: str) -> None:
    """Unpickling in a new process imports the class's module first, whichever it is."""
    found = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False, timeout=120
    )
    assert found.returncode == 0, found.stderr


def test_the_package_itself_imports_only_version_and_registration() -> None:
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
    """The same in a process: the modules that `ciuic_cli.load` really imports."""
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
    assert {_room(name) for name in loaded} & forbidden == set()
