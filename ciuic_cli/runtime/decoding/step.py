"""Decoding steps that compute all decoder layers of a model at once.

Between the layers, Python takes as long as a small model's products. transformers calls the layers one after another.
The calls of a step only note that they came, and return the hidden state that they got; the last one runs the program
of all layers and returns its result. If the hidden state changed on the way, or a layer got other arguments than the
first, or was not called, the step is computed again layer by layer, and so are all later ones. The first step of a
program is computed in both ways and compared, because the caller may read the hidden state between two layers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import Enum, auto
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ciuic_cli.runtime.decoding import layer as one_layer
from ciuic_cli.runtime.decoding.layer import DecoderLayer, cache_of, rows_of
from ciuic_cli.runtime.decoding.stack import StackProgram
from ciuic_cli.runtime.mixed_classes import Mixin, mixed_class, original_class

_CAPTURING = ("output_hidden_states", "output_attentions")
"""Keywords that ask for what is between the layers."""


STRUCTURE_TOLERANCE = 0.1
"""Largest relative difference between the outputs of the module that calls the layers, with and without the program of
all layers, in their first step. Another layer's hidden state differs by about 1, bfloat16 between layers causes 1e-2.
Chosen."""


class LayerStack(Mixin):
    """Mixin for the classes of modules that call a list of decoder layers."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, during which its layers may compute together."""
        forward = original_class(self).forward
        steps: Steps = self.__dict__[one_layer.STEPS]
        if torch.compiler.is_compiling() or steps.are_refused or any(kwargs.get(name) for name in _CAPTURING):
            return forward(self, *args, **kwargs)
        step, out = steps.attempt(self, args, kwargs)
        if not step.needs_the_layers():
            return out
        step.take_back()
        expected = forward(self, *args, **kwargs)
        if not step.passes(out, expected):
            return expected
        step.take_back()  # what the layers cached, too, so that every step has the program's results
        return steps.attempt(self, args, kwargs)[1]


class Steps:
    """What a model knows of its steps. It is shared by the model and its layers. A copy knows only the list's name."""

    def __init__(self, name: str) -> None:
        self._name = name  # of the list of layers
        self._local = threading.local()  # each thread of Python has its own step
        self.are_refused = False
        self.program: StackProgram | None = None
        self._unsuited: list[
            Any
        ] = []  # what layers knew of their programs when these made none of all layers

    def __reduce__(self) -> Any:
        return Steps, (self._name,)

    @property
    def pending(self) -> Step | None:
        """This thread's step."""
        step: Step | None = getattr(self._local, "step", None)
        return step

    @pending.setter
    def pending(self, step: Step | None) -> None:
        self._local.step = step

    def attempt(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Step, Any]:
        """A step whose layers may compute together, and what the module returned; None if it was interrupted."""
        self.pending = step = Step(self, self.layers_of(module))
        try:
            return step, original_class(module).forward(module, *args, **kwargs)
        except _InterruptedError:
            step.progress = Progress.INTERRUPTED
            return step, None
        finally:
            self.pending = None

    def layers_of(self, module: nn.Module) -> list[nn.Module]:
        """The layers of the module, in their order."""
        layers = module._modules[self._name]
        assert layers is not None
        return list(layers._modules.values())  # type: ignore[arg-type]

    def current_program(self, layers: Sequence[Any]) -> StackProgram | None:
        """The program of these layers, made anew if a part of them has changed; None if there is none."""
        program = self.program
        if program is None or not program.sources.are_current():
            if self._unsuited == [one_layer.known_of(layer) for layer in layers]:
                return None
            if any(one_layer.has_watched_parts(layer) for layer in layers):
                return None
            self.program = program = self._new_program(layers)
            if program is None:
                self._unsuited = [one_layer.known_of(layer) for layer in layers]
                return None
        return None if program.sources.are_watched() else program

    def _new_program(self, layers: Sequence[Any]) -> StackProgram | None:
        parts = [programs.steps for programs in map(one_layer.programs_of, layers) if programs is not None]
        try:
            return StackProgram(parts) if len(parts) == len(layers) else None
        except ValueError:
            return None


class Progress(Enum):
    """How far a step has come."""

    BEGINNING = auto()
    TAKING = auto()  # calls of layers were noted
    DONE = auto()  # the program has run
    DECLINED = auto()  # each layer computes by itself
    INTERRUPTED = auto()  # the layers were not simply called one after another


