"""The range of artifact sizes that a model can have, from its shapes alone: checked before any work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ciuic_cli.allocation.arms import ArmTable, PassOptions, highest_rank
from ciuic_cli.allocation.artifact_size import blob_sizes, shards_of
from ciuic_cli.allocation.group_knapsack import GroupKnapsack
from ciuic_cli.allocation.matrices import weight_matrices
from ciuic_cli.artifact.layout import stored_bytes
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.bits import BITS, stored_bits
from ciuic_cli.errors import InputError, TargetError, UsageError
from ciuic_cli.passes import lowrank


def check_reachable(model_map: ModelMap, budget: int, options: PassOptions) -> None:
    """Check that the budget can be met.

    Raises:
        TargetError: even the smallest arms exceed the budget. The remedy names the highest ratio with these options,
            and with each option that raises it.
        UsageError: no matrix can have a low-rank part of the rank that the user chose.
        InputError: the model has no matrix to compress, or weights of a class that is not supported exceed the budget
            alone. The remedy is as that of the TargetError.
    """
    tables = _lossless_tables(model_map, options)
    if not tables:
        raise InputError(
            "the model has no matrix that is worth compressing",
            file=model_map.checkpoint.folder,
            remedy="keep it as it is; `ciuic inspect` shows what it consists of",
        )
    if isinstance(options.rank, int) and not any(table.lowrank for table in tables):
        highest = max(highest_rank(table.matrix) for table in tables)
        raise UsageError(
            f"--rank {options.rank}: no matrix has room for a low-rank part of that rank",
            remedy=f"use at most {highest}, or auto" if highest else "use auto or off",
        )
    knapsack = _smallest(model_map, options, budget)
    try:
        knapsack.solve()
    except TargetError as error:
        least_bits = min(bits for bits in BITS if bits)
        alternatives = {
            "--prune auto": replace(options, prune="auto"),
            "--rank auto": replace(options, rank="auto"),
            f"--bits with {least_bits:g}": replace(options, bits=tuple(sorted({least_bits, *options.bits}))),
        }
        others = []
        for option, changed in alternatives.items():
            reached = _two_decimals(_smallest(model_map, changed, budget).highest_ratio())
            if float(reached) > float(_two_decimals(knapsack.highest_ratio())):
                others.append(f"; {option} allows up to {reached}")
        remedy = f"{error.remedy}{''.join(others)}"
        _require_supported(model_map, budget, _two_decimals(knapsack.highest_ratio()), remedy)
        raise TargetError(error.message, remedy=remedy) from error


def _require_supported(model_map: ModelMap, budget: int, highest: str, remedy: str) -> None:
    """Raise InputError if matrices whose class is not supported exceed the budget alone; it names the class."""
    kept = [
        parameter
        for parameter in model_map.parameters.values()
        if parameter.used_by is not None and parameter.tied_to is None
    ]
    kept_bytes = sum(parameter.numel * model_map.stored_dtype(parameter.name).itemsize for parameter in kept)
    if not kept or kept_bytes < budget:
        return
    weights = sum(parameter.numel for parameter in kept)
    raise InputError(
        f"{100 * weights / model_map.stored_numel:.0f} % of the weights are in modules of "
        f"{' and '.join(sorted({str(parameter.used_by) for parameter in kept}))}, which ciuic does not support: it "
        f"keeps them exactly. The highest ratio is {highest}",
        file=model_map.checkpoint.folder,
        tensor=kept[0].name,
        remedy=remedy,
    )


def _smallest(model_map: ModelMap, options: PassOptions, budget: int) -> GroupKnapsack:
    """The knapsack of arms with a predicted loss of 0, with the rank that the user chose, if any."""
    tables = _lossless_tables(model_map, options)
    if isinstance(options.rank, int):
        tables = [replace(table, rank=options.rank) for table in tables]
    return GroupKnapsack(model_map, tables, budget)


def _two_decimals(ratio: float) -> str:
    """The ratio, rounded down."""
    return f"{np.floor(ratio * 100) / 100:.2f}"


def largest_bytes(model_map: ModelMap, options: PassOptions) -> int:
    """The most bytes that the safetensors files can take: every matrix at its largest arm, with sorted rows and input
    scales."""
    tables = [
        replace(
            table,
            rank=max((part.rank for part in table.lowrank), default=0),
            row_class=np.broadcast_to(np.uint8(0), table.matrix.rows),
        )
        for table in _lossless_tables(model_map, options)
    ]
    most = {
        table.matrix.key: np.full(table.matrix.groups, stored_bits(max(table.bits)), np.uint8)
        for table in tables
    }
    return stored_bytes(shards_of(model_map, blob_sizes(model_map, tables, most)))


def _lossless_tables(model_map: ModelMap, options: PassOptions) -> list[ArmTable]:
    """The arms of every matrix with their bytes, input scales included, and with a predicted loss of 0."""
    tables = []
    for matrix in weight_matrices(model_map.parameters.values()):
        zeros = np.zeros(matrix.groups)
        remaining = np.broadcast_to(np.float32(1), matrix.groups)
        parts = [
            lowrank.LowRankPart(rank, lowrank.factor_bytes(matrix.rows, matrix.cols, rank), remaining)
            for rank in options.ranks_for(matrix)
        ]
        scales = np.broadcast_to(np.uint8(0), matrix.cols) if matrix.expert is None else None
        bits = options.bits_for(matrix)
        tables.append(ArmTable(matrix, bits, options.L, zeros, zeros, parts, input_scale=scales))
    return tables
