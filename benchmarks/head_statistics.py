"""How long do the statistics of a model's head take? Alone, on random hidden states.

    python benchmarks/head_statistics.py MODEL [--sequences 2] [--tokens 128]

Prints the tokens of a part, seconds, seconds of the processor, and the peak of resident memory. --tokens sets the
tokens of a part, whatever the vocabulary.
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
from ciuic_cli.layerwise import logits as logit_parts  # noqa: E402
from ciuic_cli.layerwise.layer_stream import LayerStream  # noqa: E402
from ciuic_cli.layerwise.logits import TokenSpan  # noqa: E402
from ciuic_cli.layerwise.operations.mixed_precision import compute_dtype  # noqa: E402
from ciuic_cli.process.memory import configure_allocators, peak_resident_bytes  # noqa: E402
from ciuic_cli.statistics.head_fisher import HeadSums  # noqa: E402

SEQLEN = 512


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--tokens", type=int)
    arguments = parser.parse_args()
    if arguments.tokens:
        logit_parts.LEAST_TOKENS, logit_parts.LOGIT_BYTES = arguments.tokens, 0
    configure_allocators()
    cpu = torch.device("cpu")
    model_map, dtype = map_model(open_checkpoint(arguments.model)), compute_dtype(cpu)
    random = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        chunks = [torch.zeros(1, SEQLEN, dtype=torch.long) for _ in range(arguments.sequences)]
        stream = LayerStream(model_map, chunks, Path(folder), device=cpu, dtype=dtype)
        head = stream.model.get_output_embeddings()
        vocabulary, cols = head.weight.shape
        for index in range(arguments.sequences):
            states = torch.randn(1, SEQLEN, cols, generator=random)
            stream.hidden.put(f"{len(stream.prefixes)}.{index}", states)
        inputs: list[torch.Tensor] = []
        head.register_forward_hook(lambda module, args, output: inputs.append(args[0].detach()))
        sums = HeadSums(vocabulary, cols, cpu, dtype)

        def visit(span: TokenSpan, hidden: torch.Tensor, logits: torch.Tensor) -> None:
            draws = torch.rand(logits.shape[1], 1, generator=random)
            logits.backward(sums.add(inputs.pop()[0].float(), logits.detach()[0], None, draws)[None])

        with stream.tail(visit) as run_chunks:
            wall, processor = time.perf_counter(), time.process_time()
            run_chunks(range(arguments.sequences))
            sums.rows()
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
    print(
        f"{stream.span_tokens} tokens: {wall:.1f} s, {processor:.1f} s of the processor, "
        f"{peak_resident_bytes() / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()
