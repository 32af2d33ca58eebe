"""Rounding in fronts: the native search gives the native codes; the GPU's search is as good as the native one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from emulation import Emulator

from ciuic_cli.codecs import trellis
from ciuic_cli.codecs.bits import BITS, bits_of, stored_bits
from ciuic_cli.codecs.rate_distortion import SCALE_BY_L
from ciuic_cli.codecs.sizes import group_offsets
from ciuic_cli.errors import UsageError
from ciuic_cli.kernels import fronts
from ciuic_cli.kernels.encoder import encode
from ciuic_cli.kernels.launcher import Limits

Pair = tuple[torch.Tensor, torch.Tensor]


def _gaussian(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _feedback(size: int, seed: int) -> torch.Tensor:
    """A unit block lower triangular factor, as `passes.feedback` makes them."""
    factor = torch.tril(0.15 * _gaussian(size, size, seed=seed), -1)
    for begin in range(0, size, 16):
        factor[begin : begin + 16, begin : begin + 16] = torch.eye(16)
    return factor


@pytest.mark.parametrize("sides", ["inputs and outputs", "inputs", "inputs and rows", "outputs", "none"])
@pytest.mark.parametrize("shape", [(96, 160), (16, 112), (80, 16)])
def test_the_native_search_gives_the_native_codes(sides: str, shape: tuple[int, int]) -> None:
    rows, cols = shape
    weight, bits = _gaussian(rows, cols, seed=1), stored_bits([2, 4, 0, 4, 3.5, 4][: rows // 16])
    scale = np.full(rows, 1.1, np.float32)
    directions = (0.1 * _gaussian(rows, cols, seed=2), 0.02 * _gaussian(rows, cols, seed=3))
    feedback = {
        "input_feedback": _feedback(cols, 4) if "inputs" in sides else None,
        "output_feedback": _feedback(rows, 5) if "outputs" in sides else None,
        "row_feedback": directions if "rows" in sides else None,
    }
    native, native_decoded = trellis.round_matrix(weight, scale, bits, L=12, **feedback)  # type: ignore[arg-type]
    codes, decoded = fronts.round_matrix(
        weight, scale, bits, L=12, search=fronts.native_search, **feedback  # type: ignore[arg-type]
    )  # fmt: skip
    # Sums are rounded in another order, which may decide between two paths of equal error.
    assert (codes != native).mean() < 0.02
    torch.testing.assert_close(
        (decoded - weight).square().mean(), (native_decoded - weight).square().mean(), rtol=1e-2, atol=0
    )
    assert float((decoded - native_decoded).abs().median()) < 1e-6


def test_padding_rows_do_not_count_and_bad_numbers_are_refused() -> None:
    weight, scale = _gaussian(32, 48, seed=6), np.full(32, 1.1, np.float32)
    weight[27:], scale[27:] = 0.0, 0.0
    feedback = {"input_feedback": _feedback(48, 7), "output_feedback": _feedback(32, 8)}
    bits = stored_bits([4, 4])
    _, decoded = fronts.round_matrix(weight, scale, bits, L=12, search=fronts.native_search, **feedback)
    _, native = trellis.round_matrix(weight, scale, bits, L=12, **feedback)
    errors = [float((found - weight)[:27].square().mean()) for found in (decoded, native)]
    assert errors[0] < 1.15 * errors[1]
    assert not decoded[27:].any()
    weight[3, 5] = torch.nan
    with pytest.raises(UsageError, match="NaN"):
        fronts.round_matrix(weight, scale, bits, L=12, search=fronts.native_search, **feedback)


class _BothSearches:
    """The emulated GPU's search; `errors` sums its squared errors, and those of the native one on the same targets."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self.errors: dict[float, list[float]] = {}

    def __call__(self, targets: torch.Tensor, bits: float, L: int) -> Pair:
        codes, decoded = encode(self.emulator.tensor(targets), bits, L)
        native = fronts.native_search(targets, bits, L)[1]
        sums = self.errors.setdefault(bits, [0.0, 0.0])
        for number, found in enumerate((decoded, native)):
            sums[number] += float((found - targets).double().square().sum())
        return codes, decoded


@pytest.fixture
def rounded(emulator: Emulator) -> Callable[..., dict[float, list[float]]]:
    emulator.limits = Limits(
        shared_bytes=227 * 1024, multiprocessors=2
    )  # as an H100: 1 bit at L = 16 needs 128 KiB

    def round_all(bits: tuple[float, ...], L: int, cols: int, chunk: int) -> dict[float, list[float]]:
        """Squared errors by bits, of matrices with feedback on both sides; their codes decode to what was fed back."""
        search = _BothSearches(emulator)
        for number in range(0, len(bits), chunk):
            mixed = bits[number : number + chunk]
            rows, row_bits = 16 * len(mixed), stored_bits(list(mixed))
            weight = _gaussian(rows, cols, seed=number)
            scale = np.repeat([SCALE_BY_L[L][k] for k in mixed], 16).astype(np.float32)
            codes, decoded = fronts.round_matrix(
                weight, scale, row_bits, L=L, input_feedback=_feedback(cols, 9),
                output_feedback=_feedback(rows, 10), search=search,
            )  # fmt: skip
            stored = torch.empty_like(decoded)
            offsets = group_offsets(row_bits, cols)
            trellis_decode(codes, offsets, row_bits, scale, L, stored)
            torch.testing.assert_close(stored, decoded, rtol=1e-5, atol=1e-5)
        return search.errors

    return round_all


def trellis_decode(
    codes: np.ndarray, offsets: np.ndarray, row_bits: np.ndarray, scale: np.ndarray, L: int, out: torch.Tensor
) -> None:
    """Decode by the native library, which decodes what a CPU has coded."""
    status = trellis.native.interface().ciuic_decode(
        codes.ctypes.data, offsets.ctypes.data, row_bits.ctypes.data, scale.ctypes.data, *out.shape, L,
        0, out.shape[0], out.data_ptr(), 0, 1,
    )  # fmt: skip
    assert status == 0


@pytest.mark.parametrize(("L", "cols"), [(12, 64), (16, 64)])
def test_with_feedback_every_width_is_as_good_as_native(
    rounded: Callable[..., dict[float, list[float]]], L: int, cols: int
) -> None:
    errors = rounded(BITS[1:], L, cols, 4)
    assert sorted(errors) == sorted(BITS[1:]) and len(bits_of(stored_bits(BITS))) == len(BITS)
    ratios = {bits: ours / native for bits, (ours, native) in errors.items()}
    assert max(ratios.values()) < 1.005, ratios


def test_occupancy_says_how_many_matrices_fill_a_gpu() -> None:
    gpu = {"multiprocessors": 132, "two_sided": True}
    assert fronts.tiles_per_front(4096, 7168, two_sided=True) == pytest.approx(256 * 448 / 703)
    assert fronts.occupancy(4096, 7168, **gpu) == pytest.approx(0.62, abs=0.01)
    small = {"working_bytes": 20 << 20, "free_bytes": 70 << 30, **gpu}
    assert fronts.matrices_in_flight(576, 1536, **small) == 11
    assert fronts.matrices_in_flight(4096, 7168, working_bytes=3 << 30, free_bytes=70 << 30, **gpu) == 2
    assert fronts.matrices_in_flight(4096, 7168, working_bytes=3 << 30, free_bytes=5 << 30, **gpu) == 1
