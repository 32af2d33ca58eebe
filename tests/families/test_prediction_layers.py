"""Multi-token-prediction layers, kept or dropped: from files of V3 in FP8 and V4 in FP4 to artifacts that load."""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_families import BOUND, RATIO, decoded_logits, must_be_compressed, stored_blobs
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ciuic_cli import load, read_tensor
from ciuic_cli.allocation.arms import PassOptions
from ciuic_cli.allocation.matrices import weight_matrices
from ciuic_cli.allocation.pricing import price_matrix
from ciuic_cli.artifact.verification import verify
from ciuic_cli.checkpoint.header import read_header
from ciuic_cli.checkpoint.model_map import ModelMap, map_model
from ciuic_cli.checkpoint.mtp_parameters import is_mtp, keep_mtp
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.checkpoint.roles import MTP_ROLES
from ciuic_cli.cli.app import app
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.cost import forecast as forecasting
from ciuic_cli.cost import run_time
from ciuic_cli.cost.forecast import disk_bytes
from ciuic_cli.cost.run_time import TextSize
from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.report.inspection import describe
from ciuic_cli.report.schema import MemoryReport

PREFIXES = {"deepseek_v3_fp8": "model.layers.3", "deepseek_v4_fp4": "mtp.0"}
ERROR = 0.01
"""Bound of a decoded matrix' squared error, as a share of the sum of its squared weights, at RATIO.

4 bits per weight give 0.006.
"""
KEPT_EXACTLY = re.compile(r"norm|gate\.|hc_|attn_sink")


@dataclass(frozen=True)
class Kept:
    """A checkpoint with a multi-token-prediction layer, an artifact that keeps the layer, and the report of the run.

    `prefix` is the prefix of the layer's names.
    """

    prefix: str
    source: Path
    out: Path
    report: MemoryReport

    @property
    def original(self) -> ModelMap:
        return map_model(open_checkpoint(self.source))


def run(source: Path, out: Path, text: Path, **options: Any) -> MemoryReport:
    settings: dict[str, Any] = {"ratio": RATIO, "effort": "fast", "nsamples": 6, "seqlen": 48, "prune": "off"}
    return compress(source, out, calibration=[text], calibration_only=True, **{**settings, **options})


