"""The native attention of prompts, against float64 and torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ciuic_cli.codecs import native
from ciuic_cli.errors import UsageError
from ciuic_cli.runtime.attention import prompt_kernel

SHAPES = [
    # b, heads, kv heads, queries, context, width of keys, of values
    (1, 9, 3, 512, 512, 64, 64),
    (2, 4, 4, 65, 65, 192, 128),
    (1, 8, 1, 130, 200, 24, 12),
    (3, 2, 2, 4, 4, 16, 16),
    (1, 130, 1, 7, 77, 32, 80),
]


@pytest.fixture
def without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX the kernel works, too, but is not chosen."""
    if native.cpu_kernels() == "amx":
        monkeypatch.setattr(native, "cpu_kernels", lambda: "avx512vnni")


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as modules have them: heads are not the second dimension in memory."""
    b, heads, kv, queries, context, size, columns = shape
    return tuple(
        gaussian(b, n, h, w).to(dtype).transpose(1, 2)
        for n, h, w in ((queries, heads, size), (context, kv, size), (context, kv, columns))
    )  # type: ignore[return-value]


def exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    is_causal: bool,
) -> torch.Tensor:
    """float64 [b, s, heads, v], written out."""
    shared = query.shape[1] // key.shape[1]
    key, value = (t.double().repeat_interleave(shared, dim=1) for t in (key, value))
    scores = query.double() @ key.mT * scaling
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ value).transpose(1, 2)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.usefixtures("without_amx")
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_float32(shape: tuple[int, ...], is_causal: bool) -> None:
    given = inputs(shape, torch.float32)
    assert prompt_kernel.fits(*given, None)
    found = prompt_kernel.attention(*given, None, scaling=0.7, is_causal=is_causal)
    assert found.shape == (shape[0], shape[3], shape[1], shape[6])
    assert error(found, exact(*given, None, 0.7, is_causal)) < 1e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_as_exact_as_torch(shape: tuple[int, ...]) -> None:
    """The result is rounded to bfloat16 once, which alone has an error of 0.0017; torch rounds the weights, too."""
    given = inputs(shape, torch.bfloat16)
    expected = exact(*given, None, 0.2, False)
    found = prompt_kernel.attention(*given, None, scaling=0.2, is_causal=False)
    query, key, value = given
    shared = query.shape[1] // key.shape[1]
    torchs = F.scaled_dot_product_attention(
        query, key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1), scale=0.2
    )
    assert error(found, expected) < 1.9e-3
    assert error(found, expected) <= 1.02 * error(torchs.transpose(1, 2), expected)


@pytest.mark.usefixtures("without_amx")
def test_masks() -> None:
    given = inputs((2, 6, 3, 70, 150, 32, 32), torch.float32)
    of_sequence = torch.rand(2, 1, 70, 150, generator=torch.Generator().manual_seed(0)) < 0.3
    of_sequence[1, 0, 5] = False  # a query of padding gets zeros, not NaN
    of_sequence[0, 0, 6, :140] = False  # nothing in the first blocks of tokens
    position = torch.arange(150)
    window = (position[None] <= position[80:, None]) & (position[None] > position[80:, None] - 20)
    for mask in (of_sequence, window[None, None]):
        assert prompt_kernel.fits(*given, mask)
        found = prompt_kernel.attention(*given, mask, scaling=0.2, is_causal=False)
        assert error(found, exact(*given, mask, 0.2, False)) < 1e-6
    found = prompt_kernel.attention(*given, of_sequence, scaling=0.2, is_causal=False)
    assert not found[1, 5].any()


def test_large_scores_do_not_overflow() -> None:
    given = inputs((1, 2, 2, 100, 100, 32, 32), torch.float32)
    found = prompt_kernel.attention(*given, None, scaling=300.0, is_causal=True)
    assert error(found, exact(*given, None, 300.0, True)) < 1e-3  # scores of 1e4 have an error of 1e-3


def test_the_number_of_threads_changes_nothing() -> None:
    given = inputs((2, 6, 3, 300, 300, 64, 64), torch.bfloat16)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(prompt_kernel.attention(*given, None, scaling=0.1, is_causal=True))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_what_does_not_fit() -> None:
    query, key, value = inputs((1, 4, 2, 8, 8, 32, 32), torch.float32)
    assert prompt_kernel.fits(query, key, value, None) == (native.cpu_kernels() != "amx")
    assert not prompt_kernel.fits(query[:, :, :3], key, value, None)
    assert not prompt_kernel.fits(query, key[..., :24], value, None)
    assert not prompt_kernel.fits(query[:, :3], key, value, None)
    assert not prompt_kernel.fits(query.double(), key.double(), value.double(), None)
    assert not prompt_kernel.fits(query.bfloat16(), key, value, None)
    assert not prompt_kernel.fits(query, key, value, torch.zeros(1, 1, 8, 8))
    assert not prompt_kernel.fits(query, key, value, torch.ones(1, 4, 8, 8, dtype=torch.bool))
    assert not prompt_kernel.fits(query, key, value, torch.ones(1, 1, 8, 7, dtype=torch.bool))
    assert not prompt_kernel.fits(query.requires_grad_(), key, value, None)
    with torch.no_grad():
        assert prompt_kernel.fits(query, key, value, None) == (native.cpu_kernels() != "amx")


def test_the_library_refuses_widths_that_it_does_not_compute() -> None:
    query, key, value = inputs((1, 2, 2, 8, 8, 1056, 24), torch.float32)
    with pytest.raises(UsageError):
        prompt_kernel.attention(query, key, value, None, scaling=1.0, is_causal=True)
