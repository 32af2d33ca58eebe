"""Modules in main memory that are computed there, in a model whose other modules are on a GPU.

For a `device_map` with "cpu" entries, accelerate copies the weights of those modules to the GPU for every call. Here
the hidden states travel instead: a module's inputs go to main memory, and its outputs return. Modules on "disk" stay
with accelerate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map


class Crossing:
    """The two hooks of a module that is computed on another device than the modules around it.

    Args:
        device: of the module's weights.
        staying: names of keyword arguments that are passed as they are, such as the KV cache.
    """

    def __init__(self, device: torch.device, staying: Iterable[str]) -> None:
        self.device = device
        self.staying = frozenset(staying)
        self.outside: torch.device | None = None

    def attach(self, module: nn.Module) -> None:
        """Let the module take inputs from any one device, and return its outputs to it."""
        module.register_forward_pre_hook(self.enter, with_kwargs=True)
        module.register_forward_hook(self.leave)

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments of the call, on the module's device."""
        moving = {name: value for name, value in kwargs.items() if name not in self.staying}
        tensors = (value for value in tree_leaves((args, moving)) if isinstance(value, torch.Tensor))
        first = next(tensors, None)
        self.outside = None if first is None else first.device
        moved = tree_map(_to(self.device), (args, moving))
        return moved[0], kwargs | moved[1]

    def leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """The outputs, on the device from which the arguments came."""
        return output if self.outside is None else tree_map(_to(self.outside), output)


def _to(device: torch.device) -> Callable[[Any], Any]:
    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) and value.device != device else value

    return move


def keep_weights_in_place(model: Any) -> list[nn.Module]:
    """Undo accelerate's hooks where a `device_map` puts modules on the CPU beside one or more accelerators, in place.

    Their weights return to main memory. If all other modules are on one accelerator, their hooks, which have nothing to
    move any more, are removed too; only the whole model keeps its hook, which moves the token ids to the accelerator.

    Returns:
        The modules to which `Crossing` must be attached before they run; none without such a `device_map`.
    """
    places: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    kinds = {str(place) for place in places.values()}
    accelerators = kinds - {"cpu", "disk"}
    if "cpu" not in kinds or not accelerators:
        return []
    from accelerate.hooks import remove_hook_from_module  # a device_map needs accelerate

    modules = dict(model.named_modules())
    in_memory = [modules[name] for name, place in places.items() if str(place) == "cpu" and name in modules]
    freed = [inner for module in in_memory for inner in module.modules()]
    if len(accelerators) == 1 and "disk" not in kinds:
        freed += [module for name, module in modules.items() if name and module not in set(freed)]
    for module in freed:
        remove_hook_from_module(module)
        # accelerate leaves the class's own function behind in the instance; other classes would never see theirs.
        own = vars(module).get("forward")
        if getattr(own, "__func__", None) is type(module).forward:
            del module.forward
    for module in in_memory:
        module.to("cpu")  # buffers, which accelerate had put on the accelerator
    return in_memory


def compute_in_place(model: Any, in_memory: Iterable[nn.Module]) -> None:
    """Attach `Crossing` to modules that `keep_weights_in_place` returned."""
    staying = getattr(model, "_skip_keys_device_placement", None) or ()
    for module in in_memory:
        Crossing(torch.device("cpu"), [staying] if isinstance(staying, str) else staying).attach(module)
