"""The arms that the budget takes: the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ciuic_cli.allocation.arms import Arms, PassOptions, require_weighable, structures_of
from ciuic_cli.allocation.knapsack import Allocation, allocate, smallest
from ciuic_cli.allocation.matrices import WeightMatrix, weight_matrices
from ciuic_cli.artifact.layout import StoredTensor, lay_out, stored_bytes
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.checkpoint.reader import TORCH_DTYPES
from ciuic_cli.checkpoint.roles import MTP_ROLES
from ciuic_cli.codecs.packing import bits_of, packed_nbytes, stored_bits
from ciuic_cli.codecs.stack import stack_header_nbytes
from ciuic_cli.codecs.widths import BITS
from ciuic_cli.errors import TargetError, UsageError
from ciuic_cli.passes import lowrank, prune
from ciuic_cli.passes.quantize import BLOCK

_SAFETENSORS_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """row_bits: (groups,) uint8; rank of the low-rank part; predicted KL per token; the others: as in `Arms`.

    A multi-token-prediction layer's matrix predicts none: the model's own predictions do not pass through it.
    """

    matrix: WeightMatrix
    row_bits: NDArray[np.uint8]
    rank: int
    lowrank_bytes: int
    predicted_kl: float
    row_class: NDArray[np.uint8] | None = None
    input_scale: NDArray[np.uint8] | None = None

    @property
    def is_zero(self) -> bool:
        """Whether nothing is left of the matrix."""
        return not self.row_bits.any() and not self.rank


@dataclass(frozen=True)
class Plan:
    """The arms taken. blob_bytes: exact size of each compressed parameter; file_bytes: of all safetensors files."""

    matrices: dict[str, MatrixPlan]
    blob_bytes: dict[str, int]
    file_bytes: int
    budget: int
    multiplier: float
    removed: tuple[prune.Structure, ...] = ()

    @property
    def predicted_kl(self) -> float:
        return sum(plan.predicted_kl for plan in self.matrices.values())

    @cached_property
    def rounding_kl(self) -> dict[str, float]:
        """Predicted KL of each matrix without what removed structures cost: that is charged to down projections."""
        found = {key: plan.predicted_kl for key, plan in self.matrices.items()}
        for structure in self.removed:
            found[structure.down] -= structure.loss
        return found

    @cached_property
    def gone(self) -> dict[str, NDArray[np.bool_]]:
        """The row groups that went with removed structures, as one mask per matrix that lost any."""
        return prune.masks(self.removed, {key: len(plan.row_bits) for key, plan in self.matrices.items()})


def blob_sizes(
    model_map: ModelMap, arms: Sequence[Arms], row_bits: dict[str, NDArray[np.uint8]]
) -> dict[str, int]:
    """Bytes of every compressed parameter's blob, stacks included."""
    single: dict[str, list[int]] = {}
    for arm in arms:
        matrix = arm.matrix
        size = packed_nbytes(
            matrix.rows,
            matrix.cols,
            row_bits[matrix.key],
            arm.lowrank_bytes,
            is_sorted=arm.row_class is not None,
            has_input_scale=arm.input_scale is not None,
        )
        single.setdefault(matrix.name, []).append(size)
    return {
        name: sum(sizes)
        + (stack_header_nbytes(len(sizes)) if len(model_map.parameters[name].shape) == 3 else 0)
        for name, sizes in single.items()
    }


def dense_names(model_map: ModelMap) -> list[str]:
    """What is stored as it is: norms, biases, routers."""
    return [p.name for p in model_map.parameters.values() if not p.compress and not p.tied_to]


def require_storable(model_map: ModelMap) -> None:
    """Read all that is stored as it is: raises InputError for what cannot be, before any work is done."""
    for name in dense_names(model_map):
        model_map.read(name)


