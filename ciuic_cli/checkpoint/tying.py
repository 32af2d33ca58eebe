"""Parameters that share their values: an output head tied to the input embedding.

The config says what should be tied; the checkpoint may hold one of the two, both with the same values, or
both with different ones. The rules are those of `from_pretrained`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ciuic_cli.checkpoint.naming import Assembly
from ciuic_cli.checkpoint.reader import Checkpoint

_ROWS = 4096  # rows compared at a time: bounded memory for a vocabulary of any size


@dataclass(frozen=True)
class Ties:
    """`tied`: parameter -> the one that holds its values. `broken`: tied by config, different by value."""

    tied: dict[str, str]
    broken: tuple[str, ...]


def resolve_ties(
    model: Any, assemblies: dict[str, Assembly], checkpoint: Checkpoint
) -> tuple[Ties, dict[str, Assembly], list[str]]:
    """What is really tied, the assemblies by the names that hold the values, and warnings.

    Reads values only where both of a tied pair are stored.
    """
    tied: dict[str, str] = {}
    broken: list[str] = []
    warnings: list[str] = []
    resolved = dict(assemblies)
    for target, source in model.all_tied_weights_keys.items():
        if target in resolved and source in resolved:
            if not _same_values(resolved[target], resolved[source], checkpoint):
                broken.append(target)
                warnings.append(
                    f"config.json ties {target} to {source}, but their stored values differ: both are kept"
                )
                continue
        elif target in resolved:
            # The checkpoint has only the head; the embedding takes its values, under the embedding's name.
            resolved[source] = _renamed(resolved.pop(target), target, source)
        elif source not in resolved:
            continue
        tied[target] = source
    return Ties(tied, tuple(broken)), resolved, warnings


def _renamed(assembly: Assembly, old: str, new: str) -> Assembly:
    shapes = {new if name == old else name: shape for name, shape in assembly.shapes.items()}
    return Assembly(
        new if assembly.target == old else assembly.target, assembly.sources, assembly.converter, shapes
    )


def _same_values(left: Assembly, right: Assembly, checkpoint: Checkpoint) -> bool:
    if left.converter is not None or right.converter is not None:
        return left.source_names == right.source_names
    return same_values(checkpoint, left.source_names[0], right.source_names[0])


def same_values(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Whether two tensors are equal number for number, read a few thousand rows at a time."""
    shape = checkpoint.dense_shape(first)
    if shape != checkpoint.dense_shape(second) or not shape:
        return False
    for begin in range(0, shape[0], _ROWS):
        rows = (begin, min(shape[0], begin + _ROWS))
        if not torch.equal(checkpoint.read_dense(first, rows), checkpoint.read_dense(second, rows)):
            return False
    return True
