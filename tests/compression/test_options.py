"""The values that each option of `compress` can have; how the command line writes them is in test_cli_options.py."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from ciuic_cli.codecs.rate_distortion import MSE_BY_L
from ciuic_cli.compression.options import BITS, EFFORTS, RANK_STEP, CompressOptions
from ciuic_cli.errors import UsageError
from ciuic_cli.passes.quantize import BLOCK

HUGE = 10**5000
"""A number that Python refuses to write."""


def refused(match: str, **options: Any) -> None:
    with pytest.raises(UsageError, match=match):
        CompressOptions(**options)


def test_budgets() -> None:
    assert CompressOptions().budget(1000) == 250
    assert CompressOptions(ratio=2.5).budget(1000) == 400
    assert CompressOptions(target_bpw=3.2).budget(1000) == 200
    assert CompressOptions(target_size=2**20).budget(1000) == 2**20
    refused("--ratio and --target-size contradict", ratio=4.0, target_size=2**20)


def test_options_cannot_change_once_they_are_checked() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CompressOptions().ratio = 0.5  # type: ignore[misc]
    refused("--ratio 0.5", ratio=0.5)
    with pytest.raises(UsageError, match=r"--ratio 0\.5"):
        dataclasses.replace(CompressOptions(ratio=2.0), ratio=0.5)


@pytest.mark.parametrize("value", [0, -1, 0.5, math.nan, math.inf, "4", True, []])
def test_wrong_ratios(value: object) -> None:
    refused("--ratio", ratio=value)


@pytest.mark.parametrize("value", [0, -1, 16.5, math.nan, "x", True])
def test_wrong_bits_per_weight(value: object) -> None:
    refused("--target-bpw", target_bpw=value)


@pytest.mark.parametrize("value", [0, -5, 1.5, "8GB", True, pytest.param(-HUGE, id="huge")])
def test_wrong_sizes(value: object) -> None:
    refused("is not a positive number of bytes", target_size=value)


def test_texts_are_one_path_or_several() -> None:
    for one in ("a.txt", Path("a.txt")):
        assert CompressOptions(calibration=one).calibration == (Path("a.txt"),)  # type: ignore[arg-type]
    several: Any = ["a", Path("b")]
    assert CompressOptions(calibration=several).calibration == (Path("a"), Path("b"))
    for wrong in (None, 5, b"x", [None], [b"x"], "a\0b"):
        refused(r"--calibration: .* is no path", calibration=wrong)


def test_shares() -> None:
    assert [CompressOptions(prune=share).prune for share in ("off", "auto", 0, 0.25)] == [
        "off",
        "auto",
        0.0,
        0.25,
    ]
    for wrong in ("x", 1.5, 1, -1, math.nan, None, True, "0.1"):
        refused("--prune", prune=wrong)


def test_ranks() -> None:
    assert [CompressOptions(rank=rank).rank for rank in ("off", "auto", 16, 160)] == ["off", "auto", 16, 160]
    for wrong in ("x", 0, -16, 17, 16.0, None, True, HUGE + 1):
        refused("--rank", rank=wrong)


def test_bits() -> None:
    for asked in ([8, 2, 4, 2], (2, 4, 8)):
        assert CompressOptions(bits=asked).bits == (2, 4, 8)  # type: ignore[arg-type]
    assert CompressOptions(bits=4).bits == (4,)  # type: ignore[arg-type]
    assert CompressOptions(bits=(4.5, 2.0)).bits == (2, 4.5)
    for wrong in ((), (9,), "24", [2.25], [6.5], None, (2, "3"), [True], [HUGE]):
        refused("--bits", bits=wrong)


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
    usual: dict[str, Any] = {
        "nsamples": None,
        "seqlen": 64,
        "seed": 2**32 - 1,
        "effort": "fast",
        "mtp": "keep",
        "device": "cuda:1",
    }
    CompressOptions(**usual)
    refused(f"--{name} ", **{**usual, name: value})


def test_the_choices_are_those_of_the_code() -> None:
    assert set(BITS) == set(MSE_BY_L[16]) and RANK_STEP == BLOCK
    assert {effort.L for effort in EFFORTS.values()} <= set(MSE_BY_L)


def test_what_decides_the_bytes_is_written_down_and_nothing_else() -> None:
    """The journal compares this: a run continues exactly where all of it is equal."""
    found = CompressOptions(effort="best", seed=3, dry_run=True, force=True).as_dict(ratio=4.0, seqlen=512)
    assert found == {
        "ratio": 4.0, "effort": "best", "L": 16, "nsamples": 128, "recovery_steps": 90, "seqlen": 512, "seed": 3,
        "prune": "auto", "rank": "auto", "bits": [2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8], "mtp": "drop",
        "device": "auto",
    }  # fmt: skip