class Step:
    """One step of one thread: the calls of the layers so far."""

    def __init__(self, steps: Steps, layers: list[nn.Module]) -> None:
        self._steps, self._layers = steps, layers
        self.progress = Progress.BEGINNING
        self.result: Any = None  # of the last call that was taken
        self._calls = 0  # of layers that were taken
        self._kwargs: dict[str, Any] = {}
        self._program: StackProgram | None = None
        self._has_run = False

    def takes(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the step answers this call of a layer: with `result`."""
        if self.progress is Progress.DECLINED:
            return False
        if self.progress is Progress.BEGINNING:
            if not self._begins(layer, args, kwargs):
                self.progress = Progress.DECLINED
                return False
            self.progress = Progress.TAKING
        elif self.progress is not Progress.TAKING or not self._goes_on(layer, args, kwargs):
            raise _InterruptedError
        self._calls += 1
        if self._calls == len(self._layers):
            self._run()
        return True

    def _begins(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if layer is not self._layers[0] or len(args) != 1 or not one_layer.suits(layer, args[0], kwargs):
            return False
        x = args[0]
        program = self._steps.current_program(self._layers)
        caches = None if program is None else program.reserve(x, cache_of(kwargs))
        if program is None or caches is None:
            return False
        mask = kwargs.get("attention_mask")
        bias = None if mask is None else _bias(mask, x.shape[0], caches.context)
        if mask is not None and bias is None:
            return False
        self._program, self._caches, self._bias = program, caches, bias
        self._x, self._before = x, _bits(x).clone()
        self.result, self._kwargs = x, kwargs
        return True

    def _goes_on(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this is a call of the next layer, with the arguments of the first."""
        return (
            layer is self._layers[self._calls]
            and len(args) == 1
            and args[0] is self.result
            and kwargs.keys() == self._kwargs.keys()
            and all([value is self._kwargs[name] for name, value in kwargs.items()])  # noqa: C419  a list is faster
        )

    def _run(self) -> None:
        x = self._x
        if not torch.equal(_bits(x), self._before):
            raise _InterruptedError
        assert self._program is not None
        angles = rows_of(self._kwargs["position_embeddings"], x)
        self.result = self._program.run(x, angles, self._bias, cache_of(self._kwargs), self._caches)
        self.progress, self._has_run = Progress.DONE, True

    def needs_the_layers(self) -> bool:
        """Whether the layers must compute the step one by one: for its result, or to compare it with the program's."""
        if self.progress is Progress.DONE:
            assert self._program is not None
            return not self._program.is_tried
        return self.progress in (Progress.TAKING, Progress.INTERRUPTED)

    def take_back(self) -> None:
        """Undo the step: take its token out of the cache, and restore the hidden state that came in."""
        if self._has_run:
            for layer in cache_of(self._kwargs).layers:
                layer.take_reserved(-1)
        if not torch.equal(_bits(self._x), self._before):
            _bits(self._x).copy_(self._before)

    def passes(self, found: Any, expected: Any) -> bool:
        """Whether the module returned the same with the program: then it is used from now on, else never again."""
        assert self._program is not None
        self._program.is_tried = self.progress is Progress.DONE and _are_alike(found, expected)
        self._steps.are_refused = not self._program.is_tried
        return self._program.is_tried


def _are_alike(found: Any, expected: Any) -> bool:
    pairs = zip_longest(
        *([x for x in tree_leaves(out) if isinstance(x, torch.Tensor)] for out in (found, expected))
    )
    return all(
        a is not None
        and b is not None
        and a.shape == b.shape
        and bool((a.float() - b.float()).norm() <= STRUCTURE_TOLERANCE * b.float().norm())
        for a, b in pairs
    )


def _is_a_stack(layers: nn.Module | None) -> bool:
    return (
        isinstance(layers, nn.ModuleList)
        and len(layers) > 1
        and all(isinstance(layer, DecoderLayer) for layer in layers)
    )


class _InterruptedError(Exception):
    """The layers were not simply called one after another."""


def adapt_layer_stacks(model: nn.Module) -> None:
    """Change the class of every module whose list of layers consists of `DecoderLayer`s, in place.

    A model that is nothing else (without a head) stays as it is: it has another mixin.
    """
    for module in list(model.modules()):
        if module is model or isinstance(module, Mixin):
            continue
        name = next((name for name, part in module._modules.items() if _is_a_stack(part)), None)
        if name is not None:
            steps = Steps(name)
            for part in (module, *steps.layers_of(module)):
                part.__dict__[one_layer.STEPS] = steps
            kind: Any = type(module)
            module.__class__ = mixed_class(LayerStack, kind)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that NaN equals itself."""
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def _bias(mask: Any, batch: int, tokens: int) -> torch.Tensor | None:
    """A mask [b or 1, 1, 1, tokens], bool or float, as what it adds to scores: float32 [b, tokens]. None for others."""
    if not isinstance(mask, torch.Tensor) or mask.shape not in ((1, 1, 1, tokens), (batch, 1, 1, tokens)):
        return None
    mask = mask[:, 0, 0].expand(batch, tokens)
    if mask.dtype == torch.bool:
        return torch.zeros(batch, tokens).masked_fill_(~mask, -torch.inf)
    return mask.to(torch.float32).contiguous() if mask.is_floating_point() else None
