"""`compress`: makes an artifact from a checkpoint, completely or not at all; an interrupted run can be continued."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from safetensors import SafetensorError

from ciuic_cli import kernels
from ciuic_cli.allocation.artifact_size import require_readable
from ciuic_cli.artifact import publishing, writer
from ciuic_cli.artifact.verification import verify
from ciuic_cli.checkpoint.reader import Checkpoint, open_checkpoint
from ciuic_cli.codecs import native
from ciuic_cli.compression.journal import FinishedFiles, Journal
from ciuic_cli.compression.options import CompressOptions, check_path
from ciuic_cli.compression.output_checks import check_apart, check_no_other_run, check_output
from ciuic_cli.compression.run import STATISTICS, Run
from ciuic_cli.compression.task import Task, make_task
from ciuic_cli.compression.writing import ROUNDED, write_artifact
from ciuic_cli.cost.forecast import Forecast
from ciuic_cli.errors import CiuicError, EnvironmentFault, InputError, TargetError, UsageError
from ciuic_cli.hub.download import hub_id
from ciuic_cli.hub.mirror import mirrored
from ciuic_cli.process import atomic_files
from ciuic_cli.process.file_faults import environment_fault
from ciuic_cli.process.memory import KEPT_BYTES, configure_allocators
from ciuic_cli.process.numeric_libraries import make_products_reproducible
from ciuic_cli.process.progress import Progress, no_progress
from ciuic_cli.process.threads import renew_pool
from ciuic_cli.process.torch_modes import default_modes
from ciuic_cli.process.workers import Workers, is_distributed, join_workers
from ciuic_cli.profiling.account import Account, keeping
from ciuic_cli.report.schema import MemoryReport
from ciuic_cli.runtime.loading import choose_device

Hint = Callable[[str], None]
_running = threading.Lock()
"""Held by the run of this process."""
_KEPT_STEPS = "finished steps are kept in {}; the same command continues from there"


def compress(
    model: str | Path | Checkpoint,
    out: str | Path,
    *,
    progress: Progress = no_progress,
    hint: Hint = lambda message: None,
    max_disk: int | None = None,
    account: Account | None = None,
    **options: Any,
) -> MemoryReport:
    """Compress a checkpoint to a byte budget; returns the memory report (also written into the artifact).

    Under torchrun every process calls this with the same arguments, and they share the work. The leader (rank 0)
    reports progress and hints, and writes the artifact. The artifact's bytes do not depend on the number of processes.

    Args:
        model: folder or hub id of a safetensors checkpoint; or an opened one, which may make weights as they are read.
        out: folder of the artifact; it must be absent or empty unless `force`, and others must not write into it during
            the run.
        progress: called as progress(phase, done, total). hint: called with a message for the user.
        max_disk: of a model on the hub, at most so many bytes of weights are on disk at a time (in the temporary
            folder); they are fetched again when they are needed again. Default: the whole model is downloaded once.
        account: receives what this process computes in the run, and how long that takes.
        **options: the fields of `CompressOptions`: ratio, target_bpw, target_size, calibration, nsamples, seqlen, seed,
            effort, states, time_budget, prune, rank, bits, mtp, device, prompt, dry_run, force. The report has a
            forecast of the run, unless the run was continued.

    Raises:
        TypeError: an option that does not exist.
        CiuicError: see errors.py; the output is as it was before. A process makes one run at a time.
    """
    make_products_reproducible()
    renew_pool()
    if not isinstance(model, Checkpoint):
        check_path("model", model)
    checked, started = CompressOptions(**options), time.monotonic()
    destination = Path(os.path.realpath(check_path("out", out)))  # a link is followed
    with _only_run_of_the_process(), default_modes(), _source(model, max_disk) as source, keeping(account):
        request = _Request(
            model=source,
            out=destination,
            options=checked,
            progress=progress,
            hint=hint,
            started=started,
        )
        native.interface()  # raises if the library is missing; the first rounding comes late
        configure_allocators(KEPT_BYTES)
        with join_workers() as workers:
            return _lead(request, workers) if workers.is_leader else _follow(request, workers)


@contextmanager
def _source(model: str | Path | Checkpoint, max_disk: int | None) -> Iterator[str | Path | Checkpoint]:
    """The model, or with `max_disk` a folder that fetches its weights from the hub."""
    if max_disk is None:
        yield model
        return
    found = hub_id(model) if isinstance(model, str) and not os.path.exists(model) else None
    if found is None or is_distributed():
        raise UsageError(
            "--max-disk is for a model on the hub, compressed by one process",
            remedy="give a hub id such as org/name, or leave --max-disk out",
        )
    with mirrored(*found, max_disk) as folder:
        yield folder


@contextmanager
def _only_run_of_the_process() -> Iterator[None]:
    """Raise EnvironmentFault if a run is under way in this process.

    Runs change torch's number of threads and default dtype for a while, and those belong to the whole process.
    """
    if not _running.acquire(blocking=False):
        raise EnvironmentFault(
            "another compression is running in this process",
            remedy="start it when the other one has ended, or in a process of its own",
        )
    try:
        yield
    finally:
        _running.release()


@dataclass(frozen=True)
class _Request:
    """The arguments of `compress`, checked. started: seconds of the monotonic clock."""

    model: str | Path | Checkpoint
    out: Path
    options: CompressOptions
    progress: Progress
    hint: Hint
    started: float


def _opened(model: str | Path | Checkpoint) -> Checkpoint:
    return model if isinstance(model, Checkpoint) else open_checkpoint(model)


def _lead(request: _Request, workers: Workers) -> MemoryReport:
    """The run of the leader, which may be the only worker: it holds the journal's lock and writes the artifact."""
    task = _checked_task(request)
    if not request.options.dry_run:
        return _compress(request, task, workers)
    return _plan_only(request, task, workers, _announced_forecast(request, task))


