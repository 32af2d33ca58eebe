"""What a run computes has the same bits for any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ciuic_cli.passes import lowrank
from ciuic_cli.passes.linear_algebra import cholesky, solve_lower, solve_transposed
from ciuic_cli.passes.quantize import Importance, prepare
from ciuic_cli.threads import one_thread

SIZE = 700


def _positive(generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(SIZE, SIZE + 40, dtype=torch.float64, generator=generator)
    return x @ x.T / SIZE


def _prepared(generator: torch.Generator) -> torch.Tensor:
    moment = _positive(generator).float()
    weight = torch.randn(SIZE, SIZE, generator=generator)
    made = prepare(weight, Importance(moment / moment.trace(), moment))
    assert made.inputs.factor is not None and made.outputs.factor is not None
    return torch.cat([made.weight, made.inputs.factor, made.outputs.factor], dim=1)


WORK: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "product": lambda g: torch.randn(SIZE, 2048, generator=g) @ torch.randn(2048, SIZE, generator=g),
    "product in bfloat16": lambda g: (
        torch.randn(SIZE, 2048, generator=g).bfloat16() @ torch.randn(2048, SIZE, generator=g).bfloat16()
    ).float(),
    "product in float64": lambda g: (
        torch.randn(SIZE, SIZE, dtype=torch.float64, generator=g)
        @ torch.randn(SIZE, SIZE, dtype=torch.float64, generator=g)
    ),
    "sum along rows": lambda g: torch.randn(SIZE, 4096, generator=g).square().sum(1),
    "factorisation": lambda g: _cholesky(_positive(g)),
    "low rank": lambda g: lowrank.factor(
        torch.randn(SIZE, SIZE, generator=g), torch.rand(SIZE, generator=g), 64
    )[0],
    "solution": lambda g: solve_transposed(
        _lower(g), solve_lower(_lower(g), torch.randn(SIZE, 300, generator=g))
    ),
    "prepared matrix": _prepared,
}


def _lower(generator: torch.Generator) -> torch.Tensor:
    lower = cholesky(_positive(generator))
    assert lower is not None
    return lower.float()


def _cholesky(matrix: torch.Tensor) -> torch.Tensor:
    lower = cholesky(matrix)
    assert lower is not None
    torch.testing.assert_close(lower @ lower.T, matrix)
    return lower


@pytest.mark.parametrize("what", WORK)
def test_threads_do_not_matter(what: str) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(WORK[what](torch.Generator().manual_seed(0)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_the_number_of_threads_comes_back_after_an_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before
