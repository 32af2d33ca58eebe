"""A vocabulary that is worked on part by part is priced, disturbed and rounded as it is as a whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ciuic_cli.allocation import pricing
from ciuic_cli.allocation.arms import Arms, PassOptions
from ciuic_cli.allocation.matrices import (
    EMBEDDING_ROLES,
    WeightMatrix,
    row_slices,
    weight_matrices,
    working_bytes,
)
from ciuic_cli.allocation.plan import MatrixPlan, Plan
from ciuic_cli.allocation.pricing import price_matrix
from ciuic_cli.allocation.probes import perturbation
from ciuic_cli.allocation.row_chunks import read_matrix
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.compression.encoding import encode_matrix
from ciuic_cli.passes import quantize
from ciuic_cli.statistics.collect import collect_statistics
from ciuic_cli.statistics.files import Statistics

WINDOW = 12
ROWS_AT_ONCE = 96


def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 96 rows and one of 71."""
    monkeypatch.setattr(quantize, "ROWS_AT_ONCE", ROWS_AT_ONCE)
    monkeypatch.setattr(quantize, "CHUNK_BYTES", 1)


def _vocabularies(model_map: ModelMap) -> list[WeightMatrix]:
    return [
        matrix for matrix in weight_matrices(model_map.parameters.values()) if matrix.role in EMBEDDING_ROLES
    ]


def _statistics(model_map: ModelMap, folder: Path) -> Statistics:
    folder.mkdir()
    batches = torch.randint(0, 256, (4, 48), generator=torch.Generator().manual_seed(1)) ** 2 // 256
    return collect_statistics(
        model_map, batches, folder, device=torch.device("cpu"), seed=0, progress=lambda *_: None
    )


def _chosen(arms: Arms, sorted_rows: bool) -> Plan:
    """Two, three and four bits in turns."""
    matrix, taken = arms.matrix, arms.sorted if sorted_rows else arms
    assert taken is not None
    bits = np.resize(np.array([4, 3, 2], np.uint8), matrix.groups)
    chosen = MatrixPlan(matrix, bits, 0, 0, 0.0, taken.row_class, taken.input_scale)
    return Plan({matrix.key: chosen}, {}, 0, 0, 0.0)


@pytest.mark.parametrize("sorted_rows", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_parts_give_what_the_whole_gives(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    sorted_rows: bool,
) -> None:
    monkeypatch.setattr(pricing, "sorting_pays", lambda *_: True)  # so few rows do not pay for their classes
    model_map = map_model(open_checkpoint(tiny_checkpoint(family)))
    statistics = _statistics(model_map, tmp_path / "s")
    options = PassOptions((2, 3, 4), WINDOW)

    def made(matrix: WeightMatrix) -> tuple[Arms, torch.Tensor, PackedMatrix]:
        arms = price_matrix(model_map, statistics, matrix, options)
        plan = _chosen(arms, sorted_rows)
        noisy = perturbation(model_map, statistics, plan, [matrix], L=WINDOW)(matrix.name, None)
        assert noisy is not None
        return arms, noisy, encode_matrix(model_map, statistics, plan, matrix, L=WINDOW)

    for matrix in _vocabularies(model_map):
        arms, noisy, packed = made(matrix)
        with monkeypatch.context() as patch:
            _small_chunks(patch)
            assert [part.stop - part.start for part in row_slices(matrix)] == [96, 96, 71]
            arms_of_parts, noisy_of_parts, packed_of_parts = made(matrix)
        for mine, theirs in ((arms, arms_of_parts), (arms.sorted, arms_of_parts.sorted)):
            assert mine is not None and theirs is not None
            np.testing.assert_allclose(theirs.sensitivity, mine.sensitivity, rtol=1e-5)
            np.testing.assert_allclose(theirs.removal, mine.removal, rtol=1e-5)
            assert np.array_equal(theirs.input_scale, mine.input_scale)  # type: ignore[arg-type]
        weight = read_matrix(model_map, matrix)
        assert float((noisy - weight).square().mean()) > 0
        torch.testing.assert_close(noisy_of_parts, noisy, rtol=1e-4, atol=1e-5)
        assert packed_of_parts.to_bytes() == packed.to_bytes()


def test_parts_take_less_memory(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (matrix,) = _vocabularies(map_model(open_checkpoint(tiny_checkpoint("gemma3"))))
    whole = working_bytes(matrix)
    _small_chunks(monkeypatch)
    assert working_bytes(matrix) < whole
    assert row_slices(WeightMatrix("w", None, "down", 4096, 64)) == [slice(0, 4096)]
