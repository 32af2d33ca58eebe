"""Keeps what autograd saves between the forward and the backward pass in 8 bits.

    with ActivationStore(model) as store:
        loss = model(**batch).loss
    loss.backward()

Works on any model of transformers, because it replaces tensors where autograd saves them
(`torch.autograd.graph.saved_tensors_hooks`). A tensor that several operations save is stored once, and so is a mask of
attention that torch makes anew in every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ciuic_cli.codecs.blockcode.code import BlockCode, Encoded, decode, encode
from ciuic_cli.train.memory.offload import Offload, Place

SMALLEST = 1024
"""Elements below which a tensor is kept as it is: it saves little memory. Chosen."""

CODE = BlockCode(bits=8, block=64, hadamard=True)
"""The policy's code: 0.258 of float32's bytes. Measured: docs/experiments/training/activations.md."""

Policy = Callable[[nn.Module | None, torch.Tensor], BlockCode | None]
"""Module that is running, and the tensor that it saves, to the tensor's code; None keeps it exact."""


def default_policy(module: nn.Module | None, tensor: torch.Tensor) -> BlockCode | None:
    """8 bits for activations; exact are integers, small tensors, statistics of norms and of softmax, and masks.

    Statistics are one number per row: the factor of a norm, and the logarithm of a softmax's sum, which attention
    saves beside its four-dimensional inputs.

    A mask is what attention adds to its scores. torch makes one of floating point in every layer, and saves it, if rows
    hold several examples or padding, or if a layer has a sliding window. It is infinite where a token is hidden, and a
    block with such a number decodes to NaN. A mask has four dimensions, as the scores have, and no gradient. So have
    sines and cosines of positions, and the first layer's queries, keys and values that depend on no trained weight: few
    bytes. Infinities elsewhere are those of a training that diverges.
    """
    if not tensor.is_floating_point() or tensor.numel() < SMALLEST or tensor.shape[-1] == 1:
        return None
    if _may_be_mask(tensor):
        return None
    in_attention = module is not None and type(module).__name__.endswith("Attention")
    return None if in_attention and tensor.dim() < 4 else CODE


