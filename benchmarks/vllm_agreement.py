"""How far vLLM's predictions are from transformers', for a model and its artifact; runs in an environment with vLLM.

    python benchmarks/vllm_agreement.py MODEL OUT --text FILE [--dtype bfloat16] [--length 384] [--sequences 8]

Both programs predict the same tokens. The measure is the mean |difference| of the log-probabilities of the tokens that
come next, in nats. A plug-in without errors adds little to what the two programs differ by on the dense model.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def engine(folder: Path, length: int, **options: Any) -> Iterator[Any]:
    """`vllm.LLM` for sequences of `length` tokens; the next one can follow it in this process.

    options: of `vllm.LLM`; the default computes in float32 without compilation.
    """
    # GiB of the cache: enough for small models.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {"dtype": "float32", "enforce_eager": True, "distributed_executor_backend": "uni"} | options
    made = LLM(str(folder), max_model_len=length, max_num_seqs=4, **settings)
    try:
        yield made
    finally:
        del made
        gc.collect()
        cleanup_dist_env_and_memory()


def in_vllm(folder: Path, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    """Log-probability of every token but the first of each sequence, float (sequences, length - 1).

    tokens: LongTensor (sequences, length). options: as `engine`.
    """
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": row} for row in tokens.tolist()]
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with engine(folder, tokens.shape[1] + 1, **options) as model:
        results = model.generate(prompts, sampling, use_tqdm=False)
        del model
    found = [
        [position[token].logprob for position, token in zip(result.prompt_logprobs[1:], row[1:], strict=True)]
        for result, row in zip(results, tokens.tolist(), strict=True)
    ]
    return torch.tensor(found)


def generated_in_vllm(
    folder: Path, tokens: torch.Tensor, count: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy continuation of each sequence: token ids and their log-probabilities, (sequences, count).

    tokens, options: as `in_vllm`.
    """
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": row} for row in tokens.tolist()]
    sampling = SamplingParams(max_tokens=count, temperature=0, logprobs=0, ignore_eos=True)
    with engine(folder, tokens.shape[1] + count, **options) as model:
        results = [result.outputs[0] for result in model.generate(prompts, sampling, use_tqdm=False)]
        del model
    ids = torch.tensor([result.token_ids for result in results])
    found = [
        [position[token].logprob for position, token in zip(result.logprobs, result.token_ids, strict=True)]
        for result in results
    ]
    return ids, torch.tensor(found)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--length", type=int, default=384, help="tokens per sequence")
    parser.add_argument("--sequences", type=int, default=8)
    options = parser.parse_args()
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(options.model)(options.text.read_text(encoding="utf-8")).input_ids
    count = options.length * options.sequences
    if len(ids) < count:
        parser.error(f"the text has {len(ids)} tokens, {count} are needed")
    tokens = torch.tensor(ids[:count]).reshape(options.sequences, options.length)
    measured = {}
    for title, folder in (("dense", options.model), ("artifact", options.out)):
        reference = in_transformers(folder, tokens, getattr(torch, options.dtype))
        measured[title] = difference(in_vllm(folder, tokens, dtype=options.dtype), reference)
        print(f"{title}: mean |difference| {measured[title]:.2e} nats", flush=True)
    print(f"ratio {measured['artifact'] / measured['dense']:.3f}")


if __name__ == "__main__":
    main()
