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

LAYERS: tuple[tuple[str, ...], ...] = (
    (
        *("display", "errors", "digests", "memory", "interruption", "streams", "console"),
        *("estimates", "workers", "threads", "waiting"),
    ),
    ("checkpoint", "codecs", "budget"),
    ("statistics", "passes", "artifact", "kernels"),
    (
        "units",
        "arms",
        "planning",
        "encoding",
        "probing",
        "factors",
        "recovery",
        "journal",
        "runtime",
        "verification",
        "forecast",
    ),
    (
        *(
            "pipeline",
            "run",
            "task",
            "options",
            "evaluate",
            "predictions",
            "bench",
            "benching",
            "card",
            "report",
            "sentences",
            "summary",
            "tables",
        ),
        *("inspection", "opening", "inplace"),
    ),
    ("cli", "__main__"),
)
"""A module may import its own layer and those above it in this list. A new module has to be given its place."""

RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
SEPARATE = {"checkpoint", "codecs", "budget", "statistics", "passes", "artifact", "kernels"}
"""Parts that know nothing of their neighbours in the same layer."""


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


def test_every_module_has_its_place() -> None:
    parts = {_part(module) for module in INNER}
    assert parts - RANK.keys() == set(), "give the new module its layer in LAYERS"
    assert RANK.keys() - parts == set(), "LAYERS names a module that is gone"


@pytest.mark.parametrize("module", INNER)
def test_imports_point_one_way(module: str) -> None:
    own = _part(module)
    for target, names in IMPORTS[module].items():
        if target == PACKAGE:
            # The front door imports the top lazily, so only what it defines itself may be taken from it.
            taken = names | _attributes_of_the_package(module)
            assert taken <= {"__version__", "__path__"}, f"{module} imports {taken} from the package itself"
            continue
        other = _part(target)
        assert RANK[other] <= RANK[own], f"{module} imports {target}, which lies after it"
        if other != own and RANK[other] == RANK[own]:
            assert own not in SEPARATE, f"{module} imports {target}, its neighbour"


def test_no_cycles() -> None:
    graph = {module: set(IMPORTS[module]) - {PACKAGE, module} for module in INNER}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    assert set(order) == set(INNER)


def test_nothing_but_the_terminal_imports_the_command_line() -> None:
    assert [module for module in INNER if f"{PACKAGE}.cli" in IMPORTS[module]] == [f"{PACKAGE}.__main__"]


def test_loading_never_reaches_what_compresses() -> None:
    compressing = {
        "passes",
        "statistics",
        "planning",
        "encoding",
        "probing",
        "pipeline",
        "run",
        "task",
        "journal",
        "budget",
    }
    for module in INNER:
        if _part(module) in ("runtime", "kernels") or module == f"{PACKAGE}.artifact.reader":
            reached = {_part(found) for found in _reached(module)}
            assert reached & compressing == set(), module
    assert "codecs" in {_part(found) for found in _reached(f"{PACKAGE}.runtime.loading")}  # the walk walks


def test_the_passes_touch_no_files_models_or_terminal() -> None:
    """They are functions of arrays: besides each other they know only codecs, threads, interruption, errors."""
    for module in INNER:
        if _part(module) in ("passes", "budget"):
            reached = {_part(found) for found in _reached(module)}
            known = {"passes", "budget", "codecs", "threads", "interruption", "errors", "display"}
            assert reached <= known, module


AT_HAND = {f"{PACKAGE}.{module}" for module in ("cli", "inplace", "runtime.loading", "runtime.plugin")}
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
    assert top_level == {f"{PACKAGE}.runtime.registration"}


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
    forbidden = {"passes", "statistics", "planning", "encoding", "probing", "pipeline"}
    assert {_part(name) for name in loaded} & forbidden == set()
