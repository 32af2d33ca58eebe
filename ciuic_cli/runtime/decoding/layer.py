"""Decoder layers of transformers that compute single tokens by two native programs, before and after attention.

A layer qualifies by its parts (RMS norms, attention with q, k, v and o projections, a gated MLP; all matrices
compressed) and by a trial: before the first token, the layer's own `forward` and the programs compute the same random
token, and the programs are used only if the results agree. So other rotary embeddings, residual factors and the like
need no list. What the programs do not cover (prompts, gradients, hooks, adapters, GPUs, torch.compile) runs in the
layer's own `forward`.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ciuic_cli.runtime.blobs import weight_of
from ciuic_cli.runtime.decoding.program import Activation, Program, ProgramBuilder
from ciuic_cli.runtime.matrices import CpuMatrix
from ciuic_cli.runtime.mixed_classes import Mixin, mixed_class, original_class
from ciuic_cli.runtime.modules import CompressedLinear

MAX_ROWS = 8
"""Most sequences of a batch: the largest batch for which the native kernels decode the codes once. Not tuned."""

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj"}
_SCORE_TERMS = ("sinks", "softcap", "attn_logit_softcapping", "logit_softcapping")
"""Attributes of attention modules that change large scores only, which the trial might miss."""

_UNDERSTOOD = ("sdpa", "eager")
"""Attention implementations whose masks (None, or 4-D) `scaled_dot_product_attention` takes."""

_CACHE_NAMES = ("cache", "past_key_values")
"""The keyword of the cache, by transformers' version (5.24 renamed it)."""

_IGNORED = {"position_ids", "use_cache", "cache_position", *_CACHE_NAMES}
_READ = {"attention_mask", "position_embeddings"}

_ATTRIBUTE = "_ciuic_programs"

TRIAL_TOLERANCE = 2e-3
"""Largest relative difference between the trial's two results. 15-bit activations cause 1e-4, a missing term 1e-1."""

_TRIAL_CONTEXT = 6
"""Cached tokens of the trial: enough for scores and rotary embedding to matter."""


