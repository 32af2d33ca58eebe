"""How many chunks of a text run through a layer or the head at once, one thread each.

Products of a few thousand tokens and the element-wise work between them leave torch's threads waiting for each other:
with two threads, a sweep over SmolLM2 kept 1.3 cores busy (measured: docs/experiments/scale/account.md). Chunks do not
depend on each other, so where memory allows, every thread runs a chunk of its own.
"""

from __future__ import annotations

import torch

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.process.memory import PARALLEL_WORK_BYTES

_LAYER_COPIES, _WIDEST_COPIES = 12, 8
"""Float32 copies of a chunk's hidden states, and of the widest matrix's inputs and outputs, while a layer runs forward
and backward. Estimated; docs/SCALE.md compares forecasts with runs."""
_LOGIT_COPIES = 2
"""Float32 copies of the logits while they are compared with stored predictions: the logits, half a copy for the stored
ones in 16 bits, and room for temporaries. Counted, not measured."""


def hidden_width(model_map: ModelMap) -> int:
    """Numbers per token between layers."""
    config = model_map.config.get_text_config()
    streams = int(getattr(config, "hc_mult", 1) or 1)  # DeepSeek-V4 carries several residual streams
    return streams * int(config.hidden_size)


def activation_bytes(model_map: ModelMap, prefix: str, tokens: int) -> int:
    """Estimated bytes of activations while a layer runs forward and backward on a chunk of so many tokens.

    prefix: of the layer's parameter names.
    """
    sizes = (
        sum(parameter.shape[-2:])
        for parameter in model_map.parameters.values()
        if parameter.compress and parameter.name.startswith(prefix)
    )
    per_token = _LAYER_COPIES * hidden_width(model_map) + _WIDEST_COPIES * max(sizes, default=0)
    return 4 * tokens * per_token


def chunks_side_by_side(
    model_map: ModelMap, prefix: str, tokens: int, device: torch.device, *, besides: int = 0
) -> int:
    """How many chunks of so many tokens run through a layer at once: one for each thread of torch, at least 2; or 1.

    Chunks run one after the other, each with all threads, on a GPU, in layers with expert stacks (their weights are
    brought where they are used by a mode of torch, which belongs to one thread), and where a chunk takes more than
    PARALLEL_WORK_BYTES. Which of the two it is does not depend on the number of threads, because the bits of products
    in bfloat16 may depend on it (`stable_bits.py`). besides: bytes that each chunk takes besides activations.
    """
    has_experts = any(
        len(parameter.shape) == 3 and parameter.name.startswith(prefix)
        for parameter in model_map.parameters.values()
    )
    fits = activation_bytes(model_map, prefix, tokens) + besides <= PARALLEL_WORK_BYTES
    return max(2, torch.get_num_threads()) if device.type == "cpu" and not has_experts and fits else 1


def logit_bytes(vocabulary: int, tokens: int) -> int:
    """Estimated bytes while the logits of so many tokens are compared with stored predictions."""
    return _LOGIT_COPIES * 4 * tokens * vocabulary


def heads_side_by_side(model_map: ModelMap, tokens: int, device: torch.device) -> int:
    """How many chunks run through the head at once, without gradients: one for each thread of torch, at least 2; or 1.

    tokens: whose logits of a chunk exist at a time. Chunks run one after the other on a GPU, and where a chunk's logits
    take more than PARALLEL_WORK_BYTES.
    """
    vocabulary = int(model_map.config.get_text_config().vocab_size)
    fits = logit_bytes(vocabulary, tokens) <= PARALLEL_WORK_BYTES
    return max(2, torch.get_num_threads()) if device.type == "cpu" and fits else 1