def dense_tensors(model_map: ModelMap) -> list[StoredTensor]:
    """Layout of the dense tensors, in the dtype that the model computes with."""
    found = []
    for name in dense_names(model_map):
        dtype = model_map.stored_dtype(name)
        shape = model_map.parameters[name].shape
        found.append(
            StoredTensor(name, _SAFETENSORS_NAMES[dtype], shape, int(np.prod(shape)) * dtype.itemsize)
        )
    return found


def stored_tensors(model_map: ModelMap, blobs: dict[str, int]) -> list[StoredTensor]:
    return dense_tensors(model_map) + [
        StoredTensor(name, "U8", (size,), size) for name, size in blobs.items()
    ]


def with_sorted_rows(arms: Sequence[Arms], plan: Plan) -> list[Arms]:
    """The arms with rows sorted where that pays, but for the matrices whose MLP channels the plan removes."""
    bound = {key for structure in plan.removed if structure.block is not None for key, _ in structure.members}
    return [arm if arm.sorted is None or arm.matrix.key in bound else arm.sorted for arm in arms]


def make_plan(model_map: ModelMap, arms: list[Arms], budget: int, options: PassOptions) -> Plan:
    """Take the arms with the least predicted loss whose files come to at most `budget` bytes.

    Raises:
        InputError: a predicted loss that is NaN or infinite.
        TargetError: not reachable even with every matrix at its smallest arm.
    """
    for arm in arms:
        require_weighable(arm.loss, arm.matrix, model_map)
    if isinstance(options.rank, int):
        arms = [
            replace(arm, rank=options.rank) if any(part.rank == options.rank for part in arm.lowrank) else arm
            for arm in arms
        ]
    forced: dict[str, NDArray[np.bool_]] = {}
    if isinstance(options.prune, float):
        candidates = {
            arm.matrix.key: (arm.removal, BLOCK * arm.matrix.cols) for arm in arms if 0 in arm.widths
        }
        forced = prune.forced_groups(candidates, options.prune)
    solution = _Solution(model_map, arms, budget, forced)
    plan = _take(solution, options)
    while plan.file_bytes > budget:  # shard headers can be a few bytes longer than they were counted
        solution.budget -= plan.file_bytes - budget
        plan = solution.plan(solution.solve())
    return replace(plan, budget=budget)


def _take(solution: _Solution, options: PassOptions) -> Plan:
    """Solve, then admit low-rank parts and structures at the Lagrange multiplier that was found, and solve again."""
    allocation = solution.solve()
    if options.rank == "auto":
        without = solution.arms
        solution.arms = [_with_best_rank(arm, allocation.multiplier) for arm in without]
        if any(arm.rank for arm in solution.arms):
            try:
                allocation = solution.solve()
            except TargetError:  # the codes alone take (nearly) all bytes, so the multiplier says nothing
                solution.arms = [replace(arm, rank=0) for arm in without]
    if options.prune == "auto":
        structures = [
            s for s in structures_of(solution.arms) if s.block is not None or solution.maskable(s.down)
        ]
        worth = solution.worth(allocation)
        taken = [s for s in structures if s.loss < worth(s)]
        solution.forced = prune.masks(taken, {arm.matrix.key: arm.matrix.groups for arm in solution.arms})
        solution.taken = taken
        solution.arms = [replace(arm, rank=0) if solution.is_removed(arm) else arm for arm in solution.arms]
        allocation = solution.solve()
    return solution.plan(allocation)


def check_reachable(model_map: ModelMap, budget: int, options: PassOptions) -> None:
    """Raise `TargetError` if even the smallest arms are over the budget; needs no statistics.

    Raises `UsageError` for a rank that no matrix can have.
    """
    arms = _blank_arms(model_map, options)
    if isinstance(options.rank, int):
        if not any(arm.lowrank for arm in arms):
            raise UsageError(
                f"--rank {options.rank}: no matrix has room for a low-rank part of that rank",
                remedy="use a smaller one, or auto",
            )
        arms = [replace(arm, rank=options.rank) for arm in arms]
    _Solution(model_map, arms, budget, {}).solve()


