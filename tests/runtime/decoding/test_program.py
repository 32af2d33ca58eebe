"""Programs of native steps against torch, step by step."""

from __future__ import annotations

import threading

import pytest
import torch
from instruction_sets import digests
from torch.nn import functional as F

from ciuic_cli.codecs import trellis
from ciuic_cli.codecs.testing import random_matrix
from ciuic_cli.codecs.trellis import Factor
from ciuic_cli.errors import UsageError
from ciuic_cli.runtime.decoding.program import Activation, Program, ProgramBuilder
from ciuic_cli.runtime.matrices import CpuMatrix


def run(program: Program, *arguments: torch.Tensor, threads: int = 2) -> None:
    program.run(arguments, arguments[0].shape[0], threads=threads)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", [16, 30, 576])
def test_norm(rows: int, size: int) -> None:
    """Two runs of `size` values per row, each with its own norm."""
    weight = gaussian(size, seed=1)
    builder = ProgramBuilder()
    builder.store(builder.norm(builder.load(0, 2 * size), weight, 1e-3), 1)
    x, y = gaussian(rows, 2 * size), torch.empty(rows, 2 * size)
    run(builder.build(), x, y)
    expected = F.rms_norm(x.view(rows, 2, size), (size,), weight, 1e-3).view(rows, -1)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", Activation)
def test_gate(activation: Activation) -> None:
    """Also far from zero, where the exponential leaves the range of float32."""
    x = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([float("nan"), -1e30, 1e30])])[None]
    other = gaussian(1, x.shape[1])
    builder = ProgramBuilder()
    a, b = builder.load(0, x.shape[1]), builder.load(1, x.shape[1])
    builder.store(builder.gate(a, b, activation), 2)
    y = torch.empty_like(x)
    run(builder.build(), x, other, y)
    function = F.silu(x) if activation == Activation.SILU else F.gelu(x, approximate="tanh")
    torch.testing.assert_close(y, function * other, rtol=2e-6, atol=2e-7, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 4])
