"""All layers of a model as one program: the same results as layer by layer, and only where that is so."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_steps import PROMPT, Doubled, step_logits
from packed_weights import relative_error
from transformers import AutoModelForCausalLM, DynamicCache

from ciuic_cli.evaluation.bench_process import cache_keyword
from ciuic_cli.runtime.attention.growing_cache import GrowingLayer
from ciuic_cli.runtime.decoding import layer as one_layer
from ciuic_cli.runtime.decoding.stack import StackProgram
from ciuic_cli.runtime.decoding.step import LayerStack

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "qwen2": {"hidden_size": 64, "num_attention_heads": 4},
    "qwen3": {"head_dim": 32},
    "mistral": {"head_dim": 16, "sliding_window": None},
}
"""Heads of a size that the native attention has; other sizes run layer by layer (test_layer.py)."""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch size of every step that the program of all layers computed."""
    found: list[int] = []
    run = StackProgram.run

    def counted(self: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
        found.append(x.shape[0])
        return run(self, x, *args)

    monkeypatch.setattr(StackProgram, "run", counted)
    return found


@pytest.fixture(scope="module")
def built(
    tiny_checkpoint: Callable[..., Path],
    make_artifact: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Any]:
    """`built(family)`: the artifact of a tiny model with heads as in SIZES."""
    made: dict[str, Any] = {}

    def build(family: str) -> Any:
        if family not in made:
            folder = tmp_path_factory.mktemp(f"{family}-stack")
            made[family] = make_artifact(tiny_checkpoint(family, **SIZES[family]), folder, prune=False)
        return made[family]

    return build


@pytest.fixture
def load(built: Callable[[str], Any]) -> Callable[..., Any]:
    """`load(family, **options of from_pretrained)`: the artifact's model, float32 unless `dtype` says otherwise."""

    def load(family: str = "llama", **options: Any) -> Any:
        options = {"dtype": torch.float32, **options}
        return AutoModelForCausalLM.from_pretrained(built(family).folder, **options).eval()

    return load


def layer_by_layer(model: Any) -> Any:
    """The model, which no longer computes all layers at once."""
    model.model.__dict__[one_layer.STEPS].are_refused = True
    return model


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", SIZES)
def test_as_the_dense_model(
    family: str, implementation: str, load: Callable[..., Any], built: Callable[[str], Any], runs: list[int]
) -> None:
    model = load(family, attn_implementation=implementation)
    assert relative_error(step_logits(model), step_logits(built(family).dense_model())) < 1e-3
    assert runs == [1] * (1 + 3)  # the first step runs twice, before and after it is compared


def test_the_first_step_is_compared(load: Callable[..., Any], runs: list[int], monkeypatch: Any) -> None:
    layers: list[int] = []
    decode = one_layer.LayerPrograms.decode

    def counted(self: Any, *args: Any) -> torch.Tensor:
        layers.append(self.steps.layer_index)
        return decode(self, *args)

    model = load()
    monkeypatch.setattr(one_layer.LayerPrograms, "decode", counted)
    step_logits(model)
    assert layers == [0, 1, 2, 0, 1, 2]  # each layer's own trial, then the step
    step_logits(model)
    assert len(layers) == 6 and len(runs) == 7


def test_sliding_windows_run_layer_by_layer(load: Callable[..., Any], runs: list[int]) -> None:
    model = load("mistral", sliding_window=4)
    wide = step_logits(load("mistral"))
    runs.clear()
    found = step_logits(model)
    assert not runs and relative_error(found, wide) > 1e-3
    assert torch.equal(step_logits(layer_by_layer(model)), found)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
def test_batches(padded: bool, implementation: str, load: Callable[..., Any], runs: list[int]) -> None:
    model = load("qwen2", attn_implementation=implementation)
    mask = torch.ones(3, PROMPT, dtype=torch.long)
    if padded:
        mask[1, :4] = 0
    found = step_logits(model, batch=3, mask=mask)
    assert runs == [3] * (1 + 3)
    assert relative_error(found, step_logits(layer_by_layer(model), batch=3, mask=mask)) < 1e-3


def test_bfloat16_is_no_worse_than_layer_by_layer(load: Callable[..., Any], runs: list[int]) -> None:
    """Both round activations to int8; the program keeps float32 between the layers."""
    exact = step_logits(load(), steps=12)
    runs.clear()
    model = load(dtype=torch.bfloat16)
    found = step_logits(model, steps=12)
    assert len(runs) == 13 and found.dtype == torch.bfloat16
    layers = step_logits(layer_by_layer(model), steps=12)
    assert relative_error(found.float(), exact) < 1.2 * relative_error(layers.float(), exact)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 4}],
    ids=lambda options: next(iter(options), "greedy"),
)
def test_generate(options: dict[str, Any], load: Callable[..., Any], runs: list[int]) -> None:
    model = load()
    prompt = torch.randint(3, 260, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    keywords = {"max_new_tokens": 12, "do_sample": False, **options}
    found = model.generate(prompt, **keywords)
    assert bool(runs) == ("cache_implementation" not in options)
    assert torch.equal(found, layer_by_layer(model).generate(prompt, **keywords))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_matter(threads: int, load: Callable[..., Any]) -> None:
    model = load()
    expected = step_logits(model)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(step_logits(model), expected)
    finally:
        torch.set_num_threads(before)


def test_threads_of_python_have_their_own_steps(load: Callable[..., Any], runs: list[int]) -> None:
    model = load()
    expected = step_logits(model, steps=20)
    found: list[torch.Tensor] = []
    workers = [threading.Thread(target=lambda: found.append(step_logits(model, steps=20))) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 3 and all(torch.equal(logits, expected) for logits in found)
    assert len(runs) == 1 + 80


def _stops_early(model: Any, x: torch.Tensor, layers: list[Any], **keywords: Any) -> torch.Tensor:
    return layers[1](layers[0](x, **keywords), **keywords)


def _changes_in_place(model: Any, x: torch.Tensor, layers: list[Any], **keywords: Any) -> torch.Tensor:
    x = layers[0](x, **keywords)
    x *= 0.5
    return layers[2](layers[1](x, **keywords), **keywords)


def _replaces(model: Any, x: torch.Tensor, layers: list[Any], **keywords: Any) -> torch.Tensor:
    x = layers[1](layers[0](x, **keywords), **keywords)
    return layers[2](x + 1.0, **keywords)


def _reads_between(model: Any, x: torch.Tensor, layers: list[Any], **keywords: Any) -> torch.Tensor:
    middle = layers[1](layers[0](x, **keywords), **keywords)
    return layers[2](middle, **keywords) + middle


def _goes_round_twice(model: Any, x: torch.Tensor, layers: list[Any], **keywords: Any) -> torch.Tensor:
    for layer in [*layers, *layers]:
        x = layer(x, **keywords)
    return x


def _in_another_order(model: Any, x: torch.Tensor, layers: list[Any], **keywords: Any) -> torch.Tensor:
    for layer in (layers[1], layers[0], layers[2]):
        x = layer(x, **keywords)
    return x


@pytest.mark.parametrize(
    "between",
    [_stops_early, _changes_in_place, _replaces, _reads_between, _goes_round_twice, _in_another_order],
)
def test_what_happens_between_the_layers_counts(
    between: Callable[..., torch.Tensor], load: Callable[..., Any], runs: list[int], monkeypatch: Any
) -> None:
    from transformers.models.llama.modeling_llama import LlamaModel

    def forward(self: Any, x: torch.Tensor, cache: Any) -> torch.Tensor:
        angles = self.rotary_emb(x, torch.tensor([[cache.get_seq_length()]]))
        keywords = {"attention_mask": None, "position_embeddings": angles, cache_keyword(whole): cache}
        return between(self, x, list(self.layers), **keywords)

    whole = load()
    plain = step_logits(whole)  # its program has passed its first step
    assert len(runs) == 4
    monkeypatch.setattr(LlamaModel, "forward", forward)

    def steps(model: Any) -> tuple[torch.Tensor, list[int]]:
        cache = DynamicCache(config=model.config)
        tokens = torch.randn(4, 1, 1, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
        with torch.inference_mode():
            for index in range(3):
                cache.update(torch.ones(1, 2, 5, 16), torch.ones(1, 2, 5, 16), index)
            found = torch.stack([model.model.forward(x.clone(), cache) for x in tokens])
        return found, [layer.get_seq_length() for layer in cache.layers]

    fresh = load()
    found, lengths = steps(fresh)
    expected, expected_lengths = steps(layer_by_layer(load()))
    assert torch.equal(found, expected) and lengths == expected_lengths
    assert fresh.model.__dict__[one_layer.STEPS].are_refused == (between is not _in_another_order)
    assert plain.isfinite().all()


@pytest.mark.parametrize("where", ["q_proj", "input_layernorm", "mlp", "self_attn", "1"])
def test_hooks_are_called(where: str, load: Callable[..., Any], runs: list[int]) -> None:
    model = load()
    step_logits(model)
    calls: list[int] = []
    watched = next(m for name, m in model.model.layers.named_modules() if name.split(".")[-1] == where)
    handle = watched.register_forward_hook(lambda *_: calls.append(1))
    runs.clear()
    step_logits(model, steps=2)
    assert len(calls) == 3 and not runs  # the prompt and two tokens
    handle.remove()
    step_logits(model, steps=2)
    assert len(calls) == 3 and len(runs) == 2


def test_hidden_states_that_were_asked_for(load: Callable[..., Any], runs: list[int]) -> None:
    model = load()
    step_logits(model)
    runs.clear()
    cache = {cache_keyword(model): DynamicCache(config=model.config)}
    with torch.inference_mode():
        model(torch.arange(3, 12)[None], **cache)
        by_keyword = model(torch.tensor([[7]]), output_hidden_states=True, **cache)
        model.config.output_hidden_states = True
        by_config = model(torch.tensor([[7]]), **cache)
    for out in (by_keyword, by_config):
        assert len(out.hidden_states) == len(model.model.layers) + 1
        assert relative_error(out.hidden_states[1], out.hidden_states[0]) > 1e-2


def test_changed_parts_are_used(load: Callable[..., Any], runs: list[int]) -> None:
    model = load("qwen2")
    before = step_logits(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.bias.add_(1.0)
    changed = step_logits(model)
    assert relative_error(changed, before) > 1e-2 and len(runs) == 8
    assert relative_error(step_logits(layer_by_layer(load("qwen2"))), before) < 1e-3
    attention = model.model.layers[1].self_attn
    attention.o_proj = Doubled(attention.o_proj)
    assert relative_error(step_logits(model), changed) > 1e-2 and len(runs) == 8
    attention.o_proj = attention.o_proj.base
    assert (
        relative_error(step_logits(model), changed) < 1e-3
    )  # the layer notices it in the first step, the stack next
    assert torch.equal(step_logits(model), changed) and len(runs) == 8 + (1 + 2) + 3


def test_gradients_flow(load: Callable[..., Any], runs: list[int]) -> None:
    model = load()
    cache = {cache_keyword(model): DynamicCache(config=model.config)}
    with torch.no_grad():
        model(torch.arange(3, 12)[None], **cache)
    x = torch.randn(1, 1, model.config.hidden_size, requires_grad=True)
    model(inputs_embeds=x, **cache).logits.sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0 and not runs


def test_copies_and_pickles(load: Callable[..., Any], runs: list[int]) -> None:
    model = load()
    expected = step_logits(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        runs.clear()
        assert torch.equal(step_logits(twin), expected)
        assert len(runs) == 4 and isinstance(twin.model, LayerStack)


def test_a_cache_goes_on_after_it_was_cropped_and_copied(load: Callable[..., Any], runs: list[int]) -> None:
    model = load()
    cache = DynamicCache(config=model.config)
    keyword = cache_keyword(model)

    def tokens(*ids: int, cache: Any) -> torch.Tensor:
        with torch.inference_mode():
            return torch.stack([model(torch.tensor([[i]]), **{keyword: cache}).logits[0, -1] for i in ids])

    tokens(4, 5, 6, 7, cache=cache)
    twin = copy.deepcopy(cache)
    first = tokens(8, 9, cache=cache)
    assert isinstance(cache.layers[0], GrowingLayer) and cache.layers[0].keys.shape[2] == 6
    cache.crop(-2)
    assert torch.equal(tokens(8, 9, cache=cache), first)
    assert torch.equal(tokens(8, 9, cache=twin), first)
    assert len(runs) == 1 + 3 + 3 * 2  # the first token finds no cache


def test_a_whole_model_without_a_head_runs_layer_by_layer(
    built: Callable[[str], Any], runs: list[int]
) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(built("llama").folder, dtype=torch.float32).eval()
    cache = {cache_keyword(model): DynamicCache(config=model.config)}
    with torch.inference_mode():
        model(torch.arange(3, 12)[None], **cache)
        model(torch.tensor([[7]]), **cache)
    assert not runs
