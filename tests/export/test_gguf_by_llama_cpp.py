"""`ciuic export --to gguf` with the real llama-quantize: types of 256-blocks, prices, codes, and KL.

Runs where CIUIC_LLAMA_CPP names a folder of llama.cpp whose programs are built.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_checkpoints import make_checkpoint

from ciuic_cli.allocation.matrices import fisher_of
from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.export.gguf import writing
from ciuic_cli.export.gguf.blocks import layout_of
from ciuic_cli.export.gguf.grids import grid_of
from ciuic_cli.export.gguf.header import tensor_places
from ciuic_cli.export.gguf.llama_cpp import LlamaCpp, find_llama_cpp
from ciuic_cli.export.gguf.pricing import quadratic_loss
from ciuic_cli.export.gguf.tensors import GgufFile
from ciuic_cli.export.gguf.types import TYPES, GgufType
from ciuic_cli.export.gguf.writing import GgufOptions, GgufPlanner, export_gguf
from ciuic_cli.statistics.files import Statistics
from ciuic_cli.text.calibration import CalibrationSequences

gguf = pytest.importorskip("gguf")
from stand_in_llama_cpp import StandIn  # noqa: E402 (needs gguf)

pytestmark = pytest.mark.skipif(
    "CIUIC_LLAMA_CPP" not in os.environ, reason="CIUIC_LLAMA_CPP names no folder of llama.cpp"
)
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
"""All rows are multiples of 256."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), **SIZES)


@pytest.fixture(scope="module")
def programs() -> LlamaCpp:
    """The real quantizer. llama.cpp's converter refuses tokenizers that it does not know, as that of the tests."""
    found = find_llama_cpp(Path(os.environ["CIUIC_LLAMA_CPP"]))
    object.__setattr__(found, "convert", StandIn().convert)
    return found


@pytest.fixture(scope="module")
def sequences(checkpoint: Path, text: Path) -> CalibrationSequences:
    options = GgufOptions(calibration=(text,), calibration_only=True, nsamples=8, seqlen=128)
    return writing.calibration_text(map_model(open_checkpoint(checkpoint)), options)


@pytest.fixture(scope="module")
def planner(
    checkpoint: Path,
    programs: LlamaCpp,
    sequences: CalibrationSequences,
    tmp_path_factory: pytest.TempPathFactory,
) -> GgufPlanner:
    model_map, work = map_model(open_checkpoint(checkpoint)), tmp_path_factory.mktemp("work")
    return GgufPlanner(model_map, sequences, work, programs, device=torch.device("cpu"))


def _decoded(planner: GgufPlanner, file: Path) -> GgufFile:
    """The weights that llama.cpp has from a file."""
    out = file.with_suffix(".f32")
    planner.programs.decode(file, out)
    return GgufFile(out)


def _loss(planner: GgufPlanner, file: Path) -> float:
    """Predicted KL of a file, from the weights that llama.cpp decodes."""
    values, statistics, total = _decoded(planner, file), Statistics(planner.work / "statistics"), 0.0
    for tensor in planner.tensors:
        (part,) = tensor.parts
        error = planner.source.matrix(tensor.name, 0) - values.matrix(tensor.name, 0)
        fisher = fisher_of(part.matrix, statistics).reordered(torch.from_numpy(part.rows))
        total += quadratic_loss(error, fisher)
    return total


def _kl(planner: GgufPlanner, file: Path, tokens: torch.Tensor) -> float:
    """KL of transformers' model with the weights of a file, in nats per token."""
    original, rounded = (
        _log_probabilities(planner, weights, tokens) for weights in (planner.source, _decoded(planner, file))
    )
    return float((original.exp() * (original - rounded)).sum(-1).mean())


def _log_probabilities(planner: GgufPlanner, file: GgufFile, tokens: torch.Tensor) -> torch.Tensor:
    """Predictions of transformers' model with the weights of a file."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(planner.folder, dtype=torch.float32).eval()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for tensor in planner.tensors:
            (part,) = tensor.parts
            parameters[part.matrix.name][torch.from_numpy(part.rows)] = file.matrix(tensor.name, 0)
        return model(tokens).logits.log_softmax(-1)


def _by_llama_quantize(planner: GgufPlanner, out: Path, types: dict[str, str]) -> Path:
    """llama-quantize's own codes in the same types, with the same importance."""
    kinds = {kind.name: kind for kind in TYPES}
    chosen = {name: kinds[kind] for name, kind in types.items()}
    planner.programs.quantize(planner.source.path, out, chosen, planner.importance, planner.work, 0)
    return out


@pytest.mark.parametrize("uniform", ["IQ3_XXS", "Q4_K"])
def test_the_plan_costs_what_it_predicts_and_less_than_llama_quantize(
    planner: GgufPlanner, sequences: CalibrationSequences, tmp_path: Path, uniform: str
) -> None:
    ours, names = tmp_path / "ours.gguf", [tensor.name for tensor in planner.tensors]
    one_type = _by_llama_quantize(planner, tmp_path / "one.gguf", dict.fromkeys(names, uniform))
    written = planner.write(ours, 8 * one_type.stat().st_size / planner.source.weights)
    assert written.file_bytes <= one_type.stat().st_size
    stored = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(ours).tensors}
    assert {name: stored[name].name for name in names} == written.types
    assert _loss(planner, ours) == pytest.approx(written.predicted_kl, rel=1e-4)
    same_types = _by_llama_quantize(planner, tmp_path / "same.gguf", written.types)
    assert same_types.stat().st_size == written.file_bytes
    assert written.predicted_kl < 0.95 * _loss(planner, same_types)  # error feedback
    kls = [_kl(planner, file, sequences.tokens) for file in (ours, one_type)]
    assert kls[0] < 0.75 * kls[1]


CODED = [kind for kind in TYPES if layout_of(kind.name) or grid_of(kind.name)]


@pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)
def test_llama_cpp_decodes_our_codes(planner: GgufPlanner, kind: GgufType, tmp_path: Path) -> None:
    if kind.newer and kind.name not in planner.programs.help:
        pytest.skip("this llama.cpp does not have the type")
    types = {tensor.name: kind.name for tensor in planner.tensors}
    file = _by_llama_quantize(planner, tmp_path / "one.gguf", types)
    before = _loss(planner, file)
    writing.round_again(
        file, planner.tensors, [kind] * len(planner.tensors), planner.source, planner.statistics
    )
    assert _loss(planner, file) < 0.9 * before
    layout = layout_of(kind.name) or grid_of(kind.name)
    places, values = tensor_places(file), _decoded(planner, file)
    assert layout is not None
    for tensor in planner.tensors:
        stored = np.memmap(file, np.uint8, "r", places[tensor.name], (kind.nbytes(tensor.weights),))
        expected = layout.decoded(np.array(stored).reshape(-1, kind.block_bytes))
        np.testing.assert_allclose(
            values.matrix(tensor.name, 0).numpy().ravel(), expected.ravel(), rtol=1e-4, atol=1e-6
        )


def test_an_export_writes_one_file(
    checkpoint: Path, programs: LlamaCpp, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "find_llama_cpp", lambda folder: programs)
    options = GgufOptions(calibration=(text,), calibration_only=True, nsamples=4, seqlen=64, target_bits=5)
    written = export_gguf(checkpoint, tmp_path / "out.gguf", options)
    assert list(tmp_path.iterdir()) == [tmp_path / "out.gguf"] and written.bits <= 5
