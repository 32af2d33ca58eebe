"""The seconds of a run's phases: rates that are measured on this machine once, times the work of a choice of options.

`measure_rates` times matrices of the model's shapes and a few products. `phase_seconds` is arithmetic, so that a time
budget can compare many choices (`compression/time_budget.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ciuic_cli.allocation.machine import machine_for, processor
from ciuic_cli.allocation.matrices import (
    EMBEDDING_ROLES,
    UNPROBED_ROLES,
    WeightMatrix,
    full_outputs,
)
from ciuic_cli.allocation.probes import probe_of
from ciuic_cli.checkpoint.config.numbers import experts_per_token
from ciuic_cli.checkpoint.model_map import ModelMap, Parameter
from ciuic_cli.checkpoint.mtp_parameters import is_mtp
from ciuic_cli.checkpoint.roles import MTP_ROLES
from ciuic_cli.cost.timing import (
    TIMED_FEW_TOKENS,
    role_of_timing,
    time_activations,
    time_attention,
    time_few_tokens,
    time_matrix,
    time_moments,
    time_products,
    time_reading,
)
from ciuic_cli.evaluation.kl_meter import CHECKED_TOKENS
from ciuic_cli.layerwise.chunk_threads import hidden_width
from ciuic_cli.layerwise.operations.mixed_precision import compute_dtype
from ciuic_cli.layerwise.overrides import KEPT_DTYPE
from ciuic_cli.recovery.gradients import STEP_SEQUENCES
from ciuic_cli.recovery.tuning import EVALUATIONS
from ciuic_cli.statistics.experts import full_moments_fit
from ciuic_cli.statistics.moments import TALL_OUTPUT_STEP
from ciuic_cli.statistics.sums import CHUNK_SEQUENCES, chunk_count, gradient_sequences

FORWARD_PASSES, BACKWARD_PASSES = 4, 12
"""Operations on activations between the products of the statistics: of a layer forward, and of computing it again and
backward. Their sum is fitted to runs of SmolLM2-135M and of a random model of 1.5 billion weights
(docs/experiments/scale/large-matrices.md); their shares are estimated."""
SAME_INPUTS = ("k_proj", "v_proj", "up_proj", "kv_a_proj_with_mqa")
"""Linears outside stacks that have the inputs, and so the H, of another one in nearly all families: of q_proj,
gate_proj, or q_a_proj. A run finds out by itself (`InputSharing` in `statistics/recorder.py`)."""


@dataclass(frozen=True)
class TextSize:
    """Numbers of sequences (statistics, held out, all recovery steps), and the tokens of each.

    probe: tokens of each held-out sequence that a role's probe runs; 0: all. gradient_every: one of so many sequences
    of the statistics runs backward.
    """

    sequences: int
    held_out: int
    length: int
    recovery: int = 0
    probe: int = 0
    gradient_every: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of the statistics' sequences."""
        return self.sequences * self.length

    @property
    def gradient_tokens(self) -> int:
        """Those that run backward."""
        return gradient_sequences(self.sequences, self.gradient_every) * self.length


def pools_statistics(model_map: ModelMap, matrix: WeightMatrix) -> bool:
    """True if the matrix is an expert, and full moments exist for its pool only, not for each expert."""
    if matrix.expert is None or matrix.role in MTP_ROLES:
        return False
    return not full_moments_fit(experts_of(model_map.parameters[matrix.name]), matrix.rows, matrix.cols)


def executed(model_map: ModelMap) -> list[Parameter]:
    """Parameters that take part when the model runs: multi-token-prediction layers are coded, but never run."""
    return [parameter for parameter in model_map.parameters.values() if not is_mtp(parameter)]


def executed_compressible(model_map: ModelMap) -> list[Parameter]:
    """Parameters whose statistics are collected."""
    return [parameter for parameter in executed(model_map) if parameter.compress]


def has_own_inputs(parameter: Parameter) -> bool:
    """False if the parameter's name says that it has the inputs of another one (SAME_INPUTS)."""
    leaf = parameter.name.removesuffix(".weight").rpartition(".")[2]
    return len(parameter.shape) == 3 or leaf not in SAME_INPUTS


