"""Embeddings and heads give the same results in row chunks as in one piece."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ciuic_cli.allocation import pricing
from ciuic_cli.allocation.arms import ArmTable, PassOptions
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
from ciuic_cli.codecs.row_order import stored_order
from ciuic_cli.compression.encoding import encode_matrix
from ciuic_cli.passes import chunk_size
from ciuic_cli.statistics.collect import collect_statistics
from ciuic_cli.statistics.files import Statistics

L = 12


def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks of 96 rows and one of 71."""
    monkeypatch.setattr(chunk_size, "SCRATCH_ROWS", 96)
    monkeypatch.setattr(chunk_size, "CHUNK_BYTES", 1)


def _embeddings(model_map: ModelMap) -> list[WeightMatrix]:
    return [
        matrix for matrix in weight_matrices(model_map.parameters.values()) if matrix.role in EMBEDDING_ROLES
    ]


def _statistics(model_map: ModelMap, folder: Path) -> Statistics:
    folder.mkdir()
    batches = torch.randint(0, 256, (4, 48), generator=torch.Generator().manual_seed(1)) ** 2 // 256
    return collect_statistics(
        model_map, batches, folder, device=torch.device("cpu"), seed=0, progress=lambda *_: None
    )


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "deepseek_v4"])
def test_an_embedding_is_read_in_parts(
    family: str, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _small_chunks(monkeypatch)
    model_map = map_model(open_checkpoint(tiny_checkpoint(family)))
    expected = {matrix.name: model_map.read(matrix.name).float() for matrix in _embeddings(model_map)}
    monkeypatch.setattr(ModelMap, "read", None)  # reads whole matrices
    for matrix in _embeddings(model_map):
        assert torch.equal(read_matrix(model_map, matrix), expected[matrix.name])


def _chosen(table: ArmTable, sorted_rows: bool) -> ArmTable:
    chosen = table.row_sorted if sorted_rows else table
    assert chosen is not None
    return chosen


def _plan(table: ArmTable, sorted_rows: bool) -> Plan:
    """Four, three and two bits in turns."""
    matrix, chosen = table.matrix, _chosen(table, sorted_rows)
    bits = np.resize(np.array([4, 3, 2], np.uint8), matrix.groups)
    matrix_plan = MatrixPlan(matrix, bits, 0, 0, 0.0, chosen.row_class, chosen.input_scale, L)
    return Plan({matrix.key: matrix_plan}, {}, 0, 0, 0.0)


@pytest.mark.parametrize("sorted_rows", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_chunks_give_the_results_of_the_whole_matrix(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    sorted_rows: bool,
) -> None:
    monkeypatch.setattr(
        pricing, "sorting_pays", lambda *_: True
    )  # the few rows here would not pay for their classes
    model_map = map_model(open_checkpoint(tiny_checkpoint(family)))
    statistics = _statistics(model_map, tmp_path / "s")
    options = PassOptions((2, 3, 4), L)

    def process(matrix: WeightMatrix) -> tuple[ArmTable, torch.Tensor, PackedMatrix]:
        table = price_matrix(model_map, statistics, matrix, options)
        plan = _plan(table, sorted_rows)
        noisy = perturbation(model_map, statistics, plan, [matrix], L=L)(matrix.name, None)
        assert noisy is not None
        return table, noisy, encode_matrix(model_map, statistics, plan, matrix)

    for matrix in _embeddings(model_map):
        table, noisy, packed = process(matrix)
        with monkeypatch.context() as patch:
            _small_chunks(patch)
            assert [rows.stop - rows.start for rows in row_slices(matrix)] == [96, 96, 71]
            chunked_table, chunked_noisy, chunked_packed = process(matrix)
        for whole, chunked in ((table, chunked_table), (table.row_sorted, chunked_table.row_sorted)):
            assert whole is not None and chunked is not None
            np.testing.assert_allclose(chunked.sensitivity, whole.sensitivity, rtol=1e-5)
            np.testing.assert_allclose(chunked.pruning_loss, whole.pruning_loss, rtol=1e-5)
            assert np.array_equal(chunked.input_scale, whole.input_scale)  # type: ignore[arg-type]
        weight = read_matrix(model_map, matrix)
        # The first chunk has the same noise as the whole matrix, later ones draw their own.
        row_class = _chosen(table, sorted_rows).row_class
        first = slice(0, 96) if row_class is None else torch.from_numpy(stored_order(row_class))[:96]
        torch.testing.assert_close(chunked_noisy[first], noisy[first], rtol=1e-4, atol=1e-5)
        noise = (noisy - weight).square().mean()
        assert float(noise) > 0
        torch.testing.assert_close((chunked_noisy - weight).square().mean(), noise, rtol=0.1, atol=0.0)
        assert chunked_packed.to_bytes() == packed.to_bytes()


def test_chunks_take_less_memory(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (matrix,) = _embeddings(map_model(open_checkpoint(tiny_checkpoint("gemma3"))))
    whole = working_bytes(matrix)
    _small_chunks(monkeypatch)
    assert working_bytes(matrix) < whole
    assert row_slices(WeightMatrix("w", None, "down", 4096, 64)) == [slice(0, 4096)]
