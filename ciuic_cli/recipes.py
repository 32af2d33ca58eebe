"""Recipes: the options of a command as a YAML file, for `--config` and beside every result.

A key is the name of an option, with `-` or `_`. Which keys there are, and what their values mean, is decided by the
command's class of options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.process.file_faults import reading

RECIPE = "recipe.yaml"
"""The name of the recipe in an output folder."""
_MAX_BYTES = 1 << 16
"""Largest recipe that is read (chosen, far above any real one)."""


def read_recipe(file: Path, keys: Sequence[str]) -> dict[str, Any]:
    """The options in a recipe, by their names with `_`. A key without a value is left out.

    Args:
        keys: the options that the recipe may have.

    Raises:
        InputError: the file cannot be read, or is no YAML.
        UsageError: a key is unknown or repeated, or a value is nested.
    """
    if not file.is_file():
        raise InputError("there is no such recipe", file=file, remedy="give a YAML file of options")
    with reading(file), file.open("rb") as stream:
        data = stream.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise InputError(
            f"a recipe has at most {_MAX_BYTES:,} bytes", file=file, remedy="give a YAML file of options"
        )
    try:
        node = yaml.compose(data.decode("utf-8"), Loader=yaml.SafeLoader)
        values = yaml.safe_load(data.decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"the recipe is not YAML: {reason:.300}",
            file=file,
            remedy="write a line `key: value` for each option",
        ) from error
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        raise UsageError(
            "the recipe has no options", file=file, remedy="write a line `key: value` for each option"
        )
    _require_plain_numbers(node, file)
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in keys:
            raise UsageError(
                f"the recipe has the unknown key {key!r:.60}", file=file, remedy=_nearest(name, keys)
            )
        if name in found or len(node.value) != len(values):
            raise UsageError("the recipe has a key twice", file=file, remedy="keep one of them")
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, (dict, list)) for item in items):
            raise UsageError(
                f"the recipe's {name} is nested", file=file, remedy="give one value, or a list of values"
            )
        found[name] = value
    return {name: value for name, value in found.items() if value is not None}


def _require_plain_numbers(node: yaml.Node, file: Path) -> None:
    """Raise UsageError for a number with colons, which YAML 1.1 reads in base 60: 1:30 as 90."""
    if isinstance(node, yaml.ScalarNode) and node.tag.endswith((":int", ":float")) and ":" in node.value:
        raise UsageError(
            f"the recipe has the number {node.value:.60}, which YAML reads in base 60",
            file=file,
            remedy="write a number without a colon, or text in quotes",
        )
    if isinstance(node, yaml.CollectionNode):
        for item in node.value:
            for part in item if isinstance(item, tuple) else (item,):
                _require_plain_numbers(part, file)


def write_recipe(folder: Path, command: str, values: Mapping[str, Any]) -> None:
    """Write the recipe of a result into its folder. Values of None and empty lists are left out.

    Args:
        command: the name of the command that takes it.
        values: plain values by option.
    """
    given = {name: value for name, value in values.items() if value is not None and value != []}
    # A line for each option, lists in brackets.
    text = "".join(
        yaml.safe_dump(
            {name: value}, allow_unicode=True, default_flow_style=None if isinstance(value, list) else False
        )
        for name, value in given.items()
    )
    (folder / RECIPE).write_text(f"# ciuic {command} MODEL OUT --config {RECIPE}\n{text}", encoding="utf-8")


def _nearest(name: str, keys: Sequence[str]) -> str:
    near = get_close_matches(name, keys, n=1)
    return f"did you mean {near[0]}?" if near else f"known keys: {', '.join(keys)}"
