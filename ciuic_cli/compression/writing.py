"""The last part of a run: writes the coded matrices as an artifact, measures and checks it, and publishes it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ciuic_cli.allocation.artifact_size import shards_of
from ciuic_cli.allocation.plan import Plan
from ciuic_cli.artifact import publishing, writer
from ciuic_cli.artifact.schema import quantization_config
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.compression.journal import FinishedFiles
from ciuic_cli.compression.loaded_model import require_loadable
from ciuic_cli.compression.output_checks import check_no_run_inside
from ciuic_cli.compression.recipe import write_recipe
from ciuic_cli.compression.run import Run
from ciuic_cli.errors import CiuicError, InputError, TargetError
from ciuic_cli.evaluation.estimates import Floats, Mean, mean_of
from ciuic_cli.evaluation.kl_meter import NONFINITE_REMEDY
from ciuic_cli.evaluation.perplexity import generate_text
from ciuic_cli.process.memory import return_freed_memory
from ciuic_cli.process.signals import raise_if_interrupted
from ciuic_cli.profiling.account import measured
from ciuic_cli.recovery.row_factors import Factors, tuned_dense, with_row_factors
from ciuic_cli.report.html import render_html
from ciuic_cli.report.inspection import describe
from ciuic_cli.report.model_card import render_card, source_of
from ciuic_cli.report.schema import MemoryReport, SampleReport

ROUNDED = "rounded.kl"
"""Journal step: KL of every held-out token of the rounded weights."""


def write_artifact(run: Run, plan: Plan, out: Path, *, force: bool) -> tuple[MemoryReport, Path | None]:
    """Write the artifact under a temporary name and rename it to `out`. force: replace an older artifact there.

    Returns the report, and the path of a folder with a replaced output that cannot be removed (None: it was removed).

    Raises:
        TargetError: the compressed model predicts worse than guessing, or otherwise once it is loaded.
        InputError: a source file changed during the run; transformers cannot run the artifact.
    """
    try:
        folder = publishing.begin(out)
        report = _write_folder(run, plan, folder)
        run.task.require_unchanged()
        check_no_run_inside(out)
        raise_if_interrupted()
        run.journal.publishing(folder)
        undeleted = publishing.publish(out, force=force)
    except BaseException:
        publishing.discard(out)
        raise
    return report, undeleted


def _write_folder(run: Run, plan: Plan, folder: Path) -> MemoryReport:
    """Write all files of the artifact; returns the report."""
    factors = {} if run.recovered is None else run.recovered.factors
    with measured("measure", ""):
        rounded = _rounded_kls(run, plan, factors)
    _require_better_than_guessing(run, mean_of(rounded))
    with measured("write", ""):
        _write_weights(run, plan, folder, factors)
    writer.copy_companions(run.map.checkpoint.folder, folder)
    report = run.report(plan, mean_of(rounded))
    quantization = quantization_config(
        bits_per_weight=report.bits_per_weight, ratio=report.ratio, mtp=run.map.mtp
    )
    writer.write_config(folder, run.map.source_config, quantization)
    _require_readable(folder)
    with measured("measure", ""):
        require_loadable(run, folder, rounded)
    report = run.report(plan, mean_of(rounded))  # again: its seconds include the check
    if run.options.prompt is not None:
        report = _with_sample(
            report, run.options.prompt, run.map.checkpoint.folder, folder, run.options.device
        )
    (folder / writer.REPORT).write_text(report.to_json(), encoding="utf-8")
    (folder / writer.REPORT_PAGE).write_text(render_html(report), encoding="utf-8")
    card = render_card(report, source_of(run.map))
    (folder / "README.md").write_text(card, encoding="utf-8")
    if run.map.checkpoint.is_stored:
        write_recipe(run.options, folder)
    writer.write_checksums(folder)
    return report


def _with_sample(
    report: MemoryReport, prompt: str, original: Path, artifact: Path, device: str
) -> MemoryReport:
    """The report with the prompt continued by both models; a warning instead of a text that cannot be made."""
    texts: list[str | None] = []
    warnings = list(report.warnings)
    for name, folder in (("original", original), ("artifact", artifact)):
        try:
            texts.append(generate_text(folder, prompt, device=device))
        except CiuicError as fault:  # a run of hours does not fail for a sample
            texts.append(None)
            warnings.append(f"no text of the {name}: {fault}")
    sample = SampleReport(prompt=prompt, before=texts[0], after=texts[1])
    return replace(report, samples=(sample,), warnings=tuple(warnings))


def _rounded_kls(run: Run, plan: Plan, factors: Factors) -> list[Floats]:
    """`Run.rounded_kls`, once: a run that continues after this step may lack the codes (`FinishedFiles`)."""
    stored = run.journal.load(ROUNDED)
    if stored is None:
        kls = [part.tolist() for part in run.rounded_kls(plan, factors)]
        stored = json.dumps(kls).encode()
        run.journal.save(ROUNDED, stored)
    return [np.array(part) for part in json.loads(stored)]


def _write_weights(run: Run, plan: Plan, folder: Path, factors: Factors) -> None:
    """Write the safetensors files and their index, one tensor in memory at a time.

    Files are written into the journal and linked into the folder. The codes in a finished file are deleted from the
    journal, so that codes are on the disk once, and one file's twice; with recovery all of them stay.
    """

    def payload(name: str) -> bytes:
        return_freed_memory()
        parameter = run.map.parameters[name]
        if not parameter.compress:
            value = tuned_dense(run.map, name, factors)
            return value.reshape(-1).view(torch.uint8).numpy().tobytes()
        if len(parameter.shape) < 3:
            return with_row_factors(run.encoded((name, None)), factors.get((name, None))).to_bytes()
        keys = [(name, expert) for expert in range(parameter.shape[0])]
        stack = ExpertStack(tuple(with_row_factors(run.encoded(key), factors.get(key)) for key in keys))
        return stack.to_bytes()

    written = 0

    def count(nbytes: int) -> None:
        nonlocal written
        written += nbytes
        run.progress("write", written, plan.file_bytes)

    shards, finished = shards_of(run.map, plan.blob_bytes), FinishedFiles(run.journal)
    for shard in shards:
        if finished.has(shard.file):
            count(shard.nbytes)
        else:
            writer.write_shards([shard], finished.folder, payload, count)
            finished.add(shard.file)
        if run.recovered is None:
            run.release_codes(tensor.name for tensor in shard.tensors)
        finished.link(shard.file, folder)
    return_freed_memory()
    writer.write_index(shards, folder)


def _require_better_than_guessing(run: Run, measured: Mean) -> None:
    """Raise TargetError if the KL exceeds log(vocabulary), the largest KL of uniform predictions."""
    uniform_kl = math.log(run.map.config.get_text_config().vocab_size)
    if measured.value > uniform_kl:
        raise TargetError(
            "the compressed model predicts worse than one that guesses: its KL divergence from the original is "
            f"{measured.value:.3g} nats per token; guessing has at most {uniform_kl:.3g}",
            file=run.map.checkpoint.folder,
            remedy=f"{NONFINITE_REMEDY}; a few weights may be far larger than all others",
        )


def _require_readable(folder: Path) -> None:
    """Raise RuntimeError if our reader refuses the folder: an artifact with such a bug must not be published."""
    try:
        describe(folder)
    except InputError as error:
        raise RuntimeError(f"the finished artifact cannot be opened: {error}") from error
