"""Which modules of an artifact lie on the GPU and which in main memory, by their bytes.

A token reads all weights of attention, but only a few of the routed experts, so experts lose the least in the slower
memory. The order in which modules get a place on the GPU is therefore:

1. the head, the last norm, and what else is outside the decoder layers (with the embedding, if the head shares it),
2. layer by layer, all of a layer but its routed experts,
3. the embedding,
4. layer by layer, the routed experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ciuic_cli.checkpoint.architecture import layer_prefixes
from ciuic_cli.checkpoint.roles import classify
from ciuic_cli.errors import UsageError

_EXPERT_ROLE = "expert_"
"""How the roles of routed experts' weights begin."""


@dataclass(frozen=True)
class Layer:
    """Bytes of a decoder layer. `experts`: name of each module of routed experts in the layer -> its bytes."""

    name: str
    nbytes: int
    experts: Mapping[str, int]

    @property
    def expert_bytes(self) -> int:
        return sum(self.experts.values())

    @property
    def other_bytes(self) -> int:
        """Of all but the routed experts."""
        return self.nbytes - self.expert_bytes


@dataclass(frozen=True)
class Weights:
    """Bytes of a model by module. `embedding` is its name, None if the head shares its weights."""

    nbytes: int
    layers: Sequence[Layer]
    embedding: str | None
    embedding_bytes: int

    @property
    def outside_bytes(self) -> int:
        """Of all but the layers and the embedding."""
        return self.nbytes - self.embedding_bytes - sum(layer.nbytes for layer in self.layers)


@dataclass(frozen=True)
class Placement:
    """What lies where.

    Attributes:
        device: the GPU.
        device_map: module or parameter -> device, for all of the model, as transformers takes it. No entry is inside
            another.
        gpu_bytes, cpu_bytes: of the weights on the GPU and in main memory.
        summary: what lies where, in a sentence.
    """

    device: str
    device_map: Mapping[str, str]
    gpu_bytes: int
    cpu_bytes: int
    summary: str


def measure(model: Any, layer_count: int, nbytes: Mapping[str, int]) -> Weights:
    """The bytes of a model's modules.

    Args:
        model: on the meta device; it gives the structure.
        layer_count: decoder layers in the model's config.
        nbytes: name of every stored tensor -> its bytes in memory.

    Raises:
        UsageError: layers share weights, so that they cannot lie on two devices.
    """
    experts: dict[str, int] = {}
    for name, (classified, _) in classify(model).items():
        if classified.role.startswith(_EXPERT_ROLE):
            module = name.rpartition(".")[0]
            experts[module] = experts.get(module, 0) + nbytes.get(name, 0)
    layers = []
    for prefix in layer_prefixes(model, layer_count):
        inside = sum(size for name, size in nbytes.items() if name.startswith(prefix))
        of_layer = {name: size for name, size in experts.items() if name.startswith(prefix)}
        layers.append(Layer(prefix.rstrip("."), inside, of_layer))
    table = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    for pair in ties.items():
        if any(name.startswith(f"{layer.name}.") for name in pair for layer in layers):
            raise UsageError(
                "layers of this model share weights, so they cannot be distributed over two memories",
                remedy="load it without gpu_memory",
            )
    shared = any(f"{table}.weight" in pair for pair in ties.items())
    in_table = 0 if shared else sum(size for name, size in nbytes.items() if name.startswith(f"{table}."))
    return Weights(sum(nbytes.values()), layers, None if shared else table, in_table)


def choose(model: Any, weights: Weights, gpu_memory: int, device: str) -> Placement:
    """The placement of at most `gpu_memory` bytes of weights on `device`, in the order of the module's docstring.

    Raises:
        UsageError: not even what is outside the decoder layers fits.
    """
    free = gpu_memory - weights.outside_bytes
    if free < 0:
        raise UsageError(
            f"gpu_memory of {_gigabytes(gpu_memory)} is less than the {_gigabytes(weights.outside_bytes)} of the head "
            "and norms",
            remedy='give more, or load everything into main memory with device="cpu"',
        )
    on_cpu: list[str] = []
    for index, layer in enumerate(weights.layers):
        if (
            layer.other_bytes > free
        ):  # the rest follows in main memory, so that hidden states change place once
            on_cpu += [later.name for later in weights.layers[index:]]
            break
        free -= layer.other_bytes
    on_gpu = len(weights.layers) - len(on_cpu)
    embedding_fits = weights.embedding is None or weights.embedding_bytes <= free
    if weights.embedding is not None:
        if embedding_fits:
            free -= weights.embedding_bytes
        else:
            on_cpu.append(weights.embedding)
    with_experts = [layer for layer in weights.layers[:on_gpu] if layer.experts]
    moved = []
    for layer in with_experts:
        if layer.expert_bytes <= free:
            free -= layer.expert_bytes
            continue
        moved.append(layer)
        on_cpu += layer.experts
    gpu_bytes = gpu_memory - free
    cpu_bytes = weights.nbytes - gpu_bytes
    parts = ["the head and norms"]
    if on_gpu:
        parts.append(f"{on_gpu} of {len(weights.layers)} layers")
    if with_experts:
        parts.append(f"the routed experts of {len(with_experts) - len(moved)} of {len(with_experts)} of them")
    parts += ["the embedding"] if embedding_fits else []
    summary = f"{_gigabytes(gpu_bytes)} of weights are on {device} ({', '.join(parts)})"
    rest = f"the other {_gigabytes(cpu_bytes)} are in main memory and computed there"
    summary += f"; {rest}" if on_cpu else ""
    return Placement(
        device, covering(model, dict.fromkeys(on_cpu, "cpu"), device), gpu_bytes, cpu_bytes, summary
    )


def covering(model: Any, places: Mapping[str, str], default: str) -> dict[str, str]:
    """`places` (module -> device), and `default` for everything else, such that no entry is inside another.

    Args:
        model: its structure, for example on the meta device.
    """
    if not places:
        return {"": default}
    ancestors = {""} | {name[:end] for name in places for end in range(len(name)) if name[end] == "."}
    covered: dict[str, str] = {}
    for name in ancestors:
        module = model.get_submodule(name)
        for part in _parts(module):
            full = f"{name}.{part}" if name else part
            if full not in ancestors:
                covered[full] = places.get(full, default)
    return covered


def _parts(module: Any) -> Iterable[str]:
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return (name for name, _ in (*module.named_children(), *tensors))


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"
