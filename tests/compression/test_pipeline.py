"""compress() from checkpoint to artifact on tiny models: budget, determinism, refusals."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tiny_runs import compress_tiny, weights_of
from transformers import AutoModelForCausalLM

import ciuic_cli
from ciuic_cli.artifact.verification import verify
from ciuic_cli.artifact.writer import CHECKSUMS
from ciuic_cli.errors import EnvironmentFault, InputError, TargetError, UsageError
from ciuic_cli.layerwise.operations import mixed_precision
from ciuic_cli.report.schema import LowRankPass, MemoryReport, PrunePass


@pytest.mark.parametrize("family", ["llama_tied", "qwen2", "deepseek_v2", "deepseek_v3"])
def test_budget_is_kept_and_every_matrix_compressed(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path, family: str
) -> None:
    source, out = tiny_checkpoint(family), tmp_path / "out"
    report = compress_tiny(source, out, text)
    stored = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert stored == report.artifact_bytes <= report.budget_bytes
    assert report.original_bytes / stored >= 2.0
    text_of_report = (out / "memory_report.json").read_text()
    assert report.to_dict() == json.loads(text_of_report)
    assert report == MemoryReport.from_json(text_of_report)
    for row in report.components:
        if len(row.shape) > 1 and row.role != "router":
            assert row.dense is None, (row.name, row.dense)
    verify(out).require_intact(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    original = AutoModelForCausalLM.from_pretrained(source)
    ids = torch.randint(0, 250, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        p = original(ids).logits.float().log_softmax(-1)
        q = model(ids).logits.float().log_softmax(-1)
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    spread = float((p.exp() * (p - p.mean(-2, keepdim=True))).sum(-1).mean())
    assert 0 <= kl < max(0.15 * spread, 1e-3)
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 24)


def test_the_model_card_has_the_figures_of_the_report_and_working_code(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    """The hub can read README.md, its figures are those of the report, and its code runs unchanged."""
    out = tmp_path / "out"
    report = compress_tiny(tiny_checkpoint("llama"), out, text)
    card = ModelCard.load(out / "README.md")
    assert card.data.library_name == "transformers"
    assert f"{report.bits_per_weight:.3f} bits per weight" in card.text
    assert f"measured {report.measured_kl:.3g} ±" in card.text
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    assert code.startswith("from transformers import")  # nothing of ours needs to be imported
    names: dict[str, Any] = {}
    exec(code.replace("path/to/this/folder", str(out)), names)
    ids = names["tokenizer"]("Pack my box", return_tensors="pt").input_ids
    assert torch.isfinite(names["model"](ids).logits).all()


def test_sequences_are_at_most_as_long_as_the_positions(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    source, out = tiny_checkpoint("llama"), tmp_path / "out"
    with pytest.raises(UsageError, match="--seqlen 257: the model has 256 positions"):
        compress_tiny(source, out, text, seqlen=257)
    assert not out.exists()
    assert compress_tiny(source, out, text, seqlen=None, dry_run=True).options["seqlen"] == 256


def test_equal_inputs_give_equal_bytes(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    source = tiny_checkpoint("deepseek_v3")
    compress_tiny(source, tmp_path / "a", text)
    compress_tiny(source, tmp_path / "b", text)
    assert weights_of(tmp_path / "a") == weights_of(tmp_path / "b")


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_layers_run_in_either_dtype(
    family: str,
    rounds: bool,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processors multiply layers either in bfloat16 or in float32; both must work on any machine."""
    monkeypatch.setattr(mixed_precision, "multiplies_bfloat16", lambda: rounds)
    report = compress_tiny(tiny_checkpoint(family), tmp_path / "out", text)
    # Five seeds of deepseek_v3 on a processor with AMX: 0.031 to 0.054 in bfloat16, 0.025 to 0.047 in float32.
    assert report.measured_kl is not None and report.measured_kl < 0.1


