"""A device beside the CPU that any machine has: its tensors lie in main memory and are tagged with another device.

Inside `SecondDevice` torch computes with such tensors, refuses to mix them with tensors of the CPU, as a GPU does, and
counts every copy between the two devices. It serves to test where modules are computed; gradients are not supported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class _NotForOthers(backend_registration._DummyBackendModule):
    def is_available(self) -> bool:
        """Libraries that look for an accelerator find none, so other tests of the process are not affected."""
        return False

    def device_count(self) -> int:
        return 0


class _Hook(backend_registration._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return False


backend_registration._setup_privateuseone_for_python_backend("stand_in", _NotForOthers(), _Hook())

DEVICE = torch.device("stand_in:0")
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Copy(NamedTuple):
    """A copy between the devices."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    to_device: bool


class OnDevice(torch.Tensor):
    """A tensor on the second device; `values` is the same tensor on the CPU."""

    values: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> OnDevice:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        tensor.values = values
        return tensor

    def data_ptr(self) -> int:
        """Of the memory in use: accelerate tells tensors apart by it."""
        return self.values.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on the second device outside of SecondDevice")


class SecondDevice(TorchDispatchMode):
    """Makes the device usable in this thread; `copies` lists what crossed."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Copy] = []

    def __enter__(self) -> SecondDevice:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) calls the mode, too
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = any(isinstance(tensor, OnDevice) for tensor in tensors)
        if kwargs.get("device") is not None:
            on_device = torch.device(kwargs["device"]).type == DEVICE.type
            kwargs["device"] = torch.device("cpu") if on_device else kwargs["device"]
        if func in _COPIES:
            is_in_place = func is torch.ops.aten.copy_.default
            on_device = isinstance(tensors[0], OnDevice) if is_in_place else on_device
            self._count(tensors[-1] if is_in_place else tensors[0], on_device)
        elif on_device and any(t.device.type == "cpu" and t.dim() for t in tensors):
            raise RuntimeError(f"{func}: tensors on two devices")
        result = func(*tree_map(_values, args), **tree_map(_values, kwargs))
        if func._schema.name.endswith("_"):
            return args[0]
        return tree_map(_on_device, result) if on_device else result

    def _count(self, source: torch.Tensor, to_device: bool) -> None:
        if isinstance(source, OnDevice) != to_device:
            self.copies.append(Copy(tuple(source.shape), source.dtype, source.nbytes, to_device))


def _values(value: Any) -> Any:
    return value.values if isinstance(value, OnDevice) else value


def _on_device(value: Any) -> Any:
    plain = isinstance(value, torch.Tensor) and not isinstance(value, OnDevice)
    return OnDevice(value) if plain else value
