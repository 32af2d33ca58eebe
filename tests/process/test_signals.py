"""Signals interrupt the work reliably, and never the cleanup after it."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from interrupting import lose

from ciuic_cli.process.signals import defer_signals, interruptible, raise_if_interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def require_default_handlers() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_was_lost_is_remembered(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    with interruptible() as interruption:
        raise_if_interrupted()
        lose(number)
        assert interruption.signal == number
        with pytest.raises(KeyboardInterrupt):
            raise_if_interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert interruption.signal == number, "the first one"
    raise_if_interrupted()
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_do_not_interrupt_the_cleanup(number: signal.Signals) -> None:
    removed: list[str] = []

    class Slow(TemporaryDirectory):  # type: ignore[type-arg]
        def cleanup(self) -> None:
            for _ in range(3):
                signal.raise_signal(number)
            super().cleanup()

    with pytest.raises(KeyboardInterrupt), interruptible(), Slow() as folder:
        try:
            signal.raise_signal(number)
        finally:
            try:
                raise OSError("during the cleanup")
            except OSError:
                signal.raise_signal(number)
                raise_if_interrupted()
                removed.append("first")
    assert removed == ["first"] and not Path(folder).exists()


def test_an_interruption_that_a_library_swallows_is_raised_again() -> None:
    with interruptible():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise_if_interrupted()  # no effect while the exception propagates
        with pytest.raises(KeyboardInterrupt):
            raise_if_interrupted()


def test_a_nested_block_shares_the_outer_interruption() -> None:
    with interruptible() as outer:
        with interruptible() as inner:
            lose(signal.SIGTERM)
        assert inner is outer
        with pytest.raises(KeyboardInterrupt):
            raise_if_interrupted()


def test_a_lost_signal_is_resent_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), interruptible(resend=True):
        lose(signal.SIGINT)


def test_after_the_last_block_signals_are_ignored() -> None:
    try:
        with interruptible(last=True):
            pass
        for number in SIGNALS:
            signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in SIGNALS[1:]:
            signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("within", [True, False])
def test_a_deferred_signal_raises_at_the_end(within: bool) -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt), interruptible() if within else nullcontext():
        with defer_signals():
            with defer_signals():
                signal.raise_signal(signal.SIGINT)
                raise_if_interrupted()
            reached.append("the end")
        reached.append("after the block")
    assert reached == ["the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_takes_precedence_over_a_deferred_signal() -> None:
    with interruptible(), pytest.raises(OSError, match="its own"):  # noqa: SIM117
        with defer_signals():
            signal.raise_signal(signal.SIGINT)
            raise OSError("its own")
