"""Which tensors of a checkpoint make which parameter of the model, by transformers' own conversion rules.

`map_names` takes the meta model and the shapes of the stored tensors and returns a `NameMap`: one `Assembly` per
parameter, which knows its source tensors and can build the parameter from them.

Names and shapes in files differ from those in memory: matrices of single experts become one fused 3-D parameter, and
DeepSeek-V4 ships names of its own. transformers describes this per family by renamings and converters (merge,
concatenate, split, transpose, ...). It applies the same rules in the same order as `from_pretrained`, to names
and meta tensors only, so it supports every family that transformers can load.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from ciuic_cli.errors import InputError

Read = Callable[[str], torch.Tensor]
"""Reads one tensor of the checkpoint by its name."""
_REMEDY = "download the checkpoint again; some of its tensors may be missing"


@dataclass(frozen=True)
class Assembly:
    """How tensors of the checkpoint become one parameter, or several if a converter splits.

    Attributes:
        target: the parameter's name; the first name if there are several parameters.
        sources: pattern of the converter -> names of the checkpoint's tensors, in order.
        converter: transformers' converter; None if the parameter is one tensor, perhaps under another name.
        shapes: parameter -> shape, for all parameters made.
    """

    target: str
    sources: dict[str, tuple[str, ...]]
    converter: WeightConverter | None
    shapes: dict[str, tuple[int, ...]]

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of all source tensors."""
        return tuple(name for names in self.sources.values() for name in names)

    @property
    def stacks_experts(self) -> bool:
        """Whether expert e of the target is the e-th tensor of each pattern, concatenated along the rows."""
        return self.converter is not None and _stacks_experts(self.converter)

    def expert_sources(self, expert: int) -> tuple[str, ...]:
        """Names of one expert's tensors, in the order of their rows. Only valid if `stacks_experts`."""
        return tuple(self.sources[pattern][expert] for pattern in self._patterns())

    def build(self, read: Read, model: Any) -> dict[str, torch.Tensor]:
        """Read the sources with `read` and convert them. Returns parameter -> tensor."""
        if self.converter is None:
            return {self.target: read(self.source_names[0])}
        converter = deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.target, name, pattern, _lazy_read(read, name))
        built = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in built.items()}

    def _patterns(self) -> list[str]:
        if self.converter is None:
            raise ValueError(f"{self.target} is no stack of experts")
        return [pattern for pattern in self.converter.source_patterns if pattern in self.sources]


@dataclass(frozen=True)
class NameMap:
    """`assemblies` by parameter name, and `unexpected`: the checkpoint's names that make no parameter."""

    assemblies: dict[str, Assembly]
    unexpected: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where the model has a tensor of the checkpoint.

    Attributes:
        parameter: the name in memory.
        expert: of a stack of experts; None: all of the parameter.
        part: (number, count) of the equal parts into which the expert's rows are divided.
    """

    parameter: str
    expert: int | None = None
    part: tuple[int, int] = (0, 1)


def place_of(model: Any, name: str) -> Place | None:
    """The place of a tensor that checkpoints of the meta `model` call `name`; None if they have none of that name.

    Raises InputError if it is a part of a parameter that cannot be cut out of it.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    state = model.state_dict()
    target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
    if target not in state:
        return None
    converter = next((entry for entry in converters if pattern in entry.source_patterns), None)
    if converter is None or pattern is None:
        return Place(target)
    renamed, _ = rename_source_key(name, renamings, [])
    number = re.search(pattern.replace(".*.", r"\.(\d+)\."), renamed)
    if not _stacks_experts(converter) or number is None or not number.groups():
        raise InputError(
            f"the tensor is a part of {target}, which is stored as a whole",
            tensor=name,
            remedy=f"read {target}",
        )
    part = (converter.source_patterns.index(pattern), len(converter.source_patterns))
    return Place(target, int(number[1]), part)


