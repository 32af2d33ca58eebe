"""Times of the kernels on a GPU, with torch in bfloat16, bitsandbytes' NF4 and the measured copy bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import Any

import numpy as np
import torch
from gpu_checks import blob_on, on_device

from ciuic_cli import kernels
from ciuic_cli.codecs.bits import BITS, stored_bits
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.testing import random_matrix
from ciuic_cli.kernels import activations, fronts, product_launch
from ciuic_cli.kernels.launcher import launcher_for
from ciuic_cli.kernels.parameters import TO_BYTES
from ciuic_cli.kernels.rows import decode

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 512)
ROTATION_BYTES = 2 << 30
"""Compressed bytes that a timed sequence reads: many times the size of any level-2 cache."""


def time_of(calls: Sequence[Callable[[], Any]], repeats: int = 10) -> tuple[float, float]:
    """Median and range (largest - smallest) of the seconds per call. One CUDA graph captures all calls in order."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    seconds = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(seconds), max(seconds) - min(seconds)


def copy_bandwidth() -> float:
    """Bytes per second read plus written by a kernel that adds 1 to 2 GiB of numbers.

    torch's copy of a tensor uses the driver's copy, which is slower: 2.7 against 4.2 TB/s on an H200.
    """
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    seconds, _ = time_of([lambda: torch.add(source, 1.0, out=target)])
    return 2 * source.nbytes / seconds


def random_on_device(rows: int, cols: int, bits: tuple[float, ...]) -> kernels.DeviceMatrix:
    return on_device(random_matrix(rows, cols, bits, rng=np.random.default_rng()), torch.device("cuda"))


