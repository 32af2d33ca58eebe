"""`ciuic export --to gguf`: types by the budget, prices from the real rounding, importance from the statistics."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_moments import random_contexts
from tiny_checkpoints import make_checkpoint

from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.errors import EnvironmentFault, InputError, TargetError, UsageError
from ciuic_cli.export.gguf import writing
from ciuic_cli.export.gguf.llama_cpp import LlamaCpp, find_llama_cpp
from ciuic_cli.export.gguf.pricing import quadratic_loss
from ciuic_cli.export.gguf.tensors import GgufFile, match_tensors, padded
from ciuic_cli.export.gguf.types import TYPES, candidates
from ciuic_cli.export.gguf.writing import GgufOptions, GgufPlanner, export_gguf
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.text.shares import MIX_WEIGHT

gguf = pytest.importorskip("gguf")
from stand_in_llama_cpp import StandIn  # noqa: E402 (needs gguf)

LAYERS = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows are multiples of 32, so that only types of 32-blocks fit."""
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), hidden_size=64, intermediate_size=96,
        num_hidden_layers=LAYERS, head_dim=16,
    )  # fmt: skip


@pytest.fixture(scope="module")
def planner(checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> GgufPlanner:
    model_map = map_model(open_checkpoint(checkpoint))
    sequences = writing.calibration_text(
        model_map, GgufOptions(calibration=(text,), calibration_only=True, nsamples=4, seqlen=64)
    )
    return GgufPlanner(
        model_map, sequences, tmp_path_factory.mktemp("work"), StandIn(), device=torch.device("cpu")
    )


def test_the_statistics_know_what_each_sequence_counts(
    checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_map = map_model(open_checkpoint(checkpoint))
    sequences = writing.calibration_text(model_map, GgufOptions(calibration=(text,), nsamples=4, seqlen=64))
    given: list[torch.Tensor] = []

    def stop(*args: Any, weights: torch.Tensor, **options: Any) -> None:
        given.append(weights)
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "collect_statistics", stop)
    with pytest.raises(KeyboardInterrupt):
        GgufPlanner(model_map, sequences, tmp_path, StandIn(), device=torch.device("cpu"))
    assert given[0].tolist() == pytest.approx(2 * [MIX_WEIGHT] + 4 * [1.0])


def test_types_fit_the_rows() -> None:
    names = [kind.name for kind in candidates(576, "")]
    assert names == ["Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
    newer = [kind.name for kind in candidates(576, "  or  Q2_0 38  or  MXFP4_MOE")]
    assert newer[:2] == ["Q2_0", "MXFP4"] and newer[2:] == names
    wide = [kind.name for kind in candidates(1536, "Q2_0")]
    assert wide[0] == "IQ2_XXS" and wide[-1] == "Q8_0" and "IQ4_NL" not in wide and "Q4_K" in wide
    assert candidates(40, "Q2_0") == ()
    sizes = {
        kind.name: gguf.GGML_QUANT_SIZES.get(gguf.GGMLQuantizationType.__members__.get(kind.name))
        for kind in TYPES
    }
    for kind in TYPES:
        if sizes[kind.name] is not None:
            assert sizes[kind.name] == (kind.block, kind.block_bytes), kind.name
            member = next(
                value for name, value in gguf.LlamaFileType.__members__.items()
                if name in (f"MOSTLY_{kind.name}", f"MOSTLY_{kind.name}_M", f"MOSTLY_{kind.name}_MOE")
            )  # fmt: skip
            assert member == kind.file_type, kind.name


def test_the_loss_is_the_quadratic_form() -> None:
    torch.manual_seed(0)
    error, root = torch.randn(6, 4), torch.randn(4, 4)
    h, g, contexts = root @ root.T, torch.rand(6), random_contexts(6, 4)
    v = contexts.float32()
    expected = 0.5 * torch.trace(error.T @ torch.diag(g) @ error @ h)
    assert quadratic_loss(error, KroneckerFisher(h, g)) == pytest.approx(float(expected), rel=1e-5)
    full = torch.diag(g) + 0.1
    expected = 0.5 * torch.trace(error.T @ full @ error @ h)
    assert quadratic_loss(error, KroneckerFisher(h, full)) == pytest.approx(float(expected), rel=1e-5)
    rows = [g[r] * error[r] @ (h + torch.outer(v[r], v[r])) @ error[r] for r in range(6)]
    assert quadratic_loss(error, KroneckerFisher(h, g, contexts)) == pytest.approx(
        0.5 * float(sum(rows)), rel=1e-5
    )


def test_rows_of_queries_are_found_in_their_new_order(checkpoint: Path, tmp_path: Path) -> None:
    StandIn().convert(checkpoint, tmp_path / "model.gguf")
    file = GgufFile(tmp_path / "model.gguf")
    model_map = map_model(open_checkpoint(checkpoint))
    tensors, unmatched = match_tensors(model_map, file, "")
    assert not unmatched
    assert {tensor.name for tensor in tensors} == {
        "token_embd.weight", "output.weight",
        *(f"blk.{n}.{part}.weight" for n in range(LAYERS)
          for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")),
    }  # fmt: skip
    orders = {tensor.name: tensor.parts[0].rows for tensor in tensors}
    assert (orders["blk.0.attn_v.weight"] == np.arange(32)).all()
    assert orders["blk.0.attn_q.weight"][:4].tolist() == [0, 8, 1, 9]
    for tensor in tensors:
        weight = model_map.read(tensor.parts[0].matrix.name).float()
        assert torch.equal(weight[torch.from_numpy(tensor.parts[0].rows)], file.matrix(tensor.name, 0))


def test_a_changed_tensor_is_not_planned(checkpoint: Path, tmp_path: Path) -> None:
    """As where the converter absorbs or transposes: no statistics hold for it."""
    StandIn().convert(checkpoint, tmp_path / "model.gguf")
    file = GgufFile(tmp_path / "model.gguf")
    changed = file.matrices("blk.1.ffn_up.weight").copy()
    changed[0, 0, 0] += 1
    original = file.matrices
    file.matrices = lambda name: changed if name == "blk.1.ffn_up.weight" else original(name)  # type: ignore[method-assign]
    tensors, unmatched = match_tensors(map_model(open_checkpoint(checkpoint)), file, "")
    assert [matrix.key for matrix in unmatched] == ["model.layers.1.mlp.up_proj.weight"]
    assert "blk.1.ffn_up.weight" not in {tensor.name for tensor in tensors}


def test_prices_fall_with_bytes_and_count_every_byte(planner: GgufPlanner) -> None:
    names = [kind.name for kind in planner.tensors[0].types]
    loss, nbytes = planner.loss, planner.nbytes
    assert (loss > 0).all() and np.isfinite(loss).all()
    best_of_4 = np.minimum(loss[:, names.index("Q4_0")], loss[:, names.index("IQ4_NL")])
    assert (loss[:, names.index("Q8_0")] < best_of_4 / 5).all()  # 16 times as fine, but no feedback
    assert (loss[:, names.index("Q5_1")] < best_of_4).all()
    total = planner.source.weights
    assert planner.rest < 0.2 * total
    bytes_of_4 = [padded(tensor.weights // 32 * 18) for tensor in planner.tensors]
    assert (nbytes[:, 0] == bytes_of_4).all()


def test_the_file_keeps_to_the_target_and_takes_the_best_types(planner: GgufPlanner, tmp_path: Path) -> None:
    least = 8 * (planner.rest + planner.nbytes[:, 0].sum()) / planner.source.weights
    predicted = []
    for bits in (least + 0.001, least + 0.5, least + 1.5):
        out = tmp_path / f"{bits}.gguf"
        written = planner.write(out, bits)
        assert written.file_bytes == out.stat().st_size <= bits * planner.source.weights / 8
        assert written.bits == pytest.approx(8 * written.file_bytes / written.weights)
        stored = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
        assert {name: stored[name] for name in written.types} == written.types
        assert planner.programs.calls[-1][0] == written.types  # type: ignore[attr-defined]
        predicted.append(written.predicted_kl)
    assert predicted[0] > predicted[1] > predicted[2]
    # The middle plan beats the best one in which all tensors have the same type.
    names = [kind.name for kind in planner.tensors[0].types]
    spent = (least + 0.5) * planner.source.weights / 8 - planner.rest
    uniform = [planner.loss[:, n].sum() for n in range(len(names)) if planner.nbytes[:, n].sum() <= spent]
    assert predicted[1] < min(uniform)


def test_a_target_below_the_smallest_types_is_refused(planner: GgufPlanner, tmp_path: Path) -> None:
    with pytest.raises(TargetError) as caught:
        planner.write(tmp_path / "small.gguf", 3.0)
    asked = float(str(caught.value.remedy).split(":")[0].removeprefix("--target-bits "))
    assert planner.write(tmp_path / "asked.gguf", asked).bits <= asked


def test_importance_is_the_diagonal_of_h(planner: GgufPlanner) -> None:
    from ciuic_cli.allocation.matrices import fisher_of
    from ciuic_cli.statistics.files import Statistics

    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(planner.importance).tensors}
    assert len(stored) == 2 * len(planner.tensors)
    statistics = Statistics(planner.work / "statistics")
    for tensor in planner.tensors:
        diagonal = fisher_of(tensor.parts[0].matrix, statistics).inputs.diagonal().numpy()
        values = stored[f"{tensor.name}.in_sum2"].ravel() / stored[f"{tensor.name}.counts"].ravel()
        np.testing.assert_allclose(values, np.maximum(diagonal / diagonal.mean(), 1e-6), rtol=1e-5)


def test_an_artifact_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    folder.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "ciuic", "format_version": 1}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="artifact") as caught:
        export_gguf(folder, tmp_path / "out.gguf")
    assert caught.value.exit_code == 3 and "ciuic export ORIGINAL " in str(caught.value.remedy)
    (folder / "memory_report.json").write_text('{"model": "SmolLM2-135M"}')
    with pytest.raises(InputError) as caught:
        export_gguf(folder, tmp_path / "out.gguf")
    command = f"ciuic export SmolLM2-135M {tmp_path / 'out.gguf'} --to gguf"
    assert str(caught.value.remedy).endswith(command)
    (folder / "README.md").write_text("---\nbase_model: org/model\n---\n# A card\n")
    with pytest.raises(InputError, match="artifact") as caught:
        export_gguf(folder, tmp_path / "out.gguf")
    assert "ciuic export org/model " in str(caught.value.remedy)


def test_an_export_leaves_one_file_or_none(
    checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "find_llama_cpp", lambda folder: StandIn())
    options = GgufOptions(target_bits=6.5, calibration=(text,), calibration_only=True, nsamples=2, seqlen=64)
    out, steps = tmp_path / "model.gguf", set[str]()
    written = export_gguf(checkpoint, out, options, progress=lambda phase, done, total: steps.add(phase))
    assert steps == {"forward", "backward", "price"}
    assert list(tmp_path.iterdir()) == [out] and written.bits <= 6.5 and written.unplanned == ()
    with pytest.raises(InputError, match="exists"):
        export_gguf(checkpoint, out, options)
    low = GgufOptions(target_bits=2, calibration=(text,), calibration_only=True, nsamples=2, seqlen=64)
    with pytest.raises(TargetError):
        export_gguf(checkpoint, tmp_path / "low.gguf", low)
    assert list(tmp_path.iterdir()) == [out]


def test_wrong_options_are_refused() -> None:
    for bits in (0, -1, 17, float("nan")):
        with pytest.raises(UsageError, match="target-bits"):
            GgufOptions(target_bits=bits)
    with pytest.raises(UsageError, match="nsamples"):
        GgufOptions(nsamples=1)


def _program(file: Path, script: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def test_programs_are_found_in_a_folder_and_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(EnvironmentFault, match=r"convert_hf_to_gguf.py is not on PATH") as caught:
        find_llama_cpp(None)
    assert caught.value.exit_code == 5 and "--llama-cpp" in str(caught.value.remedy)
    converter = _program(tmp_path / "source/convert_hf_to_gguf.py", "")
    with pytest.raises(EnvironmentFault, match="llama-quantize is not in the folder"):
        find_llama_cpp(tmp_path / "source")
    quantizer = _program(tmp_path / "source/build/bin/llama-quantize", "")
    assert find_llama_cpp(tmp_path / "source") == LlamaCpp(converter, quantizer)
    on_path = (
        _program(tmp_path / "bin/convert_hf_to_gguf.py", ""),
        _program(tmp_path / "bin/llama-quantize", ""),
    )
    on_path[0].chmod(0o644)
    assert find_llama_cpp(None) == LlamaCpp(*on_path)


def test_the_quantizer_gets_the_plan_and_its_failure_is_reported(tmp_path: Path) -> None:
    script = 'echo "$@" > "$0.arguments"; echo "main: no such type"; exit 1'
    quantizer = _program(tmp_path / "llama-quantize", script)
    programs = LlamaCpp(tmp_path / "converter", quantizer)
    with pytest.raises(EnvironmentFault, match="no such type"):
        programs.quantize(
            tmp_path / "in.gguf", tmp_path / "out.gguf", {"blk.1.ffn_up.weight": TYPES[0]}, tmp_path / "i.gguf",
            tmp_path, 19,
        )  # fmt: skip
    assert (tmp_path / "types.txt").read_text() == "^blk\\.1\\.ffn_up\\.weight$=iq2_xxs\n"
    arguments = (tmp_path / "llama-quantize.arguments").read_text().split()
    assert arguments[-3:] == [str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q8_0"]
    assert f"--imatrix {tmp_path / 'i.gguf'}" in " ".join(arguments)
    assert "general.file_type=int:19" in arguments
    with pytest.raises(EnvironmentFault, match="--tensor-type-file"):
        programs.help  # noqa: B018 (reads the program's help)


def test_a_model_that_the_converter_refuses(checkpoint: Path, tmp_path: Path) -> None:
    converter = tmp_path / "convert_hf_to_gguf.py"
    converter.write_text("raise SystemExit('ERROR: Model X is not supported')")
    with pytest.raises(InputError, match="Model X is not supported"):
        LlamaCpp(converter, tmp_path / "quantizer").convert(checkpoint, tmp_path / "out.gguf")
