"""The emulated GPU for the kernels' tests."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "emulator"))

from emulation import Emulator, build

from ciuic_cli.kernels.launcher import LAUNCHERS, Limits


class _Libraries(dict[int, ctypes.CDLL]):
    """The kernels by L, each compiled at first use."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, L: int) -> ctypes.CDLL:
        self[L] = build(self._folder, L)
        return self[L]


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ctypes.CDLL]:
    return _Libraries(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def emulator(libraries: dict[int, ctypes.CDLL]) -> Iterator[Emulator]:
    """The launcher of CPU tensors: a small GPU with two multiprocessors and 99 KiB of shared memory per block."""
    device = torch.device("cpu")
    launcher = Emulator(libraries, Limits(shared_bytes=99 * 1024, multiprocessors=2))
    LAUNCHERS[device] = launcher
    yield launcher
    del LAUNCHERS[device]
    launcher.close()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)
