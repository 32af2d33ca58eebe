"""The files in autoload/: artifacts load in a fresh process that does not import `ciuic_cli`. Each case has a process.

Processes add the folder as Python adds site-packages at its start. tests/test_wheel.py tests the installed files.
"""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ciuic_cli.runtime.registration import REGISTRY_MODULE

FOLDER = Path(__file__).parents[2] / "autoload"

START = "import site, sys\nsite.addsitedir(sys.argv[1])\n"
LOAD = (
    START
    + "from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained(sys.argv[2])\n"
)


def run(
    code: str, *arguments: object, options: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "CIUIC_AUTOLOAD"}
    return subprocess.run(
        [sys.executable, *options, "-c", code, str(FOLDER), *map(str, arguments)],
        capture_output=True, text=True, timeout=120, env=environment | variables,
    )  # fmt: skip


def test_an_artifact_loads_without_an_import(artifact: Callable[..., Any]) -> None:
    code = LOAD.replace(
        "AutoModelForCausalLM.from_pretrained", "model = AutoModelForCausalLM.from_pretrained"
    )
    done = run(code + "print(type(model.model.layers[0].mlp.up_proj).__name__)", artifact("llama").folder)
    assert done.stdout.strip() == "CompressedLinear", done.stderr


def test_the_variable_switches_it_off(artifact: Callable[..., Any]) -> None:
    done = run(LOAD, artifact("llama").folder, CIUIC_AUTOLOAD="0")
    assert done.returncode == 1 and "MISMATCH" in done.stderr


def test_the_start_of_python_imports_only_the_module_with_the_finder() -> None:
    code = START.replace("site.", "before = set(sys.modules); site.", 1)
    done = run(
        code
        + "print(sorted(set(sys.modules) - before))\nimport json, email.message\nprint('ciuic_cli' in sys.modules)",
        options=("-S",),  # an installed package would have installed its finder already
    )
    assert done.stdout.splitlines() == ["['_ciuic_autoload']", "False"], done.stderr


def test_the_start_of_python_takes_at_most_5_ms_more() -> None:
    """The least of five processes: other work on the machine only adds to it."""
    code = (
        "import site, sys, time\n"
        "begin = time.perf_counter()\n"
        "site.addsitedir(sys.argv[1])\n"
        "print(time.perf_counter() - begin)"
    )
    assert min(float(run(code, options=("-S",)).stdout) for _ in range(5)) <= 0.005


def test_the_finder_leaves_after_its_work() -> None:
    code = (
        START + f"import {REGISTRY_MODULE}\nprint([f.__name__ for f in sys.meta_path if isinstance(f, type)])"
    )
    done = run(code)
    assert "BuiltinImporter" in done.stdout and "'Finder'" not in done.stdout, done.stderr


def test_a_package_that_does_not_import_warns_and_transformers_works() -> None:
    done = run(
        START + "sys.modules['ciuic_cli'] = None\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "print(LlamaForCausalLM.__name__)"
    )
    assert done.stdout.strip() == "LlamaForCausalLM", done.stderr
    assert "ciuic artifacts cannot be loaded" in done.stderr and "ModuleNotFoundError" in done.stderr


def test_both_files_call_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.15 on, a .start file takes the place of the imports in the .pth file of the same name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    (entry,) = (FOLDER / "ciuic_cli.start").read_text().split()
    module, function = entry.split(":")
    assert (FOLDER / "ciuic_cli.pth").read_text() == f"import {module}; {module}.{function}()\n"
    finder = pkgutil.resolve_name(f"{module}:Finder")
    for _ in range(2):
        pkgutil.resolve_name(entry)()
    assert sys.meta_path.count(finder) == 1
    assert pkgutil.resolve_name(f"{module}:TRIGGER") == REGISTRY_MODULE
