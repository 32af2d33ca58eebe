"""Random small checkpoints of shapes that no other test has, through compress, inspect, eval, load and generate.

    python tests/families/random_shapes.py --count 40 --seed 0

Each shape takes the configuration class of a family of transformers and odd sizes: heads of a width that is no multiple
of 16, untied heads, biases, odd vocabularies, one layer, many shards, and files whose tensors have several dtypes. A
shape fails if it ends with code 1 or 5, or if its logits differ from those of a dense model with the decoded weights.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from family_table import MAX_DIFFERENCE, TEXT, compare
from tiny_checkpoints import make_tokenizer
from tiny_families import CHANGES, SIZES

from ciuic_cli.artifact.verification import verify
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.errors import CiuicError
from ciuic_cli.evaluation.perplexity import evaluate
from ciuic_cli.integers import round_up
from ciuic_cli.report.inspection import describe

FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text",
    "phi", "phi3", "gpt2", "gpt_neox", "gptj", "falcon", "bloom", "opt", "stablelm", "starcoder2", "olmo2", "olmoe",
    "granite", "granitemoe", "cohere", "glm4", "deepseek_v2", "deepseek_v3", "mamba2", "gpt_oss", "smollm3", "ernie4_5",
)  # fmt: skip
"""Families whose configurations take odd sizes without other changes."""
OTHERS = (
    "apertus", "arcee", "biogpt", "bitnet", "codegen", "cohere2", "deepseek_v32", "doge", "dots1", "ernie4_5_moe",
    "exaone4", "falcon_h1", "falcon_mamba", "flex_olmo", "glm", "glm4_moe", "glm_moe_dsa", "gpt_bigcode",
    "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "jamba", "jetmoe", "lfm2", "llama4_text", "longcat_flash",
    "mamba", "minimax", "minimax_m2", "ministral", "mpt", "nemotron", "nemotron_h", "olmo", "olmo3", "persimmon",
    "phimoe", "qwen3_next", "seed_oss", "vaultgemma", "xglm",
)  # fmt: skip
"""More of them; `--others` tries these."""


_EXPERT_SIZES = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
STORED = ("alike", "vectors in float32", "some in float32", "some in float16", "named otherwise", "unnamed")
"""Dtypes in the files: all of the model's; all vectors or half of the tensors in another one; all of the model's, and
config.json names another one or none."""


@dataclass(frozen=True)
class Shape:
    """What is tried: a family, values of its configuration, the dtype, the size of a shard, and one of `STORED`."""

    family: str
    values: dict[str, Any]
    dtype: torch.dtype
    shard: str
    stored: str


def random_shape(generator: random.Random, families: Sequence[str] = FAMILIES) -> Shape:
    """A shape of one of the families, with odd sizes in the proportions of released models.

    Every model of these sizes can reach 4:1, so that a refusal is a finding. What a model keeps dense (norms, biases,
    routers) is a share of its weights that falls with the width, so the width is 72 to 160. In proportion to it are the
    heads together (0.5 to 2; Qwen3 0.6B has 2), the feed-forward part (1.5 to 5.3; Llama 2.7, Gemma 8), an expert
    (0.3 to 1; DeepSeek-V3 0.29, OLMoE 0.5, Mixtral 3.5), and the latents of DeepSeek's attention (0.2 to 0.4; V3's
    queries have 0.21, its keys and values 0.07).
    """
    pick = generator.choice
    heads = pick([1, 2, 3, 5, 6])
    kv_heads = pick([n for n in (1, 2, 3, 5, 6) if heads % n == 0])
    hidden = pick([72, 84, 100, 110, 126, 140, 160])
    head_dim = 2 * max(4, round(hidden * pick([0.5, 1, 1, 2]) / heads / 2))
    experts = pick([2, 3, 5, 7, 9])
    layers = pick([1, 1, 2, 3])
    intermediate = int(hidden * generator.uniform(1.5, 5.3))
    expert, shared = (int(hidden * generator.uniform(0.3, 1)) for _ in range(2))
    # V2's rotated keys lie behind the latent, and torch reads them in pairs.
    latent, query_latent = (2 * int(hidden * generator.uniform(0.1, 0.2)) for _ in range(2))
    values = {
        "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "intermediate_size": intermediate, "num_hidden_layers": layers,
        "vocab_size": pick([263, 271, 300, 401, 512, 1009]), "max_position_embeddings": pick([64, 100, 256, 2048]),
        "num_experts": experts, "num_local_experts": experts, "n_routed_experts": experts,
        "num_experts_per_tok": pick([1, 2]), "moe_intermediate_size": expert,
        "shared_expert_intermediate_size": shared, "n_shared_experts": pick([1, 2]),
        "tie_word_embeddings": pick([True, False]), "attention_bias": pick([True, False]),
        "mlp_bias": pick([True, False]), "use_bias": pick([True, False]), "sliding_window": pick([8, 16, 33]),
        "kv_lora_rank": latent, "q_lora_rank": pick([None, query_latent]),
        "qk_nope_head_dim": pick([10, 16, 18]), "qk_rope_head_dim": pick([4, 8, 10]), "v_head_dim": pick([9, 12, 20]),
        "first_k_dense_replace": pick([0, min(1, layers - 1)]), "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "n_embd": hidden, "n_head": heads, "n_layer": layers, "n_positions": 128, "n_inner": pick([None, intermediate]),
        "ffn_dim": intermediate, "word_embed_proj_dim": hidden,
    }  # fmt: skip
    return Shape(
        pick(families),
        values,
        pick([torch.bfloat16, torch.float16, torch.float32]),
        pick(["5GB", "30KB", "100KB"]),
        pick(STORED),
    )


def config_of(shape: Shape) -> Any:
    """The family's configuration with those values that it has. Its class raises for values that do not fit."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[shape.family]
    plain = kind()
    sizes = _fitted(plain, {**SIZES, **shape.values})
    known = {key: value for key, value in sizes.items() if _has(plain, key)}
    changes = {key: value for key, value in CHANGES.get(shape.family, {}).items() if key not in sizes}
    return kind(**{**known, **changes})