def largest_bytes(model_map: ModelMap, options: PassOptions) -> int:
    """The most bytes that the safetensors files can take: all arms at their largest, rows sorted, inputs scaled."""
    arms = [
        replace(
            arm,
            rank=max((part.rank for part in arm.lowrank), default=0),
            row_class=np.broadcast_to(np.uint8(0), arm.matrix.rows),
        )
        for arm in _blank_arms(model_map, options)
    ]
    widest = {
        arm.matrix.key: np.full(arm.matrix.groups, stored_bits(max(arm.widths)), np.uint8) for arm in arms
    }
    return stored_bytes(lay_out(stored_tensors(model_map, blob_sizes(model_map, arms, widest))))


def _blank_arms(model_map: ModelMap, options: PassOptions) -> list[Arms]:
    """Every matrix's arms with their bytes, input scales among them, and no loss."""
    arms = []
    for matrix in weight_matrices(model_map.parameters.values()):
        nothing = np.zeros(matrix.groups)
        remaining = np.broadcast_to(np.float32(1), matrix.groups)
        parts = [
            lowrank.LowRankArm(rank, lowrank.factor_bytes(matrix.rows, matrix.cols, rank), remaining)
            for rank in options.ranks_for(matrix)
        ]
        scales = np.broadcast_to(np.uint8(0), matrix.cols) if matrix.expert is None else None
        widths = options.widths_for(matrix)
        arms.append(Arms(matrix, widths, options.L, nothing, nothing, parts, input_scale=scales))
    return arms


def _with_best_rank(arm: Arms, multiplier: float) -> Arms:
    """The arms at the rank with the least loss plus multiplier times bytes."""
    candidates = [replace(arm, rank=rank) for rank in (0, *(part.rank for part in arm.lowrank))]

    def cost(candidate: Arms) -> float:
        best = (candidate.loss + multiplier * candidate.nbytes).min(axis=1).sum()
        return float(best) + multiplier * candidate.lowrank_bytes

    return min(candidates, key=lambda candidate: (cost(candidate), candidate.rank))


