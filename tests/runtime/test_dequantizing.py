"""The dense model of an artifact: `dequantize()`, `from_pretrained` with `dequantize=True`, and the exported one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

import ciuic_cli
from ciuic_cli.artifact.layout import place
from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.artifact.tensors import dense_tensor
from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.export import dense as exporting

FAMILIES = ("llama", "llama_tied", "gemma3", "deepseek_v3", "qwen2_moe", "deepseek_v4")
"""Plain and tied, scaled embedding, fused experts with and without a router's bias, other names."""


def logits(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=prompt, use_cache=False).logits.double()
    return found


@pytest.fixture(params=FAMILIES)
def built(artifact: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    return artifact(request.param, rank=16 if request.param == "llama" else 0)


def test_a_dequantized_model_predicts_as_the_decoded_one(built: Any, prompt: torch.Tensor) -> None:
    expected = logits(built.dense_model(), prompt)
    model = AutoModelForCausalLM.from_pretrained(built.folder, dtype=torch.float32)
    assert model.dequantize() is model
    assert type(model) is type(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(built.source)))
    assert not any("Compressed" in type(module).__name__ for module in model.modules())
    assert not any(parameter.dtype == torch.uint8 for parameter in model.parameters())
    torch.testing.assert_close(logits(model, prompt), expected, atol=2e-5, rtol=2e-5)
    assert not hasattr(model.config, "quantization_config") and not model.is_quantized


def test_loading_with_dequantize(built: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    config = ciuic_cli.CiuicConfig(dequantize=True)
    with pytest.warns(UserWarning, match="quantization_config"):
        model = AutoModelForCausalLM.from_pretrained(
            built.folder, dtype=torch.float32, quantization_config=config
        )
    expected = logits(built.dense_model(), prompt)
    torch.testing.assert_close(logits(model, prompt), expected, atol=2e-5, rtol=2e-5)
    model.save_pretrained(tmp_path)  # an ordinary checkpoint under the names of the original's files
    if "v4" not in str(built.source):  # `save_pretrained` does not write DeepSeek-V4's own names
        assert names(tmp_path) == names(built.source)


def names(folder: Path) -> dict[str, list[int]]:
    """Names and shapes of the tensors in a folder's files."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found.update({name: opened.get_slice(name).get_shape() for name in opened.keys()})  # noqa: SIM118
    return found


def test_an_exported_checkpoint_predicts_as_the_decoded_model(
    built: Any, prompt: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "place", lambda tensors: place(tensors, shard_bytes=100_000))
    out = tmp_path / "dense"
    steps: list[tuple[str, int, int]] = []
    written = ciuic_cli.export_dense(built.folder, out, to="fp32", progress=lambda *step: steps.append(step))
    assert written.files > 1 and steps[-1] == ("write", written.file_bytes, written.file_bytes)
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    if "v4" not in str(built.source):
        assert names(out) == names(built.source)
    expected = logits(built.dense_model(), prompt)
    if written.warnings:  # without a router's bias pruned experts are still chosen
        assert "routers have no bias" in written.warnings[0]
    else:
        torch.testing.assert_close(logits(model, prompt), expected, atol=2e-5, rtol=2e-5)
    assert {"tokenizer.json", "tokenizer_config.json"} <= {file.name for file in out.iterdir()}


def test_dtypes_of_an_exported_checkpoint(artifact: Callable[..., Any], tmp_path: Path) -> None:
    built = artifact("deepseek_v3")
    ciuic_cli.export_dense(built.folder, tmp_path / "dense")
    with safe_open(tmp_path / "dense" / "model.safetensors", "pt") as opened:
        dtypes = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    kept = {name for name, dtype in dtypes.items() if dtype != "BF16"}
    assert {name.split(".mlp.")[1] for name in kept} == {"gate.weight", "gate.e_score_correction_bias"}
    assert '"dtype": "bfloat16"' in (tmp_path / "dense" / "config.json").read_text()


def test_the_decoded_rows_can_be_replaced(artifact: Callable[..., Any], tmp_path: Path) -> None:
    built = artifact("llama", rank=16)
    opened = open_artifact(built.folder)
    ciuic_cli.export_dense(
        built.folder, tmp_path / "dense", to="fp32",
        rows=lambda found: lambda name: iter([2 * dense_tensor(found, name)]),
    )  # fmt: skip
    with safe_open(tmp_path / "dense" / "model.safetensors", "pt") as file:
        for name in opened.blobs:
            torch.testing.assert_close(file.get_tensor(name), 2 * built.decoded[name], atol=1e-5, rtol=1e-5)


def test_where_an_export_is_refused(artifact: Callable[..., Any], tmp_path: Path) -> None:
    built = artifact("llama", rank=16)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InputError, match="exists already"):
        ciuic_cli.export_dense(built.folder, tmp_path / "full")
    with pytest.raises(InputError, match="inside the input"):
        ciuic_cli.export_dense(built.folder, built.folder / "dense")
    with pytest.raises(InputError, match="not a ciuic artifact"):
        ciuic_cli.export_dense(built.source, tmp_path / "dense")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_an_interrupted_export_leaves_nothing(artifact: Callable[..., Any], tmp_path: Path) -> None:
    def stop(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ciuic_cli.export_dense(artifact("llama", rank=16).folder, tmp_path / "dense", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_memory_of_dequantizing_is_freed(artifact: Callable[..., Any]) -> None:
    model = ciuic_cli.load(artifact("llama", rank=16).folder, device="cpu")
    codes = [parameter for parameter in model.parameters() if parameter.dtype == torch.uint8]
    model.dequantize()
    gc.collect()
    assert codes and all(parameter.numel() == 0 for parameter in codes)


def test_a_model_on_disk_is_not_dequantized(artifact: Callable[..., Any]) -> None:
    model = ciuic_cli.load(artifact("llama", rank=16).folder, device="cpu")
    model.lm_head._parameters["weight"] = torch.nn.Parameter(
        torch.empty(3, dtype=torch.uint8, device="meta"), requires_grad=False
    )
    with pytest.raises(UsageError, match="on disk"):
        model.dequantize()