class DecoderLayer(Mixin):
    """Mixin for decoder layer classes."""

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward, or its programs where they compute the same."""
        if not torch.compiler.is_compiling() and not args and _suits(self, hidden_states, kwargs):
            programs = _programs(self)
            if programs is not None:
                return programs.decode(hidden_states, kwargs)
        return original_class(self).forward(self, hidden_states, *args, **kwargs)


def adapt_decoder_layers(model: nn.Module) -> None:
    """Change the class of every decoder layer that has the parts of `LayerPrograms`, in place."""
    for module in list(model.modules()):
        if not isinstance(module, DecoderLayer) and _has_the_parts(module):
            kind: Any = type(module)
            module.__class__ = mixed_class(DecoderLayer, kind)


class LayerPrograms:
    """The two programs of one layer, and what they were made from.

    Raises:
        ValueError: a part of the layer is not of the kind that the programs compute.
    """

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._layer_index: int = attention.layer_idx
        self._head_dim: int = attention.head_dim
        self._scaling: float = attention.scaling
        self._sources: list[_Source] = []
        matrices = {
            name: self._matrix(parent, name)
            for parent, names in ((attention, _ATTENTION_PARTS), (mlp, _MLP_PARTS))
            for name in sorted(names)
        }
        hidden = matrices["q_proj"].cols
        self._widths = tuple(matrices[name].rows for name in ("q_proj", "k_proj", "v_proj"))
        self._kv_heads = self._widths[1] // self._head_dim
        self._before = self._before_attention(layer, matrices, hidden)
        self._after = self._after_attention(layer, matrices, hidden)

    def decode(self, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """The layer's output, [b, 1, hidden], for one token of each sequence; the cache gets its keys and values."""
        batch = hidden_states.shape[0]
        cosine, sine = (_rows(part, hidden_states) for part in kwargs["position_embeddings"])
        hidden_states = hidden_states.contiguous()
        q, k, v = (hidden_states.new_empty((batch, width)) for width in self._widths)
        self._before.run((hidden_states, cosine, sine, q, k, v), batch)
        heads = (batch, self._kv_heads, 1, self._head_dim)
        cache = next(kwargs[name] for name in _CACHE_NAMES if kwargs.get(name) is not None)
        keys, values = cache.update(k.view(heads), v.view(heads), self._layer_index)
        # The queries of one key-value head stand where a sequence's tokens would: no key is repeated.
        grouped = q.view(batch, self._kv_heads, -1, self._head_dim)
        attended = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=kwargs.get("attention_mask"), scale=self._scaling
        )
        out = torch.empty_like(hidden_states)
        self._after.run((attended.contiguous(), hidden_states, out), batch)
        return out

    def is_current(self) -> bool:
        """Whether the layer's modules and parameters are still those that the programs were made from."""
        return all(source.is_current() for source in self._sources)

    def _before_attention(self, layer: Any, matrices: dict[str, CpuMatrix], hidden: int) -> Program:
        builder, attention = ProgramBuilder(), layer.self_attn
        normed = self._norm(builder, builder.load(0, hidden), layer, "input_layernorm")
        q, k, v = (
            builder.multiply(normed, matrices[name].factor_with(getattr(attention, name).bias))
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if attention._modules.keys() >= _HEAD_NORMS:
            q = self._norm(builder, q, attention, "q_norm")
            k = self._norm(builder, k, attention, "k_norm")
        for buffer in (q, k):
            builder.rotate(buffer, self._head_dim, 1)
        for argument, buffer in enumerate((q, k, v), start=3):
            builder.store(buffer, argument)
        return builder.build()

    def _after_attention(self, layer: Any, matrices: dict[str, CpuMatrix], hidden: int) -> Program:
        builder, mlp = ProgramBuilder(), layer.mlp
        attended, residual = builder.load(0, matrices["o_proj"].cols), builder.load(1, hidden)
        projected = builder.multiply(attended, matrices["o_proj"].factor_with(layer.self_attn.o_proj.bias))
        residual = builder.add(residual, projected)
        normed = self._norm(builder, residual, layer, "post_attention_layernorm")
        gate, up = (
            builder.multiply(normed, matrices[name].factor_with(getattr(mlp, name).bias))
            for name in ("gate_proj", "up_proj")
        )
        gated = builder.gate(gate, up, _activation(mlp.act_fn))
        down = builder.multiply(gated, matrices["down_proj"].factor_with(mlp.down_proj.bias))
        builder.store(builder.add(residual, down), 2)
        return builder.build()

    def _matrix(self, parent: nn.Module, name: str) -> CpuMatrix:
        module: Any = parent._modules[name]
        if type(module) is not CompressedLinear or module.blob.device.type != "cpu" or _is_watched(module):
            raise ValueError(f"{name} is not only a compressed linear on the CPU")
        matrix = weight_of(module.blob).matrix
        if not isinstance(matrix, CpuMatrix) or matrix.lowrank is not None:
            raise ValueError(f"{name} has a low-rank part")
        self._sources.append(_Source(parent, name))
        return matrix

    def _norm(self, builder: ProgramBuilder, source: int, parent: Any, name: str) -> int:
        module = getattr(parent, name)
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(epsilon, float) or set(module._parameters) != {"weight"} or _is_watched(module):
            raise ValueError(f"{name} is not an RMS norm")
        self._sources.append(_Source(parent, name))
        return builder.norm(source, module.weight.detach().to(torch.float32).contiguous().clone(), epsilon)


class _Source:
    """A submodule as it was when a program was made from it.

    The references are strong: the layer that owns its programs owns its submodules too. `is_current` runs ten times per
    layer and token, so it looks into dictionaries directly.
    """

    def __init__(self, parent: nn.Module, name: str) -> None:
        module = parent._modules[name]
        assert module is not None
        self.siblings, self.name, self.module = parent._modules, name, module
        self.parameters = [
            (module._parameters, key, weakref.ref(value), value.data_ptr(), _version(value))
            for key, value in module._parameters.items()
            if value is not None
        ]

    def is_current(self) -> bool:
        module = self.module
        if self.siblings.get(self.name) is not module or _is_watched(module):
            return False
        for parameters, key, reference, address, version in self.parameters:
            value = parameters.get(key)
            if (
                value is None
                or reference() is not value
                or value.data_ptr() != address
                or _version(value) != version
            ):
                return False
        return True


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _has_the_parts(module: nn.Module) -> bool:
    parts = module._modules
    if parts.keys() != _LAYER_PARTS or module._parameters:
        return False
    attention, mlp = parts["self_attn"], parts["mlp"]
    assert attention is not None and mlp is not None
    linears = attention._modules.keys() - _HEAD_NORMS
    return (
        linears == _ATTENTION_PARTS
        and mlp._modules.keys() - {"act_fn"} == _MLP_PARTS
        and not attention._parameters
        and all(getattr(attention, name, None) is None for name in _SCORE_TERMS)
        and all(hasattr(attention, name) for name in ("head_dim", "scaling", "layer_idx", "config"))
    )


def _suits(layer: Any, x: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether the call is a decoding step that the programs cover."""
    if x.dim() != 3 or x.shape[1] != 1 or not 1 <= x.shape[0] <= MAX_ROWS:
        return False
    if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float32) or layer.training:
        return False
    if type(x) is not torch.Tensor or (torch.is_grad_enabled() and x.requires_grad):
        return False
    if any(
        value is not None and value is not False
        for name, value in kwargs.items()
        if name not in _IGNORED | _READ
    ):
        return False
    if kwargs.get("position_embeddings") is None or all(kwargs.get(name) is None for name in _CACHE_NAMES):
        return False
    attention, mlp = layer._modules["self_attn"], layer._modules["mlp"]
    angles = ((1, 1, attention.head_dim), (x.shape[0], 1, attention.head_dim))
    if any(part.shape not in angles for part in kwargs["position_embeddings"]):
        return False  # angles for a part of a head's numbers, or of another form
    return (
        attention.config._attn_implementation in _UNDERSTOOD
        and not _is_watched(attention)
        and not _is_watched(mlp)
        and not nn.modules.module._has_any_global_hook()
    )


def _is_watched(module: nn.Module) -> bool:
    """Whether calls of the module do more than its class says: hooks, or a `forward` of its own (accelerate)."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _programs(layer: Any) -> LayerPrograms | None:
    """The layer's programs, made and tried at the first call and whenever a part of it has changed."""
    known: _Known | None = layer.__dict__.get(_ATTRIBUTE)
    if known is not None:
        if known.programs is not None and known.programs.is_current():
            return known.programs
        if known.programs is None and known.refused == _signature(layer):
            return None
    programs = _tried(layer)
    layer.__dict__[_ATTRIBUTE] = _Known(programs, None if programs is not None else _signature(layer))
    return programs


class _Known:
    """What a layer knows of its programs. A copy of the layer knows nothing, because programs hold addresses."""

    def __init__(self, programs: LayerPrograms | None = None, refused: Any = None) -> None:
        self.programs = programs
        self.refused = refused  # without programs: the signature of the layer that has none

    def __reduce__(self) -> Any:
        return _Known, ()


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    """Changes when a part of the layer is replaced, or gets or loses hooks."""
    return tuple((id(module), _is_watched(module)) for module in layer.modules())


def _tried(layer: Any) -> LayerPrograms | None:
    """Programs that computed a random token as the layer's own forward does; None if there are none."""
    try:
        programs = LayerPrograms(layer)
        expected, found = (_trial(layer, compute) for compute in (original_class(layer).forward, programs))
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError):
        return None
    same = all(
        a.shape == b.shape and bool((a - b).norm() <= TRIAL_TOLERANCE * a.norm())
        for a, b in zip(expected, found, strict=True)
    )
    return programs if same else None


@torch.no_grad()
def _trial(layer: Any, compute: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, keys, values) of a random token behind random cached ones, in float32."""
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(layer.self_attn.layer_idx)
    attention, heads = layer.self_attn, layer.self_attn.k_proj.out_features // layer.self_attn.head_dim
    shape = (1, heads, _TRIAL_CONTEXT, attention.head_dim)
    cache = DynamicCache(config=attention.config)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    cache.update(keys, values, attention.layer_idx)
    x = torch.randn((1, 1, attention.q_proj.in_features), generator=generator)
    angles = torch.rand((1, 1, attention.head_dim // 2), generator=generator).repeat(1, 1, 2)
    kwargs: dict[str, Any] = {
        "attention_mask": None,
        "position_ids": torch.tensor([[_TRIAL_CONTEXT]]),
        "use_cache": True,
        "position_embeddings": (angles.cos(), angles.sin()),
        _cache_name(original_class(layer)): cache,
    }
    out = compute.decode(x, kwargs) if isinstance(compute, LayerPrograms) else compute(layer, x, **kwargs)
    if isinstance(out, tuple):
        raise TypeError("the layer returns more than its output")
    cached = cache.layers[attention.layer_idx]
    return out, cached.keys, cached.values


def _cache_name(kind: Any) -> str:
    parameters = inspect.signature(kind.forward).parameters
    return next((name for name in _CACHE_NAMES if name in parameters), _CACHE_NAMES[-1])


def _rows(part: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Cosines or sines, [1 or batch, 1, n], as contiguous [batch, 1, n] of the dtype of x, [batch, 1, hidden]."""
    return part.to(x.dtype).expand(x.shape[0], -1, -1).contiguous()


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
