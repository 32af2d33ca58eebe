"""The native attention of sequences and its gradients, against float64 and torch's own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from ciuic_cli.codecs import native
from ciuic_cli.layerwise.operations import sequence_attention as module
from ciuic_cli.layerwise.operations.mixed_precision import mixed_precision
from ciuic_cli.layerwise.operations.sequence_attention import sequence_attention
from ciuic_cli.process.threads import threads

CPU = torch.device("cpu")
SHAPES = [
    # b, heads, kv heads, queries, context, width of keys, of values
    (2, 9, 3, 300, 300, 64, 64),
    (1, 4, 4, 65, 65, 192, 128),
    (2, 8, 1, 130, 200, 24, 12),
    (3, 2, 2, 4, 4, 16, 16),
    (1, 6, 1, 7, 77, 33, 81),
]
Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

pytestmark = pytest.mark.skipif(
    not native.interface().ciuic_has_sequence_attention(False), reason="torch's attention stays here"
)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Arrays:
    """Queries, keys and values as modules have them: heads are not the second dimension in memory."""
    b, heads, kv, queries, context, size, columns = shape
    query, key, value = (
        gaussian(b, n, h, w, seed=seed).to(dtype).transpose(1, 2).requires_grad_()
        for seed, (n, h, w) in enumerate(
            ((queries, heads, size), (context, kv, size), (context, kv, columns))
        )
    )
    return query, key, value


def exact(given: Arrays, mask: torch.Tensor | None, scaling: float, is_causal: bool) -> list[torch.Tensor]:
    """In float64, written out: the result, and the gradients of its sum with weights."""
    query, key, value = (each.detach().double().requires_grad_() for each in given)
    shared = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(shared, dim=1).mT * scaling
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ value.repeat_interleave(shared, dim=1)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), weights_of(out))]


def weights_of(out: torch.Tensor) -> torch.Tensor:
    return gaussian(*out.shape, seed=3).bfloat16().to(out.dtype)


def found(given: Arrays, mask: torch.Tensor | None, scaling: float, is_causal: bool) -> list[torch.Tensor]:
    out = sequence_attention(*given, mask, 0.0, is_causal, scaling, enable_gqa=True)
    assert out is not None
    return [out.detach(), *torch.autograd.grad(out, given, weights_of(out))]


def errors(values: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    return [
        float((value.double() - other).norm() / other.norm())
        for value, other in zip(values, expected, strict=True)
    ]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_float32(shape: tuple[int, ...], is_causal: bool) -> None:
    given = inputs(shape, torch.float32)
    is_causal = is_causal and shape[3] == shape[4]
    assert max(errors(found(given, None, 0.3, is_causal), exact(given, None, 0.3, is_causal))) < 5e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16(shape: tuple[int, ...]) -> None:
    """Rounding a result to bfloat16 has an error of 0.0017; weights and gradients of scores are rounded, too. With
    few tokens of sharp weights, the gradient of scores is a difference of nearly equal numbers."""
    given = inputs(shape, torch.bfloat16)
    values = errors(found(given, None, 0.3, False), exact(given, None, 0.3, False))
    assert values[0] < 2.5e-3 and max(values) < 1e-2


def test_masks() -> None:
    given = inputs((2, 6, 3, 70, 150, 32, 32), torch.float32)
    of_sequence = torch.rand(2, 1, 70, 150, generator=torch.Generator().manual_seed(0)) < 0.3
    of_sequence[1, 0, 5] = False  # a query of padding gets zeros, not NaN, and has no gradient
    of_sequence[0, 0, 6, :140] = False  # nothing in the first blocks of tokens
    position = torch.arange(150)
    window = (position[None] <= position[80:, None]) & (position[None] > position[80:, None] - 20)
    for mask in (of_sequence, window[None, None]):
        assert max(errors(found(given, mask, 0.2, False), exact(given, mask, 0.2, False))) < 3e-6
    out, of_query, _, _ = found(given, of_sequence, 0.2, False)
    assert not out[1, :, 5].any() and not of_query[1, :, 5].any()


def test_large_scores_do_not_overflow() -> None:
    given = inputs((1, 2, 2, 100, 100, 32, 32), torch.float32)
    out, *gradients = found(given, None, 300.0, True)
    assert errors([out], exact(given, None, 300.0, True)[:1])[0] < 1e-3  # scores of 1e4 have an error of 1e-3
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_the_number_of_threads_changes_nothing() -> None:
    given, results = inputs((2, 6, 3, 300, 300, 64, 64), torch.bfloat16), []
    for number in (1, 2, 5):
        with threads(number):
            results.append(found(given, None, 0.1, True))
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kernels", ["avx2", "avx512vnni"])
def test_every_instruction_set(kernels: str) -> None:
    """A machine that lacks an instruction set uses another."""
    tests = "test_float32 or test_bfloat16 or test_masks"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", tests],
        env=os.environ | {"CIUIC_CPU_KERNELS": kernels},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_torch_computes() -> None:
    query, key, value = inputs((1, 4, 2, 8, 8, 32, 32), torch.float32)
    assert sequence_attention(query, key, value, enable_gqa=True) is not None
    assert sequence_attention(query, key, value) is None, "torch refuses it without enable_gqa"
    key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
    assert sequence_attention(query, key, value) is not None
    assert sequence_attention(query, key, value, dropout_p=0.1) is None
    assert sequence_attention(query, key, value, scale=0.0) is None
    assert sequence_attention(query, key, value, torch.zeros(1, 1, 8, 8)) is None
    assert sequence_attention(query, key, value, torch.ones(1, 4, 8, 8, dtype=torch.bool)) is None
    assert sequence_attention(query[:, :, :4], key, value, is_causal=True) is None
    assert sequence_attention(query.double(), key.double(), value.double()) is None
    assert sequence_attention(query[0], key[0], value[0]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_use_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under autocast, which rounds its arguments, and with the same gradients as torch's."""
    given, calls, call = inputs((1, 4, 4, 70, 70, 32, 32), torch.float32), [], module._call
    monkeypatch.setattr(module, "_call", lambda *arrays: (calls.append(arrays[0].dtype), call(*arrays)))
    with mixed_precision(CPU, dtype):
        out = F.scaled_dot_product_attention(*given, is_causal=True)
    assert out.dtype == dtype and out.shape == (1, 4, 70, 32)
    values = [out.detach(), *torch.autograd.grad(out, given, weights_of(out))]
    assert calls == [dtype] * 2 and all(value.dtype == torch.float32 for value in values[1:])
    assert max(errors(values, exact(given, None, 32**-0.5, True))) < (
        3e-6 if dtype == torch.float32 else 1.2e-2
    )