def hidden_and_vocabulary(model_map: ModelMap) -> tuple[int, int]:
    """Numbers per token between layers, and tokens in the vocabulary."""
    return hidden_width(model_map), int(model_map.config.get_text_config().vocab_size)


@dataclass(frozen=True)
class Rates:
    """How long this machine takes for the work of one model.

    Attributes:
        matrices: matrices of equal shape and treatment, how many there are, and the seconds of each
            (`timing.time_matrix`).
        product: seconds per weight and token of a product in the KL measurements, float32.
        statistics: the same in the statistics, which may be bfloat16.
        moments: seconds per number of H or G and token.
        activations: seconds of an operation on activations, per number.
        attention: seconds of attention in the KL measurements, float32, per query, key, and number of all heads'
            outputs.
        statistics_attention: the same in the statistics, forward.
        backward_attention: the same in the statistics, forward again and backward.
        read: seconds per weight that is read.
        weights: seconds per weight that a product with an expert takes in the KL measurements, whatever the number of
            tokens.
        statistics_weights: the same in the statistics.
    """

    matrices: tuple[tuple[WeightMatrix, int, dict[str, float]], ...]
    product: float
    statistics: float
    moments: float
    activations: float
    attention: float
    statistics_attention: float
    backward_attention: float
    read: float
    weights: float
    statistics_weights: float


def measure_rates(
    model_map: ModelMap, matrices: Sequence[WeightMatrix], *, ranks: bool, device: torch.device
) -> Rates:
    """Time matrices of all shapes; takes seconds. ranks: whether arms with a low-rank part are priced.

    The rates of products are measured before the matrices and after them, and the smaller ones count: now and then a
    process is slow in its first tenths of a second, and its forecast was a third too high (measured:
    docs/experiments/scale/account.md).
    """
    machine = machine_for(device)
    timed: dict[tuple[Any, ...], dict[str, float]] = {}

    def seconds_of(matrix: WeightMatrix, *, pooled: bool) -> dict[str, float]:
        treatment = (matrix.rows, matrix.cols, pooled, role_of_timing(matrix.role))
        if treatment not in timed:
            timed[treatment] = time_matrix(matrix, machine, ranks=ranks, pooled=pooled)
        return timed[treatment]

    shapes = Counter(
        (replace(matrix, name="", expert=None), pools_statistics(model_map, matrix)) for matrix in matrices
    )
    before = _product_rates(model_map, matrices, device)
    by_shape = tuple(
        (matrix, count, seconds_of(matrix, pooled=pooled)) for (matrix, pooled), count in shapes.items()
    )
    after = _product_rates(model_map, matrices, device)
    least = {name: min(seconds, after[name]) for name, seconds in before.items()}
    for weights, product in (("weights", "product"), ("statistics_weights", "statistics")):
        least[weights] = max(0.0, least[weights] - TIMED_FEW_TOKENS * least[product])
    return Rates(by_shape, **least)


def _product_rates(
    model_map: ModelMap, matrices: Sequence[WeightMatrix], device: torch.device
) -> dict[str, float]:
    """The fields of `Rates` besides `matrices`, measured once.

    "weights" and "statistics_weights" still contain `TIMED_FEW_TOKENS` tokens of their product.
    """
    dtype = compute_dtype(device)
    attention, _ = time_attention(device, torch.float32)
    statistics_attention, backward_attention = time_attention(device, dtype)
    return {
        "product": time_products(device, torch.float32),
        "statistics": time_products(device, dtype),
        "moments": time_moments(device, dtype),
        "activations": time_activations(_widest(model_map), device),
        "attention": attention,
        "statistics_attention": statistics_attention,
        "backward_attention": backward_attention,
        "read": time_reading(model_map, matrices),
        "weights": time_few_tokens(device, torch.float32, model_map.dtype),
        "statistics_weights": time_few_tokens(device, dtype, dtype),
    }


