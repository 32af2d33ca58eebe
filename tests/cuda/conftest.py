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

L_VALUES = (16, 13)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ctypes.CDLL]:
    folder = tmp_path_factory.mktemp("emulated")
    return {L: build(folder, L) for L in L_VALUES}


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
