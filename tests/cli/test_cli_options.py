"""Parsing of option values."""

from __future__ import annotations

import pytest

from ciuic_cli.cli import compress as command
from ciuic_cli.cli.values import parse_bits, parse_prune, parse_rank
from ciuic_cli.compression import options
from ciuic_cli.compression.options import CompressOptions
from ciuic_cli.errors import UsageError
from ciuic_cli.integers import parse_size


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
        ("4M", 4_000_000),
        ("4MB", 4_000_000),
        ("1.5k", 1500),
        ("8G", 8_000_000_000),
    ],
)
def test_sizes(written: str, expected: int) -> None:
    assert parse_size(written) == expected


@pytest.mark.parametrize(
    "written",
    [
        "",
        "GiB",
        "G",
        "8Gb/s",
        "-1MB",
        "1e9",
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
        parse_size(written)


@pytest.mark.parametrize("written", ["0", "0MB", "0.0GiB"])
def test_size_zero(written: str) -> None:
    with pytest.raises(UsageError, match="not a positive number of bytes"):
        CompressOptions(target_size=parse_size(written))


def test_bits() -> None:
    assert CompressOptions(bits=parse_bits("8, 2,4,2")).bits == (2, 4, 8)
    assert CompressOptions(bits=parse_bits("2.5,1")).bits == (1, 2.5)
    for written in ("", "2,9", "0", "2,,3", "02", "two"):
        with pytest.raises(UsageError, match="bits per weight are not offered"):
            CompressOptions(bits=parse_bits(written))


def test_bits_of_the_command_line_in_python() -> None:
    with pytest.raises(UsageError, match="'2,3' bits per weight are not offered") as caught:
        CompressOptions(bits="2,3")  # type: ignore[arg-type]
    assert "in Python: a list of numbers" in (caught.value.remedy or "")


def test_prune() -> None:
    written = ("off", "auto", "0", "0.25")
    assert [CompressOptions(prune=parse_prune(text)).prune for text in written] == ["off", "auto", 0.0, 0.25]
    for text in ("1", "-0.1", "nan", "inf", "some", "25%"):
        with pytest.raises(UsageError):
            CompressOptions(prune=parse_prune(text))


def test_rank() -> None:
    written = ("off", "auto", "16", "160")
    assert [CompressOptions(rank=parse_rank(text)).rank for text in written] == ["off", "auto", 16, 160]
    for text in ("0", "-16", "1.5", "many"):
        with pytest.raises(UsageError):
            CompressOptions(rank=parse_rank(text))
    with pytest.raises(UsageError, match="use 16"):
        CompressOptions(rank=parse_rank("17"))


def test_choices_equal_those_of_compress_options() -> None:
    assert {level.value for level in command.EffortLevel} == set(options.EFFORTS)
    assert {choice.value for choice in command.MtpLayers} == set(options.MTP)
