"""Damaged adapters, and adapters of other models, are refused before anything is merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ciuic_cli
from ciuic_cli.errors import InputError
from ciuic_cli.train.examples import Example
from ciuic_cli.train.merging import patterns
from ciuic_cli.train.merging.adapter import ADAPTER_FILE, CONFIG_FILE, adapted_model
from ciuic_cli.train.merging.merge import merge

peft = pytest.importorskip("peft")

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(artifact: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of an artifact and of an adapter of rank 4 on its attention."""
    folder = artifact("llama").folder
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"])
    model = peft.get_peft_model(ciuic_cli.load(folder, device="cpu", dtype=torch.float32), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.1)
    out = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(out)
    return folder, out


@pytest.fixture
def copied(trained: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """The artifact, and a copy of the adapter that may be damaged."""
    return trained[0], Path(shutil.copytree(trained[1], tmp_path / "adapter"))


def refused(folder: Path, adapter: Path, message: str) -> InputError:
    with pytest.raises(InputError, match=message) as caught:
        adapted_model(folder, adapter, "cpu")
    assert caught.value.exit_code == 3 and caught.value.remedy
    return caught.value


def test_the_undamaged_adapter_is_loaded(copied: tuple[Path, Path]) -> None:
    folder, adapter = copied
    model = adapted_model(folder, adapter, "cpu")
    stored = load_file(adapter / ADAPTER_FILE)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            assert torch.equal(parameter.cpu().float(), stored[name.replace(".default", "")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 0}, "PEFT cannot load the adapter: ValueError: `r` should be a positive integer"),
        ({"r": "x"}, "PEFT cannot load the adapter: TypeError"),
        ({"r": None}, "PEFT cannot load the adapter"),
        ({"r": 3}, "size mismatch"),
        ({"lora_alpha": "x"}, "PEFT cannot load the adapter"),
        ({"bias": 7}, "PEFT cannot load the adapter"),
        ({"rank_pattern": 7}, "PEFT cannot load the adapter"),
        ({"target_modules": "("}, "PEFT cannot load the adapter"),
        ({"target_modules": []}, "PEFT cannot load the adapter"),
        ({"modules_to_save": ["lm_head"]}, "PEFT cannot load the adapter"),
        ({"task_type": "X"}, "PEFT cannot load the adapter"),
        ({"peft_type": "PROMPT_TUNING"}, "only LoRA adapters"),
        ({"peft_type": []}, "only LoRA adapters"),
        ({"layers_to_transform": [0]}, "8 of the adapter's tensors belong to no weight"),
        ({"target_modules": ["q_proj"]}, "6 of the adapter's tensors belong to no weight"),
        ({"target_modules": ["q_proj", "o_proj", "k_proj"]}, "6 of the adapter's tensors are missing"),
    ],
    ids=str,
)
def test_damaged_options(change: dict[str, Any], message: str, copied: tuple[Path, Path]) -> None:
    folder, adapter = copied
    file = adapter / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    refused(folder, adapter, message)


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": r"(\w+\.?)+!"},
        {"rank_pattern": {r"(\w+\.?)+!": 2}},
        {"exclude_modules": r"(\w+\.?)+!"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_regular_expression_without_end(
    change: dict[str, Any], copied: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "MOST_SECONDS", 2.0)
    folder, adapter = copied
    file = adapter / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert refused(folder, adapter, "do not end within 2 s").file == str(file)


def test_an_ordinary_regular_expression(copied: tuple[Path, Path]) -> None:
    folder, adapter = copied
    file = adapter / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "target_modules": r".*\.(q|o)_proj"}))
    found = adapted_model(folder, adapter, "cpu")
    adapted = {name.split(".")[-4] for name, _ in found.named_parameters() if "lora_A" in name}
    assert adapted == {"q_proj", "o_proj"}


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b"[" * 100_000, b"\xff"],
    ids=["empty", "list", "null", "deep", "not UTF-8"],
)
def test_an_options_file_that_is_no_json_object(content: bytes, copied: tuple[Path, Path]) -> None:
    folder, adapter = copied
    (adapter / CONFIG_FILE).write_bytes(content)
    assert refused(folder, adapter, "JSON").file == str(adapter / CONFIG_FILE)


def _nan(tensors: Tensors, name: str) -> None:
    tensors[name][0, 0] = float("nan")


def _missing(tensors: Tensors, name: str) -> None:
    del tensors[name]


def _extra(tensors: Tensors, name: str) -> None:
    tensors[name.replace("layers.0", "layers.77")] = tensors[name].clone()


def _integers(tensors: Tensors, name: str) -> None:
    tensors[name] = torch.ones_like(tensors[name], dtype=torch.int32)


def _shape(tensors: Tensors, name: str) -> None:
    tensors[name] = torch.ones(3, 3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_nan, "1 of 192 values are NaN or infinite"),
        (_missing, "1 of the adapter's tensors are missing"),
        (_extra, "1 of the adapter's tensors belong to no weight"),
        (_integers, "stored as I32"),
        (_shape, "size mismatch"),
    ],
)
def test_damaged_factors(
    damage: Callable[[Tensors, str], None], message: str, copied: tuple[Path, Path]
) -> None:
    folder, adapter = copied
    tensors = load_file(adapter / ADAPTER_FILE)
    damage(tensors, min(tensors))
    save_file(tensors, adapter / ADAPTER_FILE)
    refused(folder, adapter, message)


def test_half_a_file(copied: tuple[Path, Path]) -> None:
    folder, adapter = copied
    file = adapter / ADAPTER_FILE
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert refused(folder, adapter, "the file is truncated").file == str(file)


def test_an_output_inside_a_folder_that_is_read(copied: tuple[Path, Path]) -> None:
    folder, adapter = copied
    for out in (folder / "merged", adapter, adapter.parent):
        with pytest.raises(InputError, match="the output lies inside the input"):
            merge(folder, adapter, out, "bf16", [Example((1, 2, 3), (False, True, True))], device="cpu")
        assert not (folder / "merged").exists()
