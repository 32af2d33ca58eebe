"""The range of artifact sizes that a model can have, from its shapes alone: checked before any work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ciuic_cli.allocation.arms import Arms, PassOptions, highest_rank
from ciuic_cli.allocation.artifact_size import blob_sizes, shards_of
from ciuic_cli.allocation.group_knapsack import GroupKnapsack
from ciuic_cli.allocation.matrices import weight_matrices
from ciuic_cli.artifact.layout import stored_bytes
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.bits import BITS, stored_bits
from ciuic_cli.errors import InputError, TargetError, UsageError
from ciuic_cli.passes import lowrank


def check_reachable(model_map: ModelMap, budget: int, options: PassOptions) -> None:
    """Raise TargetError if even the smallest arms exceed the budget, UsageError for a rank that no matrix can have, and
    InputError for a model without any matrix to compress.

    The TargetError's remedy names the highest ratio with these options, and with each option that raises it.
    """
    arms = _lossless_arms(model_map, options)
    if not arms:
        raise InputError(
            "the model has no matrix that is worth compressing",
            file=model_map.checkpoint.folder,
            remedy="keep it as it is; `ciuic inspect` shows what it consists of",
        )
    if isinstance(options.rank, int) and not any(arm.lowrank for arm in arms):
        highest = max(highest_rank(arm.matrix) for arm in arms)
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
        raise TargetError(error.message, remedy=f"{error.remedy}{''.join(others)}") from error


def _smallest(model_map: ModelMap, options: PassOptions, budget: int) -> GroupKnapsack:
    """The knapsack of arms without losses, each with the rank that the user demands, if any."""
    arms = _lossless_arms(model_map, options)
    if isinstance(options.rank, int):
        arms = [replace(arm, rank=options.rank) for arm in arms]
    return GroupKnapsack(model_map, arms, budget, {})


def _two_decimals(ratio: float) -> str:
    """The ratio, rounded down."""
    return f"{np.floor(ratio * 100) / 100:.2f}"


def largest_bytes(model_map: ModelMap, options: PassOptions) -> int:
    """The most bytes that the safetensors files can take: every arm at its largest, rows sorted, inputs scaled."""
    arms = [
        replace(
            arm,
            rank=max((part.rank for part in arm.lowrank), default=0),
            row_class=np.broadcast_to(np.uint8(0), arm.matrix.rows),
        )
        for arm in _lossless_arms(model_map, options)
    ]
    most = {arm.matrix.key: np.full(arm.matrix.groups, stored_bits(max(arm.bits)), np.uint8) for arm in arms}
    return stored_bytes(shards_of(model_map, blob_sizes(model_map, arms, most)))


def _lossless_arms(model_map: ModelMap, options: PassOptions) -> list[Arms]:
    """The arms of every matrix with their bytes, input scales included, and a predicted loss of 0."""
    arms = []
    for matrix in weight_matrices(model_map.parameters.values()):
        zeros = np.zeros(matrix.groups)
        remaining = np.broadcast_to(np.float32(1), matrix.groups)
        parts = [
            lowrank.LowRankArm(rank, lowrank.factor_bytes(matrix.rows, matrix.cols, rank), remaining)
            for rank in options.ranks_for(matrix)
        ]
        scales = np.broadcast_to(np.uint8(0), matrix.cols) if matrix.expert is None else None
        bits = options.bits_for(matrix)
        arms.append(Arms(matrix, bits, options.L, zeros, zeros, parts, input_scale=scales))
    return arms
