"""Weights that live in 8 bits, or in 8 and 4, while they are trained, and gradients that live for one layer.

Between uses, a weight is stored as codes of the block code. A layer's weights are decoded before its forward pass and
again before its backward pass. As soon as a weight's gradient is complete, its optimizer updates the decoded weight,
which is then encoded with stochastic rounding: an update that is smaller than the code's step changes the weight with
the probability of their ratio. (To the nearest code, small updates would be lost.)

The rounding errors of a weight are summed in main memory. Every `sync_steps` steps, the sum is added to the weight
before it is encoded, so errors do not pile up.

Methods: stochastic rounding for training in low precision (Gupta et al. 2015); updates inside the backward pass (LOMO,
Lv et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ciuic_cli.train.memory.adaptive import AdaptiveQuantizer, group_sizes, narrow_errors
from ciuic_cli.train.memory.updates import slice_updates, uncompiled
from ciuic_cli.train.memory.weight_codes import WeightCodes

SMALLEST = 4096
"""Elements below which a parameter stays as it is; optimizers in 8 and 4 bits keep such states in float32, too."""

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class _Weight:
    """A parameter, its codes, and its summed rounding errors."""

    def __init__(self, name: str, parameter: nn.Parameter, seed: int) -> None:
        self.name, self.parameter, self.seed = name, parameter, seed
        self.users = 0
        """Modules that need the decoded values now."""
        parameter.data = parameter.data.clone()  # in memory of its own, which can be freed
        self.residual = torch.zeros(parameter.shape, device="cpu")
        self.codes = WeightCodes(parameter.shape)
        self._encode(parameter.data, 0)
        self._release()

    def _encode(self, values: torch.Tensor, step: int) -> None:
        """Encode, and add the rounding errors to the residual."""
        self.codes.store(values, self.seed + 0x85EBCA6B * step)
        self.residual += (
            values.float() - self.codes.load(torch.empty_like(values, dtype=torch.float32))
        ).cpu()

    def need(self) -> None:
        """Decode the weight into its parameter, unless another module has."""
        self.users += 1
        if self.users == 1:
            data = self.parameter.data
            data.untyped_storage().resize_(data.nbytes)
            self.codes.load(data)

    def drop(self) -> None:
        """Free the decoded values, unless another module needs them."""
        self.users -= 1
        if self.users == 0:
            self._release()

    def _release(self) -> None:
        self.parameter.data.untyped_storage().resize_(0)

    def store(self, step: int, sync: bool) -> None:
        """Encode the updated parameter; with `sync`, together with the rounding errors until now."""
        values = self.parameter.data
        if sync:
            values += self.residual.to(values.device)
            self.residual.zero_()
        self._encode(values, step)

    def recode(self, wide: torch.Tensor, step: int) -> None:
        """Encode again, together with the rounding errors until now, with 8 bits in the groups of rows `wide`."""
        if self.codes.wide is not None and torch.equal(self.codes.wide, wide):
            return
        self.need()
        self.codes.wide = wide
        self.store(step, sync=True)
        self.drop()


class _Unit:
    """Modules' weights that are decoded together, and those among them whose gradients are awaited."""

    def __init__(self, weights: list[_Weight]) -> None:
        self.weights = weights
        self.is_forward = self.is_backward = False
        self.awaited: set[str] = set()

    def _hold(self, held: bool, wanted: bool) -> bool:
        for weight in self.weights:
            if wanted and not held:
                weight.need()
            elif held and not wanted:
                weight.drop()
        return wanted

    def forward(self, wanted: bool) -> None:
        self.is_forward = self._hold(self.is_forward, wanted)

    def backward(self, wanted: bool) -> None:
        if wanted and not self.is_backward:
            self.awaited = {weight.name for weight in self.weights if weight.parameter.requires_grad}
        self.is_backward = self._hold(self.is_backward, wanted)

    def arrived(self, name: str) -> None:
        self.awaited.discard(name)
        if self.is_backward and not self.awaited:
            self.backward(False)


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Trains a model whose large weights are stored in 8 bits; each gradient is used and freed inside `backward()`.

    `step()` ends a step; call it after every `backward()`. Gradients cannot be accumulated or clipped: they never exist
    together. A learning rate schedule works as usual.

    Args:
        model: of transformers, on its device, in float32 or bfloat16. Its forward must run the layers one by one.
        make_optimizer: makes the optimizer of one parameter, whose "lr" is overwritten before every step.
        lr: learning rate.
        sync_steps: steps between two additions of the summed rounding errors.
        seed: of stochastic rounding.
        quantizer: which chooses 8 or 4 bits for groups of rows, again every `sync_steps`; None: all have 8.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        lr: float,
        sync_steps: int = 100,
        seed: int = 0,
        quantizer: AdaptiveQuantizer | None = None,
    ) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        super().__init__(list(named.values()), {"lr": lr})
        self._sync_steps, self.steps_done = sync_steps, 0
        self._named = named
        self._optimizers = {name: make_optimizer([p]) for name, p in named.items()}
        for one in self._optimizers.values():
            slice_updates(one)
        self._weights = {
            name: _Weight(name, p, seed + 0x9E3779B1 * number)
            for number, (name, p) in enumerate(named.items())
            if p.numel() >= SMALLEST
        }
        self._quantizer = quantizer
        self._adapt()
        self._units = self._make_units(model)
        for name, parameter in named.items():
            parameter.register_post_accumulate_grad_hook(self._updater(name))

    @torch.no_grad()
    def _adapt(self) -> None:
        """Let the quantizer choose every weight's bits."""
        if self._quantizer is None:
            return
        errors = {}
        for name, weight in self._weights.items():
            weight.need()
            errors[name] = narrow_errors(weight.parameter.data)
            weight.drop()
        now = {name: weight.codes.wide for name, weight in self._weights.items()}
        sizes = {name: group_sizes(weight.parameter.shape) for name, weight in self._weights.items()}
        for name, wide in self._quantizer.choose(errors, now, sizes).items():
            # A seed that no update has: those of updates are step numbers.
            self._weights[name].recode(wide, -1 - self.steps_done)

    def _make_units(self, model: nn.Module) -> list[_Unit]:
        """One unit per decoder layer, and one per other module that owns weights."""
        by_parameter = {weight.parameter: weight for weight in self._weights.values()}
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        inner = {m for layer in layers for m in layer.modules()}
        others = [m for m in model.modules() if m not in inner and m._parameters]
        units = []
        for module in (*layers, *others):
            parameters: Iterable[nn.Parameter] = (
                module.parameters()
                if module in inner
                else [p for p in module._parameters.values() if p is not None]
            )
            weights = [by_parameter[p] for p in parameters if p in by_parameter]
            if weights:
                unit = _Unit(weights)
                _register(module, unit)
                units.append(unit)
        return units

    def _updater(self, name: str) -> Callable[[torch.Tensor], None]:
        optimizer = self._optimizers[name]

        def update(parameter: torch.Tensor) -> None:
            _set_lr(optimizer.param_groups[0], self.param_groups[0]["lr"])
            weight = self._weights.get(name)
            if weight is not None:
                weight.need()
                if self._quantizer is not None and parameter.grad is not None:
                    self._quantizer.observe(name, parameter.grad)
            with uncompiled(parameter.device):
                optimizer.step()
            parameter.grad = None
            if weight is not None:
                step = self.steps_done + 1
                weight.store(step, sync=step % self._sync_steps == 0)
                weight.drop()
                for unit in self._units:
                    unit.arrived(name)

        return update

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """End a step. (The updates happened in the backward pass.)"""
        for unit in self._units:
            unit.forward(False)
            unit.backward(False)
        self.steps_done += 1
        if self.steps_done % self._sync_steps == 0:
            self._adapt()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients are freed as they are used."""

    @torch.no_grad()
    def finish(self) -> None:
        """Give all parameters their values, rounding errors included, for saving the model; training cannot go on."""
        for weight in self._weights.values():
            weight.need()
            weight.parameter.data += weight.residual.to(weight.parameter.device)
            weight.residual.zero_()

    def bytes(self) -> dict[str, int]:
        """Bytes by class: codes with scales, dense parameters, optimizer states; and residuals in main memory."""
        dense = sum(p.nbytes for name, p in self._named.items() if name not in self._weights)
        return {
            "weights": sum(weight.codes.nbytes for weight in self._weights.values()) + dense,
            "states": sum(held_bytes(optimizer.state) for optimizer in self._optimizers.values()),
            "residuals": sum(weight.residual.nbytes for weight in self._weights.values()),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that a run needs to continue with the same bytes: codes, residuals, states, dense parameters."""
        return {
            "steps_done": self.steps_done,
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
            ],
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()},
            "weights": {
                name: {**weight.codes.state(), "residual": weight.residual}
                for name, weight in self._weights.items()
            },
            "importance": {} if self._quantizer is None else self._quantizer.importance,
            "dense": {name: p.detach() for name, p in self._named.items() if name not in self._weights},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict()` of the same model."""
        self.steps_done = state["steps_done"]
        for group, stored in zip(self.param_groups, state["param_groups"], strict=True):
            group.update(stored)
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        for name, weight in self._weights.items():
            stored = state["weights"][name]
            weight.codes.restore(stored, weight.parameter.device)
            weight.residual = stored["residual"].to("cpu", copy=True)
        if self._quantizer is not None:
            self._quantizer.importance = dict(state["importance"])
        for name, value in state["dense"].items():
            self._named[name].copy_(value)


def _register(module: nn.Module, unit: _Unit) -> None:
    """Decode the unit's weights for the module's forward pass and, before its output's gradient is used, again."""

    def before(module: nn.Module, arguments: Any) -> None:
        unit.forward(True)

    def after(module: nn.Module, arguments: Any, outputs: Any) -> None:
        unit.forward(False)
        output = outputs[0] if isinstance(outputs, tuple) else outputs
        if torch.is_tensor(output) and output.requires_grad:
            output.register_hook(before_backward)

    def before_backward(gradient: torch.Tensor) -> None:
        unit.backward(True)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def _set_lr(group: dict[str, Any], lr: float) -> None:
    """torchao keeps the learning rate in a tensor, which may not be replaced."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def held_bytes(value: Any) -> int:
    """Bytes of all tensors in a structure; of tensors that wrap others, the bytes of the wrapped ones."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            return sum(held_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(held_bytes, value.values()))
    return 0
