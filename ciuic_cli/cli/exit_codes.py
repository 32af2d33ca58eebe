"""Turns errors into messages and exit codes; the only place where they become exit codes.

Codes: 0 done; 1 a bug of ciuic; 2 wrong usage; 3 bad input; 4 the target cannot be met; 5 the machine cannot do it; 130
interrupted. Codes 2 to 5 are attributes of the error classes in `ciuic_cli/errors.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from ciuic_cli.cli.console import Console
from ciuic_cli.errors import CiuicError, WorkerFault
from ciuic_cli.process.libraries import import_fault
from ciuic_cli.process.memory import machine_fault
from ciuic_cli.process.signals import INTERRUPTED, Interruption, interruptible
from ciuic_cli.process.streams import silence_stdout

_BUG = 1
"""Exit code of an unexpected exception."""


def run(console: Console, action: Callable[[], object]) -> int:
    """Run a command; print a message for any error, and return the exit code (0 to 5, 130).

    If the reader closes stdout early (`| head`), the rest is not printed and the code is 0. SIGTERM and SIGHUP end the
    command like Ctrl-C; the code is 130 even if a library swallowed the interrupt. An unexpected exception is a bug:
    its traceback is printed, and the code is 1.
    """
    with interruptible() as interruption:
        try:
            action()
            console.close()
            interruption.raise_if_interrupted()
            return 0
        except SystemExit:
            raise
        except BaseException as error:  # a panic in a Rust library is not an Exception
            interruption.deferred += 1  # a signal must not cut the message short
            code = _report(console, error, interruption)
            _flush_or_silence_stdout()
            return code


def _report(console: Console, error: BaseException, interruption: Interruption) -> int:
    worker = _worker_fault(error)
    if worker is not None:
        console.error(worker)
        return worker.exit_code
    # A signal that interrupts C code of a library can appear as any other error.
    if isinstance(error, KeyboardInterrupt) or interruption.signal is not None:
        console.hint("interrupted")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        silence_stdout()
        console.hint("stdout was closed early; the rest is not printed")
        return 0
    fault = error if isinstance(error, CiuicError) else machine_fault(error) or import_fault(error)
    if fault is None:
        console.bug(error)
        return _BUG
    console.error(fault)
    return fault.exit_code


def _worker_fault(error: BaseException | None) -> WorkerFault | None:
    """The WorkerFault that `error` is, or that it interrupted."""
    while error is not None and not isinstance(error, WorkerFault):
        error = error.__context__
    return error


def _flush_or_silence_stdout() -> None:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        silence_stdout()
