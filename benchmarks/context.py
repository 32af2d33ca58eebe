"""Time per token of a random model with latent attention (MLA) at several context lengths.

    python benchmarks/context.py --family deepseek_v3 --hidden-size 1024 --layers 4

The model has random codes at 4 bits per weight: every string of bits is valid, so nothing has to be compressed. The
cache is filled with random latents; that of deepseek_v4, whose attention has a window and compressed tokens instead of
latents, by a random prompt. With --compare the same steps run once more with the whole context expanded in each
step, as transformers does it, and the predictions are compared; deepseek_v4's keys are copied once per head then.
With --exact both are compared with the same model in float32 (expanded), too: what differs there is due to the dtype.
--save FOLDER measures nothing; it writes the model to FOLDER/artifact, decoded to FOLDER/dense, for `ciuic bench`.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.testing import blob_of, random_matrix
from ciuic_cli.evaluation.bench_process import cache_keyword
from ciuic_cli.runtime.attention import mla_products, shared_keys
from ciuic_cli.runtime.loading import pack_module_inplace

RANK, ROPE = 512, 64
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "greedy"},
    "deepseek_v3": {},
    "deepseek_v32": {"index_topk": 2048},
    "deepseek_v4": {},
}


def config_of(family: str, hidden_size: int, layers: int) -> Any:
    """16 heads, 16 experts of which 6 are chosen; kv_lora_rank 512 and heads of 128, or V4's heads of 512."""
    common = {
        "vocab_size": 8192, "hidden_size": hidden_size, "moe_intermediate_size": hidden_size // 2,
        "num_hidden_layers": layers, "num_attention_heads": 16, "q_lora_rank": 768, "n_routed_experts": 16,
        "n_shared_experts": 1, "num_experts_per_tok": 6, "max_position_embeddings": 16384,
    }  # fmt: skip
    if family == "deepseek_v4":
        kinds = ("heavily_compressed_attention", "compressed_sparse_attention")
        return CONFIG_MAPPING[family](**common, layer_types=[kinds[i % 2] for i in range(layers)])
    return CONFIG_MAPPING[family](
        **common, intermediate_size=2 * hidden_size, num_key_value_heads=16, kv_lora_rank=RANK, qk_nope_head_dim=128,
        qk_rope_head_dim=ROPE, v_head_dim=128, n_group=1, topk_group=1, first_k_dense_replace=1, **FAMILIES[family],
    )  # fmt: skip


def random_model(config: Any, dtype: torch.dtype) -> Any:
    """A model whose weights are random codes at 4 bits."""
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    blobs = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3:
            experts, rows, cols = parameter.shape
            stack = ExpertStack(tuple(random_matrix(rows, cols, seed=expert) for expert in range(experts)))
            blobs[name] = blob_of(stack)
        elif parameter.dim() == 2 and isinstance(
            model.get_submodule(name.rpartition(".")[0]), nn.Linear | nn.Embedding
        ):
            blobs[name] = blob_of(random_matrix(*parameter.shape))
    return pack_module_inplace(model, blobs)


def filled_cache(model: Any, context: int) -> DynamicCache:
    """A cache of random latents, rotary keys and, for V3.2, keys of the indexer."""
    torch.manual_seed(context)
    if model.config.model_type == "deepseek_v4":
        prompt = torch.randint(0, model.config.vocab_size, (1, context))
        return model(prompt, use_cache=True, logits_to_keep=1).past_key_values
    cache = DynamicCache(config=model.config)
    for layer in range(model.config.num_hidden_layers):
        latents, rope = torch.randn(1, 1, context, RANK), torch.randn(1, 1, context, ROPE)
        cache.update(latents.to(model.dtype), rope.to(model.dtype), layer)
        if model.config.model_type == "deepseek_v32":
            keys = torch.randn(1, context, model.config.index_head_dim)
            cache.update_indexer(keys.to(model.dtype), layer)
    return cache


@torch.inference_mode()
def decode(model: Any, context: int, steps: int) -> tuple[list[float], torch.Tensor]:
    """(milliseconds of each step, log-probabilities [steps, vocabulary])."""
    cache = {cache_keyword(model): filled_cache(model, context)}
    times, found = [], []
    for step in range(steps):
        begin = time.perf_counter()
        output = model(torch.full((1, 1), 50 + step), use_cache=True, **cache)
        times.append(1e3 * (time.perf_counter() - begin))
        found.append(output.logits[0, -1].float().log_softmax(-1))
    return times, torch.stack(found)


@contextmanager
def always_expanded() -> Iterator[None]:
    with (
        mock.patch.object(mla_products, "absorbing_is_cheaper", lambda *_, **__: False),
        mock.patch.object(shared_keys, "BIAS_BYTES", 0),
    ):
        yield


def differences(found: torch.Tensor, expected: torch.Tensor) -> str:
    """KL and equal predictions of two sequences of log-probabilities [steps, vocabulary]."""
    kl = float((expected.exp() * (expected - found)).sum(-1).mean())
    same = float((expected.argmax(-1) == found.argmax(-1)).float().mean())
    return f"KL {kl:.1e}, same token {same:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, default="deepseek_v3")
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 2048, 4096, 8000])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--compare", type=int, default=0, help="steps to compare with the expanded context")
    parser.add_argument("--exact", action="store_true", help="compare both with the model in float32, too")
    parser.add_argument("--save", type=Path, help="write the model and its decoded original, and stop")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = config_of(arguments.family, arguments.hidden_size, arguments.layers)
    model = random_model(config, getattr(torch, arguments.dtype))
    if arguments.save:
        model.save_pretrained(arguments.save / "artifact")
        model.dequantize().save_pretrained(arguments.save / "dense")
        return
    exact_model = copy.deepcopy(model).to(torch.float32) if arguments.exact else None
    first = None
    for context in arguments.contexts:
        times, absorbed = decode(model, context, arguments.steps)
        median = statistics.median(times)
        first = median if first is None else first
        line = f"context {context}: {median:.2f} ms per token, {median / first:.2f} of the first"
        if arguments.compare:
            with always_expanded():
                times, expanded = decode(model, context, arguments.compare)
            ours = absorbed[: arguments.compare]
            line += f"; expanded {statistics.median(times):.2f} ms, {differences(ours, expanded)}"
            if exact_model is not None:
                with always_expanded():
                    _, exact = decode(exact_model, context, arguments.compare)
                line += (
                    f"; to float32: ours {differences(ours, exact)}, expanded {differences(expanded, exact)}"
                )
        print(line, flush=True)


if __name__ == "__main__":
    main()
