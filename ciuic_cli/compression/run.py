"""The steps of a run, each finished one in the journal, shared by the workers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.allocation.arms import Arms, level_uncovered
from ciuic_cli.allocation.encoding import arms_from_bytes, arms_to_bytes, encode_matrix, price_matrix
from ciuic_cli.allocation.matrices import WeightMatrix, weight_matrices, working_bytes
from ciuic_cli.allocation.plan import Plan, make_plan, stored_tensors, with_sorted_rows
from ciuic_cli.allocation.probes import correction_of, corrections_of, perturbation, probes_of
from ciuic_cli.artifact import publishing, writer
from ciuic_cli.artifact.layout import lay_out
from ciuic_cli.artifact.schema import quantization_config
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.compression.journal import Journal
from ciuic_cli.compression.task import Task
from ciuic_cli.errors import InputError, TargetError
from ciuic_cli.evaluation.estimates import Mean
from ciuic_cli.evaluation.kl_meter import LOOK, KLMeter
from ciuic_cli.layerwise.layer_stream import Adjust
from ciuic_cli.layerwise.linear_hooks import Key
from ciuic_cli.process import atomic_files
from ciuic_cli.process.memory import SIDE_BY_SIDE, return_freed_memory
from ciuic_cli.process.signals import check
from ciuic_cli.process.threads import side_by_side
from ciuic_cli.process.workers import Workers
from ciuic_cli.recovery.row_factors import Factors, tuned_dense, tuned_weights, with_row_factors
from ciuic_cli.recovery.tuning import Recovery, Result
from ciuic_cli.report.build import build_report
from ciuic_cli.report.html import render_html
from ciuic_cli.report.inspection import describe
from ciuic_cli.report.model_card import render_card
from ciuic_cli.runtime.loading import choose_device
from ciuic_cli.runtime.routing import masking
from ciuic_cli.statistics.collect import collect_statistics
from ciuic_cli.statistics.files import Statistics

Progress = Callable[[str, int, int], None]
STATISTICS = "statistics.done"
"""The journal's step after which the model has run once, forward and backward."""
RECOVERY = "recovery"
"""The journal's step with what recovery has come to."""


