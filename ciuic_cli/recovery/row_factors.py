"""What recovery tunes: a factor for every row of a linear and every number of a norm, and how they are stored.

A row's factor goes into its scale, which then has finer steps; a norm's into the norm. Neither takes another byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from ciuic_cli.allocation.matrices import UNPRUNED_ROLES, weight_matrices
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.scales import encode_scales, finest_steps
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.layerwise.layer_stream import Override
from ciuic_cli.layerwise.linear_hooks import Key

FINE = 40
"""Steps per octave that a row scale must at least have: half of one is 0.9 %, and factors are off 1 by half a per cent.
A matrix whose rows are too unlike each other for that is left alone."""

Factors = Mapping[Key, torch.Tensor]
"""By parameter, or expert of one: what its rows (m,), or the numbers of a norm, are multiplied by; float32."""
Coded = Callable[[str, int | None], PackedMatrix | None]
"""The rounded matrix of a parameter, or of one expert; None for what is not rounded."""


def with_row_factors(packed: PackedMatrix, factors: torch.Tensor | None) -> PackedMatrix:
    """The matrix with each of its rows multiplied, as nearly as row scales can say it; it takes as many bytes.

    factors: (rows,) float32, positive, in the matrix's own order; None for the matrix as it is.
    """
    if factors is None:
        return packed
    order, coded = packed.header.order, packed.header.is_coded
    wish = packed.header.scales[: packed.rows] * (factors if order is None else factors[order]).numpy()
    steps = finest_steps(wish[coded])
    base, codes = encode_scales(np.where(coded, wish, wish[coded].min()), steps)
    header = replace(packed.header, base=base, row_scale=codes, scale_steps=steps)
    return replace(packed, header=header)


def tuned_dense(model_map: ModelMap, name: str, factors: Factors) -> torch.Tensor:
    """A parameter that is stored as it is, in the dtype that it is stored in, with its factors if it has any."""
    value, factor = model_map.read(name), factors.get((name, None))
    return (value if factor is None else value.float() * factor).to(model_map.stored_dtype(name)).contiguous()


def tuned_weights(model_map: ModelMap, coded: Coded, factors: Factors) -> Override:
    """Weights as the artifact with these factors has them."""

    def override(name: str, expert: int | None) -> torch.Tensor | None:
        packed = coded(name, expert)
        if packed is not None:
            return decode_dense(with_row_factors(packed, factors.get((name, expert))))
        return tuned_dense(model_map, name, factors) if (name, None) in factors else None

    return override


def tunable(model_map: ModelMap, coded: Coded) -> dict[Key, torch.Size]:
    """What has factors, and of which shape: rows of linears that the layers consist of, and norms.

    A low-rank part has scales of its own, so that a row's would not be its factor: such matrices are left alone. So are
    those with rows too unlike each other for fine scales.
    """
    inside = tuple(model_map.layer_prefixes)
    found: dict[Key, torch.Size] = {}
    for matrix in weight_matrices(model_map.parameters.values()):
        if matrix.role in UNPRUNED_ROLES or not matrix.name.startswith(inside):
            continue
        packed = coded(matrix.name, matrix.expert)
        if packed is None or packed.lowrank is not None or packed.is_zero:
            continue
        if finest_steps(packed.header.scales[: packed.rows][packed.header.is_coded]) >= FINE:
            found[matrix.name, matrix.expert] = torch.Size((matrix.rows,))
    for parameter in model_map.parameters.values():
        if parameter.role == "norm" and len(parameter.shape) == 1 and not parameter.buffer:
            found[parameter.name, None] = torch.Size(parameter.shape)
    return found
