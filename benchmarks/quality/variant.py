"""The `ciuic` command with constants of its modules set to other values, for ablations that no option covers.

python benchmarks/quality/variant.py --set ciuic_cli.passes.feedback:INPUT_DAMPING=0.01 -- compress MODEL OUT
"""

from __future__ import annotations

import ast
import importlib
import sys


def patch(setting: str) -> None:
    """Carry out MODULE:NAME=VALUE. Raises SystemExit if there is no such constant or its type would change."""
    place, _, text = setting.partition("=")
    module_name, _, name = place.partition(":")
    module = importlib.import_module(module_name)
    if not hasattr(module, name):
        raise SystemExit(f"error: {module_name} has no {name}: the ablation is out of date")
    value = ast.literal_eval(text)
    old = getattr(module, name)
    if type(value) is not type(old):
        raise SystemExit(f"error: {module_name}:{name} is {old!r}, which {value!r} cannot replace")
    setattr(module, name, value)


def main(arguments: list[str]) -> None:
    while arguments[:1] == ["--set"]:
        patch(arguments[1])
        arguments = arguments[2:]
    if arguments[:1] != ["--"]:
        raise SystemExit("usage: variant.py [--set MODULE:NAME=VALUE]... -- COMMAND...")
    sys.argv = ["ciuic", *arguments[1:]]
    from ciuic_cli.cli.app import main as ciuic

    ciuic()


if __name__ == "__main__":
    main(sys.argv[1:])
