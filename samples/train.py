"""Train the sample model: a small DeepSeek-V3 (MLA, one dense layer, routed and shared experts, sigmoid router).

    python samples/train.py --out samples/deepseek-v3-tiny

The result has the hub's layout: one 2-D bfloat16 tensor per expert and projection, the router's bias in float32. The
recipe depends only on `--steps` and `--seed`. The bytes may differ between machines, because the order of sums does.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from corpus import DOCUMENT_SEPARATOR, load_corpus, write_texts
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
VOCABULARY = 4096
ROPE_THETA = 10000.0
CONTEXT = 512  # tokens of a training or evaluation window
BATCH = 4  # windows per step
PEAK_RATE = 2.5e-3  # peak learning rate of AdamW
DECAY_SHARE = 0.5  # share of the steps, at the end, in which the learning rate falls linearly to zero
WARMUP_STEPS = 100
WEIGHT_DECAY = 0.1
DROPOUT = 0.05
BIAS_RATE = 3e-3  # change of the router's balancing bias per step; it falls with the learning rate
LOG_EVERY, EVALUATE_EVERY = 50, 200  # steps
VALIDATION_TOKENS = 16_384
BOS_SHARE = 0.5  # share of the windows that begin with BOS, as a text does at inference


def model_config() -> DeepseekV3Config:
    """DeepSeek-V3's architecture with small dimensions, all multiples of 32."""
    return DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        num_mtp_layers=0,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Train a byte-level BPE of `VOCABULARY` tokens. It puts BOS before a text and makes every digit one token."""
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return tokenizer


def keep_memory() -> None:
    """Tell glibc to keep freed blocks. Otherwise a third of each step is spent on mapping large buffers again."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no separate mappings
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never return memory to the system


def add_dropout(model: nn.Module) -> None:
    """Apply dropout to the attention and feed-forward outputs: the model sees the text several times."""

    def drop(module: nn.Module, _: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> Any:
        if isinstance(output, tuple):
            return (F.dropout(output[0], DROPOUT, module.training), *output[1:])
        return F.dropout(output, DROPOUT, module.training)

    for layer in model.get_submodule("model.layers").children():
        layer.get_submodule("self_attn").register_forward_hook(drop)
        layer.get_submodule("mlp").register_forward_hook(drop)


class Balancer:
    """Auxiliary-loss-free load balancing (arXiv 2408.15664): biases of busy experts fall, those of idle ones rise."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = [module for module in model.modules() if isinstance(module, DeepseekV3TopkRouter)]
        self.loads = [torch.zeros(router.num_experts) for router in self.routers]
        for router, load in zip(self.routers, self.loads, strict=True):
            router.register_forward_hook(partial(count_choices, load))

    def update(self, rate: float) -> float:
        """Move every bias by `rate` against its load and reset the loads. Returns the highest max load / mean load."""
        imbalance = 0.0
        for router, load in zip(self.routers, self.loads, strict=True):
            router.e_score_correction_bias.add_(rate * torch.sign(load.mean() - load))
            imbalance = max(imbalance, float(load.max() / load.mean()))
            load.zero_()
        return imbalance


def count_choices(load: Tensor, module: nn.Module, _: tuple[Tensor], output: tuple[Tensor, ...]) -> None:
    """Forward hook of a router: in training, add the choices of each expert to `load` (experts,)."""
    if module.training:
        load += torch.bincount(output[2].flatten(), minlength=len(load))


def token_stream(tokenizer: Tokenizer, documents: list[str], generator: torch.Generator) -> Tensor:
    """All documents as one (n,) stream of token ids. Half of the separators are EOS BOS, half are blank lines."""
    separator = tokenizer.encode(DOCUMENT_SEPARATOR, add_special_tokens=False).ids
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(documents, add_special_tokens=False):
        end = [1, 0] if torch.rand((), generator=generator) < 0.5 else separator
        stream += encoding.ids + end
    return torch.tensor(stream)


def batches(stream: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless (BATCH, CONTEXT + 1) windows. Every epoch has a new offset and order and covers each token once."""
    while True:
        offset = int(torch.randint(CONTEXT, (), generator=generator))
        starts = torch.arange(offset, len(stream) - CONTEXT - 1, CONTEXT)
        starts = starts[torch.randperm(len(starts), generator=generator)]
        for chosen in starts[: len(starts) // BATCH * BATCH].split(BATCH):
            windows = stream[chosen[:, None] + torch.arange(CONTEXT + 1)]
            with_bos = torch.rand(BATCH, generator=generator) < BOS_SHARE
            windows[:, 0] = torch.where(with_bos, 0, windows[:, 0])
            yield windows


@torch.no_grad()
def cross_entropy(model: nn.Module, tokens: Tensor) -> float:
    """Mean cross-entropy (nats per token) over non-overlapping windows of CONTEXT tokens."""
    training = model.training
    model.eval()
    windows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    total = 0.0
    for window in windows.split(BATCH):
        logits = model(window, use_cache=False).logits[:, :-1].float()
        total += float(F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten(), reduction="sum"))
    model.train(training)
    return total / (len(windows) * (CONTEXT - 1))


def optimizer_for(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), eps=1e-9, fused=True)


