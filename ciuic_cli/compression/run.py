"""The phases of a run: statistics, plan, encoding, recovery. All workers share the steps of a phase."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from ciuic_cli.allocation.arms import ArmTable, rescale_uncovered
from ciuic_cli.allocation.arms_file import arms_from_bytes, arms_to_bytes
from ciuic_cli.allocation.machine import Machine, machine_for
from ciuic_cli.allocation.matrices import WeightMatrix, is_large, weight_matrices
from ciuic_cli.allocation.plan import Plan
from ciuic_cli.allocation.planning import make_plan, with_sorted_rows
from ciuic_cli.allocation.pool_factors import PoolFactors
from ciuic_cli.allocation.pricing import price_matrix
from ciuic_cli.allocation.probes import perturbation, probe_corrections, probe_matrices, role_correction
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.compression.encoding import encode_matrix
from ciuic_cli.compression.journal import Journal
from ciuic_cli.compression.steps import JournalMark, Steps
from ciuic_cli.compression.task import Task
from ciuic_cli.compression.windows import with_windows
from ciuic_cli.cost.forecast import Forecast, noise_room
from ciuic_cli.errors import EnvironmentFault, TargetError
from ciuic_cli.evaluation.estimates import Floats, Mean, mean_of
from ciuic_cli.evaluation.kl_meter import KLMeter
from ciuic_cli.layerwise.linear_hooks import Key
from ciuic_cli.layerwise.partial_model import Adjust
from ciuic_cli.process.atomic_files import remove_path
from ciuic_cli.process.memory import return_freed_memory
from ciuic_cli.process.progress import Progress, no_progress
from ciuic_cli.process.workers import Workers
from ciuic_cli.profiling.account import measured
from ciuic_cli.recovery.row_factors import Factors, tuned_weights
from ciuic_cli.recovery.tuning import Recovery, RecoveryResult
from ciuic_cli.report.build import build_report
from ciuic_cli.report.schema import ForecastReport, MemoryReport
from ciuic_cli.runtime.loading import choose_device
from ciuic_cli.runtime.routing import masking
from ciuic_cli.statistics.collect import collect_statistics
from ciuic_cli.statistics.files import Statistics

STATISTICS = "statistics.done"
"""Journal step: the statistics are complete. The model has run once by then, forward and backward."""
RECOVERY = "recovery"
"""Journal step: the state of recovery."""


class Run:
    """One worker's view of a run. Finished steps are read from the journal; the workers make the missing ones.

    Call the phases in this order: `collect`, `plan`, `encode`, `recover`, and then `writing.write_artifact`. A dry run
    ends after `plan`.

    Attributes:
        matrices: all weight matrices; their indices are the step numbers.
        statistics: set by `collect`.
        corrections: the result of `probe_corrections`; set by `plan`.
        singular: number of matrices whose H was singular before damping; set by `plan`.
        recovered: the result of recovery; set by `recover`, None if the effort level has no recovery steps.
        expected: the forecast of the run, for its report; None: the run is continued, or this worker does not lead it.
        coded_on: by key, the name of the machine that coded a matrix; known once the matrix was read (`encoded`).
    """

    statistics: Statistics

    def __init__(
        self,
        task: Task,
        journal: Journal,
        workers: Workers,
        progress: Progress,
        hint: Callable[[str], None] = lambda message: None,
        expected: Forecast | None = None,
    ) -> None:
        self.task, self.journal, self.workers, self.progress = task, journal, workers, progress
        self.map, self.options = task.map, task.options
        self.device = choose_device(self.options.device)
        self.matrices = weight_matrices(self.map.parameters.values())
        self.corrections: dict[str, dict[str, float]] = {}
        self.singular = 0
        self.recovered: RecoveryResult | None = None
        self.coded_on: dict[Key, str] = {}
        self._hint, self.expected = hint, expected
        self._steps = Steps(journal, workers, progress)
        self._kl_meter: KLMeter | None = None

    # --- collect

    def collect(self) -> None:
        """Collect the statistics, unless the journal has them."""
        folder = self.journal.folder / "statistics"
        if not self.workers.broadcast(self.workers.is_leader and self._has_statistics(folder)):
            if self.workers.is_leader:
                folder.mkdir(exist_ok=True)
            self.workers.barrier()
            collect_statistics(
                self.map, self.task.calibration, folder, device=self.device, seed=self.options.seed,
                weights=self.task.sequence_weights, tall_outputs=self.options.level.tall_outputs,
                gradient_every=self.options.level.gradient_every,
                progress=self.progress, workers=self.workers, journal=self.journal,
            )  # fmt: skip
            if self.workers.is_leader:
                self.journal.seal(STATISTICS, folder)
        self.statistics = Statistics(folder)

    def _has_statistics(self, folder: Path) -> bool:
        """Whether the journal has the statistics, but for those of matrices that are coded already."""

        def is_coded(file: str) -> bool:
            try:
                names = Statistics(folder).parameters_of(file)
            except EnvironmentFault:  # the list of files is damaged itself
                return False
            return bool(names) and all(
                self._steps.is_intact("encode", number) for name in names for number in self._numbers_of[name]
            )

        return self.journal.sealed(STATISTICS, folder, is_coded)

    # --- plan

    def plan(self) -> Plan:
        """Price every arm, make a first plan, measure the error of its prediction, and plan again."""
        self._finish_matrices(
            "arms",
            lambda matrix, pools: arms_to_bytes(
                price_matrix(self.map, self.statistics, matrix, self.task.passes, pools)
            ),
        )
        with measured("plan", ""):
            first = self._first_plan()
        self.corrections = self._corrections(first)
        tables = [
            table.row_sorted
            if table.row_sorted is not None and first.matrices[table.matrix.key].row_class is not None
            else table
            for table in self._arms()  # read again: the probes needed the memory
        ]
        tables = [
            replace(table, correction=role_correction(table.matrix.role, self.corrections))
            for table in tables
        ]
        with measured("plan", ""):
            plan = make_plan(self.map, tables, self.task.budget, self.task.passes)
            return with_windows(plan, self.options.mean_states)

    def _arms(self) -> list[ArmTable]:
        """The arms of all matrices, from the journal."""
        tables = [
            arms_from_bytes(self._steps.result("arms", number), matrix, self.task.passes)
            for number, matrix in enumerate(self.matrices)
        ]
        return rescale_uncovered(tables, self.statistics)

    def _first_plan(self) -> Plan:
        """The plan without corrections, with rows sorted where that pays and the budget has room for their order."""
        tables = self._arms()
        self.singular = sum(table.singular for table in tables)
        plan = make_plan(self.map, tables, self.task.budget, self.task.passes)
        candidates = with_sorted_rows(tables, plan)
        try:
            return make_plan(self.map, candidates, self.task.budget, self.task.passes)
        except TargetError:
            return plan

    def _corrections(self, plan: Plan) -> dict[str, dict[str, float]]:
        """Measure every probe on the held-out sequences, see allocation/probes.py."""
        probes = probe_matrices(plan, self.map.layer_prefixes, self.options.level.probed_layers)
        # The last one, which perturbs all matrices, first: each worker gets about as many of the others.
        missing = [n for n in reversed(range(len(probes))) if not self._steps.is_intact("probe", n)]
        missing = self.workers.broadcast(missing)
        self._measure_probes(plan, probes, missing[self.workers.number :: self.workers.size])
        self.workers.barrier()
        kls = [float(json.loads(self._steps.result("probe", number))) for number in range(len(probes))]
        return probe_corrections(plan, probes, kls)

    def _measure_probes(
        self, plan: Plan, probes: Sequence[Sequence[WeightMatrix]], numbers: Sequence[int]
    ) -> None:
        """Measure the probes with these numbers, and save their KL in the journal."""
        if not numbers:
            return
        meter, length, worker = self.meter(), self.task.held_out.shape[1], self.workers.number
        return_freed_memory()  # of the plan and the meter, because the embedding's noise comes first
        tokens = [min(self.options.level.probe_tokens, length)] * (len(probes) - 1) + [length]
        with measured("probe", ""):
            kls = meter.measure_variants(
                [({(m.name, m.expert) for m in probes[number]}, tokens[number]) for number in numbers],
                perturbation(
                    self.map, self.statistics, plan, probes[-1], L=self.options.L,
                    pools=PoolFactors(self.statistics, self.machine.device),
                ),
                self.journal.folder / f"probes-{worker}",
                limit=noise_room(self.map, self.journal.stored_bytes()) // self.workers.size,
                progress=lambda done, parts: self.progress("probe", done, parts),
                mark=JournalMark(self.journal, f"probing/{worker}", [*numbers]),
            )  # fmt: skip
        for number, kl in zip(numbers, kls, strict=True):
            self._steps.replace("probe", number, json.dumps(kl.value).encode())

    # --- encode

    def encode(self, plan: Plan) -> None:
        """Round and code every matrix as the plan says."""
        machine = self.machine
        machine.prepare(self._searches(plan))
        self._finish_matrices(
            "encode",
            lambda matrix, pools: _coded_by(
                machine.name,
                encode_matrix(
                    self.map, self.statistics, plan, matrix, pools=pools, rounder=machine.rounder
                ).to_bytes(),
            ),
            self._delete_statistics,
        )

    def _searches(self, plan: Plan) -> set[tuple[float, int]]:
        """(bits per weight, L) of the codes that are still to be found."""
        missing = [
            plan.matrices[matrix.key]
            for number, matrix in enumerate(self.matrices)
            if not self._steps.has("encode", number)
        ]
        return {(bits, matrix_plan.L) for matrix_plan in missing for bits in matrix_plan.widths}

    def _delete_statistics(self, number: int) -> None:
        """Delete the statistics of a parameter when all its matrices are coded: nothing reads them again."""

        def is_coded(name: str) -> bool:  # a torn code, which `has` counts, will be found again
            return all(self._steps.is_intact("encode", other) for other in self._numbers_of[name])

        name = self.matrices[number].name
        if all(self._steps.has("encode", other) for other in self._numbers_of[name]):
            self.statistics.delete(name, is_coded)

    def _finish_matrices(
        self,
        phase: str,
        make: Callable[[WeightMatrix, PoolFactors], bytes],
        finished: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Finish a phase with one step per matrix; large matrices run alone. finished: see `Steps.finish`."""
        machine = self.machine
        pools = PoolFactors(self.statistics, machine.device, for_coding=phase == "encode")

        def make_on_machine(number: int) -> bytes:
            if is_large(self.matrices[number]):
                return_freed_memory()  # of earlier matrices
            with machine.own_stream(), measured(phase, self.matrices[number].role):
                return make(self.matrices[number], pools)

        self._steps.finish(
            phase,
            [matrix.weights for matrix in self.matrices],
            make_on_machine,
            lambda number: machine.side_by_side(self.matrices[number]),
            finished,
        )

    def encoded(self, key: Key) -> PackedMatrix:
        """A coded matrix, from the journal."""
        self.coded_on[key], blob = _coded(self._steps.result("encode", self._numbers[key]))
        return PackedMatrix.from_buffer(blob, where=key[0])

    def release_codes(self, names: Iterable[str]) -> None:
        """Delete the codes of these parameters from the journal, where only the name of their machine stays."""
        for name in names:
            for number in self._numbers_of.get(name, []):
                matrix = self.matrices[number]
                machine, blob = _coded(self._steps.result("encode", number))
                self.coded_on[matrix.name, matrix.expert] = machine
                if blob:
                    self._steps.replace("encode", number, _coded_by(machine, b""))

    def _encoded_or_none(self, name: str, expert: int | None) -> PackedMatrix | None:
        return self.encoded((name, expert)) if (name, expert) in self._numbers else None

    @cached_property
    def machine(self) -> Machine:
        """Where matrices are priced, probed and coded."""
        return machine_for(self.device, self._hint)

    @cached_property
    def _numbers(self) -> dict[Key, int]:
        """The step number of each matrix."""
        return {(matrix.name, matrix.expert): number for number, matrix in enumerate(self.matrices)}

    @cached_property
    def _numbers_of(self) -> dict[str, list[int]]:
        """The step numbers of each parameter: one, or one for each expert of a stack."""
        numbers: dict[str, list[int]] = {}
        for number, matrix in enumerate(self.matrices):
            numbers.setdefault(matrix.name, []).append(number)
        return numbers

    # --- recover

    def recover(self, plan: Plan) -> None:
        """Tune row scales and norms, if the effort level has recovery steps."""
        if not self.options.level.recovery_steps:
            return
        folder = self._own_folder("recovery")
        recovery = Recovery(
            self.map, self._encoded_or_none, self._expert_masks(plan), self.task.recovery, folder,
            device=self.device, workers=self.workers, state=self.journal.load(RECOVERY),
        )  # fmt: skip

        def measure(factors: Factors) -> float:
            return float(
                self.workers.broadcast(self._recovered_kl(plan, factors) if self.workers.is_leader else None)
            )

        def keep(state: Callable[[], bytes]) -> None:
            if self.workers.is_leader:
                self.journal.save(RECOVERY, state())

        with measured("recovery", ""):
            self.recovered = recovery.tune(measure, keep, self.progress)
        remove_path(folder)

    def _recovered_kl(self, plan: Plan, factors: Factors) -> float:
        """KL with these factors; infinity if predictions become NaN or infinite with them."""
        try:
            return self.measured_kl(plan, factors).value
        except TargetError:
            if not factors:
                raise
            return math.inf

    # --- measurement and report

    def measured_kl(self, plan: Plan, factors: Factors) -> Mean:
        """KL divergence (nats per token) of the rounded model with these factors, on the held-out sequences."""
        return mean_of(self.rounded_kls(plan, factors))

    def rounded_kls(self, plan: Plan, factors: Factors) -> list[Floats]:
        """As `measured_kl`, but of every token: one array per held-out sequence."""
        weights = tuned_weights(self.map, self._encoded_or_none, factors)
        return self.meter().token_kls(weights, self._expert_masks(plan))

    def meter(self) -> KLMeter:
        """The meter of KL on the held-out sequences. The first call makes it, which runs the original model."""
        if self._kl_meter is None:
            folder = self._own_folder("meter")
            self._kl_meter = KLMeter(
                self.map, self.task.held_out, folder, device=self.device, progress=no_progress
            )
        return self._kl_meter

    def _own_folder(self, name: str) -> Path:
        """An empty folder of this worker, for files that no resumed run reads."""
        folder = self.journal.folder / f"{name}-{self.workers.number}"
        remove_path(folder)  # left by a killed run
        return folder

    def _expert_masks(self, plan: Plan) -> Adjust:
        """Masks for the routers: they choose no pruned expert, as in the loaded artifact."""
        experts: dict[str, list[bool]] = {}
        for matrix in self.matrices:
            if matrix.name.endswith(".down_proj"):
                pruned = plan.matrices[matrix.key].is_zero
                experts.setdefault(matrix.name.removesuffix(".down_proj"), []).append(pruned)
        return masking({name: torch.tensor(mask) for name, mask in experts.items()})

    def report(self, plan: Plan, measured_kl: Mean | None = None) -> MemoryReport:
        """The memory report."""
        return build_report(
            self.map, plan, self.statistics, options=self.task.settled_options(),
            corrections=self.corrections, singular=self.singular, measured_kl=measured_kl,
            recovered=self.recovered, coded_on=Counter(self.coded_on.values()),
            held_out_tokens=self.task.held_out.numel(), vocabulary_seen=self.task.vocabulary_seen,
            started=self.task.started,
            forecast=None if self.expected is None else ForecastReport(**self.expected.as_dict()),
        )  # fmt: skip


def _coded_by(machine: str, blob: bytes) -> bytes:
    """The result of a step of coding: the machine's name in a line, and the blob."""
    return machine.encode() + b"\n" + blob


def _coded(result: bytes) -> tuple[str, bytes]:
    """The inverse of `_coded_by`."""
    machine, _, blob = result.partition(b"\n")
    return machine.decode(), blob
