"""Stand-ins for decoder layers: they record the layers' inputs and the arguments with which the model calls them."""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import MutableMapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ciuic_cli.errors import InputError
from ciuic_cli.source_code import syntax_tree


class StandIn(nn.Module):
    """Takes a decoder layer's place: records the call's arguments and returns the hidden state, or `replacement`.

    Attributes that the model's own forward reads from the layer come from the layer. If the layer returns a tuple, so
    does the stand-in. The tuple's other parts are `extras`, empty tensors by which later layers' arguments that come
    from this layer are recognised.

    hidden: the call's first argument. kwargs: all others, by the layer's own parameter names. calls: how often it ran.
    replacement: every thread sees its own.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not a submodule: the layer's weights must not be loaded
        self.hidden: torch.Tensor | None = None
        self.kwargs: dict[str, Any] = {}
        self.calls = 0
        self._of_thread = threading.local()
        count = returned_extras(type(layer))
        self.extras = None if count is None else [torch.empty(0) for _ in range(count)]
        self._names = [
            name
            for name, parameter in inspect.signature(type(layer).forward).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY)
        ][1:]

    @property
    def replacement(self) -> torch.Tensor | None:
        return getattr(self._of_thread, "replacement", None)

    @replacement.setter
    def replacement(self, hidden: torch.Tensor | None) -> None:
        self._of_thread.replacement = hidden

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if len(args) > len(self._names) or self._names[0] not in given:
            raise InputError(
                f"{type(self.layer).__name__} is called in a way that ciuic does not know: with {len(args)} positional "
                f"arguments and {', '.join(kwargs) or 'no others'}",
                remedy="ciuic does not support this architecture",
            )
        hidden = given.pop(self._names[0])
        self.hidden, self.kwargs, self.calls = hidden, given, self.calls + 1
        output = hidden if self.replacement is None else self.replacement
        return output if self.extras is None else (output, *self.extras)


def returned_extras(kind: type[nn.Module]) -> int | None:
    """Parts of the tuple that this class's forward returns, besides the hidden state; None if it returns no tuple.

    Read from the source. Parts that are added to a tuple later, which only some calls ask for, do not count; those of
    an `else` do.
    """
    tuples: dict[str, int] = {}
    added: dict[str, int] = {}
    returned: ast.AST | None = None
    for node in ast.walk(syntax_tree(inspect.unwrap(kind.forward))):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = node.value.left if isinstance(node.value, ast.BinOp) else node.value
            if isinstance(value, ast.Tuple | ast.List):
                tuples.setdefault(node.targets[0].id, len(value.elts) - 1)
        elif isinstance(node, ast.If):
            for name, count in _added_to(node.orelse):
                added[name] = added.get(name, 0) + count
        elif isinstance(node, ast.Return):
            returned = node.value
    if isinstance(returned, ast.BinOp):
        returned = returned.left
    if isinstance(returned, ast.Tuple | ast.List):
        return len(returned.elts) - 1
    if not isinstance(returned, ast.Name) or returned.id not in tuples:
        return None
    return tuples[returned.id] + added.get(returned.id, 0)


def _added_to(statements: Sequence[ast.stmt]) -> list[tuple[str, int]]:
    """(variable, number of parts) of each statement `variable += (part, ...)`."""
    return [
        (node.target.id, len(node.value.elts))
        for node in statements
        if isinstance(node, ast.AugAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Tuple)
    ]


def linked_arguments(stand_in: StandIn, earlier: Sequence[StandIn]) -> dict[str, tuple[int, int]]:
    """Argument -> (layer, part of its output), for the arguments of the call that are extras of earlier layers."""
    parts = {
        id(extra): (number, part)
        for number, before in enumerate(earlier)
        for part, extra in enumerate(before.extras or ())
    }
    return {name: parts[id(value)] for name, value in stand_in.kwargs.items() if id(value) in parts}


def require_layer_by_layer(stand_ins: Sequence[StandIn], model: str, folder: Path) -> None:
    """Raise InputError unless the model, of this class and from this folder, has called each layer once, in order.

    Each layer's input must be the output of the one before.
    """
    calls = {stand_in.calls for stand_in in stand_ins}
    fault = None
    if calls != {1}:
        times = f"{min(calls)}" if min(calls) == max(calls) else f"{min(calls)} to {max(calls)}"
        fault = f"does not run its {len(stand_ins)} layers once each, but {times} times"
    elif not all(_equal(after.hidden, before.hidden) for before, after in pairwise(stand_ins)):
        kind = type(stand_ins[0].layer).__name__
        fault = f"does not pass each layer's output to the next layer (layers: {kind})"
    if fault is not None:
        raise InputError(f"{model} {fault}", file=folder, remedy="ciuic does not support this architecture")


def is_of_the_chunk(value: Any, other: Any) -> bool:
    """True if an argument belongs to one chunk: it is a tensor that differs from `other`, or another mapping.

    Layers get such arguments besides the hidden state: the tokens in DeepSeek-V4, inputs per layer in Gemma 3n, and in
    Gemma 3n and 4 a mapping (a UserDict, not a dict) in which a layer leaves its keys and values for later ones.
    """
    if isinstance(value, MutableMapping):
        return value is not other
    return isinstance(value, torch.Tensor) and value is not other and not _equal(value, other)


def _equal(value: Any, other: Any) -> bool:
    if value is other:
        return True
    return isinstance(other, torch.Tensor) and value.shape == other.shape and torch.equal(value, other)
