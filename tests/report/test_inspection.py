"""Descriptions of checkpoints and artifacts, compared with numbers counted here."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sample_report import REPORT

from ciuic_cli.checkpoint.header import read_header
from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.cli.console import to_json
from ciuic_cli.codecs.bits import stored_bits
from ciuic_cli.codecs.sizes import packed_nbytes
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.testing import blob_of, random_matrix
from ciuic_cli.errors import InputError
from ciuic_cli.report import losses
from ciuic_cli.report.inspection import describe

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A V3 artifact: embedding 8 bits, o_proj of rank 4, expert 1 of each stack pruned, the rest 3/4.5."""
    source = tiny_checkpoint("deepseek_v3")
    model_map = map_model(open_checkpoint(source))
    folder = tmp_path_factory.mktemp("artifact")
    stored = {}
    for name, parameter in model_map.parameters.items():
        if not parameter.compress:
            stored[name] = model_map.read(name)
        elif len(parameter.shape) == 3:
            experts = (
                random_matrix(*parameter.shape[1:], 0 if e == 1 else 4) for e in range(parameter.shape[0])
            )
            stored[name] = blob_of(ExpertStack(tuple(experts)))
        else:
            widths = [8] if parameter.role == "embedding" else [3, 4.5]
            stored[name] = blob_of(
                random_matrix(*parameter.shape, widths, rank=4 if parameter.role == "o" else 0)
            )
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "ciuic", "format_version": 1, "bits_per_weight": 4.2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_checkpoint(tiny_checkpoint: Make) -> None:
    folder = tiny_checkpoint("deepseek_v3")
    found = describe(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    weights = {name: value for name, value in tensors.items() if "e_score_correction_bias" not in name}
    assert (found.kind, found.model_type, found.architecture) == (
        "checkpoint",
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
    )
    assert found.parameters == sum(value.numel() for value in weights.values())
    assert found.file_bytes == file.stat().st_size and found.files == 1
    assert found.bits_per_weight == pytest.approx(8 * found.file_bytes / found.parameters)
    assert found.ratio == pytest.approx(2 * found.parameters / found.file_bytes) and 0.9 < found.ratio < 1
    assert found.overhead_bytes == found.file_bytes - 2 * found.parameters
    assert found.formats == {"BF16": found.parameters}
    by_role = {component.role: component for component in found.components}
    assert by_role["expert_gate_up"].parameters == 2 * 6 * 48 * 56 and by_role["expert_gate_up"].tensors == 2
    assert by_role["expert_gate_up"].bits == 16.0
    assert sum(component.bytes for component in found.components) == 2 * found.parameters
    assert [component.bytes for component in found.components] == sorted(
        (component.bytes for component in found.components), reverse=True
    )
    assert (
        len(found.rows) == len(map_model(open_checkpoint(folder)).parameters) - 2
    )  # the two routers' biases


def test_a_tied_checkpoint_counts_its_embedding_once(tiny_checkpoint: Make) -> None:
    found = describe(tiny_checkpoint("qwen2"))
    assert found.parameters == sum(
        value.numel() for value in load_file(tiny_checkpoint("qwen2") / "model.safetensors").values()
    )
    assert not any(row.role == "head" for row in found.rows)


def test_fp8_bytes_include_the_scales(tiny_checkpoint: Make, tmp_path: Path) -> None:
    folder = tmp_path / "fp8"
    shutil.copytree(tiny_checkpoint("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, folder / "model.safetensors")
    row = next(row for row in describe(folder).rows if row.name == name)
    assert (row.stored, row.bytes) == ("F8_E4M3", 88 * 48 + 4)
    assert row.bits == pytest.approx(8 * (88 * 48 + 4) / (88 * 48))


def test_an_artifact(artifact: Path) -> None:
    found = describe(artifact)
    rows = {row.name: row for row in found.rows}
    assert (found.kind, found.model_type) == ("artifact", "deepseek_v3")
    assert found.artifact is not None and found.artifact["format_version"] == 1
    embedding = rows["model.embed_tokens.weight"]
    assert embedding.widths == {8: 17} and embedding.pruned == 0.0  # 263 rows are 17 groups
    assert embedding.bytes == packed_nbytes(263, 56, [8] * 17)
    assert embedding.bits == pytest.approx(8 * embedding.bytes / (263 * 56))
    out = rows["model.layers.0.self_attn.o_proj.weight"]
    assert out.rank == 4 and out.widths == {3: 2, 4.5: 2}
    factors = packed_nbytes(4, 48, [6]) + packed_nbytes(4, 56, [6])
    assert out.bytes == packed_nbytes(56, 48, stored_bits([3, 4.5, 3, 4.5]), factors)
    stack = rows["model.layers.1.mlp.experts.gate_up_proj"]
    assert (
        stack.widths == {0: 3, 4: 15} and stack.pruned == pytest.approx(1 / 6) and stack.stored == "trellis"
    )
    norm = rows["model.norm.weight"]
    assert (norm.stored, norm.bits, norm.widths) == ("BF16", 16.0, {}) and "norm" in norm.reason
    dense = describe_source_parameters(artifact)
    assert found.parameters == dense and found.ratio == pytest.approx(2 * dense / found.file_bytes)
    header = read_header(artifact / "model.safetensors")
    buffers = sum(entry.nbytes for name, entry in header.tensors.items() if "e_score" in name)
    assert found.overhead_bytes == header.header_bytes + buffers
    assert not found.warnings


def describe_source_parameters(artifact: Path) -> int:
    """Number of weights of the transformers model of the config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(artifact)
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_description_is_json_and_leaves_rows_out_unless_asked(artifact: Path) -> None:
    found = describe(artifact)
    assert "rows" not in found.as_dict()
    rows = json.loads(to_json(found.as_dict(tensors=True)))["rows"]
    assert len(rows) == len(found.rows) and rows[0]["shape"] == [263, 56]


def edited(artifact: Path, target: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(artifact, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_missing_extra_and_misshapen_tensors(artifact: Path, tmp_path: Path) -> None:
    def lose(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.2.self_attn.o_proj.weight"]

    with pytest.raises(InputError, match=r"1 tensor\(s\) of the model are missing") as caught:
        describe(edited(artifact, tmp_path / "lose", lose))
    assert caught.value.tensor == "model.layers.2.self_attn.o_proj.weight"

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["extra"] = torch.ones(3)

    assert "extra" in describe(edited(artifact, tmp_path / "add", add)).warnings[0]

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].clone()

    with pytest.raises(InputError, match=re.escape("(88, 56)")) as caught:
        describe(edited(artifact, tmp_path / "swap", swap))
    assert caught.value.tensor == "lm_head.weight"


def test_a_damaged_blob_header_is_named(artifact: Path, tmp_path: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][4] = 99  # the window length

    with pytest.raises(InputError, match="99") as caught:
        describe(edited(artifact, tmp_path / "m", damage))
    assert caught.value.tensor == "lm_head.weight"


def test_only_headers_are_read(artifact: Path, tmp_path: Path) -> None:
    """The description is the same after all codes and dense weights are overwritten."""
    found = describe(artifact)

    def overwrite(tensors: dict[str, torch.Tensor]) -> None:
        for value in tensors.values():
            if value.dtype == torch.uint8:
                value[-64:] ^= 0xFF
            else:
                value.fill_(float("nan"))

    again = describe(edited(artifact, tmp_path / "m", overwrite))
    assert again.rows == found.rows and again.components == found.components


def test_losses_come_from_the_memory_report(artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(artifact, folder)
    assert describe(folder).losses is None and not describe(folder).warnings
    known_names = [row.name for row in describe(folder).rows if row.widths]
    rows = [{**REPORT["components"][0], "name": name, "predicted_kl": 1e-3} for name in known_names]
    rows[0]["unpredicted"] = "not the model's"
    report = {
        **REPORT,
        "predicted_kl": 0.5,
        "measured_kl": 0.4,
        "measured_kl_stderr": 0.01,
        "components": rows,
    }
    (folder / "memory_report.json").write_text(json.dumps(report))
    found = describe(folder)
    assert found.losses is not None
    assert (found.losses.predicted, found.losses.measured, found.losses.stderr) == (0.5, 0.4, 0.01)
    assert found.losses.held_out_tokens == 512
    known = {row.name for row in found.rows if row.predicted_kl == 1e-3}
    assert known == {row["name"] for row in rows[1:]}
    total = sum(part.predicted_kl or 0.0 for part in found.components)
    assert total == pytest.approx(1e-3 * len(known))
    assert found.as_dict()["losses"]["predicted"] == 0.5


@pytest.mark.parametrize(
    "damage", ["[]", "{}", '{"predicted_kl": 1e999, "components": []}', "\x00", "{" * 9999]
)
def test_a_damaged_report_hides_only_the_losses(artifact: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(artifact, folder)
    (folder / "memory_report.json").write_text(damage)
    found = describe(folder)
    assert found.losses is None
    assert [note for note in found.warnings if "memory_report.json" in note]
    assert found.rows == describe(artifact).rows


def test_a_report_over_its_limit_is_not_read(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(artifact, folder)
    (folder / "memory_report.json").write_text("{" + " " * 100 + "}")
    monkeypatch.setattr(losses, "MAX_BYTES", 100)
    assert [note for note in describe(folder).warnings if "at most 100 are accepted" in note]
