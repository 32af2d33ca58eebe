"""The steps of a decoder layer around its attention, as parts of programs, and what they were made from."""

from __future__ import annotations

import operator
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ciuic_cli.runtime.blobs import weight_of
from ciuic_cli.runtime.decoding.program import Activation, ProgramBuilder
from ciuic_cli.runtime.matrices import CpuMatrix
from ciuic_cli.runtime.modules import CompressedLinear

ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
LAYER_NORMS = {"input_layernorm", "post_attention_layernorm"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj"}

ANGLES = 1
"""The argument of a program that holds the cosines of the rotary embedding; the sines are the next one."""


class LayerSteps:
    """The steps of one layer.

    Attributes:
        widths: numbers of the queries, keys and values of a token.
        sources: the modules and parameters that the steps were made from.

    Raises:
        ValueError: a part of the layer is not of the kind that programs compute.
    """

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_index: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.sources = Sources()
        self._layer = layer
        self._matrices = {
            name: self._matrix(parent, name)
            for parent, names in ((attention, ATTENTION_PARTS), (mlp, MLP_PARTS))
            for name in sorted(names)
        }
        self._norms = {
            name: self._norm(parent, name)
            for parent, names in ((layer, LAYER_NORMS), (attention, HEAD_NORMS & attention._modules.keys()))
            for name in sorted(names)
        }
        self._activation = _activation(mlp.act_fn)
        for module in (layer, attention, mlp):
            self.sources.add_caller(module)
        self.hidden = self._matrices["q_proj"].cols
        self.widths = tuple(self._matrices[name].rows for name in ("q_proj", "k_proj", "v_proj"))
        self.kv_heads = self.widths[1] // self.head_dim

    def before_attention(self, builder: ProgramBuilder, x: int) -> tuple[int, int, int]:
        """Buffers of the queries, keys and values of a token: norm, projections and rotary embedding of buffer `x`."""
        attention = self._layer.self_attn
        normed = builder.norm(x, *self._norms["input_layernorm"])
        q, k, v = (self._product(builder, normed, attention, name) for name in ("q_proj", "k_proj", "v_proj"))
        builder.release(normed)
        if self._norms.keys() >= HEAD_NORMS:
            q = builder.norm(q, *self._norms["q_norm"])
            k = builder.norm(k, *self._norms["k_norm"])
        for buffer in (q, k):
            builder.rotate(buffer, self.head_dim, ANGLES)
        return q, k, v

    def after_attention(self, builder: ProgramBuilder, attended: int, residual: int) -> int:
        """The buffer of the layer's output. The two buffers that it reads are free afterwards."""
        mlp = self._layer.mlp
        projected = self._product(builder, attended, self._layer.self_attn, "o_proj")
        builder.release(attended)
        middle = builder.add(residual, projected)
        builder.release(residual, projected)
        normed = builder.norm(middle, *self._norms["post_attention_layernorm"])
        gate, up = (self._product(builder, normed, mlp, name) for name in ("gate_proj", "up_proj"))
        gated = builder.gate(gate, up, self._activation)
        builder.release(normed, gate, up)
        down = self._product(builder, gated, mlp, "down_proj")
        out = builder.add(middle, down)
        builder.release(gated, down, middle)
        return out

    def _product(self, builder: ProgramBuilder, source: int, parent: Any, name: str) -> int:
        return builder.multiply(source, self._matrices[name].factor_with(getattr(parent, name).bias))

    def _matrix(self, parent: nn.Module, name: str) -> CpuMatrix:
        module: Any = parent._modules[name]
        if type(module) is not CompressedLinear or module.blob.device.type != "cpu" or is_watched(module):
            raise ValueError(f"{name} is not only a compressed linear on the CPU")
        matrix = weight_of(module.blob).matrix
        if not isinstance(matrix, CpuMatrix) or matrix.lowrank is not None:
            raise ValueError(f"{name} has a low-rank part")
        self.sources.add(parent, name)
        return matrix

    def _norm(self, parent: Any, name: str) -> tuple[torch.Tensor, float]:
        module = getattr(parent, name)
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(epsilon, float) or set(module._parameters) != {"weight"} or is_watched(module):
            raise ValueError(f"{name} is not an RMS norm")
        self.sources.add(parent, name)
        return module.weight.detach().to(torch.float32).contiguous().clone(), epsilon


class Sources:
    """Submodules as they were when a program was made from them.

    The references are strong: the layer that owns its programs owns its submodules too. The checks run for each token,
    behind products that filled the caches, so they go over flat lists and look into dictionaries directly.
    """

    def __init__(self) -> None:
        self._siblings: list[dict[str, Any]] = []  # `_modules` of the parents of `_modules`
        self._names: list[str] = []
        self._modules: list[nn.Module] = []
        self._owners: list[dict[str, Any]] = []  # `_parameters` of the modules of `_parameters`
        self._keys: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._addresses: list[int] = []
        self._versioned: list[nn.Parameter] = []  # parameters that are no inference tensors
        self._versions: list[int] = []
        self._hooks: list[Any] = []
        self._attributes: list[dict[str, Any]] = []
        self._modes: list[dict[str, Any]] = []  # attributes of modules whose mode may be training

    def add(self, parent: nn.Module, name: str) -> None:
        """Remember the submodule `name` of `parent`, and its parameters."""
        module = parent._modules[name]
        assert module is not None
        self._siblings.append(parent._modules)
        self._names.append(name)
        self._modules.append(module)
        self._watch(module)
        for key, value in module._parameters.items():
            if value is not None:
                self._owners.append(module._parameters)
                self._keys.append(key)
                self._parameters.append(value)
                self._addresses.append(value.data_ptr())
                if not value.is_inference():
                    self._versioned.append(value)
                    self._versions.append(value._version)

    def add_caller(self, module: nn.Module) -> None:
        """Remember that the module has no hooks, no `forward` of its own, and is not in training mode."""
        self._watch(module)
        self._modes.append(module.__dict__)

    def _watch(self, module: nn.Module) -> None:
        self._hooks += [module._forward_hooks, module._forward_pre_hooks]
        self._attributes.append(module.__dict__)

    def extend(self, others: Sources) -> None:
        """Remember what others remember."""
        for name, known in others.__dict__.items():
            getattr(self, name).extend(known)

    def are_watched(self) -> bool:
        """Whether calls of a module do more than its class says (`is_watched`), or it is in training mode."""
        return (
            any(self._hooks)
            or any(map(dict.__contains__, self._attributes, repeat("forward")))
            or any([attributes["training"] for attributes in self._modes])  # noqa: C419  a list is faster
        )

    def are_current(self) -> bool:
        """Whether modules and parameters are the same, with the same contents."""
        return (
            all(map(operator.is_, map(dict.get, self._siblings, self._names), self._modules))
            and all(map(operator.is_, map(dict.get, self._owners, self._keys), self._parameters))
            and list(map(torch.Tensor.data_ptr, self._parameters)) == self._addresses
            and list(map(_VERSION_OF, self._versioned)) == self._versions
        )


_VERSION_OF = torch.Tensor._version.__get__  # type: ignore[attr-defined]  # without a function of Python


def is_watched(module: nn.Module) -> bool:
    """Whether calls of the module do more than its class says: hooks, or a `forward` of its own (accelerate)."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _activation(function: Any) -> Activation:
    """The activation that a function computes. Raises ValueError if the programs do not have it."""
    x = torch.linspace(-6, 6, 49)
    with torch.no_grad():
        y = function(x)
    for activation, reference in (
        (Activation.SILU, F.silu(x)),
        (Activation.GELU_TANH, F.gelu(x, approximate="tanh")),
    ):
        if torch.allclose(y, reference, rtol=1e-5, atol=1e-6):
            return activation
    raise ValueError("another activation")
