"""The recipes of `ciuic compress`: values are what `CompressOptions` takes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from ciuic_cli import recipes
from ciuic_cli.compression.options import DEFAULT_RATIO, CompressOptions

KEYS = tuple(item.name for item in fields(CompressOptions) if item.name not in ("dry_run", "force"))
"""The options that a recipe may have."""


def read_recipe(file: Path | str) -> dict[str, Any]:
    """The options in a recipe, as `recipes.read_recipe` gives them. `CompressOptions` checks the values."""
    found = recipes.read_recipe(Path(file), KEYS)
    # YAML reads `off` as false.
    return {
        name: "off" if value is False and name in ("prune", "rank") else value
        for name, value in found.items()
    }


def write_recipe(options: CompressOptions, folder: Path) -> None:
    """Write the options that shape the artifact into its folder: all that are given, except the device.

    A time budget is not among them: `options` has what it chose.
    """
    values = {name: getattr(options, name) for name in KEYS if name != "device"}
    if options.ratio is options.target_bpw is options.target_size is None:
        values["ratio"] = DEFAULT_RATIO
    values["calibration"] = [str(path) for path in options.calibration]
    values["bits"] = list(options.bits)
    recipes.write_recipe(folder, "compress", values)
