"""Recipes: the options of a run as a YAML file, for `ciuic compress --config` and in every artifact.

A key is the name of an option, with `-` or `_`; a value is what `CompressOptions` takes.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from ciuic_cli.compression.options import DEFAULT_RATIO, CompressOptions
from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.process.file_faults import reading

RECIPE = "recipe.yaml"
"""The name of an artifact's recipe."""
KEYS = tuple(item.name for item in fields(CompressOptions) if item.name not in ("dry_run", "force"))
"""The options that a recipe may have."""
_MAX_BYTES = 1 << 16
"""Largest recipe that is read (chosen, far above any real one)."""


def read_recipe(file: Path) -> dict[str, Any]:
    """The options in a recipe, under their names in `CompressOptions`. A key without a value is left out.

    The values themselves are checked by `CompressOptions`.

    Raises:
        InputError: the file cannot be read, or is no YAML.
        UsageError: a key is unknown or repeated, or a value is nested.
    """
    if not file.is_file():
        raise InputError("there is no such recipe", file=file, remedy="give a YAML file of options")
    with reading(file):
        data = file.read_bytes()[: _MAX_BYTES + 1]
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
    found = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in KEYS:
            raise UsageError(
                f"the recipe has the unknown key {key!r:.60}",
                file=file,
                remedy=f"known keys: {', '.join(KEYS)}",
            )
        if name in found or len(node.value) != len(values):
            raise UsageError("the recipe has a key twice", file=file, remedy="keep one of them")
        found[name] = _plain(name, value, file)
    return {name: value for name, value in found.items() if value is not None}


def write_recipe(options: CompressOptions, folder: Path) -> None:
    """Write the options that shape the artifact into its folder: all that are given, except the device."""
    values = {name: getattr(options, name) for name in KEYS if name != "device"}
    if options.ratio is options.target_bpw is options.target_size is None:
        values["ratio"] = DEFAULT_RATIO
    values["calibration"] = [str(path) for path in options.calibration]
    values["bits"] = list(options.bits)
    given = {name: value for name, value in values.items() if value is not None and value != []}
    text = yaml.safe_dump(given, sort_keys=False, allow_unicode=True, default_flow_style=None)
    (folder / RECIPE).write_text(f"# ciuic compress MODEL OUT --config {RECIPE}\n{text}", encoding="utf-8")


def _plain(name: str, value: Any, file: Path) -> Any:
    """The value as `CompressOptions` takes it: YAML reads `off` as false. Raises UsageError for a nested value."""
    if value is False and name in ("prune", "rank"):
        return "off"
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, (dict, list)) for item in items):
        raise UsageError(
            f"the recipe's {name} is nested", file=file, remedy="give one value, or a list of values"
        )
    return value
