"""Sums as large as the head: their totals are in files and equal those in memory, bit by bit."""

from pathlib import Path

import pytest
import torch

from ciuic_cli.process.workers import Workers
from ciuic_cli.statistics import sums
from ciuic_cli.statistics.moments import Moments
from ciuic_cli.statistics.sums import OrderedSums, StoredSums

CPU = torch.device("cpu")
KEY = ("lm_head.weight", None)


def _segments() -> list[Moments]:
    generator = torch.Generator().manual_seed(0)
    return [
        Moments(torch.randn(10, 4, generator=generator), torch.randn(3, 10, generator=generator))
        for _ in range(3)
    ]


def test_totals_in_files_are_those_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "STORED_ROWS", 3)  # the last file has fewer rows
    stored = StoredSums(Workers(), [KEY[0]], CPU, tmp_path)
    in_memory = OrderedSums(Workers(), [KEY[0]], CPU)
    for one, other in zip(_segments(), _segments(), strict=True):
        stored.add({KEY: one})
        in_memory.add({KEY: other})
    assert stored.totals[KEY].inputs.untyped_storage().nbytes() == 0
    found, expected = stored.load(KEY[0]), in_memory.totals[KEY]
    assert torch.equal(found.inputs, expected.inputs)
    assert torch.equal(found.outputs, expected.outputs)
    assert len([*tmp_path.iterdir()]) == 4


def test_stacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a stack"):
        StoredSums(Workers(), [KEY[0]], CPU, tmp_path).add({(KEY[0], 3): _segments()[0]})
