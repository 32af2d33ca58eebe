"""Which tensors of a published checkpoint the parameters in memory make: the way back of `checkpoint/naming.py`.

transformers fuses the experts of a layer into one parameter and renames others. `save_pretrained` undoes this by
`revert_weight_conversion`, for the whole model at once. `file_groups` calls that function on meta tensors, to find the
smallest groups of parameters that can be converted alone. So a model can be written tensor by tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

Shapes = dict[str, tuple[int, ...]]
_LAYER = re.compile(r"^(?:.*?\.)?layers\.\d+\.")


@dataclass(frozen=True)
class FileGroup:
    """Parameters that together make some tensors of the files.

    Attributes:
        names: the parameters.
        targets: name in the files -> shape.
        renamed: the one parameter is the one target, unchanged.
        by_expert: for a stack (experts, rows, cols) whose files have tensors per expert: the targets of each expert,
            in the order in which its part (1, rows, cols) of the stack is converted; empty otherwise.
    """

    names: tuple[str, ...]
    targets: Shapes
    renamed: bool = False
    by_expert: tuple[tuple[str, ...], ...] = ()


def file_groups(model: Any, names: Iterable[str]) -> list[FileGroup]:
    """The groups of the parameters and buffers `names` of a transformers model on the meta device.

    Their targets together are the names and shapes of the tensors that `save_pretrained` writes.
    """
    state = model.state_dict()
    wanted = {name: state[name] for name in names}
    whole = _shapes(to_files(model, wanted))
    groups: list[FileGroup] = []
    rest: list[str] = []
    for name, tensor in wanted.items():
        group = _alone(model, name, tensor)
        if group is not None and group.targets.items() <= whole.items():
            groups.append(group)
        else:
            rest.append(name)
    for together in _by_layer(rest):
        made = _shapes(to_files(model, {name: wanted[name] for name in together}))
        groups.append(FileGroup(tuple(together), made))
    covered: Shapes = {}
    for group in groups:
        covered |= group.targets
    if covered != whole:
        wrong = sorted(dict(whole.items() ^ covered.items()))
        raise RuntimeError(f"{wrong[0]} is made of parameters of several layers")
    return groups


def to_files(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters by their names in memory -> tensors by their names in the files, as `save_pretrained` does it."""
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted


def _shapes(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _alone(model: Any, name: str, tensor: torch.Tensor) -> FileGroup | None:
    """The group of one parameter; None if transformers cannot convert it without others."""
    try:
        made = to_files(model, {name: tensor})
    except Exception:  # the operations of transformers raise anything if one of their inputs is missing
        return None
    targets = _shapes(made)
    if len(made) == 1 and next(iter(made.values())) is tensor:
        return FileGroup((name,), targets, renamed=True)
    by_expert = _by_expert(model, name, tensor, targets) if tensor.dim() == 3 else ()
    return FileGroup((name,), targets, by_expert=by_expert)


def _by_expert(model: Any, name: str, tensor: torch.Tensor, targets: Shapes) -> tuple[tuple[str, ...], ...]:
    """`FileGroup.by_expert`; empty if the tensors of an expert depend on more than its part of the stack."""
    first = _shapes(to_files(model, {name: tensor[:1]}))
    second = set(_shapes(to_files(model, {name: tensor[:2]}))) - first.keys()
    templates = [_numbered(target, second) for target in first]
    if any(template is None for template in templates):
        return ()
    experts = tuple(
        tuple(f"{head}{expert}{tail}" for head, tail in templates)  # type: ignore[misc]
        for expert in range(len(tensor))
    )
    expected = {target: shape for part in experts for target, shape in zip(part, first.values(), strict=True)}
    return experts if expected == targets else ()


def _numbered(first: str, second: set[str]) -> tuple[str, str] | None:
    """The text before the number of an expert in its tensor's name, and the text after it; None without a number.

    first: the name of a tensor of expert 0. second: all names of expert 1.
    """
    for match in re.finditer(r"(?<=\.)0(?=\.)", first):
        if f"{first[: match.start()]}1{first[match.end() :]}" in second:
            return first[: match.start()], first[match.end() :]
    return None


def _by_layer(names: Sequence[str]) -> list[list[str]]:
    """The names, those of one layer together; those outside of all layers together."""
    layers: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.match(name)
        layers.setdefault("" if match is None else match[0], []).append(name)
    return list(layers.values())
