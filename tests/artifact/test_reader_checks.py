"""Checks of an opened artifact against the model's own tensors, its prediction layers and this package's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ciuic_cli.artifact.reader import (
    ArtifactFiles,
    check_format,
    open_artifact,
    read_blobs,
    require_compressed,
    require_dense,
)
from ciuic_cli.artifact.schema import FORMAT_VERSION
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.errors import InputError
from ciuic_cli.passes.rounding import round_without_feedback

ROWS, COLS = 20, 24


def blob(rows: int = ROWS, cols: int = COLS) -> torch.Tensor:
    packed: PackedMatrix = round_without_feedback(torch.ones(rows, cols), 4, L=12)
    return torch.frombuffer(bytearray(packed.to_bytes()), dtype=torch.uint8)


def files(folder: Path, **tensors: torch.Tensor) -> ArtifactFiles:
    save_file(tensors, folder / "model.safetensors")
    return read_blobs([folder / "model.safetensors"])


def model(**shapes: tuple[tuple[int, ...], torch.dtype]) -> dict[str, torch.Tensor]:
    """The model's own tensors, without memory."""
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (torch.ones(21, dtype=torch.bfloat16), r"has shape \(21,\), the config requires \(20,\)"),
        (torch.ones(20, 1, dtype=torch.bfloat16), r"has shape \(20, 1\)"),
        (torch.ones(20, dtype=torch.bool), "stored as BOOL, the model has torch.bfloat16"),
        (torch.ones(20, dtype=torch.int16), "stored as I16, the model has torch.bfloat16"),
    ],
)
def test_a_dense_tensor_that_the_model_cannot_hold_is_refused(
    tmp_path: Path, stored: torch.Tensor, message: str
) -> None:
    expected = model(norm=((20,), torch.bfloat16), w=((ROWS, COLS), torch.bfloat16))
    require_dense(files(tmp_path, norm=torch.ones(20, dtype=torch.bfloat16), w=blob()), expected)
    with pytest.raises(InputError, match=message) as caught:
        require_dense(files(tmp_path, norm=stored, w=blob()), expected)
    assert caught.value.tensor == "norm" and caught.value.remedy
    assert caught.value.file == str(tmp_path / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_tensors_of_any_float_dtype_and_unknown_ones_are_accepted(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    opened = files(tmp_path, norm=torch.ones(20, dtype=dtype), unknown=torch.ones(3, dtype=torch.int16))
    require_dense(opened, model(norm=((20,), torch.bfloat16)))


@pytest.mark.parametrize("shape", [(COLS, ROWS), (ROWS, COLS + 1), (ROWS * COLS,), (1, ROWS, COLS)])
def test_a_compressed_tensor_of_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    opened = files(tmp_path, w=blob())
    require_compressed(opened, model(w=((ROWS, COLS), torch.bfloat16)))
    with pytest.raises(InputError, match=r"has shape \(20, 24\), the config requires") as caught:
        require_compressed(opened, model(w=(shape, torch.bfloat16)))
    assert caught.value.tensor == "w" and caught.value.remedy


def test_an_unknown_compressed_tensor_may_be_as_large_as_the_largest_of_the_model(tmp_path: Path) -> None:
    opened = files(tmp_path, unknown=blob())
    require_compressed(opened, model(w=((COLS, ROWS), torch.bfloat16)))
    for smaller in (model(w=((COLS, ROWS - 1), torch.bfloat16)), {}):
        with pytest.raises(InputError, match="more weights than any tensor of the model") as caught:
            require_compressed(opened, smaller)
        assert caught.value.tensor == "unknown"


def test_bytes_in_rows_are_no_blob(tmp_path: Path) -> None:
    opened = files(tmp_path, table=blob().reshape(1, -1).clone(), w=blob())
    assert set(opened.tensors) == {"table", "w"} and set(opened.blobs) == {"w"}


def test_the_bytes_of_all_files_are_counted(tmp_path: Path) -> None:
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for number, path in enumerate(paths):
        save_file({f"w{number}": blob(ROWS + 16 * number)}, path)
    opened = read_blobs(paths)
    assert opened.file_bytes == sum(path.stat().st_size for path in paths)
    assert {name: found.shape for name, found in opened.blobs.items()} == {"w0": (20, COLS), "w1": (36, COLS)}


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, FORMAT_VERSION + 2])
def test_the_next_format_is_refused_and_the_own_one_accepted(version: int) -> None:
    for known in range(1, FORMAT_VERSION + 1):
        check_format({"format_version": known})
    with pytest.raises(InputError, match=f"version {version}"):
        check_format({"format_version": version})


def write(folder: Path, mtp: dict[str, Any], names: list[str]) -> Path:
    tensors = {"norm.weight": torch.ones(20, dtype=torch.bfloat16)}
    tensors |= {name: torch.ones(4, dtype=torch.bfloat16) for name in names}
    save_file(tensors, folder / "model.safetensors")
    quantization = {"quant_method": "ciuic", "format_version": 1, "mtp": mtp}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return folder


@pytest.mark.parametrize("names", [[], ["mtp.0.enorm.weight"], [f"mtp.0.part{n}.weight" for n in range(3)]])
def test_kept_prediction_layers_have_exactly_the_announced_tensors(tmp_path: Path, names: list[str]) -> None:
    layers = [{"name": "mtp.0", "tensors": 5, "bytes": 100}]
    mtp = {"kept": True, "layers": layers, "stored_tensors": 2, "shared": {}}
    right = ["mtp.0.enorm.weight", "mtp.0.hnorm.weight"]
    assert open_artifact(write(tmp_path, mtp, right)).mtp.stored == 2
    with pytest.raises(InputError, match=f"{len(names)} tensor.*, not 2"):
        open_artifact(write(tmp_path, mtp, names))
    dropped = {**mtp, "kept": False, "stored_tensors": 0}
    assert not open_artifact(write(tmp_path, dropped, [])).mtp.kept
