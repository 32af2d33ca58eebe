"""From a stream of an artifact's tensors to parameters of vLLM's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.model_executor.models.utils import WeightsMapper

from ciuic_cli.artifact.reader import Blob
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.errors import InputError

_SHARDS = {"q": 0, "k": 1, "v": 2, None: 0}
"""vLLM's names of the parts of merged linears -> their place; other parts have numbers."""


class PendingWeight(torch.nn.Parameter):
    """An empty parameter, uint8 (0,), that collects the tensors that vLLM loads into it.

    parts: place among the parts of a merged linear -> the tensor: a blob, uint8 (nbytes,), or a dense part.
    """

    parts: dict[int, torch.Tensor]
    weight_loader: Callable[..., bool]

    def __new__(cls, keep: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> PendingWeight:
        """keep: makes the tensor to keep from the one that is read, whose memory belongs to the file."""
        pending = super().__new__(cls, torch.empty(0, dtype=torch.uint8), requires_grad=False)
        pending.parts = {}

        def load(parameter: Any, loaded: torch.Tensor, shard: int | str | None = None, **_: Any) -> bool:
            place = shard if isinstance(shard, int) else _SHARDS[shard]
            pending.parts[place] = keep(loaded).to(parameter.device)
            return True

        pending.weight_loader = load
        return pending

    def collected(self, names: tuple[str, ...]) -> list[torch.Tensor]:
        """The parts in order. Raises InputError if one of the tensors `names` was not loaded."""
        missing = [name for place, name in enumerate(names) if place not in self.parts]
        if missing:
            raise InputError(
                "vLLM did not load the tensor",
                tensor=missing[0],
                remedy="check the artifact with `ciuic inspect --verify`",
            )
        parts = [self.parts[place] for place in range(len(names))]
        self.parts = {}
        return parts


class DecodingMapper(WeightsMapper):
    """vLLM's mapping of names, which also replaces tensors: `prepare(name, tensor)` of every tensor that is read.

    vLLM merges a model's own mapping with that of the quantization method by `|`; the result is a DecodingMapper.
    """

    prepare: Callable[[str, torch.Tensor], torch.Tensor]

    @classmethod
    def of(
        cls, mapper: WeightsMapper, prepare: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> DecodingMapper:
        """The mapping of names of `mapper`, with this preparation."""
        made = cls(**vars(mapper))
        object.__setattr__(made, "prepare", prepare)
        return made

    def __or__(self, other: WeightsMapper) -> DecodingMapper:
        return self.of(_plain(self) | _plain(other), self.prepare)

    def __ror__(self, other: WeightsMapper) -> DecodingMapper:
        return self.of(_plain(other) | _plain(self), self.prepare)

    def apply(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """(name, tensor) of the files -> (name, tensor) for vLLM's model."""
        mapped: Iterable[tuple[str, torch.Tensor]] = _plain(self).apply(
            (name, self.prepare(name, tensor)) for name, tensor in weights
        )
        return mapped


def _plain(mapper: WeightsMapper) -> WeightsMapper:
    return WeightsMapper(**{name: value for name, value in vars(mapper).items() if name != "prepare"})


def decoded(blob: Blob) -> torch.Tensor:
    """The dense tensor (rows, cols) or (experts, rows, cols) of a blob, for a module that vLLM builds without a
    quantization method. Its dtype is torch's default, which vLLM sets to the model's while it loads."""
    with blob.matrices() as matrices:
        dense = [decode_dense(matrix).to(torch.get_default_dtype()) for matrix in matrices]
    return torch.stack(dense) if len(blob.shape) == 3 else dense[0]
