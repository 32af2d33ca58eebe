"""How long do a model's head and the KL divergence of its predictions take? The head's inputs are random.

    python benchmarks/head_kl.py MODEL [--sequences 8] [--one-by-one]

Prints seconds, seconds of the processor, and the peak of resident memory. --one-by-one runs one sequence after the
other, each with all threads, instead of one for each thread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ciuic_cli.process.numeric_libraries import configure_numeric_libraries

configure_numeric_libraries()

import torch  # noqa: E402

from ciuic_cli.checkpoint.model_map import map_model  # noqa: E402
from ciuic_cli.checkpoint.reader import open_checkpoint  # noqa: E402
from ciuic_cli.evaluation.divergence import kl_divergence  # noqa: E402
from ciuic_cli.evaluation.stored_predictions import BLOCK_TOKENS, StoredPredictions  # noqa: E402
from ciuic_cli.layerwise import layer_stream  # noqa: E402
from ciuic_cli.layerwise.logits import TokenSpan  # noqa: E402
from ciuic_cli.process.memory import configure_allocators, peak_resident_bytes  # noqa: E402

SEQLEN = 256


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--one-by-one", action="store_true")
    arguments = parser.parse_args()
    if arguments.one_by_one:
        layer_stream.heads_side_by_side = lambda *_: 1
    configure_allocators()
    model_map = map_model(open_checkpoint(arguments.model))
    random = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        chunks = [torch.zeros(1, SEQLEN, dtype=torch.long) for _ in range(arguments.sequences)]
        stream = layer_stream.LayerStream(
            model_map, chunks, Path(folder), device=torch.device("cpu"), dtype=torch.float32
        )
        cols = stream.model.get_output_embeddings().weight.shape[1]
        for index in range(arguments.sequences):
            states = torch.randn(1, SEQLEN, cols, generator=random)
            stream.hidden.put(f"{len(stream.prefixes)}.{index}", states)
        stored = StoredPredictions(Path(folder) / "original")

        def store(span: TokenSpan, hidden: torch.Tensor, logits: torch.Tensor) -> None:
            stored.put(span.name, logits[0])

        def compare(span: TokenSpan, hidden: torch.Tensor, logits: torch.Tensor) -> None:
            blocks = stored.blocks(span.name, logits.device, logits.shape[1])
            for log_p, block in zip(blocks, logits[0].split(BLOCK_TOKENS), strict=True):
                kl_divergence(log_p, block.log_softmax(-1))

        for name, visit in {"store": store, "compare": compare}.items():
            _time(name, lambda visit=visit: stream.run_tail(visit))


def _time(name: str, run: Callable[[], None]) -> None:
    wall, processor = time.perf_counter(), time.process_time()
    run()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    print(f"{name}: {wall:.2f} s, {processor:.2f} s of the processor, {peak_resident_bytes() / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