def rate_share(step: int, steps: int) -> float:
    """Share of the peak rate at a step: linear warm-up, constant, linear decay over DECAY_SHARE of the steps."""
    left = (steps - step) / (DECAY_SHARE * steps)
    return min(1.0, (step + 1) / WARMUP_STEPS, left)


def train(
    model: DeepseekV3ForCausalLM, stream: Tensor, validation: Tensor, steps: int, seed: int, checkpoint: Path
) -> None:
    """Train in place. The final weights are those with the lowest loss on `validation`, tested every EVALUATE_EVERY."""
    model.set_experts_implementation("grouped_mm")
    add_dropout(model)
    balancer, optimizer = Balancer(model), optimizer_for(model)
    data = batches(stream, torch.Generator().manual_seed(seed + 1))
    model.train()
    began, mean_loss, best = time.perf_counter(), 0.0, math.inf
    for step in range(steps):
        share = rate_share(step, steps)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * share
        windows = next(data)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(windows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        imbalance = balancer.update(BIAS_RATE * (1.0 if step < WARMUP_STEPS else share))
        mean_loss += (loss.item() - mean_loss) / (step % LOG_EVERY + 1)
        if step % LOG_EVERY == LOG_EVERY - 1:
            speed = (step + 1) * BATCH * CONTEXT / (time.perf_counter() - began)
            balance = f"busiest expert {imbalance:.2f}"
            print(f"step {step + 1}/{steps} loss {mean_loss:.4f} {balance} {speed:.0f} tokens/s")
            mean_loss = 0.0
        if step % EVALUATE_EVERY == EVALUATE_EVERY - 1 or step + 1 == steps:
            now = cross_entropy(model, validation)
            print(f"step {step + 1} validation loss {now:.4f} perplexity {math.exp(now):.2f}", flush=True)
            if now < best:
                best = now
                torch.save({"step": step + 1, "model": model.state_dict()}, checkpoint)
    print(f"trained {steps} steps in {time.perf_counter() - began:.0f} s")
    chosen = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(chosen["model"])
    print(f"kept step {chosen['step']}")


def hub_config(config: DeepseekV3Config) -> dict[str, Any]:
    """A config.json with the keys of DeepSeek-V3's config.json on the hub."""
    keys = (
        "attention_bias attention_dropout bos_token_id eos_token_id first_k_dense_replace hidden_act "
        "hidden_size initializer_range intermediate_size kv_lora_rank max_position_embeddings model_type "
        "moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob num_attention_heads "
        "num_experts_per_tok num_hidden_layers num_key_value_heads q_lora_rank qk_nope_head_dim "
        "qk_rope_head_dim rms_norm_eps routed_scaling_factor tie_word_embeddings topk_group use_cache "
        "v_head_dim vocab_size"
    )
    return {key: getattr(config, key) for key in keys.split()} | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
    }


