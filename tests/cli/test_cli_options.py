"""Values of options, from what is written on the command line to what the pipeline gets."""

from __future__ import annotations

import pytest

from ciuic_cli.cli import app as cli
from ciuic_cli.compression import options
from ciuic_cli.compression.options import check_bits
from ciuic_cli.errors import UsageError


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("4365952", 4365952),
        ("17 B", 17),
        ("500MB", 500_000_000),
        ("500mb", 500_000_000),
        ("1.5GB", 1_500_000_000),
        ("8GiB", 8 * 2**30),
        ("0.5KiB", 512),
        ("2.3TB", 2_300_000_000_000),
    ],
)
def test_sizes(written: str, expected: int) -> None:
    assert cli.parse_size(written) == expected


@pytest.mark.parametrize(
    "written",
    [
        "",
        "GiB",
        "8G",
        "-1MB",
        "1e9",
        "0",
        "0MB",
        "1.5",
        "1.5B",
        "8 GiB x",
        "nan",
        "٣MB",
        "9" * 400,
        "9" * 5000,
    ],
)
def test_wrong_sizes(written: str) -> None:
    with pytest.raises(UsageError):
        cli.parse_size(written)


def test_bits() -> None:
    assert cli.parse_bits("8, 2,4,2") == (2, 4, 8)
    assert cli.parse_bits("2.5,1") == (1, 2.5)
    for written in ("", "2,9", "0", "2,,3", "02", "two"):
        with pytest.raises(UsageError, match="not among the possible widths"):
            cli.parse_bits(written)


def test_bits_of_the_command_line_in_python() -> None:
    with pytest.raises(UsageError, match="'2,3' is not among the possible widths") as caught:
        check_bits("2,3")
    assert "in Python: a list of numbers" in (caught.value.remedy or "")


def test_prune() -> None:
    assert [cli.parse_prune(text) for text in ("off", "auto", "0", "0.25")] == ["off", "auto", 0.0, 0.25]
    for written in ("1", "-0.1", "nan", "inf", "some", "25%"):
        with pytest.raises(UsageError):
            cli.parse_prune(written)


def test_rank() -> None:
    assert [cli.parse_rank(text) for text in ("off", "auto", "16", "160")] == ["off", "auto", 16, 160]
    for written in ("0", "-16", "1.5", "many"):
        with pytest.raises(UsageError):
            cli.parse_rank(written)
    with pytest.raises(UsageError, match="use 32"):
        cli.parse_rank("17")


def test_the_names_are_those_that_can_be_asked_for() -> None:
    assert {level.value for level in cli.EffortLevel} == set(options.EFFORTS)
    assert {choice.value for choice in cli.MtpLayers} == set(options.MTP)
