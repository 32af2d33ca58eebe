"""How much time does the backward sweep save without the down projection's product? The text is random tokens.

    python benchmarks/skipped_products.py MODEL [--layers 4] [--sequences 8] [--turns 3]

Each thread has sequences of its own. Both sides alternate, so that a drift of the machine affects both. Prints seconds
of a layer, the least of all turns, and seconds of the processor.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from ciuic_cli.process.numeric_libraries import configure_numeric_libraries

configure_numeric_libraries()

import torch  # noqa: E402

from ciuic_cli.checkpoint.model_map import map_model  # noqa: E402
from ciuic_cli.checkpoint.reader import open_checkpoint  # noqa: E402
from ciuic_cli.layerwise.layer_stream import LayerStream  # noqa: E402
from ciuic_cli.layerwise.linear_hooks import SkippedProducts, linears_of  # noqa: E402
from ciuic_cli.layerwise.operations.mixed_precision import compute_dtype  # noqa: E402
from ciuic_cli.process.memory import configure_allocators  # noqa: E402
from ciuic_cli.process.threads import in_order  # noqa: E402
from ciuic_cli.statistics.recorder import OutputRecorder  # noqa: E402

SEQLEN = 512


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    configure_allocators()
    cpu = torch.device("cpu")
    model_map, random = map_model(open_checkpoint(options.model)), torch.Generator().manual_seed(0)
    vocabulary = int(model_map.config.get_text_config().vocab_size)
    chunks = [torch.randint(0, vocabulary, (1, SEQLEN), generator=random) for _ in range(options.sequences)]
    with tempfile.TemporaryDirectory() as folder:
        stream = LayerStream(model_map, chunks, Path(folder), device=cpu, dtype=compute_dtype(cpu))
        stream.begin()
        for number in range(options.layers):
            stream.forward_layer(number)
            for index in range(options.sequences):
                shape = stream.hidden.get(f"{number + 1}.{index}", cpu).shape
                stream.gradient.put(f"{number + 1}.{index}", torch.randn(shape, generator=random))
        least = {True: [float("inf")] * 2, False: [float("inf")] * 2}
        for _ in range(options.turns):
            for skips, best in least.items():
                wall, processor = time.perf_counter(), time.process_time()
                for number in range(options.layers):
                    _run(stream, number, skips=skips)
                wall, processor = time.perf_counter() - wall, time.process_time() - processor
                best[:] = map(min, best, (wall / options.layers, processor / options.layers))
    for skips, (wall, processor) in least.items():
        name = "left out" if skips else "computed"
        print(f"product {name}: {wall:.3f} s, {processor:.3f} s of the processor, for each layer")


def _run(stream: LayerStream, number: int, *, skips: bool) -> None:
    with stream.backward_layer(number) as (layer, run_chunks):
        watched = linears_of(layer, stream.prefixes[number], stream.map.parameters)
        skipped = [item.tensor for item in watched if skips and item.role == "down"]

        def record(index: int) -> None:
            with SkippedProducts(skipped), OutputRecorder(watched, stream.dtype):
                run_chunks([index])

        list(in_order(range(len(stream.chunks)), record, stream.side_by_side(number)))


if __name__ == "__main__":
    main()