def _checked_task(request: _Request) -> Task:
    """The task, after all checks that need no work."""
    options, out = request.options, request.out
    device = choose_device(options.device)
    checkpoint = _opened(request.model)
    check_apart(out, checkpoint, options.calibration)
    if not options.dry_run:
        Journal(out).sweep()
        check_no_other_run(out)
        check_output(out, force=options.force)
    kernels.available(device, request.hint)  # announces the first compilation, if any
    task = make_task(checkpoint, options, request.hint, Journal(out).unfinished(), request.started)
    if not options.dry_run:
        atomic_files.require_space(out, task.codes_bytes)
    require_readable(task.map)
    return task


def _announced_forecast(request: _Request, task: Task) -> Forecast:
    expected = task.forecast()
    request.hint(expected.sentence())
    return expected


def _plan_only(request: _Request, task: Task, workers: Workers, expected: Forecast) -> MemoryReport:
    """A dry run: the report of the plan. The journal is in a temporary folder."""
    with _temporary_folder() as out, Journal(out) as journal, _disk_faults_of(journal):
        journal.begin(task.fingerprint(), restart=request.options.force)
        workers.broadcast((out, None))
        run = Run(task, journal, workers, request.progress, request.hint, expected)
        run.collect()
        report = run.report(run.plan())
        workers.barrier()  # the others read the journal until they have made their plans
        journal.remove()
        workers.broadcast(report)
    return report


