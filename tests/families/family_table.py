"""Compresses a tiny model of every family and prints what works; `--write` puts the table into docs/FAMILIES.md.

    python tests/families/family_table.py [MODEL_TYPE ...] [--write docs/FAMILIES.md]

Each model is compressed 4:1, inspected, evaluated, loaded by transformers, and generates. Its logits are compared with
those of a dense model with the decoded weights.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tiny_families import make_family

from ciuic_cli import read_tensor
from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.artifact.verification import verify
from ciuic_cli.checkpoint.config.classes import auto_class
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.errors import CiuicError
from ciuic_cli.evaluation.perplexity import evaluate
from ciuic_cli.report.inspection import describe

MAX_DIFFERENCE = 1e-3
"""Largest difference of a logit from the dense model's, in standard deviations of the logits, in float32."""
LARGE = 1024
"""Weights from which a matrix is called large here."""
TEXT = "The quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 40


@dataclass(frozen=True)
class Result:
    """code: the exit code that the command line would give. share: of the weights in large matrices that are coded."""

    family: str
    model: str
    code: int
    share: float
    ratio: float
    difference: float
    seconds: float
    reason: str

    @property
    def works(self) -> bool:
        return self.code == 0 and self.difference < MAX_DIFFERENCE


def try_family(family: str, folder: Path, ratio: float = 4.0, **options: Any) -> Result:
    """Make, compress, check. options: of the family's configuration."""
    started, model, share, reached, difference, reason, code = time.monotonic(), "", 0.0, 0.0, 0.0, "", 0
    try:
        source = make_family(family, folder / "model", **options)
    except Exception as error:
        return Result(family, "", -1, 0, 0, 0, 0, f"no tiny model: {type(error).__name__}: {error!s:.200}")
    try:
        text = folder / "text.txt"
        text.write_text(TEXT)
        out = folder / "out"
        report = compress(
            source,
            out,
            ratio=ratio,
            effort="fast",
            nsamples=6,
            seqlen=48,
            calibration=[text],
            calibration_only=True,
            prune="off",
        )
        reached = report.ratio
        rows = [row for row in report.components if len(row.shape) > 1 and row.parameters >= LARGE]
        share = sum(row.parameters for row in rows if row.dense is None) / sum(row.parameters for row in rows)
        reason = "; ".join(
            sorted({f"{row.name.rpartition('.')[2]}: {row.dense}" for row in rows if row.dense})
        )
        model, difference = compare(source, out)
        describe(out)
        verify(out).require_intact(out)
        evaluate(out, base=source, text=text, seqlen=48, limit=2)
    except CiuicError as error:
        code, reason = error.exit_code, str(error)
    except Exception as error:
        code, reason = 1, f"{type(error).__name__}: {error}"
        if "-v" in sys.argv:
            traceback.print_exc()
    return Result(family, model, code, share, reached, difference, time.monotonic() - started, reason)


@torch.inference_mode()
def compare(source: Path, out: Path) -> tuple[str, float]:
    """The model's class, and the largest difference of its logits from a dense model's, in standard deviations."""
    from transformers import AutoConfig

    auto = auto_class(AutoConfig.from_pretrained(source))
    model: Any = auto.from_pretrained(out, dtype=torch.float32)
    dense: Any = auto.from_pretrained(source, dtype=torch.float32)
    parameters = dict(dense.named_parameters(remove_duplicate=False))
    for name in open_artifact(out).blobs:
        decoded = read_tensor(out, name).float()
        parameters[name].data.copy_(decoded if decoded.shape == parameters[name].shape else decoded.mT)
    ids = torch.randint(3, 263, (2, 40), generator=torch.Generator().manual_seed(0))
    expected, found = (
        candidate.eval()(input_ids=ids, use_cache=False).logits for candidate in (dense, model)
    )
    if _generates(dense, ids) and not _generates(model, ids):
        raise AssertionError("the original generates tokens, the artifact does not")
    return type(model).__name__, float((found - expected).abs().max() / expected.std())


