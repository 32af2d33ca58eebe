"""The knapsack over the row groups of a whole model: from arm tables to an allocation, and from that to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ciuic_cli.allocation.arms import ArmTable
from ciuic_cli.allocation.artifact_size import blob_sizes, shards_of
from ciuic_cli.allocation.knapsack import Allocation, allocate
from ciuic_cli.allocation.plan import MatrixPlan, Plan
from ciuic_cli.artifact.layout import Shard, stored_bytes
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.checkpoint.roles import MTP_ROLES
from ciuic_cli.codecs.bits import bits_of, stored_bits
from ciuic_cli.errors import TargetError
from ciuic_cli.passes import prune


@dataclass(frozen=True)
class GroupKnapsack:
    """A knapsack whose items are the row groups of all matrices, in order, and whose options are bits per weight.

    `planning` changes a choice by `dataclasses.replace` and solves again.

    Attributes:
        tables: one per matrix, with the chosen rank.
        budget: bytes of the safetensors files.
        pruned: masks (groups,) of row groups that must have 0 bits, by matrix key.
        structures: the pruned structures, whose loss replaces that of their row groups.
    """

    map: ModelMap
    tables: Sequence[ArmTable]
    budget: int
    pruned: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    structures: tuple[prune.Structure, ...] = ()

    @cached_property
    def bits(self) -> tuple[float, ...]:
        """All bits per weight that any matrix may have, ascending."""
        return tuple(sorted({bits for table in self.tables for bits in table.bits}))

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """The first item of each matrix, then the number of items."""
        return np.cumsum([0, *(table.matrix.groups for table in self.tables)])

    def solve(self) -> Allocation:
        """The allocation with the least predicted loss.

        Raises TargetError, with the highest ratio that can be reached, if the budget is too small.
        """
        items = int(self._starts[-1])
        loss = np.full((items, len(self.bits)), np.inf, np.float32)
        nbytes = np.zeros((items, len(self.bits)), np.int32)
        for table, start in zip(self.tables, self._starts, strict=False):
            stop = start + table.matrix.groups
            nbytes[start:stop] = (np.array(self.bits) * 2 * table.matrix.padded_cols).astype(np.int32)
            columns = [self.bits.index(bits) for bits in table.bits]
            loss[start:stop, columns] = table.loss
            pruned = self.pruned.get(table.matrix.key)
            if pruned is not None:
                loss[start:stop][pruned, 1:] = np.inf
                loss[start:stop][pruned, 0] = 0.0
        try:
            return allocate(loss, nbytes, self.budget - self._overhead())
        except TargetError as error:
            least, highest = self.least_bytes(), self.highest_ratio()
            raise TargetError(
                f"the target of {self.budget:,} bytes cannot be reached: the least is {least:,} bytes, "
                f"a ratio of {highest:.3f}",
                remedy=f"ask for --ratio {np.floor(highest * 100) / 100:.2f} or less",
            ) from error

    def least_bytes(self) -> int:
        """Bytes of the safetensors files with every row group at its fewest bits."""
        codes = sum(
            int(min(table.bits) * 2 * table.matrix.padded_cols) * table.matrix.groups for table in self.tables
        )
        return codes + self._overhead()

    def highest_ratio(self) -> float:
        """All parameters at 2 bytes each, over `least_bytes`."""
        return 2 * self.map.stored_numel / self.least_bytes()

    def plan(self, allocation: Allocation) -> Plan:
        """The plan for an allocation."""
        codes = stored_bits(self.bits)[allocation.choice]
        row_bits = {
            table.matrix.key: codes[start : start + table.matrix.groups]
            for table, start in zip(self.tables, self._starts, strict=False)
        }
        matrices = {
            table.matrix.key: self._matrix_plan(table, row_bits[table.matrix.key]) for table in self.tables
        }
        blobs = blob_sizes(self.map, self.tables, row_bits)
        total = stored_bytes(shards_of(self.map, blobs))
        return Plan(matrices, blobs, total, self.budget, allocation.multiplier, self.structures)

    def _matrix_plan(self, table: ArmTable, row_bits: NDArray[np.uint8]) -> MatrixPlan:
        matrix = table.matrix
        columns = np.searchsorted(table.bits, bits_of(row_bits))
        per_group = table.loss[np.arange(len(row_bits)), columns]
        pruned = self.pruned.get(matrix.key)
        if pruned is not None and self.structures:
            per_group = np.where(pruned, 0.0, per_group)  # the structure's loss counts instead
        loss = float(per_group.sum()) + sum(s.loss for s in self.structures if s.down == matrix.key)
        loss = 0.0 if matrix.role in MTP_ROLES else loss
        widths = bits_of(row_bits)
        code_loss = {
            float(bits): float(per_group[widths == bits].sum()) for bits in np.unique(widths) if bits
        }
        return MatrixPlan(
            matrix, row_bits, table.rank, table.lowrank_bytes, loss, table.row_class, table.input_scale,
            table.L, code_loss,
        )  # fmt: skip

    def lagrangian_of(self, allocation: Allocation) -> Callable[[prune.Structure], float]:
        """A function from a structure to the loss + multiplier · bytes of its members in this allocation."""
        per_group = {}
        for table, start in zip(self.tables, self._starts, strict=False):
            chosen = allocation.choice[start : start + table.matrix.groups]
            columns = np.searchsorted(table.bits, np.array(self.bits)[chosen])
            rows = np.arange(table.matrix.groups)
            per_group[table.matrix.key] = (
                table.loss[rows, columns] + allocation.multiplier * table.nbytes[rows, columns]
            )

        def lagrangian(structure: prune.Structure) -> float:
            members = (
                per_group[key] if group is None else per_group[key][group] for key, group in structure.members
            )
            return float(sum(np.sum(member) for member in members))

        return lagrangian

    def is_pruned(self, table: ArmTable) -> bool:
        """Whether all row groups of the matrix must have 0 bits."""
        pruned = self.pruned.get(table.matrix.key)
        return pruned is not None and bool(pruned.all())

    def _overhead(self) -> int:
        """Bytes of everything but codes; the header counts with its longest possible offsets."""
        smallest, largest = self._shards_at(0), self._shards_at(max(self.bits))
        headers = [sum(len(shard.header) for shard in shards) for shards in (smallest, largest)]
        return stored_bytes(smallest) + max(0, headers[1] - headers[0])

    def _shards_at(self, bits: float) -> list[Shard]:
        """The safetensors files with all row groups at the same bits per weight."""
        row_bits = {
            table.matrix.key: np.full(table.matrix.groups, stored_bits(bits), np.uint8)
            for table in self.tables
        }
        return shards_of(self.map, blob_sizes(self.map, self.tables, row_bits))
