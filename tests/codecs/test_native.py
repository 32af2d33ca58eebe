"""Finding and loading the library; all instruction sets give the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from instruction_sets import digests

from ciuic_cli.codecs import native
from ciuic_cli.errors import EnvironmentFault, UsageError

DIGEST = """
import hashlib, itertools, torch
import numpy as np
from ciuic_cli.codecs.bits import BITS, stored_bits
from ciuic_cli.codecs.blockcode.code import BlockCode, decode, encode
from ciuic_cli.codecs.testing import random_matrix
from ciuic_cli.codecs import native, transform, trellis
from ciuic_cli.runtime.attention import indexer, prompt_kernel

def gaussian(rows, cols, seed):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))

digest = hashlib.sha256()
torch.set_num_threads(2)
for L in (12, 13, 14, 16):
    for bits in BITS[1:]:
        weight = gaussian(48, 32, int(2 * bits))
        scale = np.array([1.1] * 45 + [0.0] * 3, np.float32)
        codes, decoded = trellis.round_matrix(weight, scale, stored_bits([bits, 0, bits]), L=L,
            input_feedback=0.1 * gaussian(32, 32, 1), output_feedback=0.1 * gaussian(48, 48, 2))
        digest.update(codes.tobytes() + decoded.numpy().tobytes())
        matrix = random_matrix(50, 600, bits, L=L)
        digest.update(trellis.decode(matrix).numpy().tobytes())
        digest.update(trellis.decode(matrix, out_dtype=torch.bfloat16).view(torch.int16).numpy().tobytes())
        for batch, exact in ((1, False), (3, False), (17, False), (39, False), (1, True), (5, True), (60, True)):
            product = trellis.matmul(matrix, gaussian(batch, 600, 3), exact=exact)
            digest.update(product.numpy().tobytes())
for cols in (16, 48, 96, 4096):
    digest.update(transform.transform(gaussian(3, cols, 4)).numpy().tobytes())
for code in itertools.starmap(BlockCode, itertools.product((4, 8), (16, 128), (False, True), (False, True))):
    encoded = encode(gaussian(1, 3003, 5), code, seed=6)
    for part in (encoded.codes, encoded.scales.view(torch.int16), decode(encoded)):
        digest.update(part.numpy().tobytes())
    digest.update(decode(encoded, torch.bfloat16).view(torch.int16).numpy().tobytes())
for rows, heads, columns, tokens in ((1, 64, 128, 100), (3, 5, 34, 17)):
    queries = gaussian(rows * heads, columns, 7).bfloat16().view(1, rows, heads, columns)
    keys, weights = gaussian(tokens, columns, 8).bfloat16()[None], gaussian(rows, heads, 9)[None]
    digest.update(indexer.scores(queries, keys, weights).numpy().tobytes())
for heads, kv, s, size, columns in ((9, 3, 130, 64, 64), (2, 2, 70, 24, 44)):
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = (
            gaussian(n * s, w, 10 + w).to(dtype).view(1, n, s, w) for n, w in ((heads, size), (kv, size), (kv, columns))
        )
        found = prompt_kernel.attention(query, key, value, None, scaling=0.3, is_causal=True)
        digest.update(found.float().numpy().tobytes())
print(native.cpu_kernels(), digest.hexdigest())
"""


def test_all_instruction_sets_give_the_same_bytes() -> None:
    """Codes, decoded weights, products, transforms, the block code, scores of indexers and attention of prompts."""
    assert len(set(digests(DIGEST).values())) == 1


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CIUIC_NATIVE_LIBRARY", str(tmp_path / "absent.so"))
    native.interface.cache_clear()
    with pytest.raises(EnvironmentFault, match="not installed") as caught:
        native.interface()
    assert caught.value.exit_code == 5
    monkeypatch.undo()
    native.interface.cache_clear()
    assert native.cpu_kernels() in ("amx", "avx512vnni", "avx2", "portable")


def test_a_file_that_is_no_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = tmp_path / "libciuic_native.so"
    wrong.write_bytes(b"not a library")
    monkeypatch.setenv("CIUIC_NATIVE_LIBRARY", str(wrong))
    native.interface.cache_clear()
    with pytest.raises(EnvironmentFault, match="does not load"):
        native.interface()
    monkeypatch.undo()
    native.interface.cache_clear()


def test_the_native_functions_refuse_null_and_nonsense() -> None:
    lib = native.interface()
    assert lib.ciuic_round(None, 16, 16, *[None] * 6, 16, 1, None, None, None, None) == -1
    assert lib.ciuic_decode(None, None, None, None, 16, 16, 16, 0, 16, None, 0, 1) == -1
    assert lib.ciuic_hadamard(None, 0, 1, 16, 4, 0, 0, 1) == -1
    assert lib.ciuic_block_encode(None, 0, 16, 8, 6, 0, 0, 0, None, None, 1) == -1
    assert lib.ciuic_block_decode(None, None, 16, 8, 6, 0, None, 0, 1) == -1
    assert lib.ciuic_index_scores(None, None, 1) == -1
    assert lib.ciuic_prompt_attention(None, None, 1) == -1
    assert lib.ciuic_largest(None, 1, 4, 2, None, 1) == -1
    with pytest.raises(UsageError):
        native.check(-1, "x")
    with pytest.raises(EnvironmentFault):
        native.check(-3, "x")