def _compress(request: _Request, task: Task, workers: Workers) -> MemoryReport:
    """A whole run, or the rest of an interrupted one; returns the report."""
    out, force = request.out, request.options.force
    with Journal(out) as journal:
        undeleted = publishing.recover(out)
        check_output(out, force=force)  # another run may have ended since the first check
        resumed = journal.begin(task.fingerprint(), restart=force)
        expected = None
        if resumed:
            request.hint(f"continuing the unfinished run in {journal.folder}")
        if task.time_budget is not None:
            request.hint(task.choice_sentence())
        if not resumed:
            expected = _announced_forecast(request, task)
        report = _published_report(journal, out, replace=force) if resumed else None
        if resumed and report is None and not FinishedFiles.are_intact(journal, ROUNDED):
            journal.clear()  # the codes in a damaged file are nowhere else
            journal.begin(task.fingerprint(), restart=force)
        with _disk_faults_of(journal), _keep_or_remove(journal, request.hint):
            if report is not None:
                request.hint("the earlier run had written the output already")
            elif undeleted is not None:
                raise EnvironmentFault(
                    "cannot remove a folder that an earlier run left",
                    file=undeleted,
                    remedy="remove it yourself, or choose another output folder",
                )
            workers.broadcast((out, report))
            if report is None:
                run = Run(task, journal, workers, request.progress, request.hint, expected)
                run.collect()
                plan = run.plan()
                run.encode(plan)
                run.recover(plan)
                report, undeleted = write_artifact(run, plan, out, force=force)
                if not resumed and (late := task.overrun_sentence(report.seconds)):
                    request.hint(late)
        journal.remove()
        if undeleted is not None:
            request.hint(
                f"the new output is in place, but the old one cannot be removed: remove {undeleted} yourself"
            )
        workers.broadcast(report)
    return report


def _follow(request: _Request, workers: Workers) -> MemoryReport:
    """The run of any other worker: it makes its share of the steps, unless the leader finds nothing to do."""
    out, report = workers.broadcast(None)
    if report is None:
        journal = Journal(out)  # the leader holds its lock
        with _disk_faults_of(journal):
            choose_device(request.options.device)
            checkpoint = _opened(request.model)
            task = make_task(checkpoint, request.options, lambda message: None, journal.unfinished())
            run = Run(task, journal, workers, no_progress)
            run.collect()
            plan = run.plan()
            if request.options.dry_run:
                workers.barrier()
            else:
                run.encode(plan)
                run.recover(plan)
    final_report: MemoryReport = workers.broadcast(None)
    return final_report


def _published_report(journal: Journal, out: Path, *, replace: bool) -> MemoryReport | None:
    """The report of the output, if the run that left this journal had already published it; otherwise None.

    If the output was damaged since then: None with `replace` (it is written again), otherwise InputError.
    """
    if not journal.published():
        return None
    try:
        verify(out).require_intact(out)
    except InputError as error:
        if replace:
            return None
        raise InputError(
            f"an earlier run finished this output, and it was damaged since: {error.message}",
            file=error.file,
            remedy="write it again from that run's steps with --force (in Python: force=True)",
        ) from error
    file = out / writer.REPORT
    return MemoryReport.from_json(file.read_text(encoding="utf-8"), file)


@contextmanager
def _keep_or_remove(journal: Journal, hint: Hint) -> Iterator[None]:
    """After an error, keep finished steps if the same command can continue, and remove them if it would fail again."""
    try:
        yield
    except KeyboardInterrupt:
        if journal.has_steps():
            hint(_KEPT_STEPS.format(journal.folder))
        raise
    except (InputError, TargetError) as error:
        if _may_be_transient(error, journal):
            hint(_KEPT_STEPS.format(journal.folder))
        else:
            journal.remove()
        raise


def _may_be_transient(error: CiuicError, journal: Journal) -> bool:
    """Whether a library failed at work that had succeeded before; the cause may be a lack of memory."""
    of_a_library = error.__cause__ is not None and not isinstance(error.__cause__, CiuicError)
    return of_a_library and journal.load(STATISTICS) is not None


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A place for the journal of a dry run. A failed write there becomes an error that names $TMPDIR."""
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
def _disk_faults_of(journal: Journal) -> Iterator[None]:
    """Turn errors of the file system into an EnvironmentFault that names the journal."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise environment_fault(error, journal.folder) from error
