"""docs/FORMAT.md agrees with the code: its reader is run, and its worked example is recomputed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ciuic_cli.codecs import trellis
from ciuic_cli.codecs.bits import BITS
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.testing import random_matrix

TEXT = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def reader() -> dict[str, Callable[..., Any]]:
    """The functions of the document's Python block."""
    found = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found[1], names)
    return names


def _packed(
    rows: int,
    cols: int,
    L: int,
    seed: int,
    rank: int = 0,
    bits: tuple[float, ...] = BITS,
    *,
    is_sorted: bool = False,
    is_scaled: bool = False,
) -> PackedMatrix:
    rng = np.random.default_rng(rows * 1000 + cols + seed)
    shuffled = rng.choice(bits, -(-rows // 16))
    matrix = random_matrix(
        rows, cols, shuffled, rng=rng, L=L, seed=seed, is_sorted=is_sorted, is_scaled=is_scaled
    )
    if is_scaled:  # every code of an input scale may occur
        codes = rng.integers(0, 256, cols).astype(np.uint8)
        matrix = PackedMatrix(replace(matrix.header, input_scale=codes), matrix.codes)
    if not rank:
        return matrix
    lowrank = (random_matrix(rank, cols, 6, L=13, seed=3), random_matrix(rank, rows, 6, L=14, seed=4))
    return PackedMatrix(matrix.header, matrix.codes, lowrank)


def _dense(packed: PackedMatrix) -> np.ndarray:
    return trellis.decode_dense(packed).numpy()


@pytest.mark.parametrize(
    ("rows", "cols", "L", "seed", "rank"),
    [(37, 83, 12, 0, 0), (16, 64, 16, 0, 0), (48, 1040, 15, 7, 0), (100, 52, 14, 2**32 - 1, 20)],
)
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_the_documented_reader_reads_what_we_write(
    reader: dict[str, Callable[..., Any]],
    rows: int,
    cols: int,
    L: int,
    seed: int,
    rank: int,
    is_sorted: bool,
    is_scaled: bool,
) -> None:
    packed = _packed(rows, cols, L, seed, rank, is_sorted=is_sorted, is_scaled=is_scaled)
    blob = packed.to_bytes()
    weight, used = reader["matrix"](blob)
    assert used == len(blob)
    assert weight.shape == (rows, cols)
    assert np.allclose(weight, _dense(packed), rtol=1e-5, atol=1e-5 * float(np.abs(weight).max()))


def test_the_documented_reader_reads_a_stack(reader: dict[str, Callable[..., Any]]) -> None:
    experts = tuple(_packed(40, 56, 12 + number, number) for number in range(3))
    found = reader["stack"](ExpertStack(experts).to_bytes())
    assert np.allclose(found, np.stack([_dense(expert) for expert in experts]), atol=1e-5)


def _block_after(marker: str) -> str:
    """The indented block after the paragraph that contains `marker`; line breaks in the marker do not matter."""
    found = re.search(r"\s+".join(map(re.escape, marker.split())) + r".*?\n\n(.*?)\n\n", TEXT, re.DOTALL)
    assert found is not None, marker
    return found[1]


def _bytes_after(marker: str) -> bytes:
    """The hexadecimal bytes at the beginning of the lines in the block after `marker`."""
    lines = _block_after(marker).splitlines()
    return b"".join(bytes.fromhex(re.match(r"(\s*[0-9a-f]{2}\b)+", line)[0]) for line in lines)  # type: ignore[index]


def _numbers_after(marker: str) -> list[float]:
    return [float(word) for word in _block_after(marker).replace("−", "-").split()]


def test_the_worked_example_is_right(reader: dict[str, Callable[..., Any]]) -> None:
    codes = _bytes_after("and the codes, one tile")
    assert list(codes) == [(37 * i + 11) % 256 for i in range(64)]
    blob = _bytes_after("The head is") + codes
    packed = PackedMatrix.from_buffer(blob, where="example")
    assert (packed.rows, packed.cols, packed.header.L, len(blob)) == (1, 16, 12, 112)
    transformed = trellis.decode(packed)[0]
    original = trellis.decode(packed, original_basis=True)[0]
    assert torch.allclose(transformed, torch.tensor(_numbers_after("in the transformed basis is")), atol=1e-6)
    assert torch.allclose(
        original, torch.tensor(_numbers_after("after the inverse transform it is")), atol=1e-6
    )
    assert np.allclose(reader["matrix"](blob)[0][0], original.numpy(), atol=1e-6)
    table = re.findall(r"^\| (\d+) \| .* \| (\d+) \| 0x(\w+) \| ([\d+]+) \| ([−\d]+) \|$", TEXT, re.MULTILINE)
    levels = torch.round(transformed / (0.35355338 / 147.8))
    assert len(table) == 5
    for weight, L, product, addends, level in table:
        assert int(L) * 0x83DCD12D % 2**32 == int(product, 16)
        expected = int(level.replace("−", "-"))
        assert sum(int(part) for part in addends.split("+")) - 510 == expected == int(levels[int(weight)])
