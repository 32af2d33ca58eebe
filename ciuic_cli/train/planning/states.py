"""Bytes of optimizer states, and of what an optimizer's step allocates besides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

STATE_BYTES = {"8bit": 2.04, "4bit": 1.07, "lion": 4.0, "sgd": 0.0}
"""Bytes of optimizer states per trained parameter, by a part of the optimizer's name in transformers; the first part
that fits counts. Two states of one byte and their block scales; two of half a byte; one or no float32 state. Measured
for 8 and 4 bits with bitsandbytes and torchao."""
ADAM_BYTES = 8.0
"""The same for every other optimizer: Adam's two float32 states, the most that any common optimizer keeps."""
SMALL_STATE = 4096
"""Values of a parameter below which bitsandbytes and torchao keep float32 states."""
BLOCKS = {"torch_8bit": 256, "torch_4bit": 128}
"""Values per block of torchao's states, by a part of the optimizer's name. A parameter whose number of values is no
multiple of it keeps float32 states."""
UPDATE_COPIES = {"torch_8bit": 13.26, "torch_4bit": 13.26, "8bit": 5.0, "lion": 2.0, "sgd": 0.0}
"""Float32 temporaries of a parameter while an optimizer updates it, by a part of its name; the first part that fits
counts. Measured with torch's allocator on a CPU: torchao, bitsandbytes."""
ADAM_COPIES = 2.0
"""The same for every other optimizer. Torch's Adam on a CPU: the root of the second moment, and the quotient."""
TORCHAO_FLOAT_COPIES = 6.0
"""The same for torchao's optimizers and parameters that keep float32 states. Measured."""


def state_bytes(optim: str, sizes: Sequence[int]) -> int:
    """Bytes of the optimizer's states for trained parameters with these numbers of values."""
    each = next((count for part, count in STATE_BYTES.items() if part in optim), ADAM_BYTES)
    full = 4.0 if "lion" in optim else ADAM_BYTES
    return sum(round(size * (full if _keeps_floats(optim, size) else each)) for size in sizes)


def update_bytes(optim: str, sizes: Sequence[int]) -> int:
    """Most bytes of temporaries while the optimizer updates parameters with these numbers of values, one by one."""
    copies = next((count for part, count in UPDATE_COPIES.items() if part in optim), ADAM_COPIES)

    def bytes_of(size: int) -> int:
        in_floats = _block(optim) is not None and _keeps_floats(optim, size)
        return round(4 * size * (TORCHAO_FLOAT_COPIES if in_floats else copies))

    return max(map(bytes_of, sizes), default=0)


def _block(optim: str) -> int | None:
    return next((block for part, block in BLOCKS.items() if part in optim), None)


def _keeps_floats(optim: str, size: int) -> bool:
    """Whether an optimizer with states in few bits keeps float32 states of a parameter with `size` values."""
    if "8bit" not in optim and "4bit" not in optim:
        return False
    block = _block(optim)
    return size < SMALL_STATE or (block is not None and size % block != 0)


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