class _Solution:
    """The knapsack over all row groups of all matrices, and its translation back into a plan.

    arms: one per matrix, with the rank that is taken. forced: by matrix, a mask of the groups that get no bits.
    taken: the structures that are removed. budget: bytes of the safetensors files.
    """

    def __init__(
        self, model_map: ModelMap, arms: list[Arms], budget: int, forced: dict[str, NDArray[np.bool_]]
    ) -> None:
        self.map, self.arms, self.budget, self.forced = model_map, arms, budget, forced
        self.taken: list[prune.Structure] = []
        self.widths = tuple(sorted({width for arm in arms for width in arm.widths}))
        self.starts = np.cumsum([0, *(arm.matrix.groups for arm in arms)])

    def overhead(self) -> int:
        """Bytes of everything but codes; the header counted with its longest possible offsets."""
        empty = {arm.matrix.key: np.zeros(arm.matrix.groups, np.uint8) for arm in self.arms}
        most = stored_bits(max(self.widths))
        full = {arm.matrix.key: np.full(arm.matrix.groups, most, np.uint8) for arm in self.arms}
        small = stored_bytes(lay_out(stored_tensors(self.map, blob_sizes(self.map, self.arms, empty))))
        headers = [
            sum(
                len(shard.header)
                for shard in lay_out(stored_tensors(self.map, blob_sizes(self.map, self.arms, bits)))
            )
            for bits in (empty, full)
        ]
        return small + max(0, headers[1] - headers[0])

    def solve(self) -> Allocation:
        items = int(self.starts[-1])
        loss = np.full((items, len(self.widths)), np.inf, np.float32)
        nbytes = np.zeros((items, len(self.widths)), np.int32)
        for arm, start in zip(self.arms, self.starts, strict=False):
            stop = start + arm.matrix.groups
            nbytes[start:stop] = (np.array(self.widths) * 2 * arm.matrix.padded_cols).astype(np.int32)
            columns = [self.widths.index(width) for width in arm.widths]
            loss[start:stop, columns] = arm.loss
            gone = self.forced.get(arm.matrix.key)
            if gone is not None:
                loss[start:stop][gone, 1:] = np.inf
                loss[start:stop][gone, 0] = 0.0
        try:
            return allocate(loss, nbytes, self.budget - self.overhead())
        except TargetError as error:
            least = smallest(loss, nbytes) + self.overhead()
            original = 2 * self.map.stored_numel
            raise TargetError(
                f"the target of {self.budget:,} bytes cannot be reached: the least is {least:,} bytes, "
                f"a ratio of {original / least:.3f}",
                remedy=f"ask for --ratio {np.floor(original / least * 100) / 100:.2f} or less"
                + (", or allow lower widths with --bits" if BITS[1] not in self.widths else "")
                + (", or --prune auto" if 0 not in self.widths else "")
                + (", or --rank auto" if any(arm.rank for arm in self.arms) else ""),
            ) from error

    def row_bits(self, allocation: Allocation) -> dict[str, NDArray[np.uint8]]:
        widths = stored_bits(self.widths)[allocation.choice]
        return {
            arm.matrix.key: widths[start : start + arm.matrix.groups]
            for arm, start in zip(self.arms, self.starts, strict=False)
        }

    def is_removed(self, arm: Arms) -> bool:
        """Whether every row group of the matrix goes with a removed structure."""
        gone = self.forced.get(arm.matrix.key)
        return gone is not None and bool(gone.all())

    def maskable(self, down: str) -> bool:
        """Whether the router of an expert's layer chooses: a table from tokens to experts (V4) does not."""
        return f"{down.partition('.experts.')[0]}.gate.tid2eid" not in self.map.parameters

    def worth(self, allocation: Allocation) -> Callable[[prune.Structure], float]:
        """What the members of a structure cost now: their loss, and their bytes at the margin's price."""
        places = {}
        for arm, start in zip(self.arms, self.starts, strict=False):
            chosen = allocation.choice[start : start + arm.matrix.groups]
            columns = np.searchsorted(arm.widths, np.array(self.widths)[chosen])
            rows = np.arange(arm.matrix.groups)
            places[arm.matrix.key] = (
                arm.loss[rows, columns] + allocation.multiplier * arm.nbytes[rows, columns]
            )

        def worth_of(structure: prune.Structure) -> float:
            costs = (places[key] if group is None else places[key][group] for key, group in structure.members)
            return float(sum(np.sum(cost) for cost in costs))

        return worth_of

    def plan(self, allocation: Allocation) -> Plan:
        bits = self.row_bits(allocation)
        matrices = {}
        for arm in self.arms:
            chosen = bits[arm.matrix.key]
            columns = np.searchsorted(arm.widths, bits_of(chosen))
            per_group = arm.loss[np.arange(len(chosen)), columns]
            forced = self.forced.get(arm.matrix.key)
            if forced is not None and self.taken:
                per_group = np.where(forced, 0.0, per_group)  # charged to the structure instead
            loss = float(per_group.sum()) + sum(s.loss for s in self.taken if s.down == arm.matrix.key)
            loss = 0.0 if arm.matrix.role in MTP_ROLES else loss
            matrices[arm.matrix.key] = MatrixPlan(
                arm.matrix, chosen, arm.rank, arm.lowrank_bytes, loss, arm.row_class, arm.input_scale
            )
        blobs = blob_sizes(self.map, self.arms, bits)
        total = stored_bytes(lay_out(stored_tensors(self.map, blobs)))
        return Plan(matrices, blobs, total, self.budget, allocation.multiplier, tuple(self.taken))
