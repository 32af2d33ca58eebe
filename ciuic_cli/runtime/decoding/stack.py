"""One native program for all decoder layers of a model, attention and the writing of keys and values included."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from ciuic_cli.codecs import native
from ciuic_cli.runtime.attention.growing_cache import GrowingLayer, Part, let_grow
from ciuic_cli.runtime.decoding.layer_steps import LayerSteps, Sources
from ciuic_cli.runtime.decoding.program import ProgramBuilder

HEAD_COLUMNS = 16
"""kHeadColumns of `kernels.h`: the size of a head is a multiple of it."""

MAX_HEAD_DIM = 256
"""kMaxHeadSize of `kernels.h`."""


class StackProgram:
    """The program of all layers, and what it was made from.

    Attributes:
        sources: the modules and parameters that it was made from.
        is_tried: whether the module that calls the layers had the same results with and without the program.

    Raises:
        ValueError: the layers' keys and values have different shapes.
    """

    def __init__(self, layers: Sequence[LayerSteps]) -> None:
        self.count = len(layers)
        self.head_dim, self.kv_heads = layers[0].head_dim, layers[0].kv_heads
        heads = self.kv_heads * self.head_dim
        if any(steps.head_dim != self.head_dim or steps.widths[1:] != (heads, heads) for steps in layers):
            raise ValueError("layers with caches of different shapes")
        if self.head_dim % HEAD_COLUMNS or self.head_dim > MAX_HEAD_DIM:
            raise ValueError("heads of another size than the native attention has")
        if [steps.layer_index for steps in layers] != list(range(self.count)):
            raise ValueError("layers that are not numbered in their order")
        self.sources = Sources()
        builder = ProgramBuilder()
        x = builder.load(0, layers[0].hidden)
        for index, steps in enumerate(layers):
            self.sources.extend(steps.sources)
            q, k, v = steps.before_attention(builder, x)
            for array, buffer in enumerate((k, v), start=2 * index):
                builder.cache(buffer, self.head_dim, array)
                builder.release(buffer)
            attended = builder.attend(q, self.head_dim, self.kv_heads, steps.scaling, 2 * index)
            builder.release(q)
            x = steps.after_attention(builder, attended, x)
        builder.store(x, 3)
        self._program = builder.build()
        self._arrays = ctypes.c_void_p * (2 * self.count)
        self.is_tried = False

    def run(
        self,
        x: torch.Tensor,
        angles: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        cache: Any,
        caches: native.CiuicCaches,
    ) -> torch.Tensor:
        """The output of the last layer; every layer of the cache gets a token.

        Args:
            x: [b, 1, hidden].
            angles: cosines and sines, [b, 1, head_dim] of the dtype of x.
            bias: float32 [b, tokens], added to the scores, or None.
            cache: a transformers cache.
            caches: what `reserve` made of it.
        """
        x = x.contiguous()
        out = torch.empty_like(x)
        caches.bias = None if bias is None else bias.data_ptr()
        self._program.run((x, *angles, out), x.shape[0], caches=caches)
        for layer in cache.layers:
            layer.take_reserved()
        return out

    def reserve(self, x: torch.Tensor, cache: Any) -> native.CiuicCaches | None:
        """The cache's memory with room for a token of each of the b sequences; None if the program cannot use it."""
        known: Sequence[Any] = getattr(cache, "layers", ())
        if len(known) != self.count or getattr(cache, "offloading", False):
            return None
        for index in range(self.count):
            let_grow(cache, index)
        parts: list[Part] = []
        tokens = known[0].get_seq_length()
        for layer in known:
            if type(layer) is not GrowingLayer or not layer.is_initialized:
                return None
            parts += layer.reserve()
        shape, strides, *_ = kind = parts[0].kind
        if (shape[0], shape[1], shape[3]) != (x.shape[0], self.kv_heads, self.head_dim) or strides[3] != 1:
            return None
        if kind[2:] != (x.dtype, x.device, False):
            return None
        if any([part.count != tokens or part.kind != kind for part in parts]):  # noqa: C419  a list is faster
            return None
        return native.CiuicCaches(
            arrays=ctypes.cast(self._arrays(*[part.address for part in parts]), ctypes.c_void_p),
            count=len(parts),
            context=tokens + 1,
            sequence_stride=strides[0],
            head_stride=strides[1],
            token_stride=strides[2],
        )
