"""Parameters that share their values, such as an output head tied to the input embedding.

The config says which parameters should be tied. The checkpoint may store one of the two, both with equal values, or
both with different values. `resolve_ties` decides by the rules of `from_pretrained`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ciuic_cli.checkpoint.naming import Assembly
from ciuic_cli.checkpoint.reader import Checkpoint

_COMPARED_ROWS = 4096
"""Rows compared at a time; bounds memory for a vocabulary of any size. Chosen, not tuned."""


@dataclass(frozen=True)
class Ties:
    """The parameters that config.json ties.

    Attributes:
        tied: parameter -> the parameter that holds its values.
        broken: parameters that stay apart, because their stored values differ.
    """

    tied: dict[str, str]
    broken: tuple[str, ...]


def resolve_ties(
    model: Any, assemblies: dict[str, Assembly], checkpoint: Checkpoint
) -> tuple[Ties, dict[str, Assembly], list[str]]:
    """Decide which parameters of the meta `model` are tied.

    Returns the ties, the assemblies of all parameters that hold values, and warnings for the user. Values are read only
    if both parameters of a tie are stored.
    """
    tied: dict[str, str] = {}
    broken: list[str] = []
    warnings: list[str] = []
    resolved = dict(assemblies)
    for target, source in model.all_tied_weights_keys.items():
        if target in resolved and source in resolved:
            if not _equal_assemblies(resolved[target], resolved[source], checkpoint):
                broken.append(target)
                warnings.append(
                    f"config.json ties {target} to {source}, but their stored values differ: both are kept"
                )
                continue
        elif target in resolved:
            # The checkpoint stores only the head: its values are stored under the embedding's name.
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


def _equal_assemblies(left: Assembly, right: Assembly, checkpoint: Checkpoint) -> bool:
    if left.converter is not None or right.converter is not None:
        return left.source_names == right.source_names
    return same_values(checkpoint, left.source_names[0], right.source_names[0])


def same_values(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Whether two tensors of a checkpoint have equal decoded values. Scalars count as different."""
    shape = checkpoint.decoded_shape(first)
    if shape != checkpoint.decoded_shape(second) or not shape:
        return False
    for begin in range(0, shape[0], _COMPARED_ROWS):
        rows = (begin, min(shape[0], begin + _COMPARED_ROWS))
        if not torch.equal(checkpoint.read_decoded(first, rows), checkpoint.read_decoded(second, rows)):
            return False
    return True
