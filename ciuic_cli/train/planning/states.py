"""Bytes of optimizer states, and of what an optimizer's step allocates besides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ciuic_cli.train.memory.updates import slice_sizes

STATE_BYTES = {"8bit": 2.04, "4bit": 1.03, "lion": 4.0, "sgd": 0.0}
"""Bytes of optimizer states per trained value, by a part of the optimizer's name in transformers; the first part
that fits counts. Two states of one byte and their block scales; two of half a byte; one or no float32 state. Measured
for 8 and 4 bits with bitsandbytes and torchao."""
ADAM_BYTES = 8.0
"""The same for every other optimizer: Adam's two float32 states, the most that any common optimizer keeps."""
SLICED = ("bit", "bnb", "ademamix")
"""Parts of the names of bitsandbytes' and torchao's optimizers, which update large parameters slice by slice."""
SMALL_STATE = 4096
"""Values of a parameter below which bitsandbytes and torchao keep float32 states."""
TORCHAO_BLOCK = 256
"""Values per block of torchao's states, as transformers sets it. A parameter whose number of values is no multiple of
it keeps float32 states."""
UPDATE_COPIES = {"torch_8bit": 13.26, "torch_4bit": 13.26, "8bit": 5.0, "lion": 2.0, "sgd": 0.0}
"""Float32 copies that an optimizer holds of what it updates at once, by a part of its name; the first part that fits
counts. Measured with torch's allocator on a CPU: torchao, bitsandbytes."""
ADAM_COPIES = 2.0
"""The same for every other optimizer. Torch's Adam on a CPU: the root of the second moment, and the quotient."""
TORCHAO_FLOAT_COPIES = 6.0
"""The same for torchao's optimizers and parameters that keep float32 states. Measured."""


def state_bytes(optim: str, sizes: Iterable[int], in_floats: Iterable[int] = ()) -> int:
    """Bytes of the optimizer's states for trained parameters with these numbers of values.

    in_floats: values of parameters beside them whose states are float32 with any optimizer.
    """
    each = next((count for part, count in STATE_BYTES.items() if part in optim), ADAM_BYTES)
    full = 4.0 if "lion" in optim else ADAM_BYTES
    parts = (part for size in sizes for part in _updated(optim, size))
    rounded = sum(round(part * (full if _keeps_floats(optim, part) else each)) for part in parts)
    return rounded + round(full * sum(in_floats))


def keeps_embeddings_in_floats(optim: str) -> bool:
    """True if transformers makes this optimizer keep float32 states of embeddings: bitsandbytes' in 8 bits."""
    return "8bit" in optim and not _is_torchao(optim)


def update_bytes(optim: str, sizes: Iterable[int]) -> int:
    """Most bytes of temporaries while the optimizer updates parameters with these numbers of values, one by one."""
    copies = next((count for part, count in UPDATE_COPIES.items() if part in optim), ADAM_COPIES)

    def bytes_of(size: int) -> int:
        in_floats = _is_torchao(optim) and _keeps_floats(optim, size)
        return round(4 * size * (TORCHAO_FLOAT_COPIES if in_floats else copies))

    return max((bytes_of(part) for size in sizes for part in _updated(optim, size)), default=0)


def _updated(optim: str, size: int) -> list[int]:
    """Numbers of values that the optimizer updates one after another, on a CPU, of a parameter with `size` values."""
    return slice_sizes(size) if any(part in optim for part in SLICED) else [size]


def _is_torchao(optim: str) -> bool:
    return "torch_8bit" in optim or "torch_4bit" in optim


def _keeps_floats(optim: str, size: int) -> bool:
    """Whether an optimizer with states in few bits keeps float32 states of a parameter with `size` values."""
    if "8bit" not in optim and "4bit" not in optim:
        return False
    return size < SMALL_STATE or (_is_torchao(optim) and size % TORCHAO_BLOCK != 0)


class PlannedOptimizer(torch.optim.Optimizer):
    """Allocates what an optimizer's step allocates besides its states, of one parameter."""

    def __init__(self, parameters: Any, optim: str) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._optim = optim

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                torch.empty(update_bytes(self._optim, [parameter.numel()]), dtype=torch.uint8)
