"""Decoder layers as programs: the same results as the layers' own forward, and only where that is so."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding_steps import Doubled, step_logits
from packed_weights import relative_error
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from ciuic_cli.evaluation.bench_process import cache_keyword
from ciuic_cli.runtime.decoding import layer as module
from ciuic_cli.runtime.decoding.layer import DecoderLayer

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch size of every step that programs computed."""
    steps: list[int] = []
    decode = module.LayerPrograms.decode

    def counted(self: Any, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        steps.append(hidden_states.shape[0])
        return decode(self, hidden_states, kwargs)

    monkeypatch.setattr(module.LayerPrograms, "decode", counted)
    return steps


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_as_the_dense_model(
    family: str,
    implementation: str,
    load: Callable[..., Any],
    artifact: Callable[..., Any],
    decoded: list[int],
) -> None:
    model = load(family, attn_implementation=implementation)
    dense = artifact(family, prune=False).dense_model()
    assert relative_error(step_logits(model), step_logits(dense)) < 1e-3
    layers = len(model.model.layers)
    assert len(decoded) == layers * (1 + 3)  # one trial per layer, then three steps


@pytest.mark.parametrize("padded", [False, True])
def test_batches(
    padded: bool, load: Callable[..., Any], decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("qwen2")
    mask = torch.ones(3, 9, dtype=torch.long)
    if padded:
        mask[1, :4] = 0
    found = step_logits(model, batch=3, mask=mask)
    assert decoded.count(3) == 3 * len(model.model.layers)
    monkeypatch.setattr(module, "suits", lambda *_: False)
    assert relative_error(found, step_logits(model, batch=3, mask=mask)) < 1e-3


def test_bfloat16_is_no_worse_than_the_modules(
    load: Callable[..., Any], decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both round activations to int8; the programs keep float32 between steps."""
    exact = step_logits(load("llama"), steps=12)
    decoded.clear()
    model = load("llama", dtype=torch.bfloat16)
    programs = step_logits(model, steps=12)
    assert decoded and programs.dtype == torch.bfloat16
    monkeypatch.setattr(module, "suits", lambda *_: False)
    modules = step_logits(model, steps=12)
    assert relative_error(programs.float(), exact) < 1.2 * relative_error(modules.float(), exact)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 4}],
    ids=lambda options: next(iter(options), "greedy"),
)
def test_generate(
    options: dict[str, Any], load: Callable[..., Any], decoded: list[int], monkeypatch: Any
) -> None:
    model = load("llama")
    prompt = torch.randint(3, 260, (1, 9), generator=torch.Generator().manual_seed(1))
    keywords = {"max_new_tokens": 12, "do_sample": False, **options}
    found = model.generate(prompt, **keywords)
    assert len(decoded) > 12
    monkeypatch.setattr(module, "suits", lambda *_: False)
    assert torch.equal(found, model.generate(prompt, **keywords))


def test_static_cache_by_hand(load: Callable[..., Any], decoded: list[int], monkeypatch: Any) -> None:
    model = load("llama")

    def logits() -> torch.Tensor:
        cache = {cache_keyword(model): StaticCache(config=model.config, max_cache_len=32)}
        with torch.inference_mode():
            model(torch.arange(3, 12)[None], **cache)
            return model(torch.tensor([[7]]), **cache).logits

    found = logits()
    assert decoded
    monkeypatch.setattr(module, "suits", lambda *_: False)
    assert relative_error(found, logits()) < 1e-3


@pytest.mark.parametrize("where", ["q_proj", "input_layernorm", "mlp", "self_attn"])
def test_hooks_are_called(where: str, load: Callable[..., Any], decoded: list[int]) -> None:
    model = load("llama")
    step_logits(model)
    layer, calls = model.model.layers[1], []
    watched = next(m for name, m in layer.named_modules() if name.split(".")[-1] == where)
    handle = watched.register_forward_hook(lambda *_: calls.append(1))
    decoded.clear()
    step_logits(model, steps=2)
    assert len(calls) == 3  # the prompt and two tokens
    assert len(decoded) == 2 * (len(model.model.layers) - 1)
    handle.remove()
    decoded.clear()
    step_logits(model, steps=2)
    assert len(decoded) >= 2 * len(model.model.layers)


def test_outputs_that_were_asked_for(load: Callable[..., Any]) -> None:
    model = load("llama", attn_implementation="eager")
    cache = {cache_keyword(model): DynamicCache(config=model.config)}
    with torch.inference_mode():
        model(torch.arange(3, 12)[None], **cache)
        out = model(torch.tensor([[7]]), output_attentions=True, output_hidden_states=True, **cache)
    assert len(out.attentions) == len(model.model.layers) and out.attentions[0].shape[-1] == 10
    assert len(out.hidden_states) == len(model.model.layers) + 1


def test_a_replaced_projection_is_used(load: Callable[..., Any], decoded: list[int]) -> None:
    model = load("llama")
    before = step_logits(model)
    attention = model.model.layers[0].self_attn
    attention.v_proj = Doubled(attention.v_proj)
    decoded.clear()
    after = step_logits(model)
    assert relative_error(after, before) > 1e-2
    assert len(decoded) == 3 * (len(model.model.layers) - 1)


def test_changed_parameters_are_used(load: Callable[..., Any]) -> None:
    model = load("qwen2")
    before = step_logits(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.bias.add_(1.0)
    changed = step_logits(model)
    assert relative_error(changed, before) > 1e-2
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight.mul_(2.0)
    assert relative_error(step_logits(model), changed) > 1e-2


def test_gradients_flow(load: Callable[..., Any], decoded: list[int]) -> None:
    model = load("llama")
    cache = {cache_keyword(model): DynamicCache(config=model.config)}
    with torch.no_grad():
        model(torch.arange(3, 12)[None], **cache)
    x = torch.randn(1, 1, model.config.hidden_size, requires_grad=True)
    model(inputs_embeds=x, **cache).logits.sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0 and not decoded


@pytest.mark.parametrize("family", ["gemma3", "mixtral", "deepseek_v3"])
def test_other_layers_stay_as_they_are(family: str, load: Callable[..., Any]) -> None:
    assert not any(isinstance(part, DecoderLayer) for part in load(family).modules())


def test_a_layer_that_computes_something_else_runs_its_own_forward(
    load: Callable[..., Any], decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial notices it: here the residual is scaled, as in Granite."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    own = LlamaDecoderLayer.forward

    def scaled(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states + 0.5 * (own(self, hidden_states, *args, **kwargs) - hidden_states)

    model = load("llama")
    plain = step_logits(model)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    model = load("llama")
    decoded.clear()
    found = step_logits(model)
    assert len(decoded) == len(model.model.layers)  # the trials
    assert relative_error(found, plain) > 1e-2


def test_angles_of_other_forms(load: Callable[..., Any], decoded: list[int]) -> None:
    """Angles of another dtype are converted; angles for half a head are left to the layer, which refuses them."""
    model = load("llama")
    step_logits(model)
    layer, size = model.model.layers[0], model.model.layers[0].self_attn.head_dim
    x = torch.randn(1, 1, model.config.hidden_size, generator=torch.Generator().manual_seed(2))

    def step(angles: torch.Tensor) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        keywords = {"position_embeddings": (angles.cos(), angles.sin()), cache_keyword(model): cache}
        with torch.inference_mode():
            return layer(x, attention_mask=None, use_cache=True, **keywords)

    angles = torch.rand(1, 1, size, generator=torch.Generator().manual_seed(3))
    decoded.clear()
    torch.testing.assert_close(step(angles.double()), step(angles))
    assert len(decoded) == 2
    with pytest.raises(RuntimeError, match="size of tensor"):
        step(angles[..., : size // 2])
    assert len(decoded) == 2


def test_low_rank_parts_run_in_the_modules(artifact: Callable[..., Any], decoded: list[int]) -> None:
    built = artifact("llama", rank=4, prune=False)
    model = AutoModelForCausalLM.from_pretrained(built.folder, dtype=torch.float32).eval()
    assert relative_error(step_logits(model), step_logits(built.dense_model())) < 1e-3
    assert len(decoded) < 4 * len(model.model.layers)


def test_copies_and_pickles(load: Callable[..., Any], decoded: list[int]) -> None:
    model = load("llama")
    expected = step_logits(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        decoded.clear()
        assert torch.equal(step_logits(twin), expected)
        assert decoded


@pytest.mark.slow
def test_compiled(load: Callable[..., Any], decoded: list[int]) -> None:
    model = load("llama")
    expected = step_logits(model)
    decoded.clear()
    compiled = torch.compile(model.model.layers[0], fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 4, model.config.hidden_size)
    angles = torch.rand(1, 4, model.model.layers[0].self_attn.head_dim)
    keywords = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}
    with torch.inference_mode():
        # Compiled code attends by torch, whose sums differ; products round what they read.
        assert relative_error(compiled(x, **keywords), model.model.layers[0](x, **keywords)) < 1e-3
    assert not decoded
    assert torch.equal(step_logits(model), expected)
