"""Rounds and codes one weight matrix as the plan says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ciuic_cli.allocation.matrices import WeightMatrix, fisher_of, row_slices
from ciuic_cli.allocation.plan import MatrixPlan, Plan
from ciuic_cli.allocation.row_chunks import read_matrix, row_chunks
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.scales import decode_scales
from ciuic_cli.passes import lowrank, prune
from ciuic_cli.passes.quantize import KroneckerFisher, input_feedback, round_prepared, round_rows, row_scales
from ciuic_cli.passes.scale import scaled
from ciuic_cli.statistics.files import Statistics


def encode_matrix(
    model_map: ModelMap, statistics: Statistics, plan: Plan, matrix: WeightMatrix, *, L: int
) -> PackedMatrix:
    """Round one matrix as the plan says."""
    chosen = plan.matrices[matrix.key]
    fisher, weight = fisher_of(matrix, statistics), read_matrix(model_map, matrix)
    removed = prune.removed_columns(plan.removed, matrix.key, matrix.cols)
    if removed is not None:
        weight = prune.correct_remaining(weight, fisher.inputs, removed)
    weight, fisher = scaled(weight, fisher, chosen.input_scale)
    if len(row_slices(matrix)) > 1:
        return _encode_in_chunks(weight, fisher, chosen, L)
    (chunk,) = row_chunks(weight, fisher, matrix, chosen.row_class)
    prepared, factors = chunk.prepared, None
    if chosen.rank:
        row_weight = prepared.outputs.noise[: matrix.rows]
        factors, product = lowrank.encode(chunk.weight, row_weight, chosen.rank, L=L)
        prepared = prepared.with_weight(chunk.weight - product)
    return round_prepared(
        prepared,
        chosen.row_bits,
        lowrank=factors,
        row_class=chosen.row_class,
        input_scale=chosen.input_scale,
        L=L,
    )


def _encode_in_chunks(
    weight: torch.Tensor, fisher: KroneckerFisher, chosen: MatrixPlan, L: int
) -> PackedMatrix:
    """The same of a matrix that has neither a low-rank part nor feedback between its rows."""
    matrix, known = chosen.matrix, input_feedback(fisher.inputs)
    plain = row_chunks(weight, replace(fisher, contexts=None), matrix, chosen.row_class, known)
    rms = torch.cat([chunk.prepared.rms[: len(chunk.rows)] for chunk in plain])
    base, codes = row_scales(rms, chosen.row_bits, L)
    scales = decode_scales(base, codes)
    tiles = [
        round_rows(chunk.prepared, chosen.row_bits[chunk.groups], scales[chunk.stored], L)
        for chunk in row_chunks(weight, fisher, matrix, chosen.row_class, known)
    ]
    return PackedMatrix(
        matrix.rows, matrix.cols, L, 0, base, chosen.row_bits, codes, np.concatenate(tiles),
        row_class=chosen.row_class, input_scale=chosen.input_scale,
    )  # fmt: skip