def hub_tensors(model: DeepseekV3ForCausalLM) -> dict[str, Tensor]:
    """The weights under the hub's names. Fused expert stacks become one gate, up and down matrix per expert."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        prefix, _, last = name.rpartition(".")
        if last == "e_score_correction_bias":
            tensors[name] = value.float()
        elif last == "gate_up_proj":
            for expert, matrix in enumerate(value.bfloat16()):
                for half, weights in zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True):
                    tensors[f"{prefix}.{expert}.{half}.weight"] = weights.contiguous()
        elif last == "down_proj":
            for expert, matrix in enumerate(value.bfloat16()):
                tensors[f"{prefix}.{expert}.down_proj.weight"] = matrix.contiguous()
        else:
            tensors[name] = value.bfloat16().contiguous()
    return tensors


def export(model: DeepseekV3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model and its tokenizer in the hub's layout. Raises SystemExit if a loaded copy differs."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hub_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer_config = {
        "add_bos_token": True,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "pad_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    generation: dict[str, Any] = {"bos_token_id": 0, "do_sample": False, "eos_token_id": 1, "pad_token_id": 1}
    generation["repetition_penalty"] = 1.2  # greedy text of such a small model would repeat itself
    contents = {
        "config": hub_config(model.config),
        "generation_config": generation,
        "tokenizer_config": tokenizer_config,
    }
    for name, content in contents.items():
        text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)("In the beginning God created", return_tensors="pt").input_ids
    if ids.tolist() != [tokenizer.encode("In the beginning God created").ids]:
        raise SystemExit(f"{folder}: the tokenizer that was loaded differs from the one that was saved")
    trained = DeepseekV3ForCausalLM(model.config).eval()
    trained.load_state_dict({name: rounded(name, value) for name, value in model.state_dict().items()})
    loaded.set_experts_implementation("eager")
    trained.set_experts_implementation("eager")
    with torch.no_grad():
        difference = (loaded(ids).logits - trained(ids).logits).abs().max()
    if difference:
        raise SystemExit(f"{folder}: logits of the loaded model differ by {difference}")


def rounded(name: str, value: Tensor) -> Tensor:
    """A weight in the dtype of the file: bfloat16, or float32 for the router's bias."""
    return value.float() if name.endswith("e_score_correction_bias") else value.bfloat16()


@torch.no_grad()
def continuation(folder: Path, prompt: str, tokens: int = 60) -> str:
    """Greedy continuation of `prompt` by the exported model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def main() -> None:
    """Command line: fetch the text, train the tokenizer and the model, export both, print the results."""
    parser = argparse.ArgumentParser(description="Train the sample model and export it in the hub's layout.")
    parser.add_argument("--out", type=Path, default=Path("build/deepseek-v3-tiny"))
    parser.add_argument("--text-out", type=Path, help="also write heldout.txt and calibration.txt here")
    parser.add_argument("--packages", type=Path, default=Path("build/sample-packages"))
    parser.add_argument("--checkpoint", type=Path, default=Path("build/sample-checkpoint.pt"))
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    arguments.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    keep_memory()

    corpus = load_corpus(arguments.packages)
    if arguments.text_out:
        write_texts(corpus, arguments.text_out)
    tokenizer = train_tokenizer(corpus.train)
    stream = token_stream(tokenizer, corpus.train, torch.Generator().manual_seed(arguments.seed))
    heldout, calibration = (
        torch.tensor(tokenizer.encode(DOCUMENT_SEPARATOR.join(documents)).ids)
        for documents in (corpus.heldout, corpus.calibration)
    )
    model = DeepseekV3ForCausalLM(model_config())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters} parameters, {len(stream)} training tokens, {len(heldout)} held-out tokens")
    untrained = cross_entropy(model, heldout)
    print(f"untrained: held-out loss {untrained:.4f} perplexity {math.exp(untrained):.1f}", flush=True)

    # The best step is chosen on part of the calibration text: the held-out text must not influence the model.
    train(
        model, stream, calibration[:VALIDATION_TOKENS], arguments.steps, arguments.seed, arguments.checkpoint
    )
    model.set_experts_implementation("eager")
    export(model, tokenizer, arguments.out)
    exported = AutoModelForCausalLM.from_pretrained(arguments.out, dtype=torch.float32)
    loss = cross_entropy(exported, heldout)
    print(f"exported: held-out loss {loss:.4f} perplexity {math.exp(loss):.2f}")
    for prompt in ("And it came to pass", "Background: The island was"):
        print(f"---\n{continuation(arguments.out, prompt)}")


if __name__ == "__main__":
    main()
