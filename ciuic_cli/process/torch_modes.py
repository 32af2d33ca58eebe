"""torch's modes as a new process has them, for code that is called in a program with other ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def default_modes() -> Iterator[None]:
    """In the block, gradients are recorded, nothing is autocast, and new tensors are float32 on the CPU.

    Undoes, for the time of the block, a caller's `torch.no_grad`, `inference_mode`, `autocast`, `set_default_dtype` and
    `set_default_device`. Except for the default dtype these belong to the calling thread.
    """
    dtype = torch.get_default_dtype()
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
