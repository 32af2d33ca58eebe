"""Other values for the weights of a module."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from ciuic_cli.checkpoint.model_map import ModelMap, Parameter
from ciuic_cli.layerwise.activation_store import ActivationStore
from ciuic_cli.layerwise.linear_hooks import Key
from ciuic_cli.process.memory import PARALLEL_WORK_BYTES, limit_freed_memory, matrix_bytes
from ciuic_cli.process.threads import parallel_map

Override = Callable[[str, int | None], torch.Tensor | None]
"""Called with a parameter's name, and the number of an expert in a stack. Returns other values for the parameter or
the expert; None keeps the original. Called from several threads."""

KEPT_DTYPE = torch.bfloat16
"""The dtype to which kept values are rounded. The values are weights with noise like the error of a few bits per
weight, which is far larger than this rounding (docs/experiments/scale/disk.md)."""
_ROUNDED_ROWS = 1024
"""Rows of a value that are rounded at a time, in place. Chosen, not tuned."""


class KeptValues:
    """An override whose values, rounded to `KEPT_DTYPE`, are computed once: files in `folder` keep the first `limit`
    bytes of them.

    override: its values are overwritten. device: of the values. Several threads may ask, at a time each for another
    matrix.
    """

    def __init__(self, override: Override, folder: Path, device: torch.device, limit: int) -> None:
        self._override, self._device, self._room = override, device, limit
        self._files = ActivationStore(folder, KEPT_DTYPE)
        self._names: dict[Key, str] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str, expert: int | None) -> torch.Tensor | None:
        with self._lock:
            file = self._names.setdefault((name, expert), str(len(self._names)))
        if file in self._files:
            return self._files.get(file, self._device)
        value = self._override(name, expert)
        if value is None:
            return None
        for rows in value.split(_ROUNDED_ROWS):  # whether it is kept or not
            rows.copy_(rows.to(KEPT_DTYPE))
        kept_bytes = KEPT_DTYPE.itemsize * value.numel()
        with self._lock:
            fits = kept_bytes <= self._room
            if fits:
                self._room -= kept_bytes
        if fits:
            self._files.put(file, value)
        return value

    def only(self, keys: Collection[Key]) -> Override:
        """The override for these (name, expert) alone."""
        return lambda name, expert: self(name, expert) if (name, expert) in keys else None

    def clear(self) -> None:
        """Delete the files."""
        self._files.clear()


def new_values(
    model_map: ModelMap, module: nn.Module, prefix: str, override: Override
) -> dict[str, torch.Tensor]:
    """The values of `override` for all parameters but expert stacks: the argument `values` of `ModelMap.materialise`.

    The module's own weights may be missing. Small values are computed in parallel.
    """
    shapes: dict[Key, tuple[int, ...]] = {
        (parameter.name, None): parameter.shape
        for parameter, _ in _stored(model_map, module, prefix)
        if len(parameter.shape) != 3
    }
    return {name: value for (name, _), value in _computed(override, shapes)}


def replace_experts(model_map: ModelMap, module: nn.Module, prefix: str, override: Override) -> None:
    """Copy the values of `override` into the module's expert stacks, expert by expert; small ones in parallel."""
    targets: dict[Key, torch.Tensor] = {
        (parameter.name, expert): part
        for parameter, tensor in _stored(model_map, module, prefix)
        if len(parameter.shape) == 3
        for expert, part in enumerate(parameter.in_memory(tensor))
    }
    for key, value in _computed(override, {key: tuple(part.shape) for key, part in targets.items()}):
        targets[key].copy_(value)


def _stored(model_map: ModelMap, module: nn.Module, prefix: str) -> Iterator[tuple[Parameter, torch.Tensor]]:
    """The module's parameters with their tensors. Instead of a tied parameter, the one that is stored for both."""
    for name, tensor in module.named_parameters():
        parameter = model_map.parameters[prefix + name]
        yield model_map.parameters[parameter.tied_to or parameter.name], tensor


def _computed(
    override: Override, shapes: Mapping[Key, tuple[int, ...]]
) -> Iterator[tuple[Key, torch.Tensor]]:
    """(key, value) for every key for which the override has a value. shapes: of the values, by key."""
    threads = torch.get_num_threads()

    def side_by_side(key: Key) -> int:
        shape = shapes[key]
        is_large = len(shape) == 2 and matrix_bytes(*shape, full_outputs=True) > PARALLEL_WORK_BYTES
        return 1 if is_large else threads

    keys = sorted(shapes, key=side_by_side, reverse=True)
    for key, value in parallel_map(keys, lambda key: override(*key), side_by_side):
        if value is not None:
            yield key, value
        limit_freed_memory()