def phase_seconds(
    model_map: ModelMap,
    rates: Rates,
    text: TextSize,
    *,
    states: int,
    probed_layers: int,
    tall_outputs: bool = True,
    kept_noise: float = math.inf,
) -> dict[str, float]:
    """Seconds of each phase. states: mean trellis states per weight. probed_layers: most layers of a probe.
    tall_outputs: see `allocation.matrices.full_outputs`. kept_noise: most bytes of noise on the disk."""
    total = dict.fromkeys(("statistics", "arms", "probe", "encode", "recovery", "measure"), 0.0)
    decoding = 0.0  # all matrices once
    draws_outside, draws_of_experts = _noise_draws(model_map, kept_noise)
    probes, read_again = set(), 0.0
    for matrix, count, time_of in rates.matrices:
        share, draws = probed_share(model_map, matrix, probed_layers), 1.0
        if matrix.role.startswith("expert"):
            draws = draws_of_experts
            # The original is read again after the probe of the role, and after the last one. Noise that is kept is
            # written to a file once and copied into the stack twice, which counts as two readings (estimated).
            kept_share = 2.0 - draws_of_experts
            read_again += (2 + 2 * kept_share) * share * count * matrix.weights
        elif matrix.role in EMBEDDING_ROLES:
            draws = draws_outside
        full = full_outputs(matrix.role, matrix.rows, matrix.cols, tall_outputs=tall_outputs)
        outputs = time_of["outputs"] if full else 0.0
        read = rates.read * matrix.weights / processor().side_by_side(matrix)
        total["arms"] += count * (read + time_of["arms"] + (time_of["outputs of arms"] if full else 0.0))
        if share:
            probes.add(probe_of(matrix.role))
        total["probe"] += count * share * draws * (read + time_of["probe"] + outputs)
        total["encode"] += count * (read + time_of["encode"] + outputs + time_of["state"] * states)
        decoding += 0.0 if matrix.role in MTP_ROLES else count * time_of["decode"]
    active = _active_weights(model_map)
    product, reading = rates.product, rates.read * sum(parameter.numel for parameter in executed(model_map))
    contexts = math.prod(hidden_and_vocabulary(model_map))
    inputs, outputs = _moment_work(model_map, tall_outputs=tall_outputs)
    attended = _attention_outputs(model_map)

    def run_forward(length: int) -> float:
        """Seconds of the held-out sequences' first `length` tokens."""
        of_tokens = length * (active * product + length * attended * rates.attention)
        return text.held_out * (of_tokens + _expert_weights(model_map, length) * rates.weights)

    held_out, probed = run_forward(text.length), run_forward(min(text.length, text.probe or text.length))
    # Products, attention, H or G, and what is between the products: of the forward sweep; and of computing each layer
    # again and its gradients. Every weight is read in both sweeps.
    activations = _activations(model_map) * rates.activations
    forward = text.length * attended * rates.statistics_attention
    backward = text.length * attended * rates.backward_attention
    forward += active * rates.statistics + inputs * rates.moments + FORWARD_PASSES * activations
    backward += 2 * active * rates.statistics + (contexts + outputs) * rates.moments
    backward += BACKWARD_PASSES * activations
    total["statistics"] += text.tokens * forward + text.gradient_tokens * backward + 2 * reading
    for tokens, passes in ((text.tokens, 1), (text.gradient_tokens, 2)):
        chunks = chunk_count(tokens // text.length, CHUNK_SEQUENCES)
        experts = _expert_weights(model_map, tokens // max(1, chunks))
        total["statistics"] += passes * chunks * experts * rates.statistics_weights
    # The probes of roles, that of all roles together, and the original. All probes read the model once.
    total["probe"] += len(probes) * probed + 2 * held_out + 2 * reading + rates.read * read_again
    total["measure"] += held_out + reading + decoding
    if text.recovery:
        # Products of the original, of the forward pass, of recomputing each layer, and of its gradients. Every step
        # reads and decodes every layer twice.
        total["recovery"] += 4 * text.recovery * text.length * active * rates.statistics
        total["recovery"] += 2 * (text.recovery // STEP_SEQUENCES) * (reading + decoding)
        total["recovery"] += (EVALUATIONS + 1) * total["measure"]
    # The finished artifact runs some of the tokens once more, from its codes.
    total["measure"] += run_forward(min(CHECKED_TOKENS, text.length)) / text.held_out + decoding
    return total


def probed_share(model_map: ModelMap, matrix: WeightMatrix, probed_layers: int) -> float:
    """Share of the matrices like this one that probes perturb. probed_layers: most layers of a probe."""
    if matrix.role in UNPROBED_ROLES:
        return 0.0
    if matrix.role in EMBEDDING_ROLES:
        return 1.0
    return min(1.0, probed_layers / max(1, len(model_map.layer_prefixes)))


def kept_noise_bytes(model_map: ModelMap) -> tuple[int, int]:
    """Bytes of the noise that probes keep in files while there is room: of embedding and head, of a layer's experts."""
    outside = sum(
        p.numel for p in model_map.parameters.values() if p.role in EMBEDDING_ROLES and not p.tied_to
    )
    experts = [p for p in executed_compressible(model_map) if len(p.shape) == 3]
    of_layers = (
        sum(p.numel for p in experts if p.name.startswith(prefix)) for prefix in model_map.layer_prefixes
    )
    return KEPT_DTYPE.itemsize * outside, KEPT_DTYPE.itemsize * max(of_layers, default=0)


def _noise_draws(model_map: ModelMap, kept_noise: float) -> tuple[float, float]:
    """How often the probes draw the noise of an embedding or head, and that of an expert.

    Before the layers and after them, the probe of its role and the last one perturb an embedding with the same noise.
    In its layer both perturb an expert. What is kept is drawn once; other matrices stay in memory while they are used.
    """
    outside, experts = kept_noise_bytes(model_map)
    fits = outside <= kept_noise
    room = kept_noise - outside if fits else kept_noise
    return 1.0 if fits else 4.0, 2.0 - min(1.0, room / experts if experts else 1.0)


def _moment_work(model_map: ModelMap, *, tall_outputs: bool) -> tuple[float, float]:
    """Multiplications per token for H, and for G, of all matrices."""
    inputs = outputs = 0.0
    for parameter in executed_compressible(model_map):
        rows, cols = parameter.shape[-2:]
        is_stack = len(parameter.shape) == 3
        count = experts_per_token(model_map.config) if is_stack else 1
        full = full_outputs(parameter.role, rows, cols, tall_outputs=tall_outputs)
        inputs += count * cols * cols if has_own_inputs(parameter) else 0
        whole = rows * rows / (TALL_OUTPUT_STEP if rows > cols and not is_stack else 1)
        outputs += count * (whole if full else rows)
    return inputs, outputs


def _activations(model_map: ModelMap) -> float:
    """Inputs and outputs of all products that a token passes."""
    return sum(
        sum(p.shape[-2:]) * (experts_per_token(model_map.config) if len(p.shape) == 3 else 1)
        for p in executed_compressible(model_map)
        if p.role != "embedding"
    )


def _attention_outputs(model_map: ModelMap) -> float:
    """Numbers of all heads' outputs of a token, in all layers: the inputs of the output projections. Layers without
    attention (Mamba, linear attention) count as if they had it."""
    return sum(p.shape[-1] for p in executed_compressible(model_map) if p.role == "o")


def _widest(model_map: ModelMap) -> int:
    """Most inputs or outputs of a matrix in a layer; 1 without any."""
    layers = tuple(model_map.layer_prefixes)
    return max(
        (max(p.shape[-2:]) for p in executed_compressible(model_map) if p.name.startswith(layers)), default=1
    )


def _expert_weights(model_map: ModelMap, tokens: int) -> float:
    """Weights of all experts that so many tokens reach, if each token chooses at random."""
    chosen = experts_per_token(model_map.config)
    return sum(
        p.numel * (1.0 - max(0.0, 1.0 - chosen / experts_of(p)) ** tokens)
        for p in executed(model_map)
        if len(p.shape) == 3
    )


def experts_of(parameter: Parameter) -> int:
    """Experts in a stack; 1 for other parameters."""
    return parameter.shape[0] if len(parameter.shape) == 3 else 1


def _active_weights(model_map: ModelMap) -> float:
    """Weights that each token is multiplied with."""
    return sum(
        p.numel
        * (min(1.0, experts_per_token(model_map.config) / experts_of(p)) if len(p.shape) == 3 else 1.0)
        for p in executed(model_map)
        if len(p.shape) > 1 and p.role != "embedding"
    )
