"""Runs vLLM in this process, one engine after the other, and transformers on the same tokens."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch


def in_vllm(folder: Path, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    """Log-probability of every token but the first of each sequence, float (sequences, length - 1).

    tokens: LongTensor (sequences, length).
    """
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {"dtype": "float32", "enforce_eager": True, "distributed_executor_backend": "uni"} | options
    engine = LLM(str(folder), max_model_len=tokens.shape[1] + 1, max_num_seqs=4, **settings)
    prompts = [{"prompt_token_ids": row} for row in tokens.tolist()]
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    results = engine.generate(prompts, sampling, use_tqdm=False)
    found = [
        [position[token].logprob for position, token in zip(result.prompt_logprobs[1:], row[1:], strict=True)]
        for result, row in zip(results, tokens.tolist(), strict=True)
    ]
    del engine, results
    gc.collect()
    cleanup_dist_env_and_memory()
    return torch.tensor(found)


@torch.no_grad()
def in_transformers(folder: Path, tokens: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same by transformers, for an artifact or a checkpoint."""
    from transformers import AutoModelForCausalLM

    import ciuic_cli  # noqa: F401 (registers the format)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    rows = [model(row[None]).logits[0, :-1].float().log_softmax(-1) for row in tokens]
    return torch.stack([row.gather(1, ids[1:, None])[:, 0] for row, ids in zip(rows, tokens, strict=True)])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean absolute difference of two tables of log-probabilities."""
    return float((one - other).abs().mean())