def test_rotary_embedding(rows: int) -> None:
    size, heads = 12, 3
    builder = ProgramBuilder()
    x = builder.load(0, heads * size)
    builder.rotate(x, size, 1)
    builder.store(x, 3)
    values, y = gaussian(rows, heads * size), torch.empty(rows, heads * size)
    cosine, sine = gaussian(rows, size, seed=1), gaussian(rows, size, seed=2)
    run(builder.build(), values, cosine, sine, y)
    runs = values.view(rows, heads, size)
    first, second = runs.chunk(2, dim=-1)
    expected = runs * cosine[:, None] + torch.cat([-second, first], dim=-1) * sine[:, None]
    torch.testing.assert_close(y.view(rows, heads, size), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_products_of_one_input_run_together(rows: int, dtype: torch.dtype) -> None:
    """Some share their input's treatment. With orders, input scales, a bias and pruned groups."""
    matrices = [
        CpuMatrix(random_matrix(100, 72, (4, 2, 0, 6), is_sorted=True)),
        CpuMatrix(random_matrix(40, 72, 5, is_scaled=True)),
        CpuMatrix(random_matrix(16, 72, 3, seed=9)),
    ]
    bias = gaussian(100, seed=5)
    factors = [matrices[0].factor_with(bias), matrices[1].factor, matrices[2].factor]
    builder = ProgramBuilder()
    x = builder.load(0, 72)
    for argument, product in enumerate([builder.multiply(x, factor) for factor in factors], start=1):
        builder.store(product, argument)
    program = builder.build()
    values = gaussian(rows, 72, dtype=dtype)
    outputs = [torch.empty(rows, factor.rows, dtype=dtype) for factor in factors]
    for threads in (1, 2, 3):
        for output in outputs:
            output.fill_(torch.nan)
        run(program, values, *outputs, threads=threads)
        for factor, output in zip(factors, outputs, strict=True):
            assert torch.equal(output, factor.multiply(values, dtype, threads=1))
    dense = trellis.decode_dense(matrices[0].packed)
    error = outputs[0].float() - (values.float() @ dense.T + bias)
    assert error.norm() < (2e-2 if dtype == torch.bfloat16 else 3e-4) * outputs[0].float().norm()


def test_a_chain_of_products() -> None:
    """The scratch memory of one product is not that of the next."""
    first, second = (CpuMatrix(random_matrix(96, 96, 8, seed=seed)) for seed in (1, 2))
    builder = ProgramBuilder()
    x = builder.load(0, 96)
    y = builder.multiply(x, first.factor)
    builder.store(builder.multiply(builder.add(x, y), second.factor), 1)
    values, found = gaussian(2, 96), torch.empty(2, 96)
    run(builder.build(), values, found)
    middle = values + first.factor.multiply(values)
    assert torch.equal(found, second.factor.multiply(middle))


def test_wrong_programs_are_refused() -> None:
    matrix = CpuMatrix(random_matrix(32, 48)).factor
    x48 = ProgramBuilder()
    x48.multiply(x48.multiply(x48.load(0, 48), matrix), matrix)  # 32 values into a product of 48
    sizes = ProgramBuilder()
    sizes.add(sizes.load(0, 16), sizes.load(1, 32))
    odd = ProgramBuilder()
    odd.rotate(odd.load(0, 30), 15, 1)
    parts = ProgramBuilder()
    parts.norm(parts.load(0, 30), torch.ones(16), 1e-5)
    square = CpuMatrix(random_matrix(48, 48)).factor
    chain = ProgramBuilder()  # neighbouring products run together, so one may not read the other's result
    chain.multiply(chain.multiply(chain.load(0, 48), square), square)
    absent = ProgramBuilder()
    absent.store(absent.load(0, 16), 1)
    absent._steps[-1].source = 7
    for builder in (x48, sizes, odd, parts, chain, absent):
        with pytest.raises(UsageError, match="preparing a program"):
            builder.build()


def test_too_few_arguments_are_refused() -> None:
    builder = ProgramBuilder()
    builder.store(builder.load(0, 16), 1)
    with pytest.raises(UsageError, match="running a program"):
        builder.build().run((torch.zeros(1, 16),), 1)


def test_a_matrix_must_fit_its_vectors() -> None:
    packed = random_matrix(32, 48)
    for wrong in (
        {"bias": torch.zeros(31)},
        {"input_factors": torch.zeros(48, dtype=torch.float64)},
        {"order": torch.arange(32)},
    ):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            Factor(packed, **wrong)


def test_threads_of_python_share_a_program() -> None:
    factor = CpuMatrix(random_matrix(256, 256, is_sorted=True)).factor
    builder = ProgramBuilder()
    builder.store(builder.multiply(builder.load(0, 256), factor), 1)
    program, inputs = builder.build(), [gaussian(1, 256, seed=seed) for seed in range(4)]
    expected = [factor.multiply(x, threads=1) for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        y = torch.empty(1, 256)
        for _ in range(200):
            y.fill_(torch.nan)
            run(program, inputs[index], y)
            if not torch.equal(y, expected[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


_DIGEST = """
import hashlib, torch
from ciuic_cli.codecs import native
from ciuic_cli.codecs.testing import random_matrix
from ciuic_cli.runtime.decoding.program import Activation, ProgramBuilder
from ciuic_cli.runtime.matrices import CpuMatrix
g = torch.Generator().manual_seed(0)
builder = ProgramBuilder()
x = builder.norm(builder.load(0, 90), torch.randn(90, generator=g), 1e-5)
a, b = (builder.multiply(x, CpuMatrix(random_matrix(100, 90, (2, 5), seed=s)).factor) for s in (1, 2))
silu, gelu = builder.gate(a, b, Activation.SILU), builder.gate(b, a, Activation.GELU_TANH)
builder.store(builder.add(silu, gelu), 1)
program, digest = builder.build(), hashlib.sha256()
for rows in (1, 3):
    y = torch.empty(rows, 100)
    program.run((torch.randn(rows, 90, generator=g), y), rows)
    digest.update(y.numpy().tobytes())
print(native.cpu_kernels(), digest.hexdigest())
"""


def test_all_instruction_sets_compute_the_same_bytes() -> None:
    assert len(set(digests(_DIGEST).values())) == 1
