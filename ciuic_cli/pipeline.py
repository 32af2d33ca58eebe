"""compress(): the steps in reading order, each finished one in the journal."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError

from ciuic_cli import __version__
from ciuic_cli.artifact import writer
from ciuic_cli.artifact.layout import lay_out
from ciuic_cli.artifact.schema import quantization_config
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import Checkpoint, open_checkpoint
from ciuic_cli.codecs.packing import ExpertStack, PackedMatrix
from ciuic_cli.encoding import arms_from_bytes, arms_to_bytes, decode_dense, encode_unit, unit_arms
from ciuic_cli.errors import InputError, TargetError
from ciuic_cli.estimates import Mean
from ciuic_cli.forecast import Forecast, Text, forecast
from ciuic_cli.journal import Journal
from ciuic_cli.memory import steady_memory
from ciuic_cli.opening import open_tokenizer
from ciuic_cli.planning import (
    Arms,
    PassOptions,
    Plan,
    Unit,
    check_reachable,
    level_uncovered,
    make_plan,
    stored_dtype,
    stored_tensors,
    units_of,
)
from ciuic_cli.probing import role_corrections
from ciuic_cli.report import render_html
from ciuic_cli.runtime.loading import choose_device
from ciuic_cli.runtime.routing import masking
from ciuic_cli.statistics.calibration import calibration_batch
from ciuic_cli.statistics.collect import Statistics, collect_statistics
from ciuic_cli.statistics.measure import KLMeter
from ciuic_cli.summary import build_report

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Effort:
    """What an effort level spends: trellis window L, calibration sequences and their length."""

    window: int
    nsamples: int
    seqlen: int


HELD_OUT_EVERY = 16
"""One calibration sequence in so many is kept from the statistics, to measure KL on."""
EFFORTS = {"fast": Effort(12, 24, 512), "default": Effort(16, 64, 512), "best": Effort(16, 128, 512)}


@dataclass(frozen=True)
class Options:
    """Everything besides the weights and the text that decides the artifact's bytes."""

    ratio: float
    effort: str
    window: int
    nsamples: int
    seqlen: int
    seed: int
    prune: str | float
    rank: str | int
    bits: tuple[int, ...]
    device: str

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bits": list(self.bits)}


