"""Targets that no plan can meet: the highest ratio, and the options that raise it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ciuic_cli.allocation.arms import PassOptions
from ciuic_cli.allocation.reachable import check_reachable
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.compression.options import BITS
from ciuic_cli.errors import TargetError, UsageError


def _map(folder: Path) -> ModelMap:
    return map_model(open_checkpoint(folder))


def _budget(model_map: ModelMap, ratio: float) -> int:
    return int(2 * model_map.stored_numel / ratio)


@pytest.mark.parametrize("bits", [(4,), BITS])
def test_the_error_of_an_unreachable_target_reports_the_highest_ratio(
    tiny_checkpoint: Callable[..., Path], bits: tuple[int, ...]
) -> None:
    model_map = _map(tiny_checkpoint("llama"))
    options = PassOptions(bits, prune="off")
    with pytest.raises(TargetError) as caught:
        check_reachable(model_map, _budget(model_map, 14.0), options)
    assert caught.value.exit_code == 4
    best = float(str(caught.value.remedy).split("--ratio ")[1].split()[0])
    check_reachable(model_map, _budget(model_map, best), options)
    with pytest.raises(TargetError):
        check_reachable(model_map, _budget(model_map, best + 0.02), options)
    # Each other option that is named reaches the ratio that is promised for it, and no more.
    changed = {"--prune auto": PassOptions(bits), "--bits with 1": PassOptions((1, *bits), prune="off")}
    promised = dict(re.findall(r"; (--[a-z 0-9]+) allows up to ([0-9.]+)", str(caught.value.remedy)))
    assert set(promised) == set(changed) - ({"--bits with 1"} if 1 in bits else set())
    for option, ratio in promised.items():
        assert float(ratio) > best
        check_reachable(model_map, _budget(model_map, float(ratio)), changed[option])
        with pytest.raises(TargetError):
            check_reachable(model_map, _budget(model_map, float(ratio) + 0.02), changed[option])


def test_options_that_do_not_raise_the_highest_ratio_are_not_named(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """All rows may be pruned, so fewer bits per weight gain nothing."""
    with pytest.raises(TargetError) as caught:
        check_reachable(_map(tiny_checkpoint("llama")), 1000, PassOptions((4,)))
    assert re.fullmatch(r"ask for --ratio [0-9.]+ or less", str(caught.value.remedy))


def test_a_given_rank_lowers_the_highest_ratio(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("llama"))
    with pytest.raises(TargetError) as caught:
        check_reachable(model_map, 1000, PassOptions(BITS, rank="off"))
    assert "--rank" not in str(caught.value.remedy)
    best = float(str(caught.value.remedy).split("--ratio ")[1].split()[0])
    check_reachable(model_map, _budget(model_map, best), PassOptions(BITS))
    with pytest.raises(TargetError) as caught:
        check_reachable(model_map, _budget(model_map, best), PassOptions(BITS, rank=16))
    assert "--rank auto" in str(caught.value.remedy)


def test_a_rank_that_no_matrix_can_have_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    model_map = _map(tiny_checkpoint("llama"))
    with pytest.raises(UsageError, match="--rank 999999984") as caught:
        check_reachable(model_map, model_map.stored_numel * 2, PassOptions(BITS, rank=999_999_984))
    advised = re.fullmatch("use at most ([0-9]+), or auto", caught.value.remedy or "")
    assert advised is not None
    rank = int(advised[1])
    check_reachable(model_map, model_map.stored_numel * 2, PassOptions(BITS, rank=rank))
    with pytest.raises(UsageError, match="no matrix has room"):
        check_reachable(model_map, model_map.stored_numel * 2, PassOptions(BITS, rank=rank + 16))
