"""The encoder: optimality, error bounds, feedback as predicted, the same bytes for any number of threads."""

from __future__ import annotations

import ctypes
import signal
import threading
import time

import numpy as np
import pytest
import torch

from ciuic_cli.codecs import reference, trellis
from ciuic_cli.codecs.bits import BITS, stored_bits
from ciuic_cli.codecs.rate_distortion import MSE_BY_L, SCALE_BY_L
from ciuic_cli.errors import UsageError


def gaussian(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def rounded(weight: torch.Tensor, bits: float, **options: object) -> torch.Tensor:
    """The decoded matrix with the same bits for all rows and the code's best scale."""
    L = options.get("L", 16)
    scale = np.full(weight.shape[0], SCALE_BY_L[L][bits], np.float32)
    return trellis.round_matrix(weight, scale, stored_bits([bits] * (weight.shape[0] // 16)), **options)[1]


def error_of(bits: float, L: int, rows: int = 128, cols: int = 128) -> float:
    weight = gaussian(rows, cols)
    decoded = rounded(weight, bits, L=L)
    return float((weight - decoded).double().square().mean()) * 4.0**bits


@pytest.mark.parametrize(
    ("bits", "bound"),
    [
        (1, 1.12),
        (1.5, 1.13),
        (2, 1.12),
        (2.5, 1.14),
        (3, 1.14),
        (3.5, 1.16),
        (4, 1.17),
        (4.5, 1.2),
        (5, 1.22),
        (6, 1.33),
    ],
)
def test_error_on_gaussians_at_the_default_L(bits: float, bound: float) -> None:
    """Bounds on 4^K times the mean squared error of 64 tiles: 2 to 4 % above the error of 2,000 tiles."""
    assert error_of(bits, 16) < bound


@pytest.mark.parametrize("bits", BITS[1:])
@pytest.mark.parametrize("L", [12, 13, 14, 15])
def test_error_at_other_L(bits: float, L: int) -> None:
    measured = error_of(bits, L)
    assert measured == pytest.approx(MSE_BY_L[L][bits], rel=0.04 if bits <= 5 else 0.5)


@pytest.mark.parametrize(("bits", "tiles"), [(4, 1), (6, 3), (8, 6)])
@pytest.mark.parametrize("outliers", [False, True])
def test_cost_against_the_exhaustive_search(bits: int, tiles: int, outliers: bool) -> None:
    """The search is within 1 % of the optimum over all closed paths at L = 12, and never below it.

    outliers: most targets are small, and every seventh is three times as large as usual.
    """
    L, sigma = 12, float(reference.CODE_SIGMA)
    x = gaussian(16, 16 * tiles, seed=1)
    if outliers:
        x = (x * torch.where(torch.arange(x.numel()).reshape(x.shape) % 7 == 0, 3.0, 0.1)).clamp_(-4, 4)
    codes, decoded = trellis.round_matrix(x, np.ones(16, np.float32), [bits], L=L)
    exact = found = 0.0
    for tile in range(tiles):
        target = x[:, 16 * tile : 16 * (tile + 1)].double().numpy().reshape(-1) * sigma
        exact += reference.viterbi(target, bits, L)[1]
        windows = reference.tile_windows(codes[32 * bits * tile : 32 * bits * (tile + 1)], bits, L)
        found += float(((target - reference.levels(windows)) ** 2).sum())
    assert exact - 1e-6 * exact <= found <= 1.01 * exact
    assert found / sigma**2 == pytest.approx(float((x - decoded).double().square().sum()), rel=1e-4)


def test_codes_decode_to_what_was_returned() -> None:
    bits, weight = [3, 0, 8, 2.5, 5, 5.5], gaussian(96, 48)
    scale = np.linspace(0.5, 2, 96).astype(np.float32)
    codes, decoded = trellis.round_matrix(weight, scale, stored_bits(bits), L=14)
    assert codes.size == 3 * 32 * sum(bits)
    begin = 0
    for group, group_bits in enumerate(bits):
        for block in range(3 if group_bits else 0):
            nbytes = int(32 * group_bits)
            windows = reference.tile_windows(codes[begin : begin + nbytes], group_bits, 14)
            begin += nbytes
            rows, cols = slice(16 * group, 16 * group + 16), slice(16 * block, 16 * block + 16)
            expected = (scale[rows] / reference.CODE_SIGMA)[:, None] * reference.levels(windows).reshape(
                16, 16
            )
            assert np.array_equal(decoded[rows, cols].numpy(), expected.astype(np.float32))
    assert (decoded[16:32] == 0).all()


def block_ldl(h: np.ndarray) -> tuple[np.ndarray, float]:
    """H = L D L^T with 16 x 16 blocks, L unit lower block triangular: (L, trace of D)."""
    n, residual, trace = len(h), h.copy(), 0.0
    lower = np.eye(n)
    for j in range(0, n, 16):
        d = residual[j : j + 16, j : j + 16]
        lower[j + 16 :, j : j + 16] = residual[j + 16 :, j : j + 16] @ np.linalg.inv(d)
        residual[j + 16 :, j + 16 :] -= lower[j + 16 :, j : j + 16] @ residual[j : j + 16, j + 16 :]
        trace += float(np.trace(d))
    return lower, trace


def correlated(n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    basis = rng.normal(size=(n, n))
    h = basis @ np.diag(np.exp(rng.normal(0, 1.5, n))) @ basis.T / n
    return h + 0.02 * np.trace(h) / n * np.eye(n)


def test_input_feedback_reaches_its_prediction() -> None:
    """LDLQ: tr(E H E^T) becomes error x rows x tr(D) instead of error x rows x tr(H)."""
    weight, h = gaussian(64, 160), correlated(160, 1)
    lower, trace = block_ldl(h)
    error = MSE_BY_L[14][4] / 256
    feedback = torch.from_numpy(lower).float()
    for a, predicted in ((None, np.trace(h)), (feedback, trace)):
        e = (weight - rounded(weight, 4, L=14, input_feedback=a)).double().numpy()
        assert np.trace(e @ h @ e.T) == pytest.approx(error * 64 * predicted, rel=0.08)
    assert trace < 0.6 * np.trace(h)


def test_two_sided_feedback_reaches_its_prediction() -> None:
    """tr(E^T G E H) becomes error x tr(D_G) x tr(D_H), except that feedback raises the variance of the targets."""
    weight, h, g = gaussian(112, 96), correlated(96, 2), correlated(112, 3)
    (a, trace_h), (b, trace_g) = block_ldl(h), block_ldl(g)
    error = MSE_BY_L[14][3] / 64
    inputs, outputs = torch.from_numpy(a).float(), torch.from_numpy(b).float()
    for fa, fb, predicted in (
        (inputs, None, trace_h * np.trace(g)),
        (None, outputs, np.trace(h) * trace_g),
        (inputs, outputs, trace_h * trace_g),
    ):
        e = (weight - rounded(weight, 3, L=14, input_feedback=fa, output_feedback=fb)).double().numpy()
        assert np.trace(e.T @ g @ e @ h) == pytest.approx(error * predicted, rel=0.2)
    assert trace_h * trace_g < 0.45 * trace_h * np.trace(g)


def test_only_the_blocks_below_the_diagonal_are_read() -> None:
    weight = gaussian(48, 48)
    a, b = 0.2 * gaussian(48, 48, 1), 0.2 * gaussian(48, 48, 2)
    expected = rounded(weight, 4, L=12, input_feedback=a, output_feedback=b)
    below = torch.block_diag(*[torch.ones(16, 16)] * 3).tril().bool() | torch.ones(48, 48).triu(0).bool()
    for matrix in (a, b):
        matrix[below] = float("nan")
    assert torch.equal(rounded(weight, 4, L=12, input_feedback=a, output_feedback=b), expected)


def test_every_row_group_may_have_its_own_bits() -> None:
    weight, bits = gaussian(112, 512), [2, 0, 8, 3, 6, 4, 5]
    scale = np.repeat([SCALE_BY_L[14].get(k, 1.0) for k in bits], 16).astype(np.float32)
    a, b = torch.zeros(512, 512), torch.zeros(112, 112)
    decoded = trellis.round_matrix(weight, scale, bits, L=14, input_feedback=a, output_feedback=b)[1]
    error = (weight - decoded).double().square().reshape(7, -1).mean(1)
    for k, e in zip(bits, error.tolist(), strict=True):
        assert e == pytest.approx(MSE_BY_L[14].get(k, 1.0) * 4.0**-k, rel=0.5 if k >= 6 else 0.12)


def test_padding_rows_cost_nothing() -> None:
    """Rows of scale 0 are ignored, so the other rows have less error than if padding had to be matched too."""
    weight = gaussian(16, 640)
    weight[3:] = 0
    errors = []
    for padding_scale in (0.0, 1.1):
        scale = np.array([1.1] * 3 + [padding_scale] * 13, np.float32)
        decoded = trellis.round_matrix(weight, scale, [3], L=12)[1]
        errors.append(float((weight[:3] - decoded[:3]).square().mean()))
        if padding_scale == 0:
            assert (decoded[3:] == 0).all()
    assert errors[0] < 0.97 * errors[1]


@pytest.mark.parametrize("bits", BITS[1:])
def test_adversarial_targets(bits: float) -> None:
    """Constants, zeros and weights far beyond the code's range give finite, sensible results."""
    for value in (0.0, 1.0, -3.0, 1e6, -1e30):
        decoded = trellis.round_matrix(
            torch.full((16, 32), value), np.ones(16, np.float32), stored_bits([bits]), L=12
        )[1]
        assert torch.isfinite(decoded).all()
        if abs(value) > 100:
            # Which extreme levels can follow each other depends on the bits per weight.
            assert float((decoded * np.sign(value)).mean()) > 1.4
        else:
            assert float((decoded - value).square().mean()) < 0.35
    spike = gaussian(16, 32)
    spike[2, 5] = 50.0
    decoded = trellis.round_matrix(spike, np.ones(16, np.float32), stored_bits([bits]), L=12)[1]
    assert decoded[2, 5] > 2.5


def test_the_same_bytes_for_any_number_of_threads() -> None:
    weight, a, b = gaussian(96, 112), 0.1 * gaussian(112, 112, 1), 0.1 * gaussian(96, 96, 2)
    options = {"L": 13, "input_feedback": a, "output_feedback": b}
    bits = [4, 3, 2, 4, 6, 5]
    first = trellis.round_matrix(weight, np.ones(96, np.float32), bits, threads=1, **options)
    for threads in (2, 3, 7, 64):
        again = trellis.round_matrix(weight, np.ones(96, np.float32), bits, threads=threads, **options)
        assert np.array_equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_progress_counts_tiles() -> None:
    progress = ctypes.c_long(0)
    trellis.round_matrix(gaussian(48, 80), np.ones(48, np.float32), [4, 0, 2], L=12, progress=progress)
    assert progress.value == 3 * 5


def test_an_interrupt_ends_the_call_early() -> None:
    """Ctrl-C during a matrix that takes minutes raises KeyboardInterrupt within a second or two."""
    progress = ctypes.c_long(0)
    begin = time.monotonic()
    timer = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        trellis.round_matrix(gaussian(2048, 2048), np.ones(2048, np.float32), [2] * 128, progress=progress)
    assert time.monotonic() - begin < 5
    assert progress.value < 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    weight = gaussian(16, 16)
    weight[3, 4] = bad
    with pytest.raises(UsageError, match="NaN or infinite"):
        trellis.round_matrix(weight, np.ones(16, np.float32), [4])
    with pytest.raises(UsageError, match="NaN or infinite"):
        trellis.round_matrix(gaussian(16, 16), np.full(16, bad, np.float32), [4])


def test_arguments_that_do_not_fit_are_refused() -> None:
    ones = np.ones(16, np.float32)
    with pytest.raises(UsageError, match="multiples of 16"):
        trellis.round_matrix(torch.zeros(16, 17), ones, [4])
    with pytest.raises(UsageError, match="row bits"):
        trellis.round_matrix(torch.zeros(16, 16), ones, [4, 4])
    for bits, L in ((9, 16), (255, 16), (4, 11), (4, 17)):
        with pytest.raises(UsageError, match="that the format has"):
            trellis.round_matrix(torch.zeros(16, 16), ones, [bits], L=L)
    with pytest.raises(UsageError, match="input_feedback must be float32"):
        trellis.round_matrix(torch.zeros(16, 16), ones, [4], input_feedback=torch.zeros(32, 32))
    with pytest.raises(UsageError, match="weight must be float32"):
        trellis.round_matrix(torch.zeros(16, 16).double(), ones, [4])


@pytest.mark.parametrize("name", ["inputs", "outputs", "pull"])
def test_feedback_that_is_not_finite_is_refused(name: str) -> None:
    size = 48
    inputs, outputs, pull = torch.eye(size), torch.eye(size), torch.zeros(size, size)
    {"inputs": inputs, "outputs": outputs, "pull": pull}[name][40, 3] = float("inf")
    with pytest.raises(UsageError, match="NaN or infinite"):
        trellis.round_matrix(
            gaussian(size, size), np.ones(size, np.float32), [4] * 3, L=12, input_feedback=inputs,
            output_feedback=outputs, row_feedback=(torch.ones(size, size), pull),
        )  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
def test_rounding_stops_at_the_first_target_that_is_not_finite(threads: int) -> None:
    """The second column of tiles cannot be rounded; the 30 columns after it are not tried."""
    rows, cols = 64, 512
    feedback = torch.zeros(cols, cols)
    feedback[cols - 1, cols - 32] = float("nan")
    progress = ctypes.c_long(0)
    with pytest.raises(UsageError, match="NaN or infinite"):
        trellis.round_matrix(
            gaussian(rows, cols), np.ones(rows, np.float32), [4] * 4, L=12, input_feedback=feedback,
            threads=threads, progress=progress,
        )  # fmt: skip
    assert progress.value <= rows // 16
