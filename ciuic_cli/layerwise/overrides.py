"""Other values for the weights of a module."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from ciuic_cli.checkpoint.architecture import stored_tensors
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
    """An override whose values, rounded to `KEPT_DTYPE`, are computed once: files in `folder` keep up to `limit` bytes
    of them at a time.

    override: its values are overwritten. device: of the values. Several threads may ask, at a time each for another
    matrix.
    """

    def __init__(self, override: Override, folder: Path, device: torch.device, limit: int) -> None:
        self._override, self._device, self._room = override, device, limit
        self._files = ActivationStore(folder, KEPT_DTYPE)
        self._kept: dict[Key, tuple[str, int]] = {}  # file and bytes
        self._count = 0
        self._lock = threading.Lock()

    def __call__(self, name: str, expert: int | None) -> torch.Tensor | None:
        if (name, expert) in self._kept:
            return self._files.get(self._kept[name, expert][0], self._device)
        value = self._override(name, expert)
        if value is None:
            return None
        for rows in value.split(_ROUNDED_ROWS):  # whether it is kept or not
            rows.copy_(rows.to(KEPT_DTYPE))
        nbytes = KEPT_DTYPE.itemsize * value.numel()
        with self._lock:
            fits = nbytes <= self._room
            if fits:
                self._room -= nbytes
                self._count += 1
                file = str(self._count)
        if fits:
            self._files.put(file, value)
            self._kept[name, expert] = file, nbytes
        return value

    def clear(self, prefix: str = "") -> None:
        """Delete the files of the values whose names begin with the prefix."""
        for key in [key for key in self._kept if key[0].startswith(prefix)]:
            file, nbytes = self._kept.pop(key)
            self._room += nbytes
            self._files.drop(file)
        self._files.delete_dropped()


def only(override: Override, keys: Collection[Key]) -> Override:
    """The override for these (name, expert) alone."""
    return lambda name, expert: override(name, expert) if (name, expert) in keys else None


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


@contextmanager
def replaced(
    model_map: ModelMap,
    module: nn.Module,
    prefix: str,
    values: Mapping[str, torch.Tensor],
    experts: Override,
    keys: Collection[Key],
) -> Iterator[None]:
    """Context in which a module, whose weights are in memory, has other values for the weights `keys`.

    values: of parameters, from `new_values`. experts: those of experts; they are copied into the stacks, and the
    original ones are read again at the end.
    """

    def original(name: str, expert: int | None) -> torch.Tensor | None:
        return None if expert is None else model_map.read_expert(name, expert)

    originals = []
    for owner, short, name, _ in stored_tensors(module, prefix):
        key = model_map.parameters[name].tied_to or name
        if (key, None) in keys:
            tensor = getattr(owner, short)
            originals.append((owner, short, tensor))
            value = model_map.load(name, tensor.dtype, tensor.device, values[key])
            setattr(owner, short, nn.Parameter(value, requires_grad=False))
    try:
        replace_experts(model_map, module, prefix, only(experts, keys))
        yield
        replace_experts(model_map, module, prefix, only(original, keys))
    finally:
        for owner, short, tensor in originals:
            setattr(owner, short, tensor)


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
