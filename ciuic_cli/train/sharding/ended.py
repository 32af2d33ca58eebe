"""What a process of a sharded run says when another one has ended: its rank, and where the run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ciuic_cli.errors import CiuicError, WorkerFault
from ciuic_cli.process.signals import defer_signals
from ciuic_cli.process.workers import Workers
from ciuic_cli.train.run_folder import RunFolder


@contextmanager
def naming_ended_workers(workers: Workers, run: RunFolder) -> Iterator[None]:
    """Turn what the end of another process causes in the block into a WorkerFault.

    That is an error of a collective, or the signal by which torchrun ends the processes that are left. Errors with
    another cause pass.
    """
    try:
        yield
    except WorkerFault as error:
        raise _with_checkpoint(error, run) from error
    except CiuicError:
        raise
    except (RuntimeError, KeyboardInterrupt) as error:
        with defer_signals():
            fault = workers.fault(0.0) if isinstance(error, KeyboardInterrupt) else workers.fault()
            if fault is not None:
                raise _with_checkpoint(fault, run) from error
        raise


def _with_checkpoint(fault: WorkerFault, run: RunFolder) -> WorkerFault:
    """The fault, with the checkpoint from which the same command goes on."""
    step = run.newest_step()
    return WorkerFault(
        fault.message,
        file=run.path if step is None else run.checkpoint_folder(step),
        remedy="the same command begins again: there is no checkpoint yet"
        if step is None
        else f"the same command goes on from the checkpoint of step {step}",
    )
