"""Decoding steps by `torch.compile` with a static KV cache, for `ciuic bench --compile`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import StaticCache

from ciuic_cli.errors import EnvironmentFault, UsageError

Step = Callable[..., Any]


def compiled_decode(
    model: Any,
    keyword: str,
    ids: torch.Tensor,
    new_tokens: int,
    repetitions: int,
    *,
    backend: str = "inductor",
) -> dict[str, Any]:
    """Time greedy steps of the compiled model, and compare their tokens with those of the model as it is.

    Args:
        keyword: by which the model takes its cache.
        ids: the prompt, (batch, tokens); it is not compiled.
        new_tokens: steps of each run.
        repetitions: timed runs after the one that compiles.
        backend: of torch.compile.

    Returns:
        seconds: of each timed run. compile_seconds: the first run less the mean of the others. same_tokens: share of
        steps after which both find the same token most likely, both given the tokens that the model as it is chose.

    Raises:
        UsageError: transformers does not compile models of this family.
        EnvironmentFault: torch.compile fails, for example without a C++ compiler.
    """
    if not getattr(model, "_can_compile_fullgraph", False):
        raise UsageError(
            f"transformers does not support compiled steps of {type(model).__name__}",
            remedy="measure without --compile",
        )
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    expected, _ = _decode(model, model, keyword, ids, new_tokens, None)
    try:
        with torch.no_grad():
            found, first = _decode(model, compiled, keyword, ids, new_tokens, expected)
            runs = [
                _decode(model, compiled, keyword, ids, new_tokens, expected)[1] for _ in range(repetitions)
            ]
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = " ".join(str(error).split())
        raise EnvironmentFault(
            f"torch.compile fails: {type(error).__name__}: {reason:.300}",
            remedy="install a C++ compiler (g++), or measure without --compile",
        ) from error
    return {
        "seconds": runs,
        "compile_seconds": max(0.0, first - sum(runs) / len(runs)),
        "same_tokens": float((found == expected).float().mean()),
    }


def _decode(
    model: Any, step: Step, keyword: str, ids: torch.Tensor, new_tokens: int, tokens: torch.Tensor | None
) -> tuple[torch.Tensor, float]:
    """The most likely tokens (batch, new_tokens + 1), and the seconds of all steps but the prompt.

    tokens: what each step gets; None: what the step before found.
    """
    length = ids.shape[1]
    cache = {keyword: StaticCache(config=model.config, max_cache_len=length + new_tokens)}
    found = [model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache).logits[:, -1].argmax(-1)]
    _synchronize(ids.device)
    started = time.perf_counter()
    for position in range(new_tokens):
        token = (found[-1] if tokens is None else tokens[:, position])[:, None]
        positions = torch.full_like(token, length + position)
        output = step(input_ids=token, position_ids=positions, use_cache=True, **cache)
        found.append(output.logits[:, -1].argmax(-1))
    _synchronize(ids.device)
    return torch.stack(found, dim=1), time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