def _fitted(plain: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """The sizes, changed where the modules of a configuration like `plain` need sizes that depend on each other."""
    fitted = dict(sizes)
    heads = sizes["num_attention_heads"]
    rotary_share = (getattr(plain, "rope_parameters", None) or {}).get("partial_rotary_factor", 1)
    unit = 2 * Fraction(rotary_share).limit_denominator(64).denominator  # the rotated part of a head is even
    fitted["head_dim"] = round_up(sizes["head_dim"], unit)
    step = unit * heads
    if _has(plain, "num_experts_per_tok"):
        # transformers multiplies by experts only if the rows of all factors are whole 16 bytes.
        fitted |= {key: round_up(sizes[key], 8) for key in _EXPERT_SIZES}
        step = lcm(step, 8)
    fitted["hidden_size"] = round_up(sizes["hidden_size"], step)
    if _has(plain, "kv_lora_rank"):  # DeepSeek's attention: keys of all heads share one rotated part
        fitted |= {"num_key_value_heads": heads, "head_dim": sizes["qk_rope_head_dim"]}
    if _has(plain, "expand"):  # state-space layers have `expand` times the width
        fitted["hidden_size"] = round_up(sizes["hidden_size"], fitted["head_dim"])
        fitted["num_heads"] = plain.expand * fitted["hidden_size"] // fitted["head_dim"]
    if "None" not in str(
        type(plain).__annotations__.get("q_lora_rank")
    ):  # such a family always has this latent
        fitted["q_lora_rank"] = sizes["q_lora_rank"] or sizes["kv_lora_rank"]
    fitted["n_embd"] = fitted["word_embed_proj_dim"] = fitted["hidden_size"]
    return fitted


def _has(config: Any, key: str) -> bool:
    return key in config.to_dict() or key in getattr(type(config), "attribute_map", {})


@torch.no_grad()
def make(shape: Shape, folder: Path) -> Path:
    """Write the checkpoint; returns its folder."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config_of(shape), dtype=shape.dtype)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not name.endswith(("A_log", "conv1d.weight")):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
        elif parameter.dim() == 1 and parameter.is_floating_point():
            parameter.add_((torch.rand(parameter.shape, generator=generator) * 0.1).to(parameter.dtype))
    ids = torch.randint(3, 263, (1, 20), generator=generator)
    logits = model.float()(input_ids=ids, use_cache=False).logits
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("the original predicts no finite numbers")
    model.to(shape.dtype).save_pretrained(folder, max_shard_size=shape.shard)
    store(folder, shape.stored)
    make_tokenizer(folder)
    return folder


def store(folder: Path, stored: str) -> None:
    """Give the tensors of the files, or the dtype in config.json, what `stored` says."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if stored == "named otherwise":
        config["dtype"] = "float32" if config["dtype"] == "bfloat16" else "bfloat16"
    elif stored == "unnamed":
        del config["dtype"]
    file.write_text(json.dumps(config))
    other = torch.float16 if stored == "some in float16" else torch.float32
    generator = random.Random(stored)
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        for name, value in tensors.items():
            if value.is_floating_point() and (
                (stored == "vectors in float32" and value.dim() == 1)
                or (stored.startswith("some") and generator.random() < 0.5)
            ):
                noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(1))
                tensors[name] = (value.float() * (1 + noise / 1000)).to(
                    other
                )  # more digits than bfloat16 has
        save_file(tensors, shard, metadata={"format": "pt"})


