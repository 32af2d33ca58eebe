"""compress(): what is asked is checked, the steps are run, by one process or by several, and the output appears."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from safetensors import SafetensorError

from ciuic_cli.allocation.arms import PassOptions
from ciuic_cli.allocation.plan import check_reachable, largest_bytes, require_storable
from ciuic_cli.artifact import publishing, writer
from ciuic_cli.artifact.verification import verify
from ciuic_cli.checkpoint.architecture import positions_of
from ciuic_cli.checkpoint.keeping import keep_mtp
from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.compression.journal import Journal
from ciuic_cli.compression.options import (
    DEFAULT_SEQLEN,
    DEFAULT_WIDTHS,
    EFFORTS,
    Options,
    check_bits,
    check_path,
    check_prune,
    check_rank,
    check_settings,
    check_target,
    check_texts,
)
from ciuic_cli.compression.run import STATISTICS, Progress, Run
from ciuic_cli.compression.task import Task, budget_of, check_apart, check_output
from ciuic_cli.errors import CiuicError, EnvironmentFault, InputError, TargetError, UsageError
from ciuic_cli.evaluation.opening import open_generation_config
from ciuic_cli.process import atomic_files
from ciuic_cli.process.memory import steady_memory
from ciuic_cli.process.workers import Workers, joined
from ciuic_cli.recovery.tuning import SEQUENCES
from ciuic_cli.runtime.loading import choose_device
from ciuic_cli.text.calibration import calibration_batch
from ciuic_cli.text.tokenizer import open_tokenizer

Hint = Callable[[str], None]
_KEPT = "finished steps are kept in {}; the same command goes on from there"


def compress(
    model: str | Path,
    out: str | Path,
    *,
    ratio: float | None = None,
    target_bpw: float | None = None,
    target_size: int | None = None,
    calibration: str | Path | Sequence[str | Path] = (),
    nsamples: int | None = None,
    seqlen: int | None = None,
    seed: int = 0,
    effort: str = "default",
    prune: str | float = "auto",
    rank: str | int = "auto",
    bits: Sequence[float] = DEFAULT_WIDTHS,
    mtp: str = "drop",
    device: str = "auto",
    dry_run: bool = False,
    force: bool = False,
    progress: Progress = lambda what, done, total: None,
    hint: Hint = lambda message: None,
) -> dict[str, Any]:
    """Compress a checkpoint to a byte budget; returns the memory report (also written into the artifact).

    Under torchrun every process calls this with the same arguments and they share the work; the first one reports
    progress, hints, and writes. The artifact's bytes do not depend on their number.

    Args:
        model: folder or hub id of a safetensors checkpoint.
        out: folder of the artifact; must not exist unless `force`, and not appear during the run.
        ratio: bytes of all parameters at 2 bytes each, over bytes of the artifact's safetensors files; default: 4.
        target_bpw: instead of ratio: stored bits per parameter. target_size: instead of ratio: bytes.
        calibration: UTF-8 text file or files; none: the package's own mix.
        effort: "fast", "default" or "best".
        prune: "off", "auto", or the share of prunable weights to leave out. rank: "off", "auto", or a rank.
        bits: the widths that may be used, of 1, 1.5, 2, .. 6, 7, 8; from 2 on if not given.
        mtp: "keep" or "drop" the multi-token-prediction layers. Kept ones count as parameters.
        dry_run: stop at the plan, write nothing; the report has a "forecast" of the whole run (forecast.py).
        force: replace an existing output; discard an unfinished run with other options.

    Raises:
        UsageError: an option of a value that it cannot have (see options.py).
        CiuicError: see errors.py; the output is as it was before.
    """
    target, texts = check_target(ratio, target_bpw, target_size), check_texts(calibration)
    prune, rank, widths = check_prune(prune), check_rank(rank), check_bits(bits)
    check_settings(nsamples=nsamples, seqlen=seqlen, seed=seed, effort=effort, mtp=mtp, device=device)
    check_path("model", model)
    out = check_path("out", out)
    started = time.monotonic()
    steady_memory()
    out = Path(os.path.realpath(out))  # a link keeps pointing where it does; what it points to is written

    def task() -> Task:
        choose_device(device)  # refused before there is anything to go on from
        checkpoint = open_checkpoint(model)
        if workers.leads:
            check_apart(out, checkpoint, texts)
            if not dry_run:
                Journal(out).sweep()
                for place in (out, *out.parents):
                    Journal(place).require_free()
                check_output(out, force=force)
        model_map = map_model(checkpoint)
        for warning in model_map.warnings:
            hint(warning)
        if mtp == "keep":
            model_map = keep_mtp(model_map)
            if not model_map.mtp.kept:
                hint("the checkpoint has no multi-token-prediction layers to keep")
        original = 2 * model_map.stored_numel
        budget = budget_of(original, **target)
        level = EFFORTS[effort]
        length = _sequence_length(seqlen, positions_of(model_map.config))
        passes = PassOptions(widths, level.L, prune, rank)
        check_reachable(model_map, budget, passes)
        budget = min(budget, largest_bytes(model_map, passes))
        options = Options(
            original / budget, effort, level.L, nsamples or level.nsamples, level.recovery_steps, length,
            seed, prune, rank, widths, mtp, device,
        )  # fmt: skip
        if workers.leads and not dry_run:
            atomic_files.require_space(out, 2 * budget)  # the codes, in the journal and in the artifact
        open_generation_config(checkpoint.folder)  # it goes with the artifact
        batches = calibration_batch(
            open_tokenizer(checkpoint.folder),
            texts,
            nsamples=options.nsamples + SEQUENCES * options.recovery_steps,
            seqlen=options.seqlen,
            vocab_size=model_map.config.get_text_config().vocab_size,
        )
        if workers.leads:
            require_storable(model_map)
        return Task(checkpoint, model_map, options, passes, batches, budget)

    with joined() as workers:
        if workers.leads:
            return _lead(task(), out, workers, started, dry_run, force, progress, hint)
        return _follow(task, workers, dry_run)


def _sequence_length(asked: int | None, positions: int | None) -> int:
    """Tokens of a calibration sequence: what was asked for, or the default where the model has room for it."""
    if asked is None:
        return DEFAULT_SEQLEN if positions is None else min(DEFAULT_SEQLEN, positions)
    if positions is not None and asked > positions:
        raise UsageError(
            f"--seqlen {asked}: the model has {positions} positions", remedy=f"use at most {positions}"
        )
    return asked


def _lead(
    task: Task,
    out: Path,
    workers: Workers,
    started: float,
    dry_run: bool,
    force: bool,
    progress: Progress,
    hint: Hint,
) -> dict[str, Any]:
    """The run of the only worker, or of the first of several: it holds the journal and writes the artifact."""
    expected = task.forecast() if dry_run else None
    if expected is not None:
        hint(expected.sentence())
    with ExitStack() as stack:
        place = stack.enter_context(_temporary_place()) if dry_run else out
        journal = stack.enter_context(Journal(place))
        left: list[Path] = []
        if not dry_run:
            left = publishing.recover(out)
            check_output(out, force=force)  # another run may have ended meanwhile
        resumed = journal.begin(task.fingerprint(), restart=force)
        if resumed:
            hint(f"going on with the unfinished run in {journal.folder}")
        finished = _finished_earlier(journal, out, replace=force) if resumed else None
        try:
            with _disk_faults(journal):
                if finished is not None:
                    hint("the earlier run had written the output already")
                elif left:
                    raise EnvironmentFault(
                        "cannot remove what an earlier run left",
                        file=left[0],
                        remedy="remove it yourself, or choose another output folder",
                    )
                workers.tell((place, finished))
                if finished is None:
                    run = Run(task, journal, workers, progress)
                    plan = run.plan()
                    if dry_run:
                        finished = run.report(plan, started)
                    else:
                        run.encode(plan)
                        run.recover(plan)
                        finished, old = run.finish(plan, out, started, replace=force)
                        left = [] if old is None else [old]
                if expected is not None:
                    finished["forecast"] = expected.as_dict()
        except KeyboardInterrupt:
            if not dry_run and journal.has_steps():
                hint(_KEPT.format(journal.folder))
            raise
        except (InputError, TargetError) as error:
            if dry_run or not _may_pass(error, journal):
                journal.remove()  # to go on would end the same way
            else:
                hint(_KEPT.format(journal.folder))
            raise
        journal.remove()
        for path in left:
            hint(f"the new output is in place, but the old one cannot be removed: remove {path} yourself")
        workers.tell(finished)
    return finished


def _finished_earlier(journal: Journal, out: Path, *, replace: bool) -> dict[str, Any] | None:
    """The report of an output that the run which left this journal had finished; None if there is none.

    Raises InputError where it was damaged since, or with `replace` returns None: it is written again.
    """
    if not journal.published():
        return None
    try:
        verify(out).require_intact(out)
    except InputError as error:
        if replace:
            return None
        raise InputError(
            f"an earlier run had finished this output, and it was damaged since: {error.message}",
            file=error.file,
            remedy="write it again from that run's steps with --force (in Python: force=True)",
        ) from error
    found: dict[str, Any] = json.loads((out / writer.REPORT).read_text(encoding="utf-8"))
    return found


def _may_pass(error: CiuicError, journal: Journal) -> bool:
    """Whether a library refused what had run once already: for want of memory perhaps, in words that we do not know."""
    of_a_library = error.__cause__ is not None and not isinstance(error.__cause__, CiuicError)
    return of_a_library and journal.load(STATISTICS) is not None


def _follow(task: Callable[[], Task], workers: Workers, dry_run: bool) -> dict[str, Any]:
    """The run of another worker: its share of the steps, once the first has found that there is something to do."""
    place, finished = workers.tell(None)
    if finished is None:
        journal = Journal(place)  # the first worker holds its lock
        with _disk_faults(journal):
            run = Run(task(), journal, workers, lambda what, done, total: None)
            plan = run.plan()
            if not dry_run:
                run.encode(plan)
                run.recover(plan)
    told: dict[str, Any] = workers.tell(None)
    return told


@contextmanager
def _temporary_place() -> Iterator[Path]:
    """Where the journal of a dry run lies: nothing of it stays, and what cannot be written there is $TMPDIR's fault."""
    with TemporaryDirectory(prefix="ciuic-") as folder:
        try:
            yield Path(folder) / "plan"
        except EnvironmentFault as fault:
            if fault.file is None or not Path(fault.file).is_relative_to(folder):
                raise
            raise EnvironmentFault(
                fault.message,
                file=gettempdir(),
                remedy="free disk space there, or set TMPDIR to a folder on another disk, and start again",
            ) from fault


@contextmanager
def _disk_faults(journal: Journal) -> Iterator[None]:
    """What the disk refuses becomes an error that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise atomic_files.environment_fault(error, journal.folder) from error