def _may_be_mask(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() >= 4 and not tensor.requires_grad


@dataclass(frozen=True)
class _Saved:
    """Autograd keeps this for a saved tensor: the shared contents, and the view of them that the tensor is.

    Contents are in the order of memory, with `stride`, or in that of the tensor's own elements, with the shape `once`.
    """

    kept: _Kept
    shape: torch.Size
    once: torch.Size
    stride: tuple[int, ...] | None


class _Kept:
    """The contents of a saved tensor, in one of three forms. Counts its bytes in the store while it lives."""

    def __init__(
        self, store: ActivationStore, content: torch.Tensor | Encoded | Place, dtype: torch.dtype, nbytes: int
    ) -> None:
        self.content, self.dtype, self.nbytes, self._store = content, dtype, nbytes, store
        store.live_bytes += nbytes
        store.peak_bytes = max(store.peak_bytes, store.live_bytes)

    def __del__(self) -> None:
        self._store.live_bytes -= self.nbytes
        if isinstance(self.content, Place):
            self.content.free()


class ActivationStore:
    """A context for the forward pass. Use one store for a whole run, and enter it at every step.

    Args:
        model: its parameters and buffers are not copied.
        policy: chooses the code of each tensor.
        offload: where encoded tensors go until the backward pass needs them; default: they stay on the device.

    Attributes:
        original_bytes: of all different tensors saved since `reset`, as autograd would keep them.
        stored_bytes: of the same tensors as they were stored, scales included.
        live_bytes, peak_bytes: of stored tensors now, and at most since `reset`.
    """

    def __init__(
        self, model: nn.Module, policy: Policy = default_policy, offload: Offload | None = None
    ) -> None:
        self._model, self._policy, self._offload = model, policy, offload
        self._running: list[nn.Module] = []
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, _Kept]] = {}
        self._masks: dict[tuple[Any, ...], list[tuple[torch.Tensor, _Kept]]] = {}  # by layout
        self._handles: list[Any] = []
        self._weights: set[int] = set()
        self.live_bytes = 0
        self.reset()

    def reset(self) -> None:
        """Count from now on."""
        self.original_bytes = self.stored_bytes = 0
        self.peak_bytes = self.live_bytes

    def __enter__(self) -> Self:
        tensors = (*self._model.parameters(), *self._model.buffers())
        self._weights = {tensor.untyped_storage()._cdata for tensor in tensors if _is_plain(tensor)}
        self._handles = [
            register_module_forward_pre_hook(lambda module, _: self._running.append(module)),
            register_module_forward_hook(lambda *_: self._leave(), always_call=True),
        ]
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._hooks.__exit__(*details)
        for handle in self._handles:
            handle.remove()
        self._running.clear()
        self._known.clear()
        self._masks.clear()

    def _leave(self) -> None:
        if self._running:
            self._running.pop()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        module = self._running[-1] if self._running else None
        if not _is_plain(tensor) or self._is_weight(module, tensor):
            return tensor
        storage, once = tensor.untyped_storage(), _without_repetition(tensor)
        is_dense = _fills_its_memory(once)
        layout = (once.numel(),) if is_dense else (*once.shape, *once.stride())
        key = (storage._cdata, tensor.storage_offset(), tensor.dtype, tensor._version, is_dense, layout)
        known = self._known.get(key)
        # The weak reference keeps the storage's address from being used again, so equal keys are equal tensors.
        if known is None or known[0].expired():
            known = (StorageWeakRef(storage), self._keep(once, self._policy(module, tensor), is_dense))
            self._known[key] = known
        return _Saved(known[1], tensor.shape, once.shape, tensor.stride() if is_dense else None)

    def _is_weight(self, module: nn.Module | None, tensor: torch.Tensor) -> bool:
        """Whether the tensor is a view of a parameter. Sharded layers have other parameters while they run."""
        storage = tensor.untyped_storage()._cdata
        own = () if module is None else module._parameters.values()
        return storage in self._weights or any(
            weight is not None and _is_plain(weight) and weight.untyped_storage()._cdata == storage
            for weight in own
        )

    def _keep(self, tensor: torch.Tensor, code: BlockCode | None, is_dense: bool) -> _Kept:
        self.original_bytes += tensor.nbytes
        flat = tensor.as_strided((tensor.numel(),), (1,)) if is_dense else tensor
        content: torch.Tensor | Encoded | Place
        if code is None and _may_be_mask(tensor):
            return self._keep_mask(flat, (tensor.shape, tensor.stride(), tensor.dtype))
        if code is None:
            content, nbytes = flat, tensor.nbytes
        else:
            encoded = encode(flat, code)
            nbytes = encoded.nbytes
            content = encoded if self._offload is None else self._offload.put(encoded)
        self.stored_bytes += nbytes
        return _Kept(self, content, tensor.dtype, nbytes)

    def _keep_mask(self, flat: torch.Tensor, layout: tuple[Any, ...]) -> _Kept:
        """The contents of an earlier mask that is equal, or these."""
        known = self._masks.setdefault(layout, [])
        if isinstance(flat, FakeTensor):
            # It has no numbers to compare. There are as many different masks as kinds of attention.
            equal = known[-1:] if len(known) == _kinds_of_attention(self._model) else []
        else:
            equal = [(mask, kept) for mask, kept in known if torch.equal(mask, flat)]
        if equal:
            return equal[0][1]
        kept = _Kept(self, flat, flat.dtype, flat.nbytes)
        known.append((flat, kept))
        self.stored_bytes += flat.nbytes
        return kept

    def _unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        content = saved.kept.content
        if isinstance(content, Place):
            content = content.get()
        flat = decode(content, saved.kept.dtype) if isinstance(content, Encoded) else content
        if saved.stride is None:
            return flat.view(saved.once).expand(saved.shape)
        return flat.as_strided(saved.shape, saved.stride)


def _kinds_of_attention(model: nn.Module) -> int:
    """How many kinds the config names, such as full attention and a sliding window; 1 if it names none."""
    config: Any = getattr(model, "config", None)
    layers = None if config is None else getattr(config.get_text_config(), "layer_types", None)
    return len(set(layers or [None]))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor has a storage of its own kind, unlike tensors that wrap others (DTensor)."""
    return type(tensor) in (torch.Tensor, nn.Parameter, FakeTensor) and tensor.layout == torch.strided


def _without_repetition(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with one element in every dimension whose elements are the same memory, as `expand` makes it.

    On GPUs, torch expands the mask of attention over all heads.
    """
    sizes = [
        (1, 0) if size == 1 or (size > 1 and stride == 0) else (size, stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return tensor.detach().as_strided([size for size, _ in sizes], [stride for _, stride in sizes])


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements are, in some order, consecutive in memory: contiguous, or with exchanged dimensions."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
