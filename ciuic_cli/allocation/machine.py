"""The machine that prices, probes and codes the matrices of a run: the processor, or a GPU.

The passes are operations of torch and run where their tensors are. Only rounding has two implementations (`Rounder`):
the processor's native call, and fronts of tiles whose codes the GPU searches (`kernels/fronts.py`). Their codes differ
where two paths have nearly the same error; both decode everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ciuic_cli import kernels
from ciuic_cli.allocation.matrices import WeightMatrix, full_outputs, is_large, row_slices, working_bytes
from ciuic_cli.codecs import trellis
from ciuic_cli.kernels import fronts
from ciuic_cli.kernels.launcher import launcher_for
from ciuic_cli.passes.rounding import Rounder

CPU_NAME = "cpu"
"""Name of the processor in the report."""
_FREE_SHARE = 0.8
"""Share of the GPU's free memory that matrices in flight may take; the rest is for other work and for fragmentation
(chosen, not tuned)."""
_thread = threading.local()
"""`streams`: by device, the stream of the thread. It is kept, because the allocator keeps freed memory by stream."""


@dataclass(frozen=True)
class Machine:
    """Where matrices are priced, probed and coded.

    Attributes:
        name: for the report: "cpu", or what the driver calls the GPU.
        rounder: rounds a matrix on `device`.
        side_by_side: how many matrices like this one are in work at once.
        occupancy: (rows, columns, whether there is feedback between rows) to the share of the device that rounding one
            matrix keeps busy.
        prepare: makes ready to search with each (bits per weight, L): compiles kernels for a GPU.
    """

    name: str
    device: torch.device
    rounder: Rounder
    side_by_side: Callable[[WeightMatrix], int]
    occupancy: Callable[[int, int, bool], float] = lambda rows, cols, two_sided: 1.0
    prepare: Callable[[Iterable[tuple[float, int]]], None] = lambda searches: None

    @contextmanager
    def own_stream(self) -> Iterator[None]:
        """Lets the work of the calling thread overlap with that of others on a GPU."""
        if self.device.type != "cuda":
            yield
            return
        streams: dict[torch.device, torch.cuda.Stream] = _thread.__dict__.setdefault("streams", {})
        if self.device not in streams:
            streams[self.device] = torch.cuda.Stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(streams[self.device]):
            yield

    def settle(self) -> None:
        """Wait until the device has done all work that was started."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def processor() -> Machine:
    """The processor with all threads of torch: small matrices side by side, large ones one after another."""
    threads = torch.get_num_threads()
    return Machine(
        CPU_NAME,
        torch.device("cpu"),
        trellis.round_matrix,
        lambda matrix: 1 if is_large(matrix) else threads,
    )


def machine_for(device: torch.device, hint: Callable[[str], None] = lambda message: None) -> Machine:
    """The machine for a run on `device`. If the GPU's kernels cannot be used, the processor.

    hint: called with a message for the user if they cannot, and before kernels are compiled.
    """
    if device.type != "cuda":
        return processor()
    works, reason = kernels.available(device, hint)
    if not works:
        hint(f"coding runs on the CPU, because the CUDA kernels cannot be used: {reason}")
        return processor()
    multiprocessors = launcher_for(device).limits.multiprocessors
    free_bytes = int(_FREE_SHARE * torch.cuda.mem_get_info(device)[0])
    return Machine(
        torch.cuda.get_device_name(device),
        device,
        fronts.round_matrix,
        lambda matrix: in_flight(matrix, multiprocessors, free_bytes),
        lambda rows, cols, two_sided: fronts.occupancy(rows, cols, multiprocessors, two_sided=two_sided),
        lambda searches: kernels.prepare(device, searches, hint),
    )


def in_flight(matrix: WeightMatrix, multiprocessors: int, free_bytes: int) -> int:
    """How many matrices of this shape a GPU codes at once; an embedding or head takes it alone."""
    if len(row_slices(matrix)) > 1:
        return 1
    return fronts.matrices_in_flight(
        matrix.rows,
        matrix.cols,
        two_sided=full_outputs(matrix.role, matrix.rows, matrix.cols),
        multiprocessors=multiprocessors,
        working_bytes=working_bytes(matrix),
        free_bytes=free_bytes,
    )