def try_shape(shape: Shape, folder: Path, ratio: float, verbose: bool = False) -> tuple[int, str]:
    """The exit code that `ciuic compress` would have, or 1 for wrong logits, and the reason. -1: no such model."""
    try:
        source = make(shape, folder / "model")
    except Exception as error:
        return -1, f"{type(error).__name__}: {error!s:.150}"
    text, out = folder / "text.txt", folder / "out"
    text.write_text(TEXT)
    try:
        report = compress(
            source,
            out,
            ratio=ratio,
            effort="fast",
            nsamples=6,
            seqlen=48,
            calibration=[text],
            calibration_only=True,
            prune="off",  # a router passes over a pruned expert; that of the dense model does not
        )
        describe(out)
        verify(out).require_intact(out)
        evaluate(out, base=source, text=text, seqlen=64, limit=2)
        _, difference = compare(source, out)
    except CiuicError as error:
        return error.exit_code, str(error)
    except Exception as error:
        if verbose:
            traceback.print_exc()
        return 1, f"{type(error).__name__}: {error!s:.300}"
    if not difference < MAX_DIFFERENCE:
        return 1, f"logits differ by {difference:.2g} standard deviations"
    return 0, f"ratio {report.ratio:.2f}, difference {difference:.1e}"


def main() -> int:
    """Try random shapes; returns the number of those that failed, or that this machine could not run (code 5)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="skip this many shapes")
    parser.add_argument("--ratio", type=float, default=4.0)
    parser.add_argument("--others", action="store_true", help="families that are tried less often")
    parser.add_argument("-v", action="store_true")
    arguments = parser.parse_args()
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    codes: Counter[int] = Counter()
    number, families = 0, OTHERS if arguments.others else FAMILIES
    while codes.total() - codes[-1] < arguments.count:
        shape = random_shape(random.Random(1_000_003 * arguments.seed + number), families)
        number += 1
        if number <= arguments.start:
            continue
        with tempfile.TemporaryDirectory() as folder:
            code, reason = try_shape(shape, Path(folder), arguments.ratio, arguments.v)
        codes[code] += 1
        print(
            f"{number - 1:4} code {code:2} {shape.family:14} {str(shape.dtype)[6:]:9} {shape.stored:18} {reason}",
            flush=True,
        )
        if code == 1:
            print(f"     {shape}", flush=True)
    print(dict(codes))
    return codes[1] + codes[5]


if __name__ == "__main__":
    sys.exit(main())
