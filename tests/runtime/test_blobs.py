"""Blobs are parsed once per tensor and device, and freed with the tensor."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from packed_weights import as_tensor, random_codes

from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.errors import InputError
from ciuic_cli.runtime import blobs, ops
from ciuic_cli.runtime.matrices import TorchMatrix

MATRIX = random_codes(48, 40, [4, 2, 6], rank=4)


def test_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = PackedMatrix.from_buffer
    calls = []

    def counted(*arguments: Any, **options: Any) -> PackedMatrix:
        calls.append(1)
        return read(*arguments, **options)

    monkeypatch.setattr(PackedMatrix, "from_buffer", counted)
    blob = as_tensor(MATRIX)
    assert blobs.weight_of(blob) is blobs.weight_of(blob)
    with torch.inference_mode():
        inference_blob = as_tensor(MATRIX)
        assert blobs.weight_of(inference_blob) is blobs.weight_of(inference_blob)
    assert len(calls) == 2


def test_forgotten_with_the_tensor() -> None:
    blob = as_tensor(MATRIX)
    blobs.weight_of(blob)
    before = len(blobs._parsed)
    del blob
    gc.collect()
    assert len(blobs._parsed) < before


def test_damaged_blobs_are_refused() -> None:
    blob = as_tensor(MATRIX)
    blob[32] = 9
    with pytest.raises(InputError, match="bits per weight"):
        blobs.weight_of(blob)
    with pytest.raises(InputError, match="expert stack"):
        blobs.stack_of(as_tensor(MATRIX))


def test_devices_without_kernels_say_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU plays a device without an entry in the tables."""
    monkeypatch.delitem(blobs.WEIGHTS, "cpu")
    monkeypatch.delitem(blobs.STACKS, "cpu")
    blobs._warn_no_kernels.cache_clear()
    x = torch.randn(2, 40)
    with pytest.warns(RuntimeWarning, match="no kernels for cpu devices"):
        weight = blobs.weight_of(as_tensor(MATRIX))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stack = blobs.stack_of(as_tensor(ExpertStack((MATRIX, random_codes(48, 40, 3)))))
        ids = torch.tensor([[1, 0], [0, 2]])
        routed = stack.product(x, ids)
    assert isinstance(weight.matrix, TorchMatrix)
    assert torch.allclose(routed[0, 1], weight.product(x)[0], atol=1e-5)
    assert torch.allclose(weight.product(x), ops.linear(x, as_tensor(MATRIX), 48), atol=1e-5)
    assert not routed[1, 1].any()
    blobs._warn_no_kernels.cache_clear()
