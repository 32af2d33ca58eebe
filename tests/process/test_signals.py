"""Signals end the work once and for all, and never what tidies up after it."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from interrupting import lose

from ciuic_cli.process.signals import check, deferred, ends_tidily

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def usual_handlers() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_was_lost_is_remembered(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    with ends_tidily() as found:
        check()
        lose(number)
        assert found.signal == number
        with pytest.raises(KeyboardInterrupt):
            check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert found.signal == number, "the first one"
    check()
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", SIGNALS)
def test_no_signal_cuts_the_tidying_up_short(number: signal.Signals) -> None:
    removed: list[str] = []

    class Slow(TemporaryDirectory):  # type: ignore[type-arg]
        def cleanup(self) -> None:
            for _ in range(3):
                signal.raise_signal(number)
            super().cleanup()

    with pytest.raises(KeyboardInterrupt), ends_tidily(), Slow() as folder:
        try:
            signal.raise_signal(number)
        finally:
            try:
                raise OSError("while it tidies up")
            except OSError:
                signal.raise_signal(number)
                check()
                removed.append("first")
    assert removed == ["first"] and not Path(folder).exists()


def test_a_library_that_drops_the_interruption_does_not_end_it() -> None:
    with ends_tidily():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            check()  # on its way
        with pytest.raises(KeyboardInterrupt):
            check()


def test_one_block_within_another_is_a_part_of_it() -> None:
    with ends_tidily() as outer:
        with ends_tidily() as inner:
            lose(signal.SIGTERM)
        assert inner is outer
        with pytest.raises(KeyboardInterrupt):
            check()


def test_what_was_lost_is_sent_again_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), ends_tidily(resend=True):
        lose(signal.SIGINT)


def test_the_last_block_leaves_an_exit_code_that_stands() -> None:
    try:
        with ends_tidily(last=True):
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
    with pytest.raises(KeyboardInterrupt), ends_tidily() if within else nullcontext():
        with deferred():
            with deferred():
                signal.raise_signal(signal.SIGINT)
                check()
            reached.append("the end")
        reached.append("what follows")
    assert reached == ["the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_goes_before_a_deferred_signal() -> None:
    with ends_tidily(), pytest.raises(OSError, match="its own"):  # noqa: SIM117
        with deferred():
            signal.raise_signal(signal.SIGINT)
            raise OSError("its own")
