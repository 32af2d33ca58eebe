"""Whole models with random weights on a GPU: seconds per generated token, dense bfloat16 and compressed."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from gpu_checks import blob_on
from torch import nn

from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.testing import random_matrix
from ciuic_cli.runtime.swap import BlobSlot, swap_modules

BITS = (4,)
_CONTEXT = 256
_DENSE = ("gate.weight", "norm", "bias")
"""Parameters whose name contains one of these stay dense: routers, norms, biases."""

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "deepseek_v2": {
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    },
}
"""A 7B-shaped Llama and a V2-Lite-shaped mixture of experts."""


def run(family: str, layers: int | None = None, device: str = "cuda") -> dict[str, Any]:
    """Time one model dense and then compressed.

    Args:
        family: key of CONFIGS.
        layers: number of layers instead of the configuration's, for a GPU with little memory.
    """
    values = dict(CONFIGS[family])
    if layers is not None:
        values["num_hidden_layers"] = layers
    model = _model(family, values, device)
    dense_bytes = sum(parameter.nbytes for parameter in model.parameters())
    dense = seconds_per_token(model, device)
    compress(model, device)
    if device == "cuda":
        torch.cuda.empty_cache()
    compressed_bytes = sum(parameter.nbytes for parameter in model.parameters())
    ours = seconds_per_token(model, device)
    return {
        "model": family,
        "layers": values["num_hidden_layers"],
        "bf16_bytes": dense_bytes,
        "bytes": compressed_bytes,
        "bf16": dense,
        "compressed": ours,
        "times_bf16": dense["seconds"] / ours["seconds"],
    }


def _model(family: str, values: dict[str, Any], device: str) -> nn.Module:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[family](max_position_embeddings=4096, tie_word_embeddings=False, **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device=device)
    # to_empty left buffers undefined; the rotary frequencies are computed again from the configuration.
    for name, module in model.named_modules():
        if hasattr(module, "rope_init_fn"):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, type(module)(config=config))
    for parameter in model.parameters():
        parameter.data.fill_(1.0) if parameter.dim() < 2 else parameter.data.normal_(0, 0.02)
    return model.to(device).eval()


def compress(model: nn.Module, device: str) -> None:
    """Replace every matrix by random codes of BITS bits per weight, in place."""
    slots = {}
    for name, parameter in list(model.named_parameters()):
        if parameter.dim() < 2 or any(part in name for part in _DENSE):
            continue
        *experts, rows, cols = parameter.shape
        packed = random_matrix(rows, cols, BITS)
        stored = ExpertStack((packed,) * experts[0]) if experts else packed
        slots[name] = BlobSlot(tuple(parameter.shape), blob_on(stored, torch.device(device)))
    swap_modules(model, slots, torch.bfloat16)


@torch.inference_mode()
def seconds_per_token(model: nn.Module, device: str, tokens: int = 32) -> dict[str, Any]:
    """Decode one sequence with a static cache, as a CUDA graph if the model can be captured.

    Returns:
        {"seconds": median per token, "how": "graph", or "eager" with the reason}.
    """
    from transformers import StaticCache

    from ciuic_cli.evaluation.bench_process import cache_keyword

    cache = {cache_keyword(model): StaticCache(config=model.config, max_cache_len=_CONTEXT + tokens + 8)}
    prompt = torch.randint(0, model.config.vocab_size, (1, _CONTEXT), device=device)
    model(prompt, use_cache=True, **cache)
    token = torch.zeros((1, 1), dtype=torch.int64, device=device)
    position = torch.tensor([_CONTEXT], device=device)

    def step() -> torch.Tensor:
        out = model(token, cache_position=position, position_ids=position[None], use_cache=True, **cache)
        return out.logits[:, -1].argmax(-1)

    step()
    replay, how = step, "eager"
    if device == "cuda":
        try:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                for _ in range(2):
                    step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            replay, how = graph.replay, "graph"
        except RuntimeError as error:  # the model waits for the host somewhere: time it without a graph
            torch.cuda.synchronize()
            how = f"eager ({str(error).splitlines()[0]})"
    seconds = []
    for _ in range(tokens):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            step()
    return {"seconds": statistics.median(seconds) if seconds else float("nan"), "how": how}
