"""The steps of programs that write keys and values and attend to them, against torch."""

from __future__ import annotations

import ctypes

import pytest
import torch
from instruction_sets import digests
from torch.nn import functional as F

from ciuic_cli.codecs import native
from ciuic_cli.errors import UsageError
from ciuic_cli.runtime.decoding.program import Program, ProgramBuilder


def gaussian(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attention_program(heads: int, kv_heads: int, size: int, scaling: float) -> Program:
    """Arguments: queries, the token's keys and values, the result."""
    builder = ProgramBuilder()
    for argument in (1, 2):
        buffer = builder.load(argument, kv_heads * size)
        builder.cache(buffer, size, argument - 1)
        builder.release(buffer)
    query = builder.load(0, heads * size)
    builder.store(builder.attend(query, size, kv_heads, scaling, 0), 3)
    return builder.build()


def caches_of(
    keys: torch.Tensor, values: torch.Tensor, context: int, bias: torch.Tensor | None
) -> native.CiuicCaches:
    """Caches [b, kv heads, at least `context` tokens, size] of which the program writes token `context` - 1."""
    arrays = (ctypes.c_void_p * 2)(keys.data_ptr(), values.data_ptr())
    sequence, head, token, _ = keys.stride()
    caches = native.CiuicCaches(
        arrays=ctypes.cast(arrays, ctypes.c_void_p),
        count=2,
        context=context,
        sequence_stride=sequence,
        head_stride=head,
        token_stride=token,
        bias=None if bias is None else bias.data_ptr(),
    )
    caches.alive = arrays
    return caches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 4, 16), (6, 2, 48), (9, 3, 64), (28, 2, 128), (3, 1, 256)]
)
@pytest.mark.parametrize("context", [1, 15, 64, 65, 300, 9001])
def test_as_torch(heads: int, kv_heads: int, size: int, context: int, dtype: torch.dtype) -> None:
    batch, scaling = 2, size**-0.5
    # Tokens lie apart, and behind the last one is memory that nobody may read or write.
    shape = (batch, context + 3, kv_heads, size)
    keys, values = (gaussian(*shape, seed=seed, dtype=dtype).transpose(1, 2) for seed in (1, 2))
    keys[:, :, context - 1 :], values[:, :, context - 1 :] = torch.nan, torch.nan
    query = gaussian(batch, heads * size, seed=3, dtype=dtype)
    new = [gaussian(batch, kv_heads * size, seed=seed, dtype=dtype) for seed in (4, 5)]
    bias = gaussian(batch, context, seed=6)
    bias[1, : context // 2] = -torch.inf
    program = attention_program(heads, kv_heads, size, scaling)
    outputs = []
    for threads in (1, 2, 3):
        out = torch.empty_like(query)
        program.run((query, *new, out), batch, caches=caches_of(keys, values, context, bias), threads=threads)
        outputs.append(out)
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    for cached, token in zip((keys, values), new, strict=True):
        assert torch.equal(cached[:, :, context - 1], token.view(batch, kv_heads, size))
        assert cached[:, :, context:].isnan().all()
    expected = F.scaled_dot_product_attention(
        query.float().view(batch, heads, 1, size),
        keys[:, :, :context].float().repeat_interleave(heads // kv_heads, 1),
        values[:, :, :context].float().repeat_interleave(heads // kv_heads, 1),
        attn_mask=bias[:, None, None],
    ).view(batch, -1)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 2e-6}
    torch.testing.assert_close(outputs[0].float(), expected, **tolerance)


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -torch.inf])
def test_hidden_tokens_in_front(hidden: float) -> None:
    """Whole blocks of padding, hidden as transformers hides them, change nothing."""
    keys, values = (gaussian(1, 2, 400, 32, seed=seed) for seed in (1, 2))
    query, new = gaussian(1, 4 * 32, seed=3), [gaussian(1, 2 * 32, seed=seed) for seed in (4, 5)]
    bias = torch.zeros(1, 400)
    bias[:, :300] = hidden
    padded, short = torch.empty_like(query), torch.empty_like(query)
    program = attention_program(4, 2, 32, 0.2)
    program.run((query, *new, padded), 1, caches=caches_of(keys, values, 400, bias))
    keys, values = (part[:, :, 300:].contiguous() for part in (keys, values))
    program.run((query, *new, short), 1, caches=caches_of(keys, values, 100, None))
    torch.testing.assert_close(padded, short, rtol=1e-5, atol=1e-6)


def test_large_scores_do_not_overflow() -> None:
    keys, values = gaussian(1, 1, 200, 16, seed=1) * 1e4, gaussian(1, 1, 200, 16, seed=2)
    query, new = gaussian(1, 16, seed=3) * 1e4, [gaussian(1, 16, seed=seed) for seed in (4, 5)]
    out = torch.empty_like(query)
    attention_program(1, 1, 16, 1.0).run((query, *new, out), 1, caches=caches_of(keys, values, 200, None))
    expected = F.scaled_dot_product_attention(query.view(1, 1, 1, 16), keys, values, scale=1.0)
    torch.testing.assert_close(out, expected.view(1, 16))


def test_wrong_caches_are_refused() -> None:
    def builder(size: int, heads: int, kv_heads: int) -> ProgramBuilder:
        made = ProgramBuilder()
        made.store(made.attend(made.load(0, heads * size), size, kv_heads, 1.0, 0), 1)
        return made

    for size, heads, kv_heads in ((24, 2, 2), (272, 2, 2), (16, 3, 2)):
        with pytest.raises(UsageError, match="preparing a program"):
            builder(size, heads, kv_heads).build()
    program, x = builder(16, 2, 2).build(), torch.zeros(1, 32)
    keys = torch.zeros(1, 2, 4, 16)
    few, empty = caches_of(keys, keys, 4, None), caches_of(keys, keys, 0, None)
    few.count = 1
    for caches in (None, few, empty):
        with pytest.raises(UsageError, match="running a program"):
            program.run((x, torch.empty_like(x)), 1, caches=caches)


_DIGEST = """
import ctypes, hashlib, torch
from ciuic_cli.codecs import native
from ciuic_cli.runtime.decoding.program import ProgramBuilder
g, digest = torch.Generator().manual_seed(0), hashlib.sha256()
for dtype in (torch.float32, torch.bfloat16):
    for heads, size in ((1, 16), (2, 48), (7, 128), (16, 64)):
        builder = ProgramBuilder()
        builder.store(builder.attend(builder.load(0, 2 * heads * size), size, 2, 0.3, 0), 1)
        program = builder.build()
        cached = torch.randn(2, 1, 2, 700, size, generator=g).to(dtype)
        query = torch.randn(1, 2 * heads * size, generator=g).to(dtype)
        out = torch.empty_like(query)
        arrays = (ctypes.c_void_p * 2)(cached[0].data_ptr(), cached[1].data_ptr())
        strides = dict(zip(("sequence_stride", "head_stride", "token_stride"), cached[0].stride()))
        caches = native.CiuicCaches(arrays=ctypes.cast(arrays, ctypes.c_void_p), count=2, context=700, **strides)
        program.run((query, out), 1, caches=caches)
        digest.update(out.view(torch.uint8).numpy().tobytes())
print(native.cpu_kernels(), digest.hexdigest())
"""


def test_all_instruction_sets_attend_alike() -> None:
    assert len(set(digests(_DIGEST).values())) == 1
