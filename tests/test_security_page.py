"""SECURITY.md names existing tests, and the package contains no call that could run a checkpoint's code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "ciuic_cli").rglob("*.py"))


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8")))
    defined = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        defined |= set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert len(named) > 25
    assert named - defined == set()


def _calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call in a file as (source text of the called function, node)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def _keyword(call: ast.Call, name: str) -> object:
    """The constant that a call passes for a keyword; None if it passes none."""
    for keyword in call.keywords:
        if keyword.arg == name and isinstance(keyword.value, ast.Constant):
            return keyword.value.value
    return None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_package_never_unpickles_or_evaluates(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & set(modules)
    for name, call in _calls(path):
        assert name not in ("eval", "exec", "torch.load", "os.system"), f"line {call.lineno}"
        assert _keyword(call, "shell") is not True, f"line {call.lineno}"
        if name in ("np.load", "numpy.load"):
            assert _keyword(call, "allow_pickle") is False, f"line {call.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_26_transformers_is_never_left_to_ask_about_remote_code(path: Path) -> None:
    """Without `trust_remote_code=False` transformers asks on the terminal if a config has an `auto_map`."""
    for name, call in _calls(path):
        if re.fullmatch(r"Auto\w+\.(from_pretrained|from_config)", name):
            assert _keyword(call, "trust_remote_code") is False, f"line {call.lineno}: {name}"
