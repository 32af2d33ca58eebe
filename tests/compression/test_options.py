"""Which values an option can have; how they are written on the command line is in test_cli_options.py."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ciuic_cli.codecs.rate_distortion import MSE_BY_L
from ciuic_cli.compression import options
from ciuic_cli.errors import UsageError
from ciuic_cli.passes.quantize import BLOCK

HUGE = 10**5000
"""A number that Python refuses to write."""


def test_targets() -> None:
    assert options.check_target(None, None, None) == {"ratio": 4.0}
    assert options.check_target(2.5, None, None) == {"ratio": 2.5}
    assert options.check_target(None, 3.25, None) == {"target_bpw": 3.25}
    assert options.check_target(None, None, 2**20) == {"target_size": 2**20}
    with pytest.raises(UsageError, match="--ratio and --target-size"):
        options.check_target(4.0, None, 2**20)


@pytest.mark.parametrize("value", [0, -1, 0.5, math.nan, math.inf, "4", True, []])
def test_wrong_ratios(value: object) -> None:
    with pytest.raises(UsageError, match="--ratio"):
        options.check_target(value, None, None)


@pytest.mark.parametrize("value", [0, -1, 16.5, math.nan, "x", True])
def test_wrong_bits_per_weight(value: object) -> None:
    with pytest.raises(UsageError, match="--target-bpw"):
        options.check_target(None, value, None)


@pytest.mark.parametrize("value", [0, -5, 1.5, "8GB", True, pytest.param(-HUGE, id="huge")])
def test_wrong_sizes(value: object) -> None:
    with pytest.raises(UsageError, match="is no size of a model"):
        options.check_size(value)


def test_texts_are_one_path_or_several() -> None:
    assert options.check_texts("a.txt") == options.check_texts(Path("a.txt")) == (Path("a.txt"),)
    assert options.check_texts(["a", Path("b")]) == (Path("a"), Path("b")) and options.check_texts(()) == ()
    for wrong in (None, 5, b"x", [None], [b"x"], "a\0b"):
        with pytest.raises(UsageError, match=r"--calibration: .* is no path"):
            options.check_texts(wrong)


def test_shares() -> None:
    assert [options.check_prune(share) for share in ("off", "auto", 0, 0.25)] == ["off", "auto", 0.0, 0.25]
    for wrong in ("x", 1.5, 1, -1, math.nan, None, True, "0.1"):
        with pytest.raises(UsageError, match="--prune"):
            options.check_prune(wrong)


def test_ranks() -> None:
    assert [options.check_rank(rank) for rank in ("off", "auto", 16, 160)] == ["off", "auto", 16, 160]
    for wrong in ("x", 0, -16, 17, 16.0, None, True, HUGE + 1):
        with pytest.raises(UsageError, match="--rank"):
            options.check_rank(wrong)


def test_widths() -> None:
    assert options.check_bits([8, 2, 4, 2]) == options.check_bits((2, 4, 8)) == (2, 4, 8)
    assert options.check_bits(4) == (4,)
    assert options.check_bits([4.5, 2.0]) == (2, 4.5)
    for wrong in ((), (9,), "24", [2.25], [6.5], None, (2, "3"), [True], [HUGE]):
        with pytest.raises(UsageError, match="--bits"):
            options.check_bits(wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("nsamples", value) for value in (0, 1, -1, 1.5, "2", True, 2**21)),
        *(("seqlen", value) for value in (0, 31, -5, 64.0, "64")),
        pytest.param("seqlen", HUGE, id="huge"),
        *(("seed", value) for value in (-1, 2**32, 1.5, "x", None)),
        *(("effort", value) for value in ("slow", None, 1, [])),
        *(("mtp", value) for value in ("half", None, True)),
        *(("device", value) for value in ("x", "meta", "cuda:", 0, None)),
    ],
)
def test_wrong_settings(name: str, value: object) -> None:
    usual = {
        "nsamples": None,
        "seqlen": 64,
        "seed": 2**32 - 1,
        "effort": "fast",
        "mtp": "keep",
        "device": "cuda:1",
    }
    options.check_settings(**usual)
    with pytest.raises(UsageError, match=f"--{name} "):
        options.check_settings(**{**usual, name: value})


def test_the_choices_are_those_of_the_code() -> None:
    assert set(options.WIDTHS) == set(MSE_BY_L[16]) and options.RANK_STEP == BLOCK
    assert {effort.L for effort in options.EFFORTS.values()} <= set(MSE_BY_L)
