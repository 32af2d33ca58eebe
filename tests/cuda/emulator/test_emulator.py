"""The emulator detects wrong accesses and launches; the device code's shortcuts to a level are exact."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from emulation import Emulator, on_device

from ciuic_cli.codecs.testing import MIXED_BITS, random_matrix
from ciuic_cli.kernels import parameters as p
from ciuic_cli.kernels.launcher import Launch


def test_shortcuts_agree_with_trellis_decode_h_for_every_window(libraries: dict[int, ctypes.CDLL]) -> None:
    assert libraries[16].emu_wrong_levels() == 0


def decode_parameters(matrix, out: torch.Tensor, **changes: int) -> p.Decode:
    values = {
        "blob": matrix.blob.data_ptr(),
        "group_offset": matrix.group_offset.data_ptr(),
        "out": out.data_ptr(),
        "rows": matrix.rows,
        "cols_padded": matrix.cols_padded,
        "row_begin": 0,
        "row_end": matrix.rows,
        "out_type": p.FLOAT,
    }
    return p.Decode(**{**values, **changes})


def test_a_write_past_the_end_is_noticed(emulator: Emulator, rng: np.random.Generator) -> None:
    matrix = on_device(emulator, random_matrix(32, 64, MIXED_BITS, rng=rng))
    out = emulator.empty((16, 64), torch.float32)
    with pytest.raises(AssertionError, match="outside every buffer"):
        emulator.launch(Launch("decode_rows", (1, 2), 32, 0, decode_parameters(matrix, out), 16))


def test_a_read_past_the_end_is_noticed(emulator: Emulator, rng: np.random.Generator) -> None:
    matrix = on_device(emulator, random_matrix(16, 64, 4, rng=rng))
    out = emulator.empty((16, 1280), torch.float32)
    parameters = decode_parameters(matrix, out, cols_padded=1280)
    with pytest.raises(AssertionError, match="outside every buffer"):
        emulator.launch(Launch("decode_rows", (20, 1), 32, 0, parameters, 16))


def test_a_small_overrun_is_noticed(emulator: Emulator) -> None:
    out = emulator.empty((5,), torch.uint8)
    ctypes.memset(out.data_ptr() + 5, 0, 1)
    with pytest.raises(AssertionError, match="past the end"):
        emulator.check_canaries()


def test_parameters_of_another_kernel_are_noticed(emulator: Emulator) -> None:
    with pytest.raises(AssertionError, match="another size"):
        emulator.launch(Launch("transform", (1, 1), 32, 0, p.Decode(), 16))
