"""The parameters that recovery tunes, and how their factors are stored without another byte.

A linear's row i has a factor f_i, which is multiplied into the row's scale; the scales of the matrix then get finer
steps. A norm's weight w_j has a factor f_j, which is multiplied into the weight.
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
from ciuic_cli.layerwise.linear_hooks import Key
from ciuic_cli.layerwise.overrides import Override

MIN_STEPS_PER_OCTAVE = 40
"""Least steps per octave of a matrix's row scales with which it is tuned. Rounding to such a step changes a factor by
at most 0.9 %; factors differ from 1 by about half a per cent (docs/experiments/recovery/factors-and-norms.md). No
measurement is on record."""

Factors = Mapping[Key, torch.Tensor]
"""Factors of the rows (m,) of a matrix, or of the weights (n,) of a norm; float32."""
CodedLookup = Callable[[str, int | None], PackedMatrix | None]
"""The rounded matrix of a parameter, or of one expert; None for parameters that are not rounded."""


def tunable_shapes(model_map: ModelMap, coded: CodedLookup) -> dict[Key, torch.Size]:
    """The shape of the factors of everything that is tuned: rows of the layers' linears, and all norms.

    These are not tuned: embeddings and heads; matrices with a low-rank part, which has scales of its own; and matrices
    whose rows differ so much in size that the steps of their scales are too coarse.
    """
    inside_layers = tuple(model_map.layer_prefixes)
    shapes: dict[Key, torch.Size] = {}
    for matrix in weight_matrices(model_map.parameters.values()):
        if matrix.role in UNPRUNED_ROLES or not matrix.name.startswith(inside_layers):
            continue
        packed = coded(matrix.name, matrix.expert)
        if packed is None or packed.lowrank is not None or packed.is_zero:
            continue
        if finest_steps(packed.header.scales[: packed.rows][packed.header.is_coded]) >= MIN_STEPS_PER_OCTAVE:
            shapes[matrix.name, matrix.expert] = torch.Size((matrix.rows,))
    for parameter in model_map.parameters.values():
        if parameter.role == "norm" and len(parameter.shape) == 1 and not parameter.buffer:
            shapes[parameter.name, None] = torch.Size(parameter.shape)
    return shapes


def tuned_weights(model_map: ModelMap, coded: CodedLookup, factors: Factors) -> Override:
    """The weights that an artifact with these factors has, rounded as it stores them."""

    def override(name: str, expert: int | None) -> torch.Tensor | None:
        packed = coded(name, expert)
        if packed is not None:
            return decode_dense(with_row_factors(packed, factors.get((name, expert))))
        return tuned_dense(model_map, name, factors) if (name, None) in factors else None

    return override


def with_row_factors(packed: PackedMatrix, factors: torch.Tensor | None) -> PackedMatrix:
    """The matrix with its rows multiplied, as nearly as row scales can represent it, in as many bytes.

    factors: (rows,) float32, positive, in the order of the original matrix; None returns the matrix unchanged.
    """
    if factors is None:
        return packed
    order, coded = packed.header.order, packed.header.is_coded
    scales = packed.header.scales[: packed.rows] * (factors if order is None else factors[order]).numpy()
    steps = finest_steps(scales[coded])
    base, codes = encode_scales(np.where(coded, scales, scales[coded].min()), steps)
    header = replace(packed.header, base=base, row_scale=codes, scale_steps=steps)
    return replace(packed, header=header)


def tuned_dense(model_map: ModelMap, name: str, factors: Factors) -> torch.Tensor:
    """A parameter that is not rounded, times its factors if it has any, in the dtype that the artifact stores."""
    value, factor = model_map.read(name), factors.get((name, None))
    return (value if factor is None else value.float() * factor).to(model_map.stored_dtype(name)).contiguous()
