"""The account of a run: what its phases and steps compute, and how long that takes the processor.

While an `Account` is active (`keeping`), `measured` opens a phase for one kind of matrix, and `step` a part of the
phase that is open. Everything is counted in the innermost part: nothing twice. `counted_here` counts what other threads
do in the part that is open. Without an active account they do nothing.

- Operations: multiplications and additions of matrix products, attention, factorisations and triangular solves that
  torch runs, by the dtype in which they are computed. Element-wise work is not counted, and of native kernels only
  those whose callers report them (`count_native`).
- Bytes: read and written by torch's operations, arguments and results; views are free.
- Seconds: of the processor, summed over threads. Waiting for a disk or for other processes does not count, so an
  account of a busy machine is right. On a GPU it says what the processor does.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

REST = "rest"
"""Step of what is in no other step of its phase."""
_aten = torch.ops.aten


def _cholesky_operations(matrix: torch.Tensor, *_: Any) -> int:
    return matrix.numel() * matrix.shape[-1] // 3


def _solve_operations(triangular: torch.Tensor, values: torch.Tensor, *_: Any) -> int:
    return triangular.shape[-1] * values.numel()


def _linear_operations(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> int:
    return 2 * x.numel() * weight.shape[0]


def _attention_operations(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> int:
    return 2 * query.numel() * key.shape[-2] + 2 * query.shape[:-1].numel() * value.shape[-2:].numel()


def _attention_backward_operations(gradient: torch.Tensor, *factors: Any) -> int:
    """Five products of the forward pass's two sizes: scores again, and the gradients of both factors of each."""
    del gradient
    return 5 * _attention_operations(*factors[:3]) // 2


_OWN_COUNTS: dict[Any, Callable[..., int]] = {
    _aten.linalg_cholesky_ex: _cholesky_operations,
    _aten.linalg_solve_triangular: _solve_operations,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_operations,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_operations,
}
"""Operations from an operator's positional arguments, for operators that torch's own registry lacks."""


@dataclass
class Entry:
    """Sums of one part of a run: operations by dtype, bytes, and the processor's seconds."""

    operations: Counter[torch.dtype] = field(default_factory=Counter)
    nbytes: int = 0
    seconds: float = 0.0


class Account:
    """Sums by phase, step and kind of matrix. Several threads may add to it.

    Attributes:
        entries: (phase, step, kind) to sums, in the order in which the parts were first opened.
    """

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str, str], Entry] = {}
        self._owner = threading.get_ident()
        self._seconds_of_others = 0.0
        self._lock = threading.Lock()

    def add(self, part: tuple[str, str, str], seconds: float) -> None:
        """Add the processor's seconds to a part."""
        with self._lock:
            self.entries.setdefault(part, Entry()).seconds += seconds
            if threading.get_ident() != self._owner:
                self._seconds_of_others += seconds

    def add_operations(
        self, part: tuple[str, str, str], dtype: torch.dtype | None, count: int, nbytes: int
    ) -> None:
        """Add operations in this dtype (None: there are none) and bytes to a part."""
        with self._lock:
            entry = self.entries.setdefault(part, Entry())
            entry.nbytes += nbytes
            if dtype is not None:
                entry.operations[dtype] += count

    def clock(self) -> float:
        """Seconds of the processor: of the thread, and in the thread that made the account also of torch's threads.

        The other threads of the program have a single thread of torch each. The first one waits for them, and has them
        close their parts before it reads the clock: what they have added is not its own.
        """
        if threading.get_ident() != self._owner:
            return time.thread_time()
        with self._lock:
            return time.process_time() - self._seconds_of_others


class _Parts(threading.local):
    """The open parts of a thread, the innermost last, and when the clock was last read."""

    def __init__(self) -> None:
        self.open: list[tuple[str, str, str]] = []
        self.since = 0.0


Item = TypeVar("Item")
Result = TypeVar("Result")
_active: list[Account] = []
"""The active account, or empty."""
_parts = _Parts()


@contextmanager
def keeping(account: Account | None) -> Iterator[None]:
    """Make the account active in the block; None: none. A process keeps one at a time."""
    if account is None:
        yield
        return
    _active.append(account)
    try:
        yield
    finally:
        _active.clear()


@contextmanager
def measured(phase: str, kind: str) -> Iterator[None]:
    """Count the block as `phase` for matrices of this kind (a role, or "" where it concerns none)."""
    if not _active:
        yield
        return
    with _opened(_active[0], (phase, REST, kind)):
        yield


@contextmanager
def step(name: str) -> Iterator[None]:
    """Count the block as a step of the phase that is open in this thread. Without one it does nothing."""
    if not _active or not _parts.open:
        yield
        return
    phase, _, kind = _parts.open[-1]
    with _opened(_active[0], (phase, name, kind)):
        yield


def count_native(dtype: torch.dtype, operations: int, nbytes: int) -> None:
    """Add what a native kernel computed, and the bytes that it read and wrote, to the part that is open here."""
    if _active and _parts.open:
        _active[0].add_operations(_parts.open[-1], dtype, operations, nbytes)


def counted_here(run: Callable[[Item], Result]) -> Callable[[Item], Result]:
    """`run`, whose calls by other threads count in the part that is open in this thread now."""
    if not _active or not _parts.open:
        return run
    account, part = _active[0], _parts.open[-1]

    def counted(item: Item) -> Result:
        if _parts.open:  # this thread
            return run(item)
        with _opened(account, part):
            return run(item)

    return counted


@contextmanager
def _opened(account: Account, part: tuple[str, str, str]) -> Iterator[None]:
    outermost = not _parts.open
    now = account.clock()
    if not outermost:
        account.add(_parts.open[-1], now - _parts.since)
    _parts.since = now
    _parts.open.append(part)
    try:
        if outermost:
            with _Counting(account):
                yield
        else:
            yield
    finally:
        now = account.clock()
        account.add(_parts.open.pop(), now - _parts.since)
        _parts.since = now


class _Counting(TorchDispatchMode):
    """Adds the operations and bytes of every operator to the innermost part of the thread."""

    def __init__(self, account: Account) -> None:
        super().__init__()
        self._account = account

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = list(_tensors((args, kwargs, result)))
            nbytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
            count = _operations(func, args, kwargs or {}, result)
            self._account.add_operations(_parts.open[-1], tensors[0].dtype if count else None, count, nbytes)
        return result


def _operations(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    packet = func._overloadpacket
    if (own := _OWN_COUNTS.get(packet)) is not None:
        return own(*args)
    if func.namespace == "mkldnn" and packet.__name__ == "_linear_pointwise":
        return _linear_operations(*args)
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
