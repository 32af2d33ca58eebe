"""A model of which one decoder layer at a time, or everything but the layers, has its weights in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.errors import InputError
from ciuic_cli.layerwise.expert_offload import ExpertsOnUse
from ciuic_cli.layerwise.overrides import Override, new_values, replace_experts
from ciuic_cli.layerwise.stand_ins import StandIn
from ciuic_cli.process.memory import limit_freed_memory

Adjust = Callable[[str, nn.Module], AbstractContextManager[None]]
"""Called with a decoder layer's prefix and the layer with its weights; the context is active while the layer runs."""


class PartialModel:
    """A transformers model on the meta device whose parts get their weights, in float32, while they are needed.

    Attributes:
        prefixes: of the layers' parameter names.
        override: other values for weights; None: the original's. adjust: what is active while a layer runs.

    Args:
        model_map: where each parameter's weights come from.
        dtype: of matrix products. Weights that are used in products only have it, too.

    Raises InputError if the model has no list of layers.
    """

    def __init__(self, model_map: ModelMap, device: torch.device, dtype: torch.dtype) -> None:
        self.map = model_map
        self.device, self.dtype = device, dtype
        self.override: Override | None = None
        self.adjust: Adjust | None = None
        skeleton = model_map.skeleton(dtype=torch.float32, experts_implementation="eager")
        self.model = skeleton.eval().requires_grad_(False)
        self.prefixes = list(model_map.layer_prefixes)
        if not self.prefixes:
            raise InputError(
                f"{type(self.model).__name__} has no list of layers",
                file=model_map.checkpoint.folder,
                remedy="ciuic does not support this architecture",
            )

    @contextmanager
    def layer_with_weights(self, number: int) -> Iterator[nn.Module]:
        """One decoder layer, with its weights in memory inside the block."""
        module = self.layer(number)
        self._load_weights(module, self.prefixes[number], [nn.Linear])
        try:
            yield module
        finally:
            self.map.release(module)
            limit_freed_memory()

    @contextmanager
    def in_use(self, prefix: str, layer: nn.Module) -> Iterator[None]:
        """Context in which a loaded layer runs; what it brings of expert stacks to a GPU must not change inside."""
        adjusted = self.adjust(prefix, layer) if self.adjust is not None else nullcontext()
        with adjusted, ExpertsOnUse(layer, self.device):
            yield

    @contextmanager
    def without_layers(self, *rounded: nn.Module, head: bool = True) -> Iterator[list[StandIn]]:
        """The model with stand-ins for its decoder layers, and all other weights in memory inside the block.

        rounded: modules whose weights have `dtype`, with all others of the same class. head: whether the weights of the
        head, which may be the largest of the model, are loaded; without them only the base model can run.
        """
        stand_ins, layers = [], []
        for number, prefix in enumerate(self.prefixes):
            layers.append(self.layer(number))
            stand_ins.append(StandIn(layers[-1]))
            self.model.set_submodule(prefix.rstrip("."), stand_ins[-1])
        try:
            loaded = self.model if head else self.model.base_model
            name = "" if loaded is self.model else f"{self.model.base_model_prefix}."
            self._load_weights(loaded, name, {type(module) for module in rounded})
            yield stand_ins
        finally:
            self.map.release(self.model)
            for prefix, layer in zip(self.prefixes, layers, strict=True):
                self.model.set_submodule(prefix.rstrip("."), layer)

    def layer(self, number: int) -> nn.Module:
        """A decoder layer, whose weights may be missing."""
        return self.model.get_submodule(self.prefixes[number].rstrip("."))

    def _load_weights(self, module: nn.Module, prefix: str, rounded: Collection[type[nn.Module]]) -> None:
        # Linears and experts are used in products only: with bfloat16 products their dtype does not change a bit. After
        # the layers, no result depends on the embedding's rows. With float32 products, a stack has the model's own
        # dtype, to which overrides and decoded experts are rounded.
        stack_dtype = self.map.dtype if self.dtype == torch.float32 else self.dtype
        self.map.materialise(
            module, prefix, torch.float32, self.device, weight_dtypes=dict.fromkeys(rounded, self.dtype),
            stack_dtype=stack_dtype, stack_device="cpu",
            values=self.override and new_values(self.map, module, prefix, self.override),
        )  # fmt: skip
        if self.override is not None:
            replace_experts(self.map, module, prefix, self.override)
