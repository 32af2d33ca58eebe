"""Which checkpoint tensors make which in-memory parameter, by transformers' own conversion rules.

The names in a file and those in memory differ: per-expert matrices become one fused 3-D parameter,
DeepSeek-V4 ships raw names. transformers describes that per family as renamings and converters (merge,
concatenate, split, transpose, ...). This module plans with the same rules and order as `from_pretrained`
does, on names and meta tensors only, so that a family that transformers learns to load is learnt here too.
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
_REMEDY = "download the checkpoint again; some of its tensors may be missing"


@dataclass(frozen=True)
class Assembly:
    """What the checkpoint tensors `sources` (pattern -> names in order) become in memory.

    `target` is the parameter's name (the first one where a converter splits), `shapes` has all of them.
    `converter` is transformers' converter, or None where the one source is the target, renamed.
    """

    target: str
    sources: dict[str, tuple[str, ...]]
    converter: WeightConverter | None
    shapes: dict[str, tuple[int, ...]]

    @property
    def source_names(self) -> tuple[str, ...]:
        """All checkpoint names that are needed."""
        return tuple(name for names in self.sources.values() for name in names)

    @property
    def stacks_experts(self) -> bool:
        """Whether expert e of the target is just the e-th tensor of each pattern, put above one another."""
        return self.converter is not None and _stacks_experts(self.converter)

    def expert_sources(self, expert: int) -> tuple[str, ...]:
        """The tensors of one expert, in the order in which their rows stand (only if `stacks_experts`)."""
        return tuple(self.sources[pattern][expert] for pattern in self._patterns())

    def build(self, read: Read, model: Any) -> dict[str, torch.Tensor]:
        """Run the conversion on what `read` returns for each source; result by in-memory name."""
        if self.converter is None:
            return {self.target: read(self.source_names[0])}
        converter = deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.target, name, pattern, _deferred(read, name))
        built = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in built.items()}

    def _patterns(self) -> list[str]:
        if self.converter is None:
            raise ValueError(f"{self.target} is no stack of experts")
        return [pattern for pattern in self.converter.source_patterns if pattern in self.sources]


@dataclass(frozen=True)
class Plan:
    """`assemblies` by in-memory name; `unexpected` checkpoint names that make no parameter."""

    assemblies: dict[str, Assembly]
    unexpected: tuple[str, ...]


def plan_names(model: Any, shapes: dict[str, tuple[int, ...]]) -> Plan:
    """Plan which checkpoint tensors (name -> decoded shape) make which parameters of the meta `model`.

    Raises InputError where a conversion cannot be applied to the tensors that are there.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    state = model.state_dict()
    prefix = model.base_model_prefix
    collected: dict[str, dict[str, list[str]]] = {}
    chosen: dict[str, WeightConverter | None] = {}
    unexpected = []
    for name in sorted(shapes, key=_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            unexpected.append(name)
            continue
        chosen.setdefault(target, by_pattern[pattern] if pattern is not None else None)
        collected.setdefault(target, {}).setdefault(pattern or name, []).append(name)
    assemblies: dict[str, Assembly] = {}
    for target, found in collected.items():
        sources = {pattern: tuple(names) for pattern, names in found.items()}
        assembly = _assemble(target, sources, chosen[target], model, shapes)
        assemblies.update((name, assembly) for name in assembly.shapes if name in state)
    return Plan(assemblies, tuple(unexpected))


def _natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts as from_pretrained does, numbers by their value, however many digits they have."""
    parts = [part.lstrip("0") if part.isdecimal() else part for part in name.split(".")]
    return [(0, len(part), part) if not part or part.isdecimal() else (1, 0, part) for part in parts]


def _stacks_experts(converter: WeightConverter) -> bool:
    first, *others = converter.operations
    return (
        len(converter.target_patterns) == 1
        and isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(isinstance(operation, Concatenate) and operation.dim == 1 for operation in others)
    )


def _deferred(read: Read, name: str) -> Any:
    return lambda: read(name)


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
                f"several tensors would become this parameter: {', '.join(names[:3])}",
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
    """The numbers in which the names differ, in order; none where there is one name alone."""
    columns = zip(*(re.findall(r"\d+", name) for name in names), strict=False)
    return next((column for column in columns if len(set(column)) > 1), ())


def _stack_shape(
    target: str,
    sources: dict[str, tuple[str, ...]],
    converter: WeightConverter,
    shapes: dict[str, tuple[int, ...]],
) -> tuple[int, int, int]:
    absent = [pattern for pattern in converter.source_patterns if pattern not in sources]
    gaps = [
        f"expert {number} is missing beside {names[0]}"
        for names in sources.values()
        for number, found in enumerate(_varying_numbers(names))
        if found != str(number)
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
        detail = f"{different[0]} has shape {shapes[different[0]]}, others have another"
    elif any(len(shape) != 2 or shape[1] != firsts[0][1] for shape in firsts):
        detail = f"their shapes {firsts} do not fit together"
    else:
        return counts.pop(), sum(shape[0] for shape in firsts), firsts[0][1]
    raise InputError(f"the experts do not make one stack: {detail}", tensor=target, remedy=_REMEDY)
