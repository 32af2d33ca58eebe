"""Attention of one token over cached latents (MLA): the native kernel against torch's attention in the same run.

    python benchmarks/latent_attention.py [--threads 2] [--heads 16] [--contexts 64,1024,4096,8192]

kv_lora_rank 512, 64 rotary columns, bfloat16. Both get absorbed queries. Rounds take turns; times are lower quartiles.
Errors are relative, to float64.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
from torch.nn import functional as F

from ciuic_cli.runtime.attention import latent_kernel
from ciuic_cli.runtime.attention.inputs import AttentionInputs

RANK, ROPE, SCALING = 512, 64, 0.07


def by_torch(given: AttentionInputs) -> torch.Tensor:
    """As `mla_products.absorbed_attention` does it where the kernel does not fit: [b, heads, 1, RANK]."""
    absorbed, rotary = given.query.split([RANK, ROPE], dim=-1)
    heads = absorbed.shape[1]
    bias = torch.bmm(rotary.float().flatten(1, 2), given.rotary_keys[:, 0].float().mT) * SCALING
    out = F.scaled_dot_product_attention(
        absorbed.reshape(1, 1, heads, RANK),
        given.latents,
        given.latents,
        attn_mask=bias[:, None],
        scale=SCALING,
    )
    return out.view(1, heads, 1, RANK)


def exact(given: AttentionInputs) -> torch.Tensor:
    query, latents, keys = (t.double() for t in (given.query, given.latents, given.rotary_keys))
    scores = (query[..., :RANK] @ latents.mT + query[..., RANK:] @ keys.mT) * SCALING
    return scores.softmax(-1) @ latents


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--contexts", default="64,1024,4096,8192")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| context | kernel ms | torch ms | kernel error | torch error |")
    print("|---|---|---|---|---|")
    for context in map(int, options.contexts.split(",")):
        torch.manual_seed(context)
        query, latents, keys = (
            torch.randn(1, n, tokens, columns).to(torch.bfloat16)
            for n, tokens, columns in (
                (options.heads, 1, RANK + ROPE),
                (1, context, RANK),
                (1, context, ROPE),
            )
        )
        given = AttentionInputs(query, latents, keys, None, SCALING)
        actions = (
            partial(latent_kernel.attention, query[..., :RANK], query[..., RANK:], given),
            partial(by_torch, given),
        )
        times: tuple[list[float], ...] = ([], [])
        for _ in range(options.rounds):
            for action, measured in zip(actions, times, strict=True):
                started = time.perf_counter()
                action()
                measured.append(1e3 * (time.perf_counter() - started))
        ours, theirs = (statistics.quantiles(one, n=4)[0] for one in times)
        expected = exact(given)
        errors = [float((action() - expected).norm() / expected.norm()) for action in actions]
        print(f"| {context} | {ours:.3f} | {theirs:.3f} | {errors[0]:.1e} | {errors[1]:.1e} |", flush=True)


if __name__ == "__main__":
    main()
