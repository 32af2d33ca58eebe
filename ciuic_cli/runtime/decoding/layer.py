"""Decoder layers of transformers that compute single tokens by native programs.

A layer qualifies by its parts (RMS norms, attention with q, k, v and o projections, a gated MLP; all matrices
compressed) and by a trial: before the first token, the layer's own `forward` and the programs compute the same random
token, and the programs are used only if the results agree. So other rotary embeddings, residual factors and the like
need no list. What the programs do not cover (prompts, gradients, hooks, adapters, GPUs, torch.compile) runs in the
layer's own `forward`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ciuic_cli.runtime.attention.prompts import implementation_of_model
from ciuic_cli.runtime.decoding.layer_steps import (
    ATTENTION_PARTS,
    HEAD_NORMS,
    LAYER_NORMS,
    MLP_PARTS,
    LayerSteps,
    is_watched,
)
from ciuic_cli.runtime.decoding.program import ProgramBuilder
from ciuic_cli.runtime.mixed_classes import Mixin, mixed_class, original_class

MAX_ROWS = 8
"""Most sequences of a batch: the largest batch for which the native kernels decode the codes once. Not tuned."""

_LAYER_PARTS = {"self_attn", "mlp", *LAYER_NORMS}
_SCORE_TERMS = ("sinks", "softcap", "attn_logit_softcapping", "logit_softcapping")
"""Attributes of attention modules that change large scores only, which the trial might miss."""

_UNDERSTOOD = ("sdpa", "eager")
"""Attention implementations whose masks (None, or 4-D) `scaled_dot_product_attention` takes."""

CACHE_NAMES = ("cache", "past_key_values")
"""The keyword of the cache, by transformers' version (5.24 renamed it)."""

_IGNORED = {"position_ids", "use_cache", "cache_position", *CACHE_NAMES}
_READ = {"attention_mask", "position_embeddings"}

_ATTRIBUTE = "_ciuic_programs"

STEPS = "_ciuic_steps"
"""The attribute of a layer and of the module that calls it, for steps of all layers (`step.py`)."""

TRIAL_TOLERANCE = 2e-3
"""Largest relative difference between the trial's two results. Rounded activations cause 1e-4, a missing term 1e-1."""

_TRIAL_CONTEXT = 6
"""Cached tokens of the trial: enough for scores and rotary embedding to matter."""


class DecoderLayer(Mixin):
    """Mixin for decoder layer classes."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As any module's, unless the call is part of a step of all layers."""
        steps = self.__dict__.get(STEPS)
        if steps is not None and not torch.compiler.is_compiling():
            step = steps.pending
            if step is not None and step.takes(self, args, kwargs):
                return step.result
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward, or its programs where they compute the same."""
        if not torch.compiler.is_compiling() and not args and suits(self, hidden_states, kwargs):
            programs = programs_of(self)
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
    """The two programs of one layer, before and after attention, and what they were made from.

    Raises:
        ValueError: a part of the layer is not of the kind that the programs compute.
    """

    def __init__(self, layer: Any) -> None:
        self.steps = steps = LayerSteps(layer)
        before, after = ProgramBuilder(), ProgramBuilder()
        for argument, buffer in enumerate(
            steps.before_attention(before, before.load(0, steps.hidden)), start=3
        ):
            before.store(buffer, argument)
        attended, residual = after.load(0, steps.widths[0]), after.load(1, steps.hidden)
        after.store(steps.after_attention(after, attended, residual), 2)
        self._before, self._after = before.build(), after.build()

    def decode(self, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """The layer's output, [b, 1, hidden], for one token of each sequence; the cache gets its keys and values."""
        steps, batch = self.steps, hidden_states.shape[0]
        cosine, sine = rows_of(kwargs["position_embeddings"], hidden_states)
        hidden_states = hidden_states.contiguous()
        q, k, v = (hidden_states.new_empty((batch, width)) for width in steps.widths)
        self._before.run((hidden_states, cosine, sine, q, k, v), batch)
        heads = (batch, steps.kv_heads, 1, steps.head_dim)
        keys, values = cache_of(kwargs).update(k.view(heads), v.view(heads), steps.layer_index)
        # The queries of one key-value head stand where a sequence's tokens would: no key is repeated.
        grouped = q.view(batch, steps.kv_heads, -1, steps.head_dim)
        attended = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=kwargs.get("attention_mask"), scale=steps.scaling
        )
        out = torch.empty_like(hidden_states)
        self._after.run((attended.contiguous(), hidden_states, out), batch)
        return out

    def is_current(self) -> bool:
        """Whether the layer's modules and parameters are still those that the programs were made from."""
        return not self.steps.sources.are_watched() and self.steps.sources.are_current()


def _has_the_parts(module: nn.Module) -> bool:
    parts = module._modules
    if parts.keys() != _LAYER_PARTS or module._parameters:
        return False
    attention, mlp = parts["self_attn"], parts["mlp"]
    assert attention is not None and mlp is not None
    linears = attention._modules.keys() - HEAD_NORMS
    return (
        linears == ATTENTION_PARTS
        and mlp._modules.keys() - {"act_fn"} == MLP_PARTS
        and not attention._parameters
        and all(getattr(attention, name, None) is None for name in _SCORE_TERMS)
        and all(hasattr(attention, name) for name in ("head_dim", "scaling", "layer_idx", "config"))
    )


def suits(layer: Any, x: torch.Tensor, kwargs: dict[str, Any]) -> bool:
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
    if kwargs.get("position_embeddings") is None or all(kwargs.get(name) is None for name in CACHE_NAMES):
        return False
    attention, mlp = layer._modules["self_attn"], layer._modules["mlp"]
    angles = ((1, 1, attention.head_dim), (x.shape[0], 1, attention.head_dim))
    if any(part.shape not in angles for part in kwargs["position_embeddings"]):
        return False  # angles for a part of a head's numbers, or of another form
    return (
        implementation_of_model(attention) in _UNDERSTOOD
        and not is_watched(attention)
        and not is_watched(mlp)
        and not nn.modules.module._has_any_global_hook()
    )


def programs_of(layer: Any) -> LayerPrograms | None:
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


def known_of(layer: Any) -> Any:
    """An object that stays the same as long as the layer has the same programs, or none."""
    return layer.__dict__.get(_ATTRIBUTE)


def has_watched_parts(layer: Any) -> bool:
    """Whether somebody watches the calls of the layer, its attention or its MLP."""
    return is_watched(layer) or is_watched(layer._modules["self_attn"]) or is_watched(layer._modules["mlp"])


class _Known:
    """What a layer knows of its programs. A copy of the layer knows nothing, because programs hold addresses."""

    def __init__(self, programs: LayerPrograms | None = None, refused: Any = None) -> None:
        self.programs = programs
        self.refused = refused  # without programs: the signature of the layer that has none

    def __reduce__(self) -> Any:
        return _Known, ()


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    """Changes when a part of the layer is replaced, or gets or loses hooks."""
    return tuple((id(module), is_watched(module)) for module in layer.modules())


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
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[-1])


def cache_of(kwargs: dict[str, Any]) -> Any:
    """The cache among a layer's keywords."""
    return next(kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None)


def rows_of(angles: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Cosines and sines, [1 or batch, 1, n], as contiguous [batch, 1, n] of the dtype of x, [batch, 1, hidden]."""
    return [part.to(x.dtype).expand(x.shape[0], -1, -1).contiguous() for part in angles]