def products(shape: tuple[int, int], bits: tuple[float, ...], bandwidth: float) -> list[dict[str, Any]]:
    """One line per batch size: seconds, share of the copy bandwidth, and the peers' seconds in the same run."""
    rows, cols = shape
    one = random_on_device(rows, cols, bits)
    copies = max(2, min(256, ROTATION_BYTES // one.blob.numel()))
    matrices = [kernels.DeviceMatrix.on_device(one.header, one.blob.clone()) for _ in range(copies)]
    dense_copies = max(2, min(64, 2 * ROTATION_BYTES // (2 * rows * cols)))
    denses = [torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in range(dense_copies)]
    nf4 = _nf4(rows, cols)
    lines = []
    for batch in BATCHES:
        x = torch.randn(batch, cols, device="cuda", dtype=torch.bfloat16)
        ours, spread = time_of([partial(kernels.linear, [m], x) for m in matrices])
        torch_bf16, _ = time_of([partial(torch.nn.functional.linear, x, w) for w in denses])
        line = {
            "kernel": "linear",
            "shape": list(shape),
            "bits": list(bits),
            "batch": batch,
            "seconds": ours,
            "spread": spread,
            "of_bandwidth": one.blob.numel() / ours / bandwidth,
            "weights_per_second": rows * cols / ours,
            "torch_bf16_seconds": torch_bf16,
            "times_bf16": torch_bf16 / ours,
        }
        if nf4 is not None:
            line["nf4_seconds"], _ = time_of([partial(layer, x) for layer in nf4])
            line["times_nf4"] = line["nf4_seconds"] / ours
        lines.append(line)
    return lines


def choices(shape: tuple[int, int], bandwidth: float) -> list[dict[str, Any]]:
    """The product alone with each number of warps per block, and with its transform, started early or not."""
    rows, cols = shape
    launcher = launcher_for(torch.device("cuda", torch.cuda.current_device()))
    one = random_on_device(rows, cols, (4,))
    copies = max(2, min(128, ROTATION_BYTES // 2 // one.blob.numel()))
    matrices = [kernels.DeviceMatrix.on_device(one.header, one.blob.clone()) for _ in range(copies)]
    lines = []
    for batch in (1, 8, 16, 32):
        x = torch.randn(batch, cols, device="cuda", dtype=torch.bfloat16)
        y = torch.empty(batch, rows, device="cuda", dtype=torch.bfloat16)
        kernel = product_launch.kernel_for(batch)
        transformed = activations.forward(launcher, x, one.seed, kernel.mode)
        calls = [partial(product_launch.launch, launcher, kernel, [m], transformed, [y]) for m in matrices]
        products = [partial(kernels.linear, [m], x) for m in matrices]
        for warps in (4, 8, 16):
            with _replaced(product_launch, "warps_for", lambda *of, warps=warps: warps):
                timed = time_of(calls)
            lines.append(_line(f"{shape} x{batch}, {warps} warps", *timed, one.blob.numel(), bandwidth))
        for name, early in (("early", True), ("late", False)):
            with _replaced(launcher, "can_start_early", early):
                timed = time_of(products)
            lines.append(_line(f"{shape} x{batch}, transform, {name}", *timed, one.blob.numel(), bandwidth))
    return lines


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _nf4(rows: int, cols: int) -> list[Callable[[torch.Tensor], torch.Tensor]] | None:
    """Several NF4 linears of bitsandbytes to rotate through; None if it is not installed for CUDA."""
    try:
        from bitsandbytes.nn import Linear4bit
    except (ImportError, RuntimeError, OSError):
        return None
    layers = []
    for _ in range(max(2, min(64, ROTATION_BYTES // (rows * cols // 2)))):
        layer = Linear4bit(cols, rows, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        layer.weight.data = torch.randn(rows, cols) * 0.02 if not layers else layers[0].original
        layer.original = layer.weight.data if not layers else layers[0].original  # type: ignore[assignment]
        layers.append(layer.to("cuda"))
    return list(layers)


def pieces(bandwidth: float) -> list[dict[str, Any]]:
    """Times of the other kernels: transform, decode, embedding."""
    lines = []
    launcher = launcher_for(torch.device("cuda", torch.cuda.current_device()))
    matrices = [random_on_device(4096, 4096, (4,)) for _ in range(16)]
    scratch = torch.empty(4096 * 4096, dtype=torch.bfloat16, device="cuda")
    seconds, spread = time_of([partial(decode, m, dtype=torch.bfloat16, out=scratch) for m in matrices * 4])
    moved = matrices[0].blob.numel() + 2 * 4096 * 4096
    lines.append(_line("decode 4096x4096 to bf16", seconds, spread, moved, bandwidth))
    for batch in (1, 16, 512):
        x = torch.randn(batch, 4096, device="cuda", dtype=torch.bfloat16)
        seconds, spread = time_of([partial(activations.forward, launcher, x, 0, TO_BYTES)] * 64)
        lines.append(_line(f"transform {batch}x4096", seconds, spread, batch * 4096 * 4, bandwidth))
    table = random_on_device(128256, 4096, (4,))
    for count in (1, 512):
        tokens = [torch.randint(0, table.rows, (count,), device="cuda") for _ in range(32)]
        seconds, spread = time_of([partial(kernels.embedding, table, t, torch.bfloat16) for t in tokens])
        lines.append(_line(f"embedding of {count}", seconds, spread, count * 4096 * 5 // 2, bandwidth))
    return lines


def _line(name: str, seconds: float, spread: float, moved: int, bandwidth: float) -> dict[str, Any]:
    return {"kernel": name, "seconds": seconds, "spread": spread, "of_bandwidth": moved / seconds / bandwidth}


def routed(bandwidth: float) -> list[dict[str, Any]]:
    """The experts of one DeepSeek-V3-shaped layer: 8 of 256, gate and up in one stack (4096 x 7168), then down."""
    count, k, rng = 256, 8, np.random.default_rng()
    lines = []
    for rows, cols in ((4096, 7168), (7168, 2048)):
        expert = random_matrix(rows, cols, 4, rng=rng)
        packed = ExpertStack((expert,) * count)
        stack = kernels.DeviceStack.on_device(packed.header, blob_on(packed, torch.device("cuda")))
        dense = torch.randn(count, rows, cols, device="cuda", dtype=torch.bfloat16)
        for tokens in (1, 4, 16):
            x = torch.randn(tokens, cols, device="cuda", dtype=torch.bfloat16)
            steps = [torch.rand(tokens, count, device="cuda").topk(k).indices for _ in range(8)]
            seconds, spread = time_of([partial(kernels.experts, stack, x, ids) for ids in steps])
            # A lower bound for bf16: one batched product over all pairs, whose weights are gathered before.
            pairs = [torch.randperm(count, device="cuda")[: min(count, tokens * k)] for _ in range(4)]
            gathered = [dense[chosen].contiguous() for chosen in pairs]
            row = x[:1].T.expand(len(gathered[0]), -1, -1).contiguous()
            bf16, _ = time_of([partial(torch.bmm, w, row) for w in gathered])
            experts_read = float(np.mean([len(set(ids.flatten().tolist())) for ids in steps]))
            line = _line(
                f"experts {rows}x{cols}, {tokens} tokens",
                seconds,
                spread,
                int(experts_read * expert.nbytes),
                bandwidth,
            )
            lines.append({**line, "bf16_seconds": bf16, "times_bf16": bf16 / seconds})
        del dense
    return lines


def encoder() -> list[dict[str, Any]]:
    """Weights per second at L = 16."""
    lines = []
    tiles = 2 * torch.cuda.get_device_properties(0).multi_processor_count * 8
    for bits in BITS[1:]:
        targets = torch.randn(tiles, 256, device="cuda")
        kernels.encode(targets, bits)
        seconds = []
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            kernels.encode(targets, bits)
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        median = statistics.median(seconds)
        rate = targets.numel() / median
        lines.append({"kernel": f"encode {bits:g} bits", "seconds": median, "weights_per_second": rate})
    return lines


def rounding(device: torch.device, shape: tuple[int, int] = (4096, 4096)) -> list[dict[str, Any]]:
    """Seconds per matrix of two-sided rounding at 4 bits and L = 16, alone and with others in flight."""
    rows, cols = shape
    bits, scale = stored_bits(np.full(rows // 16, 4)), np.ones(rows, np.float32)
    weight = torch.randn(rows, cols, device=device)
    inputs, outputs = (
        torch.tril(torch.randn(size, size, device=device) / size, -1) + torch.eye(size, device=device)
        for size in (cols, rows)
    )

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            fronts.round_matrix(weight, scale, bits, L=16, input_feedback=inputs, output_feedback=outputs)

    run()
    lines = []
    for matrices in (1, 2, 4):
        torch.cuda.synchronize(device)
        begin = time.monotonic()
        threads = [Thread(target=run) for _ in range(matrices)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize(device)
        seconds = (time.monotonic() - begin) / matrices
        name = f"round {rows}x{cols}, {matrices} in flight"
        lines.append({"kernel": name, "seconds": seconds, "weights_per_second": rows * cols / seconds})
    return lines