def _generates(model: Any, ids: torch.Tensor) -> bool:
    """Whether the model continues the prompts; transformers cannot generate with some classes of its own."""
    try:
        generated = model.generate(
            input_ids=ids[:, :20], max_new_tokens=4, do_sample=False, eos_token_id=None
        )
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return False
    return generated.shape == (2, 24)


def decoder_families() -> list[str]:
    """All model types with a language model, alone or behind a vision tower, that is no half of an encoder-decoder."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    names = {
        **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    found = []
    for family in names:
        try:
            if not getattr(CONFIG_MAPPING[family](), "is_encoder_decoder", False):
                found.append(family)
        except Exception as error:  # a configuration that needs an optional library
            print(f"{family}: {error!s:.80}", file=sys.stderr)
    return found


def row(result: Result) -> str:
    """The result's row of the page."""
    reason = re.sub(r" \(file [^)]*\)", "", " ".join(result.reason.split()).replace("|", "/"))
    figures = f"{result.share:.1%} | {result.difference:.0e}" if result.code == 0 else " | "
    works = "yes" if result.works else "not tried" if result.code < 0 else f"no, exit code {result.code}"
    return f"| {result.family} | {result.model} | {works} | {figures} | {reason:.240} |"


def page(results: list[Result], before: str = "") -> str:
    """docs/FAMILIES.md. before: the page so far, whose rows of other families are kept."""
    import transformers

    rows = {line.split("|")[1].strip(): line for line in before.splitlines() if line.startswith("| ")}
    rows.pop("model_type", None)
    rows |= {result.family: row(result) for result in results}
    verdicts = [line.split("|")[3].strip() for line in rows.values()]
    works, tried = verdicts.count("yes"), len(verdicts) - verdicts.count("not tried")
    lines = [
        "# Model families",
        "",
        "Generated by `python tests/families/family_table.py --write docs/FAMILIES.md`, with transformers "
        f"{transformers.__version__}.",
        "",
        "Each row is a random model of a few layers. It was compressed 4:1, published, inspected, verified and "
        "evaluated; transformers loaded it, and it generated tokens if the original does. "
        "*Difference* is the largest difference of a "
        "logit from a dense model with the decoded weights, in standard deviations of the logits, in float32; "
        f"*coded* is the share of the weights in matrices of at least {LARGE} weights that is compressed.",
        "",
        f"**{works} of {tried} families work.** Those not tried have no tiny model yet: they need other libraries, or "
        "sizes that `tests/families/tiny_families.py` does not know. Code 3 means that the model is refused by name, "
        "code 4 that the tiny model has too few large matrices for 4:1 or that the loaded artifact did not predict as "
        "measured. No artifact is left in either case.",
        "",
        "Sizes that are no multiples of a tile are tried by `python tests/families/random_shapes.py --count 80 --seed "
        "2718`: 80 checkpoints of 32 of these families, with odd sizes in the proportions of released models, in three "
        "dtypes. All 80 work at 4:1.",
        "",
        "| model_type | class | works | coded | difference | not compressed, or why it does not work |",
        "|---|---|---|---|---|---|",
        *(rows[family] for family in sorted(rows)),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Try the families named, or all; returns the number of those that end with code 1 or differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--ratio", type=float, default=4.0)
    parser.add_argument("-v", action="store_true")
    arguments = parser.parse_args()
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    results = []
    for family in arguments.families or decoder_families():
        with tempfile.TemporaryDirectory() as folder:
            results.append(try_family(family, Path(folder), arguments.ratio))
        r = results[-1]
        print(
            f"{'ok ' if r.works else 'BAD'} {r.family:22} code {r.code:2} share {r.share:6.1%} ratio {r.ratio:.2f} "
            f"diff {r.difference:.1e} {r.seconds:5.1f} s {r.reason:.300}",
            flush=True,
        )
    if arguments.write is not None:
        before = arguments.write.read_text(encoding="utf-8") if arguments.write.exists() else ""
        arguments.write.write_text(page(results, before), encoding="utf-8")
    return sum(r.code == 1 or not r.difference < MAX_DIFFERENCE for r in results)


if __name__ == "__main__":
    sys.exit(main())
