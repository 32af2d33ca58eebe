"""Which texts and models `ciuic eval` refuses, and FP8 checkpoints that it decodes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference_predictions import changed_copy

from ciuic_cli.errors import InputError
from ciuic_cli.evaluation import perplexity as module
from ciuic_cli.evaluation.perplexity import evaluate, generate_text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n ", "is empty"),
        (b"a few words", "more than 32 are needed"),
        (b"caf\xe9 " * 100, r"not UTF-8 \(byte 3\)"),
        (None, "cannot be read"),
    ],
    ids=["empty", "blank", "short", "latin1", "absent"],
)
def test_unusable_text_is_refused_before_any_model_is_loaded(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    message: str,
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(module, "open_model", lambda *arguments: loaded.append(arguments))
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        evaluate(tiny_checkpoint("llama"), text=file)
    assert caught.value.file == str(file) and not loaded


def test_an_absent_base_is_refused_before_any_model_is_loaded(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(module, "open_model", lambda *arguments: loaded.append(arguments))
    with pytest.raises(InputError, match="no such folder"):
        evaluate(tiny_checkpoint("llama"), base=tmp_path / "absent", text=text)
    assert not loaded


def test_models_of_other_vocabularies_are_not_compared(
    tiny_checkpoint: Callable[..., Path], text: Path
) -> None:
    with pytest.raises(InputError, match="vocabularies differ: the base predicts 300 tokens, the model 263"):
        evaluate(
            tiny_checkpoint("llama"), base=tiny_checkpoint("llama", vocab_size=300), text=text, device="cpu"
        )


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_checkpoint("llama", vocab_size=64), folder)
    with pytest.raises(InputError, match="the model has only 64") as caught:
        evaluate(folder, text=text, device="cpu")
    assert caught.value.file == str(folder / "tokenizer.json")
    with pytest.raises(InputError, match="the model has only 64"):
        generate_text(folder, "The mill", device="cpu", max_new_tokens=1)


def test_predictions_that_are_not_finite_are_no_result(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    def ruin(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][:] = 3e38

    folder = changed_copy(tiny_checkpoint("llama"), tmp_path / "m", ruin)
    with pytest.raises(InputError, match="not finite"):
        evaluate(folder, text=text, limit=1, device="cpu")


def test_an_fp8_original_is_evaluated_decoded(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    block, name = 32, "model.layers.1.mlp.down_proj.weight"

    def to_fp8(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors[name].float()
        grid = [-(-size // block) for size in weight.shape]
        scale = torch.linspace(0.002, 0.004, grid[0] * grid[1]).reshape(grid)
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
        spread = spread[: weight.shape[0], : weight.shape[1]]
        tensors[name] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name.replace("weight", "weight_scale_inv")] = scale

    def decoded(tensors: dict[str, torch.Tensor]) -> None:
        to_fp8(tensors)
        scale = tensors.pop(name.replace("weight", "weight_scale_inv"))
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
        weight = tensors[name].float()
        tensors[name] = weight * spread[: weight.shape[0], : weight.shape[1]]

    source = tiny_checkpoint("llama", dtype=torch.float32)
    reference = changed_copy(source, tmp_path / "reference", decoded)
    fp8 = changed_copy(source, tmp_path / "fp8", to_fp8)
    config = json.loads((fp8 / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (fp8 / "config.json").write_text(json.dumps(config))
    found = evaluate(reference, base=fp8, text=text, seqlen=64, limit=2, device="cpu")
    assert found["kl_mean"] < 1e-12
    # The scales matter: without them the two would be far apart.
    assert evaluate(source, base=fp8, text=text, seqlen=64, limit=2, device="cpu")["kl_mean"] > 1e-6


def test_a_dense_copy_with_the_config_of_the_fp8_one_is_what_its_files_say(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    source = tiny_checkpoint("llama", dtype=torch.float32)
    copied = tmp_path / "copied"
    shutil.copytree(source, copied)
    config = json.loads((copied / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (copied / "config.json").write_text(json.dumps(config))
    found = evaluate(source, base=copied, text=text, seqlen=64, limit=2, device="cpu")
    assert found["kl_mean"] < 1e-12
