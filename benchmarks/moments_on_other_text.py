"""How much does rounding with feedback lose on text that the statistics have not seen?

    python benchmarks/moments_on_other_text.py MODEL --text FILE... [--sequences 60 124] [--passages 1 1]

Expected loss of rounding errors under the gradients of other text, for statistics that differ in one constant or in
their text. A loss is relative to the first variant with the first text: by default, to the present statistics.
Rounding is replaced by its expectation: noise with the same bytes in every variant, passed through the feedback of H
and G. So differences of 1 % are real, where the KL of two artifacts shows 5 %. Geometric means over layers and
matrices, and over texts. The model has the modules of Llama.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ciuic_cli.codecs.transform import transform
from ciuic_cli.passes import feedback
from ciuic_cli.statistics import moments
from ciuic_cli.statistics.sums import segments_of
from ciuic_cli.text.calibration import calibration_sequences

MATRICES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
SEQLEN = 512
Tokens = tuple[torch.Tensor, torch.Tensor]
"""Inputs (sequences, SEQLEN, n) and output gradients (sequences, SEQLEN, m) of a matrix, in bfloat16."""
VARIANTS: dict[str, dict[str, float]] = {
    "present": {},
    "half of the text": {"part": 0.5},
    "half of the text for H": {"part_of_h": 0.5},
    "half of the text for G": {"part_of_g": 0.5},
    "a third of the text for G": {"part_of_g": 1 / 3},
    "a quarter of the text for G": {"part_of_g": 1 / 4},
    "H weighted by gradients": {"gradient_power": 1.0},
    "every token with the same weight in H": {"input_power": 2.0},
    "weight |x|^-1.5 in H": {"input_power": 1.5},
    "H and G not shrunk": {"kept_of_h": 1.0, "kept_of_g": 1.0},
    "H not shrunk": {"kept_of_h": 1.0},
    "G not shrunk": {"kept_of_g": 1.0},
    "G shrunk by half": {"kept_of_g": 0.5},
    "every token for G of tall matrices": {"TALL_OUTPUT_STEP": 1},
    "every eighth token for G of tall matrices": {"TALL_OUTPUT_STEP": 8},
    "damping of H: 0.04": {"INPUT_DAMPING": 0.04},
    "damping of H: 0.16": {"INPUT_DAMPING": 0.16},
    "damping of G: 0.05": {"OUTPUT_DAMPING": 0.05},
    "damping of G: 0.2": {"OUTPUT_DAMPING": 0.2},
    "H rounded to bfloat16": {"round_h": 1.0},
    "G rounded to bfloat16": {"round_g": 1.0},
    "H and G rounded to bfloat16": {"round_h": 1.0, "round_g": 1.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 8, 15, 22, 28])
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--sequences", type=int, nargs="+", default=[60])
    parser.add_argument("--passages", type=int, nargs="+", default=[1], help="one for each --sequences")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).requires_grad_(False)
    model.enable_input_require_grads()
    sizes = [*zip(arguments.sequences, arguments.passages, strict=True)]
    seen = [
        calibration_sequences(
            tokenizer,
            [],
            only=False,
            nsamples=sequences + 4,
            seqlen=SEQLEN,
            vocab_size=model.config.vocab_size,
            passages=passages,
        ).tokens[:sequences]
        for sequences, passages in sizes
    ]
    texts = [_windows(tokenizer, file, arguments.windows) for file in arguments.text]
    names = [f"model.layers.{layer}.{matrix}" for layer in arguments.layers for matrix in MATRICES]
    others = [_tokens(model, names, batch) for batch in texts]
    first: dict[str, torch.Tensor] = {}  # losses by matrix
    print("loss (of each text): sequences x passages, statistics")
    for (sequences, passages), batch in zip(sizes, seen, strict=True):
        calibration = _tokens(model, names, batch)
        for variant in arguments.variants:
            logs = []
            for name in names:
                each_text = [tokens[name] for tokens in others]
                loss = _losses(calibration[name], each_text, **VARIANTS[variant])
                logs.append((loss / first.setdefault(name, loss)).log())
            by_text = torch.stack(logs).mean(0)
            each = " ".join(f"{value:.3f}" for value in by_text.exp().tolist())
            print(f"{by_text.mean().exp():.3f} ({each}): {sequences} x {passages}, {variant}", flush=True)


def _windows(tokenizer: Callable[..., dict[str, list[int]]], file: Path, count: int) -> torch.Tensor:
    ids = tokenizer(file.read_text()[: 20 * SEQLEN * count], add_special_tokens=False)["input_ids"]
    return torch.tensor(ids[: len(ids) // SEQLEN * SEQLEN]).reshape(-1, SEQLEN)[:count]


def _tokens(model: torch.nn.Module, names: Sequence[str], batch: torch.Tensor) -> dict[str, Tokens]:
    """The tokens of each matrix, with products in bfloat16. The labels of the loss are sampled from the model's
    predictions."""
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    gradients: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    generator = torch.Generator().manual_seed(len(batch))

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def record(_: torch.nn.Module, arguments: tuple[torch.Tensor], output: torch.Tensor) -> None:
            inputs[name].append(arguments[0][0].detach().bfloat16())
            output.register_hook(lambda gradient: gradients[name].append(gradient[0].bfloat16()))

        return model.get_submodule(name).register_forward_hook(record)

    handles = [watch(name) for name in names]
    for ids in batch:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids[None]).logits[0].float()
        labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    for handle in handles:
        handle.remove()
    return {name: (torch.stack(inputs[name]), torch.stack(gradients[name])) for name in names}


@torch.no_grad()
def _losses(seen: Tokens, others: Sequence[Tokens], **variant: float) -> torch.Tensor:
    """(texts,) expected loss of errors that are fed back along both sides, up to a constant factor."""
    part = variant.pop("part", 1.0)
    part_of_h, part_of_g = variant.pop("part_of_h", part), variant.pop("part_of_g", part)
    kept_of_h, kept_of_g = variant.pop("kept_of_h", None), variant.pop("kept_of_g", None)
    input_power, gradient_power = variant.pop("input_power", 1.0), variant.pop("gradient_power", 0.0)
    dtype_of_h, dtype_of_g = (
        torch.bfloat16 if variant.pop(key, 0.0) else torch.float32 for key in ("round_h", "round_g")
    )
    with ExitStack() as stack:
        for key, value in variant.items():
            module = moments if hasattr(moments, key) else feedback
            stack.enter_context(mock.patch.object(module, key, value))
        h = _input_moment(seen, part_of_h, kept_of_h, dtype_of_h, input_power, gradient_power)
        g = _output_moment(seen, part_of_g, kept_of_g, dtype_of_g)
        inputs, outputs = feedback.factor_inputs(h), feedback.factor_outputs(g)
    assert inputs.ldl.factor is not None and outputs.factor is not None
    # Equal loss in every row, with the same bytes in sum: a row's noise falls with the weight of its errors.
    noise = (outputs.d_diagonal.log().mean() - outputs.d_diagonal.log()).exp()
    columns = feedback.columns_of(inputs.block_order)
    losses = []
    for windows in others:
        total = torch.zeros(())
        for x, gradient in zip(*windows, strict=True):
            y = _solved(inputs.ldl.factor, transform(x.float())[:, columns])
            z = _solved(outputs.factor, gradient.float()) * noise.sqrt()
            total += (z.T @ y).square().sum()  # the error is the same at every token, so its effects add up
        losses.append(total)
    return torch.stack(losses)


def _input_moment(
    tokens: Tokens,
    part: float,
    kept: float | None,
    dtype: torch.dtype,
    input_power: float,
    gradient_power: float,
) -> torch.Tensor:
    """H (float32) from a part of the sequences, as the statistics sum it.

    kept: of the off-diagonal part; None: what the statistics keep. dtype: to which the vectors are rounded. A token has
    the weight |g|^gradient_power / |x|^input_power.
    """
    x, gradient = (each[:: round(1 / part)].float() for each in tokens)
    norms = x.norm(dim=2, keepdim=True).clamp_min(moments.SMALLEST_ROOT)
    factors = gradient.norm(dim=2, keepdim=True) ** gradient_power * norms ** (1.0 - input_power)

    def sums(segment: range) -> moments.Moments:
        found = moments.Moments.of_inputs(x.shape[2], x.device, dtype)
        for sequence in segment:
            # `add_inputs` gives a vector the weight 1 / |x|, so a factor of its length is one of its weight.
            found.add_inputs(x[sequence] * factors[sequence])
        return found

    return _total(len(x), sums, kept).inputs


def _output_moment(tokens: Tokens, part: float, kept: float | None, dtype: torch.dtype) -> torch.Tensor:
    """G, as `_input_moment`."""
    x, gradient = (each[:: round(1 / part)].float() for each in tokens)
    step = moments.TALL_OUTPUT_STEP if gradient.shape[2] > x.shape[2] else 1

    def sums(segment: range) -> moments.Moments:
        found = moments.Moments.of_outputs(gradient.shape[2], x.device, dtype)
        for sequence in segment:
            found.add_outputs(gradient[sequence], moments.vector_norms(x[sequence]), step=step)
        return found

    return _total(len(x), sums, kept).outputs


def _total(sequences: int, sums: Callable[[range], moments.Moments], kept: float | None) -> moments.Moments:
    """The sums of all segments, normalised. kept: see `_input_moment`."""
    total = None
    for segment in segments_of(sequences):
        found = sums(segment)
        if kept is None:
            found.note_segment()
        if total is None:
            total = found
        else:
            total.include(found)
    assert total is not None
    total.scale(1 / total.trace, 1.0)
    share = 1.0 if kept is None else kept
    for name in ("inputs", "outputs"):
        moment = getattr(total, name)
        if moment.dim() == 2:
            moment = moment.tril() + moment.tril(-1).T
            setattr(total, name, torch.lerp(moment.diagonal().diag(), moment, share))
    return total


def _solved(factor: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """L⁻¹ v for vectors (t, n)."""
    return torch.linalg.solve_triangular(factor, vectors.T, upper=False).T


if __name__ == "__main__":
    main()
