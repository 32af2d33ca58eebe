"""Parses option values of the command line. `CompressOptions` checks their meaning."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from ciuic_cli.compression.options import BITS
from ciuic_cli.errors import UsageError


def parse_bits(text: str) -> tuple[Any, ...]:
    """The bits per weight in "2,3,4". Any other part stays a string, which CompressOptions refuses."""
    values = {f"{bits:g}": bits for bits in BITS}
    names = [part.strip() for part in text.split(",")]
    return tuple(values.get(name, name) for name in names)


def parse_depths(text: str) -> list[int]:
    """The numbers of tokens in "128,2048"; raises UsageError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", part) and int(part) > 0 for part in parts):
        raise UsageError(f"{text!r:.60} are no numbers of tokens", remedy="write -d 128,2048")
    return sorted({int(part) for part in parts})


def parse_prune(text: str) -> str | float:
    """A share as a number; "off", "auto" and any other text stay as they are."""
    with suppress(ValueError):
        return float(text)
    return text


def parse_rank(text: str) -> str | int:
    """A rank as a number; "off", "auto" and any other text stay as they are."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else text