class Run:
    """One worker's view of a run: what the journal has is read, what it lacks is made by whoever is free."""

    def __init__(self, task: Task, journal: Journal, workers: Workers, progress: Progress) -> None:
        self.task, self.journal, self.workers, self.progress = task, journal, workers, progress
        self.map, self.options, self.passes = task.map, task.options, task.passes
        self._kl_meter: KLMeter | None = None
        self.corrections: dict[str, dict[str, float]] = {}
        self.singular = 0
        self.recovered: Result | None = None
        self.device = choose_device(self.options.device)
        self.matrices = weight_matrices(self.map.parameters.values())
        self.statistics = self._statistics()

    def _statistics(self) -> Statistics:
        folder, step = self.journal.folder / "statistics", STATISTICS
        if not self.workers.tell(self.workers.leads and self.journal.sealed(step, folder)):
            if self.workers.leads:
                folder.mkdir(exist_ok=True)
            self.workers.wait()
            collect_statistics(
                self.map, self.task.calibration, folder, device=self.device, seed=self.options.seed,
                progress=self.progress, workers=self.workers, journal=self.journal,
            )  # fmt: skip
            if self.workers.leads:
                self.journal.seal(step, folder)
        return Statistics(folder)

    def _steps(
        self,
        what: str,
        work: Sequence[int],
        make: Callable[[int], bytes],
        alone: Callable[[int], bool] = lambda number: True,
    ) -> None:
        """Have the steps 0, 1, ... of one kind in the journal; `work` is what each of them takes, in any unit.

        The largest come first, so that all workers end at about the same time. Those that need not be made `alone`
        come last, side by side.
        """

        def have(number: int) -> None:
            if self.journal.load(_step(what, number)) is None:
                self.journal.save(_step(what, number), make(number))

        order = sorted(range(len(work)), key=lambda step: (not alone(step), -work[step]))
        for number, _ in side_by_side(self.workers.take(what, order), have, alone):
            return_freed_memory()
            self.progress(what, self.workers.count(f"{what} done", work[number]), sum(work))
        self.workers.wait()

    def _matrices(self, what: str, make: Callable[[WeightMatrix], bytes]) -> None:
        """A step for every matrix."""
        self._steps(
            what,
            [matrix.weights for matrix in self.matrices],
            lambda number: make(self.matrices[number]),
            lambda number: working_bytes(self.matrices[number]) > SIDE_BY_SIDE,
        )

    def _made(self, what: str, number: int) -> bytes:
        data = self.journal.load(_step(what, number))
        if data is None:
            raise OSError(0, "the journal lost a finished step", str(self.journal.folder))
        return data

    def plan(self) -> Plan:
        """Price every arm, take a first plan, correct the prediction by what its noise really does, plan again."""
        self._matrices(
            "arms", lambda matrix: arms_to_bytes(price_matrix(self.map, self.statistics, matrix, self.passes))
        )
        first = self._first_plan()
        return_freed_memory()
        self.corrections = self._corrections(first)
        arms = [
            arm.sorted
            if arm.sorted is not None and first.matrices[arm.matrix.key].row_class is not None
            else arm
            for arm in self._arms()  # again: the probes needed the memory
        ]
        for arm in arms:
            arm.correction = correction_of(arm.matrix.role, self.corrections)
        return make_plan(self.map, arms, self.task.budget, self.passes)

    def _arms(self) -> list[Arms]:
        """All arms, from the journal."""
        arms = [
            arms_from_bytes(self._made("arms", number), matrix, self.passes)
            for number, matrix in enumerate(self.matrices)
        ]
        level_uncovered(arms, self.statistics)
        return arms

    def _first_plan(self) -> Plan:
        """The plan at uncorrected losses, with rows sorted where that pays and the budget has room for the classes."""
        arms = self._arms()
        self.singular = sum(arm.singular for arm in arms)
        plan = make_plan(self.map, arms, self.task.budget, self.passes)
        candidates = with_sorted_rows(arms, plan)
        for arm in candidates:
            arm.rank = 0
        try:
            return make_plan(self.map, candidates, self.task.budget, self.passes)
        except TargetError:
            return plan

    def _corrections(self, plan: Plan) -> dict[str, dict[str, float]]:
        probes = probes_of(plan, self.map.layer_prefixes)

        def measure(number: int) -> bytes:
            noise = perturbation(self.map, self.statistics, plan, probes[number], L=self.options.L)
            return json.dumps(self._meter().measure(noise).value).encode()

        self._steps("probe", [1] * len(probes), measure)
        measured = [float(json.loads(self._made("probe", number))) for number in range(len(probes))]
        return corrections_of(plan, probes, measured)

    def _meter(self) -> KLMeter:
        """Measures KL on the held-out sequences; built once, the original's predictions with it."""
        if self._kl_meter is None:
            folder = self.journal.folder / f"meter-{self.workers.rank}"
            atomic_files.clear_away(folder)  # a killed run's
            self._kl_meter = KLMeter(
                self.map, self.task.held_out, folder,
                device=self.device, progress=lambda what, done, total: None,
            )  # fmt: skip
        return self._kl_meter

    def encode(self, plan: Plan) -> None:
        """Code every matrix as the plan says."""
        return_freed_memory()  # what choosing took: it grows with the model, and the largest matrices come first
        self._matrices(
            "encode",
            lambda matrix: encode_matrix(
                self.map, self.statistics, plan, matrix, L=self.options.L
            ).to_bytes(),
        )

    def recover(self, plan: Plan) -> None:
        """Tune what is stored besides the codes, if the effort asks for it."""
        if not self.options.recovery_steps:
            return
        folder = self.journal.folder / f"recovery-{self.workers.rank}"
        atomic_files.clear_away(folder)  # a killed run's
        recovery = Recovery(
            self.map, self._coded, self._masking(plan), self.task.recovery, folder,
            device=self.device, workers=self.workers, state=self.journal.load(RECOVERY),
        )  # fmt: skip

        def measure(factors: Factors) -> float:
            return float(self.workers.tell(self._recovered_kl(plan, factors) if self.workers.leads else None))

        def keep(state: Callable[[], bytes]) -> None:
            if self.workers.leads:
                self.journal.save(RECOVERY, state())

        self.recovered = recovery.run(measure, keep, self.progress)
        atomic_files.clear_away(folder)

    def finish(
        self, plan: Plan, out: Path, started: float, *, replace: bool
    ) -> tuple[dict[str, Any], Path | None]:
        """Write the coded matrices and all that belongs to them, and give the folder its name.

        Returns the report, and what is left of an old output that cannot be removed.
        """
        partial = publishing.partial_of(out)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            report = self._write(plan, partial, started)
            _require_readable(partial)
            self.task.require_unchanged()
            check()
            self.journal.publishing(partial)
            left = publishing.publish(partial, out, replace=replace)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return report, left

    def _write(self, plan: Plan, folder: Path, started: float) -> dict[str, Any]:
        factors = {} if self.recovered is None else self.recovered.factors

        def finished(key: Key) -> PackedMatrix:
            return with_row_factors(self._matrix(key), factors.get(key))

        def payload(name: str) -> bytes:
            return_freed_memory()
            parameter = self.map.parameters[name]
            if not parameter.compress:
                value = tuned_dense(self.map, name, factors)
                return value.reshape(-1).view(torch.uint8).numpy().tobytes()
            if len(parameter.shape) < 3:
                return finished((name, None)).to_bytes()
            return ExpertStack(
                tuple(finished((name, expert)) for expert in range(parameter.shape[0]))
            ).to_bytes()

        shards = lay_out(stored_tensors(self.map, plan.blob_bytes))
        written = 0

        def count(nbytes: int) -> None:
            nonlocal written
            written += nbytes
            self.progress("write", written, plan.file_bytes)

        writer.write_shards(shards, folder, payload, count)
        return_freed_memory()
        writer.write_index(shards, folder)
        writer.copy_companions(self.map.checkpoint.folder, folder)
        measured = self._measured_kl(plan, factors)
        self._require_better_than_guessing(measured)
        report = self.report(plan, started, measured)
        section = quantization_config(report, self.map.mtp)
        writer.write_config(folder, self.map.source_config, section)
        text = json.dumps(report, indent=2, allow_nan=False)
        (folder / writer.REPORT).write_text(text + "\n", encoding="utf-8")
        (folder / "memory_report.html").write_text(render_html(report), encoding="utf-8")
        card = render_card(report, self.map.config.model_type)
        (folder / "README.md").write_text(card, encoding="utf-8")
        writer.write_checksums(folder)
        return report

    def _measured_kl(self, plan: Plan, factors: Factors) -> Mean:
        """KL of the artifact with these factors on the held-out sequences."""
        return self._meter().measure(tuned_weights(self.map, self._coded, factors), self._masking(plan))

    def _recovered_kl(self, plan: Plan, factors: Factors) -> float:
        """Infinite where it is these factors that make predictions NaN or infinite."""
        try:
            return self._measured_kl(plan, factors).value
        except TargetError:
            if not factors:
                raise
            return math.inf

    def _masking(self, plan: Plan) -> Adjust:
        """Routers as they will be at loading: they choose no expert that is pruned."""
        experts: dict[str, list[bool]] = {}
        for matrix in self.matrices:
            if matrix.name.endswith(".down_proj"):
                pruned = plan.matrices[matrix.key].is_zero
                experts.setdefault(matrix.name.removesuffix(".down_proj"), []).append(pruned)
        return masking({name: torch.tensor(pruned) for name, pruned in experts.items()})

    def _require_better_than_guessing(self, measured: Mean) -> None:
        """Of a model that gives every token the same probability, KL is at most the logarithm of their number."""
        most = math.log(self.map.config.get_text_config().vocab_size)
        if measured.value > most:
            raise TargetError(
                f"the compressed model predicts worse than one that guesses: its KL divergence from the original is "
                f"{measured.value:.3g} nats per token, that of guessing at most {most:.3g}",
                file=self.map.checkpoint.folder,
                remedy=f"{LOOK}; a few weights may be far larger than all others",
            )

    def report(self, plan: Plan, started: float, measured_kl: Mean | None = None) -> dict[str, Any]:
        return build_report(
            self.map, plan, self.statistics, options=self.options.as_dict(), corrections=self.corrections,
            singular=self.singular, measured_kl=measured_kl, recovered=self.recovered,
            held_out_tokens=self.task.held_out.numel(),
            started=started,
        )  # fmt: skip

    @cached_property
    def _numbers(self) -> dict[Key, int]:
        """The step of each matrix."""
        return {(matrix.name, matrix.expert): number for number, matrix in enumerate(self.matrices)}

    def _coded(self, name: str, expert: int | None) -> PackedMatrix | None:
        """A matrix as it was rounded; None for what is not."""
        return self._matrix((name, expert)) if (name, expert) in self._numbers else None

    def _matrix(self, key: Key) -> PackedMatrix:
        return PackedMatrix.from_buffer(self._made("encode", self._numbers[key]), where=key[0])


def _require_readable(folder: Path) -> None:
    """What our own reader would refuse is a bug of ours, and is not published: raises RuntimeError."""
    try:
        describe(folder)
    except InputError as error:
        raise RuntimeError(f"the finished artifact cannot be opened: {error}") from error


def _step(what: str, number: int) -> str:
    return f"{what}/{number:07d}"
