"""`load`, `choose_device` and `pack_module_inplace`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_weights import as_tensor, dense, random_codes, relative_error
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from ciuic_cli import load
from ciuic_cli.errors import EnvironmentFault, InputError, UsageError
from ciuic_cli.runtime.loading import choose_device, pack_module_inplace
from ciuic_cli.runtime.modules import CompressedEmbedding, CompressedLinear


@torch.inference_mode()
def test_load(artifact: Callable[..., Any], prompt: torch.Tensor) -> None:
    built = artifact("llama")
    model = load(built.folder, device="cpu")
    assert model.dtype == torch.bfloat16 and not model.training
    single = load(str(built.folder), device=torch.device("cpu"), dtype=torch.float32)
    assert relative_error(single(prompt).logits, built.dense_model()(prompt).logits) < 1e-3


def test_folders_that_are_not_artifacts(
    artifact: Callable[..., Any], tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"not a ciuic artifact.*ciuic compress"):
        load(tiny_checkpoint("llama"), device="cpu")
    with pytest.raises(InputError, match="no such folder"):
        load(tmp_path / "absent", device="cpu")
    with pytest.raises(InputError, match=r"config\.json"):
        load(tmp_path, device="cpu")
    with pytest.raises(InputError, match="update ciuic"):
        load(artifact("llama", format_version=4).folder, device="cpu")


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="not a device"):
        choose_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(EnvironmentFault, match="no CUDA device"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda") and choose_device("cuda:1").index == 1
    with pytest.raises(EnvironmentFault, match="sees 2"):
        choose_device("cuda:2")


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)")]
)
def test_exhausted_memory_is_not_reported_as_a_damaged_artifact(
    artifact: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def exhausted(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", exhausted)
    with pytest.raises(EnvironmentFault, match="memory is exhausted"):
        load(artifact("llama").folder, device="cpu")


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama_tied", "deepseek_v3"])
def test_packing_a_loaded_model(
    family: str, artifact: Callable[..., Any], prompt: torch.Tensor, tmp_path: Path
) -> None:
    """The result equals a model loaded from the artifact, and `save_pretrained` writes the same artifact."""
    built = artifact(family)
    model = built.dense_model()
    blobs = {name: tensor for name, tensor in built.stored.items() if name in built.decoded}
    assert pack_module_inplace(model, blobs, notes={"bits_per_weight": 4.5}) is model
    reference = AutoModelForCausalLM.from_pretrained(built.folder, dtype=torch.float32)
    assert torch.equal(model(prompt).logits, reference(prompt).logits)
    if family == "llama_tied":
        assert model.lm_head.blob is model.model.embed_tokens.blob
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], blob) for name, blob in blobs.items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(again(prompt).logits, reference(prompt).logits)
    assert again.config.quantization_config.bits_per_weight == 4.5


def test_packing_a_plain_module() -> None:
    model = nn.Sequential(nn.Embedding(30, 40), nn.Linear(40, 48), nn.Linear(48, 5))
    first, second = random_codes(30, 40), random_codes(48, 40)
    pack_module_inplace(model, {"0.weight": first.to_bytes(), "1.weight": as_tensor(second).numpy()})
    assert [type(m) for m in model] == [CompressedEmbedding, CompressedLinear, nn.Linear]
    ids = torch.tensor([2, 29])
    expected = model[2](dense(first)[ids] @ dense(second).T + model[1].bias)
    assert relative_error(model(ids), expected) < 1e-3


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("1.weight", (40, 48), "expects"),
        ("7.weight", (48, 40), "no module"),
        ("1.bias", (48, 1), "expects"),
        ("1.scale", (48, 40), "no parameter"),
        ("2.weight", (16, 16), "neither a linear nor an embedding"),
    ],
)
def test_blobs_that_do_not_fit_the_model(name: str, shape: tuple[int, int], message: str) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(16, 16))

    model = nn.Sequential(nn.ReLU(), nn.Linear(40, 48), Bare())
    with pytest.raises(InputError, match=message) as caught:
        pack_module_inplace(model, {name: random_codes(*shape).to_bytes()})
    assert caught.value.tensor is not None and name.startswith(caught.value.tensor)