@pytest.fixture(scope="module", params=PREFIXES)
def kept(
    request: pytest.FixtureRequest,
    predicting: Callable[[str], Path],
    text: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Kept:
    source, out = predicting(request.param), tmp_path_factory.mktemp(request.param) / "out"
    return Kept(PREFIXES[request.param], source, out, run(source, out, text, mtp="keep"))


def stored_names(out: Path) -> set[str]:
    with safe_open(out / "model.safetensors", framework="pt") as tensors:
        return set(tensors.keys())


def test_every_matrix_of_the_layer_is_coded_and_the_rest_is_kept_exactly(kept: Kept) -> None:
    checkpoint = open_checkpoint(kept.source)
    layer = {name for name in checkpoint.tensors if name.startswith(f"{kept.prefix}.")} - set(
        checkpoint.scales.values()
    )
    copies = {name for name in layer if re.search(r"embed_tokens|shared_head\.head", name)}
    exact = {name for name in layer if KEPT_EXACTLY.search(name)}
    matrices = layer - copies - exact
    assert len(matrices) > 15 and len(exact) > 5
    expected = must_be_compressed(kept.original.meta_model())
    assert stored_blobs(kept.out) == expected | matrices
    assert {name for name in stored_names(kept.out) if name.startswith(f"{kept.prefix}.")} == matrices | exact
    for name in matrices:
        weight = checkpoint.read_decoded(name).float()
        decoded = read_tensor(kept.out, name)
        assert decoded.shape == weight.shape and decoded.dtype == torch.float32
        assert float((decoded - weight).square().sum() / weight.square().sum()) < ERROR, name
    for name in exact:
        assert torch.equal(read_tensor(kept.out, name), checkpoint.read(name)), name


def test_copies_of_embedding_and_head_are_stored_once(kept: Kept) -> None:
    copies = {f"{kept.prefix}.embed_tokens.weight": "model.embed_tokens.weight",
              f"{kept.prefix}.shared_head.head.weight": "lm_head.weight"}  # fmt: skip
    expected = copies if kept.prefix.startswith("model") else {}
    assert kept.report.mtp.shared == expected
    for name, source in expected.items():
        assert f"{name} equals {source}: stored once" in kept.report.kept
        assert torch.equal(read_tensor(kept.out, name), read_tensor(kept.out, source))


def test_the_artifact_loads_without_warnings_and_predicts_like_the_original(
    kept: Kept, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING, "transformers"):
        model = AutoModelForCausalLM.from_pretrained(kept.out, dtype=torch.float32)
    assert not caplog.records
    ids = torch.randint(3, 263, (2, 40), generator=torch.Generator().manual_seed(0))
    reference = decoded_logits(kept.original, ids)
    with torch.no_grad():
        error = (model(ids).logits - reference).square().mean(-1) / reference.var(-1)
    assert float(error.median()) < BOUND
    generated: Any = model.generate(ids[:, :20], max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert generated.shape == (2, 24)


def test_drafting_by_transformers_is_refused_instead_of_reading_codes_as_weights(kept: Kept) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(kept.out)
    # V3: the codes do not have the shapes of its layer's weights. V4: transformers cannot draft for it at all.
    with pytest.raises((RuntimeError, ValueError), match=r"MtpModel|assisted generation"):
        model.generate(torch.arange(3, 23)[None], max_new_tokens=4, do_sample=False, use_mtp=True)


def test_the_layer_counts_as_parameters_and_towards_the_budget(kept: Kept) -> None:
    report, dense = kept.report, map_model(open_checkpoint(kept.source))
    rows = [row for row in report.components if row.role in MTP_ROLES]
    buffers = {p.name for p in keep_mtp(dense).parameters.values() if is_mtp(p) and p.buffer}
    weights = sum(row.parameters for row in rows if row.name not in buffers)
    assert report.parameters == dense.stored_numel + weights
    assert report.mtp.bytes == sum(row.bytes for row in rows) > 10_000
    stored = sum(path.stat().st_size for path in kept.out.glob("*.safetensors"))
    assert stored == report.artifact_bytes <= report.budget_bytes
    assert 2 * report.parameters / stored == report.ratio >= RATIO


def test_the_predicted_kl_is_that_of_the_model_alone(kept: Kept) -> None:
    rows = [row for row in kept.report.components if row.role in MTP_ROLES and row.dense is None]
    assert rows and all(row.predicted_kl == 0 and "calibration" in (row.unpredicted or "") for row in rows)
    assert not set(kept.report.statistics.roles) & set(MTP_ROLES)
    total = sum(row.predicted_kl for row in kept.report.components)
    assert kept.report.predicted_kl == pytest.approx(total)
    # Levelled with the model's own: neither starved nor given what the model should have.
    bits = sum(8 * row.bytes for row in rows) / sum(row.parameters for row in rows)
    assert 4 < bits < 1.5 * kept.report.bits_per_weight


def test_inspect_reports_what_is_kept(kept: Kept, tmp_path: Path) -> None:
    found = describe(kept.out)
    assert found.kept == tuple(kept.report.kept) and not found.dropped and not found.warnings
    assert f"{kept.prefix}: {kept.report.mtp.layers[0].tensors} tensors" in found.kept[0]
    assert found.parameters == kept.report.parameters and found.ratio == kept.report.ratio
    own = {row.name for row in found.rows if row.role in MTP_ROLES and row.stored == "trellis"}
    assert own == {name for name in stored_blobs(kept.out) if name.startswith(f"{kept.prefix}.")}
    assert json.loads((kept.out / "config.json").read_text())["num_nextn_predict_layers"] == 1
    verify(kept.out).require_intact(kept.out)
    shown = CliRunner().invoke(app, ["inspect", str(kept.out), "--verify"])
    assert shown.exit_code == 0 and f"{kept.prefix}:" in shown.stderr and "intact" in shown.stdout
    damaged = tmp_path / "damaged"
    shutil.copytree(kept.out, damaged)
    file = damaged / "model.safetensors"
    entries = read_header(file).tensors.values()
    data = bytearray(file.read_bytes())
    data[next(entry.begin for entry in entries if entry.name.startswith(kept.prefix))] ^= 1
    file.write_bytes(data)
    assert [problem[0] for problem in verify(damaged).problems] == ["model.safetensors"]


def test_a_lost_tensor_of_the_layer_is_noticed(kept: Kept, tmp_path: Path) -> None:
    shutil.copytree(kept.out, tmp_path / "lost")
    tensors = load_file(tmp_path / "lost/model.safetensors")
    del tensors[next(name for name in tensors if name.startswith(kept.prefix))]
    save_file(tensors, tmp_path / "lost/model.safetensors", metadata={"format": "pt"})
    stored = kept.report.mtp.stored_tensors
    for opened in (describe, load):
        with pytest.raises(InputError, match=f"{stored - 1} tensor.* not {stored}"):
            opened(tmp_path / "lost")


def test_a_saved_copy_of_the_model_has_no_such_layer(kept: Kept, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(kept.out)
    for _ in range(2):  # the layer is absent from a second copy too
        with pytest.warns(UserWarning, match="has no multi-token-prediction layers"):
            model.save_pretrained(tmp_path / "copy")
    config = json.loads((tmp_path / "copy/config.json").read_text())
    assert "mtp" not in config["quantization_config"]
    assert config["num_nextn_predict_layers"] == 0
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again.save_pretrained(tmp_path / "third")
    inspection = describe(tmp_path / "copy")
    assert not inspection.kept and not inspection.warnings
    with pytest.raises(InputError, match="no such tensor"):
        read_tensor(tmp_path / "copy", next(n for n in stored_blobs(kept.out) if n.startswith(kept.prefix)))


def test_dropped_layers_are_reported_and_not_counted_in_the_config(
    predicting: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    source, out = predicting("deepseek_v3_fp8"), tmp_path / "out"
    tensors = load_file(source / "model.safetensors")
    stored = [tensor.nbytes for name, tensor in tensors.items() if name.startswith("model.layers.3.")]
    report = run(source, out, text)
    assert list(report.dropped) == [
        f"multi-token-prediction layer model.layers.3: {len(stored)} tensors, {sum(stored)} bytes in the original, "
        "dropped"
    ]
    assert not report.kept and not report.mtp.kept and report.mtp.bytes == 0
    assert describe(out).dropped == tuple(report.dropped)
    assert not [name for name in stored_names(out) if name.startswith("model.layers.3.")]
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_copy_that_differs_in_one_number_is_a_matrix_of_its_own(
    predicting: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(predicting("deepseek_v3_fp8"), tmp_path / "changed")
    tensors = load_file(tmp_path / "changed/model.safetensors")
    tensors["model.layers.3.embed_tokens.weight"][200, 7] += 0.5
    save_file(tensors, tmp_path / "changed/model.safetensors", metadata={"format": "pt"})
    model_map = keep_mtp(map_model(open_checkpoint(tmp_path / "changed")))
    assert model_map.mtp.shared == {"model.layers.3.shared_head.head.weight": "lm_head.weight"}
    assert model_map.parameters["model.layers.3.embed_tokens.weight"].compress


def test_an_unknown_number_format_is_refused(predicting: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(predicting("deepseek_v3_fp8"), tmp_path / "changed")
    tensors = load_file(tmp_path / "changed/model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(56, 112, dtype=torch.int8)
    save_file(tensors, tmp_path / "changed/model.safetensors", metadata={"format": "pt"})
    model_map = map_model(open_checkpoint(tmp_path / "changed"))
    with pytest.raises(InputError, match="I8: the number format is unknown") as caught:
        keep_mtp(model_map)
    assert caught.value.tensor == "model.layers.3.eh_proj.weight"


def test_without_such_layers_keeping_them_is_a_hint(
    released: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    hints: list[str] = []
    report = run(released("llama"), tmp_path / "out", text, mtp="keep", dry_run=True, hint=hints.append)
    assert "the checkpoint has no multi-token-prediction layers to keep" in hints
    assert not report.kept and not report.mtp.layers


def test_a_changed_choice_is_refused_when_a_run_continues(
    predicting: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    source, out = predicting("deepseek_v4_fp4"), tmp_path / "out"

    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, out, text, mtp="keep", progress=interrupt)
    with pytest.raises(InputError, match="mtp: keep before, drop now"):
        run(source, out, text, mtp="drop")


def test_wrong_choices_are_usage_errors(tmp_path: Path) -> None:
    called = CliRunner().invoke(app, ["compress", str(tmp_path), str(tmp_path / "out"), "--mtp", "half"])
    assert called.exit_code == 2 and "--mtp" in called.stderr
    with pytest.raises(UsageError, match="keep or drop"):
        compress(tmp_path, tmp_path / "out", mtp="half")


def test_the_forecast_includes_coding_but_no_statistics_of_the_layer(
    predicting: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        run_time,
        "time_matrix",
        lambda *_, **__: {
            **dict.fromkeys(("arms", "probe", "encode", "decode"), 1.0),
            **dict.fromkeys(("state", "outputs", "outputs of arms"), 0.0),
        },
    )
    dropped = map_model(open_checkpoint(predicting("deepseek_v3_fp8")))
    maps = (dropped, keep_mtp(dropped))
    mtp = [matrix for matrix in weight_matrices(maps[1].parameters.values()) if matrix.role in MTP_ROLES]
    text, budgets = TextSize(2, 1, 64), (10**6, 2 * 10**6)
    disk = [
        disk_bytes(m, weight_matrices(m.parameters.values()), text, budget)
        for m, budget in zip(maps, budgets, strict=True)
    ]
    assert disk[1] - disk[0] == 2 * 10**6 + sum(72 * matrix.groups + 1300 for matrix in mtp)
    monkeypatch.setattr(run_time, "time_products", lambda device, dtype: 1e-9)
    monkeypatch.setattr(run_time, "time_moments", lambda device, dtype: 1e-9)
    monkeypatch.setattr(run_time, "time_activations", lambda width, device: 1e-9)
    monkeypatch.setattr(run_time, "time_reading", lambda model_map, matrices: 0.0)
    before, after = (
        forecasting.forecast(
            m,
            text,
            states=1 << 12,
            probed_layers=16,
            ranks=False,
            budget=1,
            device=torch.device("cpu"),
            started=time.monotonic(),
        ).seconds
        for m in maps
    )
    added = {phase: after[phase] - before[phase] for phase in after if phase != "start"}
    assert added == pytest.approx(
        {"statistics": 0, "arms": len(mtp), "probe": 0, "encode": len(mtp), "recovery": 0, "measure": 0}
    )


def test_a_matrix_without_statistics_is_not_called_singular_and_gets_bits_only(
    predicting: Callable[[str], Path],
) -> None:
    model_map = keep_mtp(map_model(open_checkpoint(predicting("deepseek_v3_fp8"))))
    nothing: Any = SimpleNamespace(
        covers=lambda name: False,
        tokens=lambda name, expert: 0,
        **dict.fromkeys(("input_moment", "output_fisher"), lambda name, expert: None),
        embedding_use=lambda name: None,
        contexts=lambda name: None,
    )
    (matrix,) = weight_matrices([model_map.parameters["model.layers.3.eh_proj.weight"]])
    arms = price_matrix(model_map, nothing, matrix, PassOptions((2, 4), L=12))
    assert not arms.singular and arms.bits == (2, 4) and not arms.lowrank


def test_fused_experts_are_stacks_and_none_is_pruned(
    released: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    shutil.copytree(released("deepseek_v3"), tmp_path / "fused")
    tensors = load_file(tmp_path / "fused/model.safetensors")
    generator = torch.Generator().manual_seed(1)
    names = {"gate_up_proj": (3, 48, 56), "down_proj": (3, 56, 24)}
    for name, shape in names.items():
        weight = torch.randn(shape, generator=generator) / shape[2] ** 0.5
        tensors[f"mtp.layers.0.mlp.experts.{name}"] = weight.to(torch.bfloat16)
    save_file(tensors, tmp_path / "fused/model.safetensors", metadata={"format": "pt"})
    report = run(tmp_path / "fused", tmp_path / "out", text, mtp="keep", ratio=4.0, prune="auto")
    rows = [row for row in report.components if row.role == "mtp_expert"]
    assert len(rows) == 2 and all(row.pruned == 0 and len(row.experts or ()) == 3 for row in rows)
    for name in names:
        weight = tensors[f"mtp.layers.0.mlp.experts.{name}"].float()
        decoded = read_tensor(tmp_path / "out", f"mtp.layers.0.mlp.experts.{name}")
        assert decoded.shape == weight.shape
        assert float((decoded - weight).square().sum() / weight.square().sum()) < 4 * ERROR
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.isfinite(model(torch.arange(3, 23)[None]).logits).all()