def map_names(model: Any, shapes: dict[str, tuple[int, ...]]) -> NameMap:
    """Find the sources of every parameter of the meta `model` among the checkpoint's tensors (name -> decoded shape).

    Raises InputError if a conversion does not fit the stored tensors.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    state = model.state_dict()
    base_prefix = model.base_model_prefix
    collected: dict[str, dict[str, list[str]]] = {}
    chosen: dict[str, WeightConverter | None] = {}
    unexpected = []
    for name in sorted(shapes, key=_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, base_prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], base_prefix, state)
        if target not in state:
            unexpected.append(name)
            continue
        chosen.setdefault(target, by_pattern[pattern] if pattern is not None else None)
        collected.setdefault(target, {}).setdefault(pattern or name, []).append(name)
    assemblies: dict[str, Assembly] = {}
    for target, by_source_pattern in collected.items():
        sources = {pattern: tuple(names) for pattern, names in by_source_pattern.items()}
        assembly = _assemble(target, sources, chosen[target], model, shapes)
        assemblies.update((name, assembly) for name in assembly.shapes if name in state)
    return NameMap(assemblies, tuple(unexpected))


def _natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key of `from_pretrained`: numbers in names sort by value, with any number of digits."""
    parts = [part.lstrip("0") if part.isdecimal() else part for part in name.split(".")]
    return [(0, len(part), part) if not part or part.isdecimal() else (1, 0, part) for part in parts]


def _stacks_experts(converter: WeightConverter) -> bool:
    """Whether the converter only stacks experts along dimension 0 and concatenates their parts along the rows."""
    first, *others = converter.operations
    return (
        len(converter.target_patterns) == 1
        and isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(isinstance(operation, Concatenate) and operation.dim == 1 for operation in others)
    )


def _lazy_read(read: Read, name: str) -> Any:
    return lambda: read(name)  # a function, because a lambda in the loop would read the last name


def _assemble(
    target: str,
    sources: dict[str, tuple[str, ...]],
    converter: WeightConverter | None,
    model: Any,
    shapes: dict[str, tuple[int, ...]],
) -> Assembly:
    names = [name for group in sources.values() for name in group]
    if converter is None:
        if len(names) > 1:
            raise InputError(
                f"several tensors map to this parameter: {', '.join(names[:3])}",
                tensor=target,
                remedy="download the checkpoint again; do not mix the files of two versions",
            )
        return Assembly(target, sources, None, {target: shapes[names[0]]})
    if _stacks_experts(converter):
        return Assembly(
            target, sources, converter, {target: _stack_shape(target, sources, converter, shapes)}
        )

    def meta(name: str) -> torch.Tensor:
        return torch.empty(shapes[name], device="meta")

    try:
        built = Assembly(target, sources, converter, {}).build(meta, model)
    except Exception as error:
        raise InputError(
            f"its {len(names)} tensors cannot be converted: {type(error).__name__}: {error}",
            tensor=target,
            remedy=_REMEDY,
        ) from error
    return Assembly(target, sources, converter, {name: tuple(value.shape) for name, value in built.items()})


def _varying_numbers(names: tuple[str, ...]) -> tuple[str, ...]:
    """The first number in which the names differ, for each name in order. Empty for a single name."""
    columns = zip(*(re.findall(r"\d+", name) for name in names), strict=False)
    return next((column for column in columns if len(set(column)) > 1), ())


def _stack_shape(
    target: str,
    sources: dict[str, tuple[str, ...]],
    converter: WeightConverter,
    shapes: dict[str, tuple[int, ...]],
) -> tuple[int, int, int]:
    """The (experts, rows, columns) of a fused stack. Raises InputError if experts are missing or do not fit."""
    absent = [pattern for pattern in converter.source_patterns if pattern not in sources]
    gaps = [
        f"expert {number} is missing beside {names[0]}"
        for names in sources.values()
        for number, stored_number in enumerate(_varying_numbers(names))
        if stored_number != str(number)
    ]
    counts = {len(names) for names in sources.values()}
    firsts = [shapes[names[0]] for names in sources.values()]
    different = [name for names in sources.values() for name in names if shapes[name] != shapes[names[0]]]
    if absent:
        detail = f"none match {absent[0]}"
    elif gaps:
        detail = gaps[0]
    elif len(counts) > 1:
        detail = f"{' or '.join(str(count) for count in sorted(counts))} of each kind"
    elif different:
        detail = f"{different[0]} has shape {shapes[different[0]]}, unlike the other experts"
    elif any(len(shape) != 2 or shape[1] != firsts[0][1] for shape in firsts):
        detail = f"their shapes {firsts} do not fit together"
    else:
        return counts.pop(), sum(shape[0] for shape in firsts), firsts[0][1]
    raise InputError(f"the experts do not make one stack: {detail}", tensor=target, remedy=_REMEDY)
