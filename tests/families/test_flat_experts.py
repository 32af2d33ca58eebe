"""DBRX has the experts of a layer one after another in flat matrices, and passes single ones to their module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from family_table import TEXT
from safetensors.torch import load_file, save_file
from tiny_families import make_family
from torch import nn
from transformers import AutoModelForCausalLM

import ciuic_cli
from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.checkpoint.compressible import Use, file_shape, flat_experts, stack_flat_experts
from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.errors import InputError
from ciuic_cli.layerwise.linear_hooks import Hook, Key, LinearHook, Product, WatchedLinear, linears_of
from ciuic_cli.train.merging.merged_checkpoint import merged_checkpoint

EXPERTS = "transformer.blocks.0.ffn.experts.mlp"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny DBRX and its artifact at 4:1."""
    folder = tmp_path_factory.mktemp("dbrx")
    (folder / "text.txt").write_text(TEXT)
    source = make_family("dbrx", folder / "model")
    compress(
        source, folder / "out", ratio=4, effort="fast", nsamples=6, seqlen=48,
        calibration=[folder / "text.txt"], calibration_only=True,
    )  # fmt: skip
    return source, folder / "out"


@pytest.fixture(scope="module")
def decoded(folders: tuple[Path, Path]) -> Any:
    """transformers' own model in float32 with the decoded weights."""
    source, out = folders
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name in open_artifact(out).blobs:
        model.get_parameter(name).data.copy_(ciuic_cli.read_tensor(out, name))
    return model


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(3, 263, (2, 40), generator=torch.Generator().manual_seed(0))
    found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def test_the_matrices_are_stacks_in_the_map(folders: tuple[Path, Path]) -> None:
    source, _ = folders
    model_map = map_model(open_checkpoint(source))
    model = model_map.meta_model()
    assert flat_experts(model.get_submodule(EXPERTS)) == {"w1": Use.ROWS, "v1": Use.ROWS, "w2": Use.COLUMNS}
    files = load_file(source / "model.safetensors")
    for name, shape in {"w1": (4, 96, 64), "v1": (4, 96, 64), "w2": (4, 64, 96)}.items():
        parameter, flat = model_map.parameters[f"{EXPERTS}.{name}"], files[f"{EXPERTS}.{name}"]
        assert parameter.shape == shape and parameter.is_stack and parameter.role == f"expert_{name}"
        assert file_shape(model, f"{EXPERTS}.{name}", parameter.memory_shape) == flat.shape == (384, 64)
        expected = flat[192:288].T if name == "w2" else flat[192:288]
        assert torch.equal(model_map.read_expert(parameter.name, 2), expected)
        assert torch.equal(model_map.read(parameter.name)[2], expected)
    assert model_map.parameters["transformer.blocks.0.ffn.router.layer.weight"].role == "router"


class _Recorder(LinearHook):
    def __init__(self, watched: Sequence[WatchedLinear]) -> None:
        super().__init__(watched)
        self.seen: list[tuple[Key, tuple[int, ...]]] = []

    def watch(self, product: Product) -> Hook:
        self.seen.append((product.key, tuple(product.weight.shape)))
        return lambda gradient: None


def test_products_with_single_experts_are_seen(folders: tuple[Path, Path]) -> None:
    """Both orientations: x Wᵀ with the transpose of a part of `w1`, x W with a part of `w2`."""
    model_map = map_model(open_checkpoint(folders[0]))
    experts = model_map.skeleton(dtype=torch.float32).get_submodule(EXPERTS.removesuffix(".mlp"))
    model_map.materialise(experts, EXPERTS.removesuffix("mlp"), torch.float32)
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    recorder = _Recorder(linears_of(experts, EXPERTS.removesuffix("mlp"), model_map.parameters))
    with recorder:
        experts(x, torch.full((5, 1), 2), torch.ones(5, 1))
    shapes = {"w1": (96, 64), "v1": (96, 64), "w2": (64, 96)}
    assert dict(recorder.seen) == {(f"{EXPERTS}.{name}", 2): shape for name, shape in shapes.items()}


def test_readers_of_the_weights_see_the_shapes_of_transformers(
    folders: tuple[Path, Path], decoded: Any, tmp_path: Path
) -> None:
    source, out = folders
    expected = logits(decoded)
    assert ciuic_cli.read_tensor(out, f"{EXPERTS}.w2").shape == (384, 64)
    ciuic_cli.export_dense(out, tmp_path / "dense", to="fp32")
    files = [load_file(folder / "model.safetensors") for folder in (source, tmp_path / "dense")]
    shapes = [{name: value.shape for name, value in tensors.items()} for tensors in files]
    assert shapes[0] == shapes[1]
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=2e-5)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=2e-5)
    model.dequantize()
    assert model.get_parameter(f"{EXPERTS}.w2").shape == (384, 64)
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=2e-5)


def test_an_artifact_is_a_source_of_merges(folders: tuple[Path, Path], decoded: Any) -> None:
    model_map = map_model(merged_checkpoint(folders[1], {}))
    for name in ("w1", "w2"):
        flat = decoded.get_parameter(f"{EXPERTS}.{name}").detach()
        expected = flat[96:192].T if name == "w2" else flat[96:192]
        torch.testing.assert_close(model_map.read_expert(f"{EXPERTS}.{name}", 1), expected)


def test_another_number_of_rows_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, _ = folders
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{EXPERTS}.v1"] = tensors[f"{EXPERTS}.v1"][:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        InputError, match=r"stored with shape \(383, 64\), but config.json makes it \(384, 64\)"
    ):
        map_model(open_checkpoint(tmp_path))


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(48.0).view(12, 4))

    def forward(self, x: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        return x @ one.T


class _Parent(nn.Module):
    """Three experts (4, 4), which the code of each subclass takes out of the flat matrix in another way."""

    rows = 4

    def __init__(self) -> None:
        super().__init__()
        self.child = _Experts()


class _InOneExpression(_Parent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x, self.child.w.view(-1, self.rows, 4)[1])


class _ByNames(_Parent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (3, self.rows, -1)
        one = self.child.w.view(shape)[1]
        return self.child(x, one)


class _OfOtherRows(_Parent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x, self.child.w.view(-1, 8, 2)[1])


class _OfUnknownShape(_Parent):
    def forward(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        return self.child(x, self.child.w.view(-1, rows, 4)[1])


class _NotPassedOn(_Parent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.child.w.view(-1, 4, 4)[1]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (_InOneExpression, (3, 4, 4)),
        (_ByNames, (3, 4, 4)),
        (_OfOtherRows, (12, 4)),
        (_OfUnknownShape, (12, 4)),
        (_NotPassedOn, (12, 4)),
    ],
)
def test_forms_of_flat_experts(kind: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model = nn.Sequential(kind())
    stack_flat_experts(model)
    assert model.get_parameter("0.child.w").shape == shape
    if len(shape) == 3:
        assert flat_experts(model.get_submodule("0.child")) == {"w": Use.ROWS}
        expected = torch.ones(4) @ torch.arange(48.0).view(3, 4, 4)[1].T
        assert torch.equal(model(torch.ones(4)), expected)