def compress(
    model: str | Path,
    out: str | Path,
    *,
    ratio: float = 4.0,
    target_bpw: float | None = None,
    target_size: int | None = None,
    calibration: Sequence[str | Path] = (),
    nsamples: int | None = None,
    seqlen: int | None = None,
    seed: int = 0,
    effort: str = "default",
    prune: str | float = "auto",
    rank: str | int = "auto",
    bits: Sequence[int] = (2, 3, 4, 5, 6, 8),
    device: str = "auto",
    dry_run: bool = False,
    force: bool = False,
    progress: Progress = lambda what, done, total: None,
    hint: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Compress a checkpoint to a byte budget; returns the memory report (also written into the artifact).

    Args:
        model: folder or hub id of a safetensors checkpoint.
        out: folder of the artifact; must not exist unless `force`.
        ratio: bytes of all parameters at 2 bytes each, over bytes of the artifact's safetensors files.
        target_bpw: instead of ratio: stored bits per parameter. target_size: instead of ratio: bytes.
        calibration: UTF-8 text files; none: the package's own mix.
        effort: "fast", "default" or "best".
        prune: "off", "auto", or the share of prunable weights to leave out. rank: "off", "auto", or a rank.
        bits: the widths that may be used, of 2, 3, 4, 5, 6, 8.
        dry_run: stop at the plan, write nothing; the report has a "forecast" of the whole run (forecast.py).
        force: replace an existing output; discard an unfinished run with other options.

    Raises:
        CiuicError: see errors.py; the output is as it was before.
    """
    started = time.monotonic()
    steady_memory()
    out = Path(os.path.realpath(out))  # a link keeps pointing where it does; what it points to is written
    checkpoint = open_checkpoint(model)
    _check_output(out, checkpoint, force=force, dry_run=dry_run)
    model_map = map_model(checkpoint)
    for warning in model_map.warnings:
        hint(warning)
    original = 2 * model_map.stored_numel
    budget = _budget(original, ratio, target_bpw, target_size)
    level = EFFORTS[effort]
    options = Options(
        original / budget, effort, level.window, nsamples or level.nsamples, seqlen or level.seqlen,
        seed, prune, rank, tuple(sorted(set(bits))), device,
    )  # fmt: skip
    passes = PassOptions(options.bits, options.window, prune, rank)
    check_reachable(model_map, budget, passes)
    if not dry_run:
        writer.require_space(out, 2 * budget)  # the codes, in the journal and in the artifact
    texts = [Path(file) for file in calibration]
    batches = _calibration(checkpoint, model_map, texts, options)
    expected = _forecast(model_map, batches, options, budget) if dry_run else None
    if expected is not None:
        hint(expected.sentence())
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="ciuic-"))) / "plan" if dry_run else out
        journal = stack.enter_context(Journal(place))
        resumed = journal.begin(_fingerprint(checkpoint, options, batches, budget), restart=force)
        if resumed:
            hint(f"going on with the unfinished run in {journal.folder}")
        try:
            if not dry_run:
                writer.recover(out)
            _check_output(
                out, checkpoint, force=force, dry_run=dry_run
            )  # another run may have ended meanwhile
            if resumed and journal.published():
                hint("the earlier run had written the output already")
                finished: dict[str, Any] = json.loads((out / writer.REPORT).read_text(encoding="utf-8"))
                journal.remove()
                return finished
            run = _Run(model_map, journal, options, passes, batches, progress)
            plan = run.plan(budget)
            report = run.report(plan, started) if dry_run else run.finish(plan, out, started)
            if expected is not None:
                report["forecast"] = expected.as_dict()
        except (OSError, SafetensorError) as error:
            raise writer.environment_fault(error, journal.folder) from error
        except KeyboardInterrupt:
            if not dry_run:
                hint(f"finished steps are kept in {journal.folder}; the same command goes on from there")
            raise
        except (InputError, TargetError):
            journal.remove()  # to go on would end the same way
            raise
        journal.remove()
    return report


class _Run:
    """One run's state: what the journal has is read, what it lacks is made."""

    def __init__(
        self,
        model_map: ModelMap,
        journal: Journal,
        options: Options,
        passes: PassOptions,
        batches: torch.Tensor,
        progress: Progress,
    ) -> None:
        self.map, self.journal, self.options, self.passes = model_map, journal, options, passes
        self.progress = progress
        self._kl_meter: KLMeter | None = None
        self.corrections: dict[str, dict[str, float]] = {}
        self.singular = 0
        self.device = choose_device(options.device)
        self.units = units_of(model_map.parameters.values())
        mask = _held_out(len(batches))
        self.held_out = batches[mask]
        self.statistics = self._statistics(batches[~mask] if len(batches) > 1 else batches)

    def _statistics(self, batches: torch.Tensor) -> Statistics:
        folder = self.journal.folder / "statistics"
        if not self.journal.sealed("statistics.done", folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            collect_statistics(
                self.map, batches, folder, device=self.device, seed=self.options.seed, progress=self.progress
            )
            self.journal.seal("statistics.done", folder)
        return Statistics(folder)

    def plan(self, budget: int) -> Plan:
        """Price every arm, take a first plan, correct the prediction by what its noise really does, plan again."""
        arms = []
        for number, unit in enumerate(self.units):
            arms.append(self._arms(number, unit))
            self.progress("arms", number + 1, len(self.units))
        level_uncovered(arms, self.statistics)
        self.singular = sum(arm.singular for arm in arms)
        first = make_plan(self.map, arms, budget, self.passes)
        self.corrections = self._corrections(first)
        for arm in arms:
            arm.rank = 0
            arm.correction = self.corrections[arm.unit.role]["correction"]
        return make_plan(self.map, arms, budget, self.passes)

    def _arms(self, number: int, unit: Unit) -> Arms:
        step = f"arms/{number:07d}"
        stored = self.journal.load(step)
        if stored is not None:
            return arms_from_bytes(stored, unit, self.passes)
        arms = unit_arms(self.map, self.statistics, unit, self.passes)
        self.journal.save(step, arms_to_bytes(arms))
        return arms

    def _corrections(self, plan: Plan) -> dict[str, dict[str, float]]:
        stored = self.journal.load("corrections")
        if stored is None:
            found = role_corrections(
                self.map,
                self.statistics,
                plan,
                self._meter(),
                window=self.options.window,
                progress=self.progress,
            )
            stored = json.dumps(found).encode()
            self.journal.save("corrections", stored)
        return dict(json.loads(stored))

    def _meter(self) -> KLMeter:
        """Measures KL on the held-out sequences; built once, the original's predictions with it."""
        if self._kl_meter is None:
            self._kl_meter = KLMeter(
                self.map, self.held_out, self.journal.folder / "meter", device=self.device,
                progress=lambda what, done, total: None,
            )  # fmt: skip
        return self._kl_meter

    def _measured_kl(self, plan: Plan) -> Mean:
        """KL of the finished codes on the held-out sequences, routers masked as they will be at loading."""
        steps: dict[str, list[int]] = {}
        for number, unit in enumerate(self.units):
            steps.setdefault(unit.name, []).append(number)

        def decoded(name: str) -> torch.Tensor | None:
            if name not in steps:
                return None
            parts = [
                decode_dense(PackedMatrix.from_buffer(self._blob(number), where=name))
                for number in steps[name]
            ]
            return torch.stack(parts) if len(self.map.parameters[name].shape) == 3 else parts[0]

        pruned = {
            name.removesuffix(".down_proj"): torch.tensor(
                [plan.units[self.units[number].key].is_zero for number in numbers]
            )
            for name, numbers in steps.items()
            if name.endswith(".down_proj")
        }
        return self._meter().measure(decoded, masking(pruned))

    def report(self, plan: Plan, started: float, measured_kl: Mean | None = None) -> dict[str, Any]:
        return build_report(
            self.map, plan, self.statistics, options=self.options.as_dict(), corrections=self.corrections,
            singular=self.singular, measured_kl=measured_kl, held_out_tokens=self.held_out.numel(), started=started,
        )  # fmt: skip

    def finish(self, plan: Plan, out: Path, started: float) -> dict[str, Any]:
        self._encode(plan)
        partial = writer.partial_of(out)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            report = self._write(plan, partial, started)
            self.journal.publishing(partial)
            writer.publish(partial, out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return report

    def _encode(self, plan: Plan) -> None:
        threads = torch.get_num_threads()
        total = sum(unit.weights for unit in self.units)
        done = 0
        for number, unit in enumerate(self.units):
            if self.journal.load(_step(number)) is None:
                packed = encode_unit(
                    self.map, self.statistics, plan, unit, window=self.options.window, threads=threads
                )
                self.journal.save(_step(number), packed.to_bytes())
            done += unit.weights
            self.progress("encode", done, total)

    def _write(self, plan: Plan, folder: Path, started: float) -> dict[str, Any]:
        steps: dict[str, list[int]] = {}
        for number, unit in enumerate(self.units):
            steps.setdefault(unit.name, []).append(number)

        def payload(name: str) -> bytes:
            if name not in steps:
                value = self.map.read(name).to(stored_dtype(self.map, name)).contiguous()
                return value.reshape(-1).view(torch.uint8).numpy().tobytes()
            if len(self.map.parameters[name].shape) < 3:
                return self._blob(steps[name][0])
            experts = (PackedMatrix.from_buffer(self._blob(number), where=name) for number in steps[name])
            return ExpertStack(tuple(experts)).to_bytes()

        shards = lay_out(stored_tensors(self.map, plan.blob_bytes))
        written = 0

        def count(nbytes: int) -> None:
            nonlocal written
            written += nbytes
            self.progress("write", written, plan.file_bytes)

        writer.write_shards(shards, folder, payload, count)
        writer.write_index(shards, folder)
        writer.copy_companions(self.map.checkpoint.folder, folder)
        report = self.report(plan, started, self._measured_kl(plan))
        writer.write_config(folder, self.map.source_config, quantization_config(report))
        text = json.dumps(report, indent=2)
        (folder / writer.REPORT).write_text(text + "\n", encoding="utf-8")
        (folder / "memory_report.html").write_text(render_html(report), encoding="utf-8")
        writer.write_checksums(folder)
        return report

    def _blob(self, number: int) -> bytes:
        data = self.journal.load(_step(number))
        if data is None:
            raise OSError(0, "the journal lost a finished step", str(self.journal.folder))
        return data


def _step(number: int) -> str:
    return f"matrices/{number:07d}"


def _check_output(out: Path, checkpoint: Checkpoint, *, force: bool, dry_run: bool) -> None:
    """Refuse an output that exists, is the input, or cannot be written, before any work."""
    source = checkpoint.folder.resolve()
    if out == source or source in out.parents:
        raise InputError("the output is the input", file=out, remedy="choose another output folder")
    if out in source.parents:
        raise InputError("the input lies inside the output", file=out, remedy="choose another output folder")
    if dry_run:
        return
    if out.exists() and not out.is_dir():
        raise InputError("the output is a file", file=out, remedy="choose a folder")
    if out.exists() and not force and not Journal(out).published():
        raise InputError(
            "the output exists already",
            file=out,
            remedy="choose another folder, or replace it with --force (in Python: force=True)",
        )
    for place in (out, next(path for path in out.parents if path.exists())):
        if place.exists() and not writer.is_writable(place):
            raise InputError(
                "the output's folder is read-only", file=place, remedy="choose a folder you can write to"
            )


def _budget(original: int, ratio: float, target_bpw: float | None, target_size: int | None) -> int:
    """Bytes that the artifact's safetensors files may take."""
    if target_size is not None:
        return target_size
    if target_bpw is not None:
        return int(original * target_bpw / 16)
    return int(original / ratio)


def _calibration(
    checkpoint: Checkpoint, model_map: ModelMap, files: Sequence[Path], options: Options
) -> torch.Tensor:
    tokenizer = open_tokenizer(checkpoint.folder)
    vocabulary = model_map.config.get_text_config().vocab_size
    return calibration_batch(
        tokenizer, files, nsamples=options.nsamples, seqlen=options.seqlen, vocab_size=vocabulary
    )


def _held_out(count: int) -> torch.Tensor:
    """Mask (count,) of the sequences that the statistics do not see."""
    every = min(HELD_OUT_EVERY, count)
    return torch.arange(count) % every == every - 1


def _forecast(model_map: ModelMap, batches: torch.Tensor, options: Options, budget: int) -> Forecast:
    held_out = int(_held_out(len(batches)).sum())
    text = Text(max(1, len(batches) - held_out), held_out, batches.shape[1])
    return forecast(
        model_map, text, window=options.window, ranks=options.rank != "off", budget=budget,
        device=choose_device(options.device),
    )  # fmt: skip


def _fingerprint(
    checkpoint: Checkpoint, options: Options, batches: torch.Tensor, budget: int
) -> dict[str, Any]:
    """What must be equal for a run to go on: program, options, text, and the source files."""
    files = {}
    for path in checkpoint.files():
        status = path.stat()
        files[os.path.relpath(path, checkpoint.folder.resolve())] = [status.st_size, status.st_mtime_ns]
    config = json.dumps(checkpoint.config, sort_keys=True, default=str).encode()
    return {
        "version": __version__,
        "options": options.as_dict(),
        "budget": budget,
        "calibration": hashlib.sha256(batches.numpy().tobytes()).hexdigest(),
        "config": hashlib.sha256(config).hexdigest(),
        "weights": files,
    }
