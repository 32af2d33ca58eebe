"""Valid and invalid values of each option of `compress`; tests/cli/test_cli_options.py has the command line."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from ciuic_cli.codecs.rate_distortion import MSE_BY_L
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.compression.options import BITS, EFFORTS, RANK_STEP, CompressOptions
from ciuic_cli.errors import UsageError

HUGE = 10**5000
"""An integer that Python does not print."""


def refused(match: str, **options: Any) -> None:
    with pytest.raises(UsageError, match=match):
        CompressOptions(**options)


def test_the_budget_follows_from_each_target() -> None:
    assert CompressOptions().budget(1000) == 250
    assert CompressOptions(ratio=2.5).budget(1000) == 400
    assert CompressOptions(target_bpw=3.2).budget(1000) == 200
    assert CompressOptions(target_size=2**20).budget(1000) == 2**20
    refused("--ratio and --target-size each set the budget", ratio=4.0, target_size=2**20)


def test_options_are_immutable_and_checked_by_replace() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CompressOptions().ratio = 0.5  # type: ignore[misc]
    refused("--ratio 0.5", ratio=0.5)
    with pytest.raises(UsageError, match=r"--ratio 0\.5"):
        dataclasses.replace(CompressOptions(ratio=2.0), ratio=0.5)


@pytest.mark.parametrize("value", [0, -1, 0.5, math.nan, math.inf, "4", True, []])
def test_invalid_ratios(value: object) -> None:
    refused("--ratio", ratio=value)


@pytest.mark.parametrize("value", [0, -1, 16.5, math.nan, "x", True])
def test_invalid_bits_per_weight(value: object) -> None:
    refused("--target-bpw", target_bpw=value)


@pytest.mark.parametrize("value", [0, -5, 1.5, "8GB", True, pytest.param(-HUGE, id="huge")])
def test_invalid_sizes(value: object) -> None:
    refused("is not a positive number of bytes", target_size=value)


def test_calibration_is_one_path_or_several() -> None:
    for one in ("a.txt", Path("a.txt")):
        assert CompressOptions(calibration=one).calibration == (Path("a.txt"),)  # type: ignore[arg-type]
    several: Any = ["a", Path("b")]
    assert CompressOptions(calibration=several).calibration == (Path("a"), Path("b"))
    for wrong in (None, 5, b"x", [None], [b"x"], "a\0b"):
        refused(r"--calibration: .* is not a path", calibration=wrong)
    assert CompressOptions(nsamples=24, calibration=several).sequences == 36
    assert CompressOptions(nsamples=24, calibration=several, calibration_only=True).sequences == 24
    assert CompressOptions(nsamples=24).sequences == 24
    refused("--calibration-only without a text", calibration_only=True)
    refused("--calibration-only is 'no', not true or false", calibration="a.txt", calibration_only="no")


def test_prune_values() -> None:
    assert [CompressOptions(prune=share).prune for share in ("off", "auto", 0, 0.25)] == [
        "off",
        "auto",
        0.0,
        0.25,
    ]
    for wrong in ("x", 1.5, 1, -1, math.nan, None, True, "0.1"):
        refused("--prune", prune=wrong)


def test_rank_values() -> None:
    assert [CompressOptions(rank=rank).rank for rank in ("off", "auto", 16, 160)] == ["off", "auto", 16, 160]
    for wrong in ("x", 0, -16, 17, 16.0, None, True, HUGE + 1):
        refused("--rank", rank=wrong)


def test_bits_values() -> None:
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
def test_invalid_settings(name: str, value: object) -> None:
    valid: dict[str, Any] = {
        "nsamples": None,
        "seqlen": 64,
        "seed": 2**32 - 1,
        "effort": "fast",
        "mtp": "keep",
        "device": "cuda:1",
    }
    CompressOptions(**valid)
    refused(f"--{name} ", **{**valid, name: value})


def test_the_choices_are_those_of_the_codec() -> None:
    assert set(BITS) == set(MSE_BY_L[16]) and RANK_STEP == TILE
    shortest, longest = min(MSE_BY_L), max(MSE_BY_L)
    assert all(1 << shortest <= effort.states <= 1 << longest for effort in EFFORTS.values())


def test_as_dict_has_exactly_the_options_that_decide_the_bytes() -> None:
    """The journal compares these: a run continues only if all are equal."""
    options = CompressOptions(effort="best", seed=3, dry_run=True, force=True).as_dict(ratio=4.0, seqlen=512)
    assert options == {
        "ratio": 4.0, "effort": "best", "L": 16, "states": 65536, "nsamples": 128, "recovery_steps": 90,
        "seqlen": 512, "seed": 3,
        "prune": "auto", "rank": "auto", "bits": [2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8], "mtp": "drop",
        "device": "auto",
    }  # fmt: skip
