"""The choice of a placement by bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from ciuic_cli import load
from ciuic_cli.errors import EnvironmentFault, UsageError
from ciuic_cli.runtime.placement.choice import Layer, Placement, Weights, choose, covering


class Model(nn.Module):
    """Three layers, the last two with experts, as names only."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed": nn.Identity(), "norm": nn.Identity()})
        blocks = [nn.ModuleDict({"attention": nn.Identity(), "experts": nn.Identity()}) for _ in range(3)]
        self.model["layers"] = nn.ModuleList(blocks)
        self.head = nn.Identity()


WEIGHTS = Weights(
    nbytes=10 + 7 + 20 + 125 + 225,
    layers=[
        Layer("model.layers.0", 20, {}),
        Layer("model.layers.1", 125, {"model.layers.1.experts": 100}),
        Layer("model.layers.2", 225, {"model.layers.2.experts": 200}),
    ],
    embedding="model.embed",
    embedding_bytes=7,
)


def placed(gpu_memory: int) -> Placement:
    return choose(Model(), WEIGHTS, gpu_memory, "cuda:0")


def on_cpu(gpu_memory: int) -> set[str]:
    return {name for name, place in placed(gpu_memory).device_map.items() if place == "cpu"}


FIRST, SECOND = "model.layers.1.experts", "model.layers.2.experts"


@pytest.mark.parametrize(
    ("gpu_memory", "expected", "used"),
    [
        (387, set(), 387),
        (386, {SECOND}, 187),
        (187, {SECOND}, 187),
        (186, {FIRST, SECOND}, 87),
        (86, {FIRST, SECOND, "model.embed"}, 80),
        (79, {"model.layers.2"} | {FIRST}, 62),
        (54, {"model.layers.1", "model.layers.2"}, 37),
        (10, {"model.layers.0", "model.layers.1", "model.layers.2", "model.embed"}, 10),
    ],
)
def test_order(gpu_memory: int, expected: set[str], used: int) -> None:
    """Outside of the layers, layers without experts, embedding, experts; what does not fit is in main memory."""
    assert on_cpu(gpu_memory) == expected
    found = placed(gpu_memory)
    assert (found.gpu_bytes, found.cpu_bytes) == (used, WEIGHTS.nbytes - used)
    assert ("in main memory" in found.summary) == bool(expected)


def test_experts_that_fit_follow_experts_that_do_not() -> None:
    smaller = [Layer(layer.name, layer.nbytes, layer.experts) for layer in reversed(WEIGHTS.layers)]
    weights = Weights(WEIGHTS.nbytes, smaller, WEIGHTS.embedding, WEIGHTS.embedding_bytes)
    found = choose(Model(), weights, 187, "cuda:0")
    assert [name for name, place in found.device_map.items() if place == "cpu"] == [SECOND]


def test_too_little_memory() -> None:
    with pytest.raises(UsageError, match="less than"):
        placed(9)


def test_no_entry_is_inside_another() -> None:
    places = covering(Model(), {FIRST: "cpu"}, "cuda:0")
    names = sorted(places)
    assert not any(later.startswith(f"{name}.") for name in names for later in names)
    assert places["model.layers.0"] == places["model.layers.1.attention"] == places["head"] == "cuda:0"
    assert covering(Model(), {}, "cuda:0") == {"": "cuda:0"}


@pytest.mark.parametrize(
    ("size", "message"), [("20 apples", "not a size"), (0, "positive"), (True, "positive"), (1.5, "positive")]
)
def test_wrong_sizes_of_gpu_memory(size: Any, message: str, artifact: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=message):
        load(artifact("llama").folder, device="cpu", gpu_memory=size)


def test_gpu_memory_needs_a_gpu_and_accelerate(
    artifact: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = artifact("llama").folder
    with pytest.raises(UsageError, match="needs a GPU"):
        load(folder, device="cpu", gpu_memory="20GB")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="accelerate"):
        load(folder, device="xpu", gpu_memory="20GB")