def test_a_licence_link_that_leads_outside_is_refused_before_any_work(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_checkpoint("llama_tied"), source)
    (tmp_path / "LICENSE").write_text("terms")
    (source / "LICENSE").symlink_to("../LICENSE")
    steps: list[str] = []
    with pytest.raises(InputError, match="leads outside"):
        compress_tiny(source, tmp_path / "out", text, progress=lambda what, *_: steps.append(what))
    assert not steps


def test_the_config_of_an_artifact_names_its_dtype(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_checkpoint("llama_tied"), source)
    config = json.loads((source / "config.json").read_text())
    config.pop("dtype", None)
    config.pop("torch_dtype", None)
    (source / "config.json").write_text(json.dumps(config))
    compress_tiny(source, tmp_path / "out", text)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_compression_in_place_by_several_processes_is_refused(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="one process"):
        ciuic_cli.apply_ciuic_compression(model)


def test_passes_can_be_forced_and_forbidden(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    source = tiny_checkpoint("llama")
    forced = compress_tiny(source, tmp_path / "forced", text, prune=0.2, rank=16, ratio=1.5)
    prune, lowrank, _ = forced.passes
    assert isinstance(prune, PrunePass) and isinstance(lowrank, LowRankPass)
    prunable = sum(
        r.parameters for r in forced.components if r.dense is None and r.role not in ("embedding", "head")
    )
    assert prune.weights >= 0.18 * prunable
    assert lowrank.matrices > 0 and lowrank.bytes > 0
    off = compress_tiny(source, tmp_path / "off", text, prune="off", rank="off", bits=(4,), ratio=2.5)
    assert {k for row in off.components for k in row.widths or {}} == {"4"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "forced") is not None


WRONG: dict[str, list[Any]] = {
    "ratio": [0, math.nan, "4", True],
    "target_bpw": [0, 17],
    "target_size": [0, "8GB"],
    "calibration": [[None], 5, b"x"],
    "nsamples": [0, -1],
    "seqlen": [0],
    "seed": [2**40, -1],
    "effort": ["slow"],
    "prune": [1.5],
    "rank": [0, "x"],
    "bits": [(), (9,)],
    "mtp": ["half"],
    "device": ["x", "meta", None],
}


@pytest.mark.parametrize(("option", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_wrong_options_are_usage_errors_before_anything_is_written(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path, option: str, value: object
) -> None:
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')}|is no size of a model"):
        compress_tiny(tiny_checkpoint("llama"), tmp_path / "out", text, **{option: value})
    assert list(tmp_path.iterdir()) == [text]


def test_wrong_paths_and_two_targets_are_usage_errors(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    source: Any = tiny_checkpoint("llama")
    for model, out in ((source, f"{tmp_path}/a\0b"), (source, None), (5, tmp_path / "out")):
        with pytest.raises(UsageError, match="is not a path"):
            compress_tiny(model, out, text)
    with pytest.raises(UsageError, match="each set the budget"):
        compress_tiny(source, tmp_path / "out", text, ratio=3.0, target_size=10**6)
    assert list(tmp_path.iterdir()) == [text]


def test_one_calibration_text_needs_no_list(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    for calibration in (text, str(text), (str(text),)):
        report = compress_tiny(
            tiny_checkpoint("llama"), tmp_path / "out", text, calibration=calibration, dry_run=True
        )
        assert report.options["nsamples"] == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_device_does_not_affect_the_next_call(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    with pytest.raises(EnvironmentFault, match="no CUDA device"):
        compress_tiny(tiny_checkpoint("llama"), tmp_path / "out", text, device="cuda")
    assert list(tmp_path.iterdir()) == [text]
    compress_tiny(tiny_checkpoint("llama"), tmp_path / "out", text, device="cpu")


def test_an_error_before_the_first_step_leaves_nothing(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr("ciuic_cli.compression.run.collect_statistics", fail)
        with pytest.raises(ZeroDivisionError):
            compress_tiny(tiny_checkpoint("llama"), tmp_path / "out", text)
    assert list(tmp_path.iterdir()) == [text]
    compress_tiny(tiny_checkpoint("llama"), tmp_path / "out", text, seed=1)


def test_unreachable_targets_are_refused_before_any_work(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    with pytest.raises(TargetError, match="ratio"):
        compress_tiny(
            tiny_checkpoint("llama"),
            tmp_path / "out",
            text,
            ratio=20.0,
            progress=lambda *a: pytest.fail("worked"),
        )
    assert list(tmp_path.glob("*out*")) == []


@pytest.mark.parametrize("size", [10**12, 10**400], ids=["terabyte", "absurd"])
def test_required_disk_space_is_limited_by_the_largest_artifact(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    text: Path,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    required: list[int] = []
    monkeypatch.setattr(
        "ciuic_cli.process.atomic_files.require_space", lambda out, nbytes: required.append(nbytes)
    )
    remarks: list[str] = []
    source = tiny_checkpoint("llama")
    report = compress_tiny(source, tmp_path / "out", text, target_size=size, hint=remarks.append)
    assert any(remark.startswith("the artifact will have") and "--bits" in remark for remark in remarks)
    assert required == [2 * report.budget_bytes]
    assert 0.8 * report.budget_bytes < report.artifact_bytes <= report.budget_bytes
    assert report.budget_bytes < report.original_bytes


def test_existing_output_is_kept_unless_forced(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="exists"):
        compress_tiny(tiny_checkpoint("llama_tied"), out, text)
    (out / CHECKSUMS).write_text("old")
    with pytest.raises(InputError, match="exists"):
        compress_tiny(tiny_checkpoint("llama_tied"), out, text)
    assert (out / "mine.txt").read_text() == "mine"
    compress_tiny(tiny_checkpoint("llama_tied"), out, text, force=True)
    assert not (out / "mine.txt").exists() and (out / "model.safetensors").exists()


def test_a_nan_weight_is_refused_with_its_name(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_checkpoint("llama_tied"), source)
    file = next(source.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match="up_proj"):
        compress_tiny(source, tmp_path / "out", text)
    assert not (tmp_path / "out").exists()


def test_a_loaded_model_is_compressed_in_place(tiny_checkpoint: Callable[..., Path], text: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama_tied"))
    before = sum(p.numel() * p.element_size() for p in model.parameters())
    same = ciuic_cli.apply_ciuic_compression(
        model, effort="fast", nsamples=6, seqlen=48, calibration=[text], calibration_only=True, ratio=2.0
    )
    assert same is model
    after = sum(p.numel() * p.element_size() for p in model.parameters())
    assert after <= before / 2
    ids = torch.arange(10)[None]
    assert torch.isfinite(model(ids).logits).all()


def test_wrong_options_in_place_are_refused_before_the_model_is_saved(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama"))
    monkeypatch.setattr(type(model), "save_pretrained", lambda *_: pytest.fail("the model was written"))
    with pytest.raises(TypeError, match="ratoi"):
        ciuic_cli.apply_ciuic_compression(model, ratoi=2.0)
    with pytest.raises(UsageError, match="without dry_run"):
        ciuic_cli.apply_ciuic_compression(model, dry_run=True)


def test_every_key_of_the_report_is_documented(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    report = compress_tiny(tiny_checkpoint("deepseek_v3"), tmp_path / "out", text, dry_run=True)

    def keys(value: Any, skip: tuple[str, ...] = ("options", "widths", "seconds", "shared")) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(keys, value))
        if not isinstance(value, dict):
            return set()
        named = {key: part for key, part in value.items() if key not in skip}
        if "roles" in named:
            named["roles"] = list(named["roles"].values())
        return set(value).union(*(keys(part) for part in named.values()))

    document = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text(encoding="utf-8")
    section = document.split("## The report")[1].split("\n## ")[0]
    assert keys(report.to_dict()) <= set(re.findall("`([a-z_]+)`", section))
