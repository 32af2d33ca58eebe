"""The native kernel for attention over latents, against float64."""

from __future__ import annotations

import pytest
import torch
from instruction_sets import digests

from ciuic_cli.codecs import native
from ciuic_cli.errors import UsageError
from ciuic_cli.runtime.attention import latent_kernel
from ciuic_cli.runtime.attention.inputs import AttentionInputs

pytestmark = pytest.mark.skipif(
    not native.interface().ciuic_has_latent_attention(), reason="needs a processor with AVX2"
)

LOWEST = torch.finfo(torch.float32).min


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(torch.bfloat16)


def inputs(b: int, heads: int, s: int, context: int, rank: int, rope: int) -> AttentionInputs:
    return AttentionInputs(
        gaussian(b, heads, s, rank + rope),
        gaussian(b, 1, context, rank),
        gaussian(b, 1, context, rope),
        None,
        0.1,
    )


def attention(given: AttentionInputs) -> torch.Tensor:
    rank = given.latents.shape[-1]
    return latent_kernel.attention(given.query[..., :rank], given.query[..., rank:], given)


def exact(given: AttentionInputs) -> torch.Tensor:
    rank = given.latents.shape[-1]
    query, latents, keys = (t.double() for t in (given.query, given.latents, given.rotary_keys))
    scores = (query[..., :rank] @ latents.mT + query[..., rank:] @ keys.mT) * given.scaling
    if given.mask is not None:
        hidden = given.mask.dtype == torch.bool
        scores = scores.masked_fill(~given.mask, LOWEST) if hidden else scores + given.mask
    return scores.softmax(-1) @ latents


def error(given: AttentionInputs) -> float:
    expected = exact(given)
    return float((attention(given) - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("b", "heads", "s", "context", "rank", "rope"),
    [
        (1, 16, 1, 1, 512, 64),
        (1, 16, 1, 64, 64, 32),
        (2, 5, 3, 77, 96, 32),
        (1, 20, 1, 1300, 512, 64),
        (3, 1, 1, 65, 32, 32),
    ],
)
def test_the_error_is_that_of_weights_in_bfloat16(
    b: int, heads: int, s: int, context: int, rank: int, rope: int
) -> None:
    given = inputs(b, heads, s, context, rank, rope)
    assert latent_kernel.fits(given)
    assert error(given) < 4e-3


def test_every_instruction_set_attends() -> None:
    """With AVX2 and AVX-512 in float32, on AMD's newer processors in bfloat16, whose weights are rounded."""
    script = """
import torch
from ciuic_cli.codecs import native
from ciuic_cli.runtime.attention import latent_kernel
from ciuic_cli.runtime.attention.inputs import AttentionInputs
torch.manual_seed(0)
query, latents, keys = (torch.randn(2, heads, tokens, size).bfloat16()
                        for heads, tokens, size in ((5, 2, 128), (1, 201, 96), (1, 201, 32)))
given = AttentionInputs(query, latents, keys, None, 0.1)
error = "torch"
if latent_kernel.fits(given):
    found = latent_kernel.attention(query[..., :96], query[..., 96:], given)
    scores = query.double() @ torch.cat((latents, keys), -1).double().mT * 0.1
    expected = scores.softmax(-1) @ latents.double()
    error = float((found - expected).norm() / expected.norm())
print(native.cpu_kernels(), error)
"""
    errors = digests(script)
    assert errors.pop("portable") == "torch"
    assert errors
    assert all(float(error) < 4e-3 for error in errors.values())
    if "avx2" in errors:
        assert float(errors["avx2"]) < 1e-6


def test_masks() -> None:
    given = inputs(2, 5, 3, 150, 64, 32)
    seen = torch.rand(2, 1, 3, 150, generator=torch.Generator().manual_seed(0)) < 0.6
    seen[1, 0, 2] = False  # a row of padding: the mean of all latents, not NaN
    for mask in (seen, torch.randn(2, 5, 3, 150), torch.zeros(2, 1, 3, 150).masked_fill(~seen, LOWEST)):
        masked = AttentionInputs(given.query, given.latents, given.rotary_keys, mask, given.scaling)
        assert error(masked) < 4e-3


def test_very_different_scores_in_separate_ranges_of_tokens() -> None:
    """The running maximum rises and falls by hundreds between blocks of tokens and between threads' ranges."""
    given = inputs(1, 16, 1, 2000, 64, 32)
    steps = torch.tensor([0.0, 300.0, -300.0, 290.0]).repeat_interleave(500)
    masked = AttentionInputs(given.query, given.latents, given.rotary_keys, steps[None, None, None], 0.1)
    assert error(masked) < 4e-3


def test_views_of_a_longer_cache() -> None:
    whole = inputs(2, 4, 1, 200, 64, 32)
    part = AttentionInputs(
        whole.query, whole.latents[:, :, 20:90], whole.rotary_keys[:, :, 20:90], None, whole.scaling
    )
    copied = AttentionInputs(
        whole.query, part.latents.contiguous(), part.rotary_keys.contiguous(), None, whole.scaling
    )
    assert torch.equal(attention(part), attention(copied))


def test_the_result_does_not_depend_on_threads() -> None:
    given = inputs(1, 40, 1, 1700, 64, 32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = attention(given)
        torch.set_num_threads(3)
        assert torch.equal(attention(given), alone)
    finally:
        torch.set_num_threads(threads)


def test_other_dtypes_and_widths_are_left_to_torch() -> None:
    given = inputs(1, 4, 1, 10, 64, 32)
    assert not latent_kernel.fits(
        AttentionInputs(given.query.float(), given.latents, given.rotary_keys, None, 0.1)
    )
    assert not latent_kernel.fits(inputs(1, 4, 1, 10, 48, 32))
    with pytest.raises(UsageError, match="attention over latents"):
        attention(inputs(1, 4, 1, 10, 48, 32))
