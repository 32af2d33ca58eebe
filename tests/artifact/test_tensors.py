"""Decoding single tensors of an artifact."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import TINY_CONFIGS

import ciuic_cli
from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.artifact.tensors import decoded_pieces, dense_tensor
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.testing import blob_of, random_matrix
from ciuic_cli.codecs.trellis import decode, decode_dense
from ciuic_cli.errors import InputError

SECTION = {
    "quant_method": "ciuic",
    "format_version": 1,
    "mtp": {"kept": True, "layers": [], "stored_tensors": 0, "shared": {"copy.weight": "ranked.weight"}},
}


@pytest.fixture(scope="module")
def ranked() -> PackedMatrix:
    return random_matrix(37, 52, (2, 5, 3), L=12, rank=20)


@pytest.fixture(scope="module")
def stack() -> ExpertStack:
    return ExpertStack(tuple(random_matrix(24, 40, (2, 5), L=12, seed=seed) for seed in (5, 6, 7)))


def _write(folder: Path, blobs: dict[str, PackedMatrix | ExpertStack]) -> Path:
    stored = {name: blob_of(blob) for name, blob in blobs.items()}
    stored["norm.weight"] = torch.linspace(0, 1, 7).to(torch.bfloat16)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "llama", **TINY_CONFIGS["llama"], "vocab_size": 263}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": SECTION}))
    return folder


@pytest.fixture(scope="module")
def artifact(ranked: PackedMatrix, stack: ExpertStack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("artifact"), {"ranked.weight": ranked, "experts": stack})


def test_a_matrix_with_its_low_rank_part(artifact: Path, ranked: PackedMatrix) -> None:
    assert ranked.lowrank is not None
    right, left = (decode(part, original_basis=True) for part in ranked.lowrank)
    found = ciuic_cli.read_tensor(artifact, "ranked.weight")
    assert found.shape == (37, 52) and left.abs().max() > 0
    assert torch.equal(found, decode(ranked, original_basis=True) + left.T @ right)


def test_pieces_are_small_and_make_the_whole_tensor(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ciuic_cli.artifact.tensors._PIECE_WEIGHTS", 16 * 52)
    for name, blob in open_artifact(artifact).blobs.items():
        pieces = list(decoded_pieces(blob))
        expected = ciuic_cli.read_tensor(artifact, name)
        assert len(pieces) > 2 and max(map(len, pieces)) == 16
        torch.testing.assert_close(torch.cat(pieces), expected.reshape(-1, expected.shape[-1]))
        half = dense_tensor(open_artifact(artifact), name, torch.bfloat16)
        assert half.shape == expected.shape and torch.equal(half, expected.bfloat16())


def test_rows_of_a_sorted_and_scaled_matrix() -> None:
    matrix = random_matrix(37, 52, (2, 5, 3), L=12, rank=20, is_sorted=True, is_scaled=True)
    parts = [decode_dense(matrix, begin, begin + 10) for begin in (0, 10, 20)] + [decode_dense(matrix, 30)]
    torch.testing.assert_close(torch.cat(parts), decode_dense(matrix))


def test_a_shared_tensor_is_read_where_it_is_stored(artifact: Path) -> None:
    copy = ciuic_cli.read_tensor(artifact, "copy.weight")
    assert torch.equal(copy, ciuic_cli.read_tensor(artifact, "ranked.weight"))


def test_a_stack_of_experts(artifact: Path, stack: ExpertStack) -> None:
    found = ciuic_cli.read_tensor(artifact, "experts")
    assert found.shape == (3, 24, 40)
    for index, expert in enumerate(stack.experts):
        assert torch.equal(found[index], decode(expert, original_basis=True))


def test_a_dense_tensor_keeps_its_dtype(artifact: Path) -> None:
    expected = torch.linspace(0, 1, 7).to(torch.bfloat16)
    found = ciuic_cli.read_tensor(artifact, "norm.weight")
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


def test_an_unknown_name(artifact: Path) -> None:
    with pytest.raises(InputError, match="no such tensor") as caught:
        ciuic_cli.read_tensor(artifact, "lm_head.weight")
    assert caught.value.tensor == "lm_head.weight"


def _empty(rows: int, cols: int) -> PackedMatrix:
    """A matrix without codes; its few bytes do not depend on the number of columns."""
    return random_matrix(rows, cols, 0, L=12)


@pytest.mark.parametrize("name", ["lm_head.weight", "unknown.weight"])
@pytest.mark.parametrize("blob", [_empty(1, 1 << 30), ExpertStack((_empty(1, 1 << 30), _empty(1, 1 << 30)))])
def test_a_shape_that_is_not_the_models_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, blob: PackedMatrix | ExpertStack
) -> None:
    monkeypatch.setattr("ciuic_cli.artifact.tensors.decode_dense", lambda *rows: pytest.fail("decoded"))
    with pytest.raises(InputError, match="has shape") as caught:
        ciuic_cli.read_tensor(_write(tmp_path, {name: blob}), name)
    assert caught.value.tensor == name and (caught.value.file or "").endswith("model.safetensors")


def test_a_name_that_the_library_cannot_read_is_an_input_error(artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(artifact, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"norm.weight"', b'"norm.\\ud800"'))
    with pytest.raises(InputError, match="Unicode") as caught:
        ciuic_cli.read_tensor(folder, "norm.\ud800")
    assert caught.value.file == str(file)


def test_a_replaced_file_does_not_change_an_open_blob(artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(artifact, folder)
    expected = ciuic_cli.read_tensor(folder, "ranked.weight")
    blob = open_artifact(folder).blobs["ranked.weight"]
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(bytes(10_000))
    with blob.matrices() as matrices:
        assert torch.equal(decode_dense(matrices[0]), expected)


@pytest.mark.parametrize(
    ("family", "expert_names"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.{}.w{}.weight"),
        ("deepseek_v3", "model.layers.1.mlp.experts.{}.{}_proj.weight"),
        ("deepseek_v4", "layers.1.ffn.experts.{}.w{}.weight"),
    ],
)
def test_names_of_the_original_s_files(tmp_path: Path, family: str, expert_names: str) -> None:
    values = TINY_CONFIGS[family]
    width = values.get("moe_intermediate_size", values["intermediate_size"] if family == "mixtral" else None)
    count, hidden = values.get("num_local_experts") or values["n_routed_experts"], values["hidden_size"]
    ups = ExpertStack(
        tuple(random_matrix(2 * width, hidden, (2, 5), L=12, seed=seed) for seed in range(count))
    )
    downs = ExpertStack(tuple(random_matrix(hidden, width, (2, 5), L=12, seed=seed) for seed in range(count)))
    prefix = "model.layers.1.mlp.experts"
    folder = _write(tmp_path, {f"{prefix}.gate_up_proj": ups, f"{prefix}.down_proj": downs})
    config = {"model_type": family, **values, "vocab_size": 263, "quantization_config": SECTION}
    (folder / "config.json").write_text(json.dumps(config))
    gate, up, down = ("gate", "up", "down") if family == "deepseek_v3" else ("1", "3", "2")
    last = count - 1
    whole = decode(ups.experts[last], original_basis=True)
    assert torch.equal(ciuic_cli.read_tensor(folder, expert_names.format(last, gate)), whole[:width])
    assert torch.equal(ciuic_cli.read_tensor(folder, expert_names.format(last, up)), whole[width:])
    expected = decode(downs.experts[0], original_basis=True)
    assert torch.equal(ciuic_cli.read_tensor(folder, expert_names.format(0, down)), expected)
    with pytest.raises(InputError, match="no such tensor"):
        ciuic_cli.read_tensor(folder, expert_names.format(count, down))


def test_a_tied_head_is_read_where_the_embedding_is(tmp_path: Path, ranked: PackedMatrix) -> None:
    table = random_matrix(263, 48, (2, 5), L=12)
    folder = _write(tmp_path, {"model.embed_tokens.weight": table})
    config = {"model_type": "llama", **TINY_CONFIGS["llama_tied"], "vocab_size": 263}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": SECTION}))
    assert torch.equal(ciuic_cli.read_tensor(folder, "lm_head.weight"), decode(table, original_basis=True))
