"""`ciuic generate` and `ciuic chat` with a LoRA adapter, on an artifact and on a dense model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ciuic_cli.cli.app import app
from ciuic_cli.evaluation.opening import open_model

peft = pytest.importorskip("peft")

SAMPLE = Path(__file__).parents[2] / "samples" / "deepseek-v3-tiny"
PROMPT = "Background: The island was"
GREEDY = ("--temperature", 0, "--max-new-tokens", 8, "--device", "cpu")


@pytest.fixture(scope="module")
def adapter(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of rank 4 on attention and expert stacks, with random factors that change most tokens."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, task_type="CAUSAL_LM", target_modules=["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )  # fmt: skip
    model = peft.get_peft_model(open_model(sample, "cpu"), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.1)
    out = tmp_path_factory.mktemp("adapters") / "adapter"
    model.save_pretrained(out)
    return out


def expected(folder: Path, adapter: Path, prompt: str) -> str:
    """The greedy continuation by PEFT itself."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = peft.PeftModel.from_pretrained(open_model(folder, "cpu"), adapter)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
    )
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def invoke(*arguments: object, lines: str = "") -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=lines)


@pytest.mark.parametrize("kind", ["artifact", "dense"])
def test_generate_continues_as_the_adapted_model(kind: str, sample: Path, adapter: Path) -> None:
    folder = sample if kind == "artifact" else SAMPLE
    done = invoke("generate", folder, "--prompt", PROMPT, "--adapter", adapter, *GREEDY)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{PROMPT}{expected(folder, adapter, PROMPT)}\n"
    assert done.stdout != invoke("generate", folder, "--prompt", PROMPT, *GREEDY).stdout


def test_chat_answers_as_the_adapted_model(chatting: Path, adapter: Path) -> None:
    done = invoke("chat", chatting, "--adapter", adapter, *GREEDY, lines="Hello\n")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == expected(chatting, adapter, "user: Hello\nassistant:") + "\n"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_wrong_adapters_are_bad_input(command: str, chatting: Path, adapter: Path, tmp_path: Path) -> None:
    options = (*GREEDY, *(("--prompt", PROMPT) if command == "generate" else ()))
    for folder, reason in (
        (tmp_path / "absent", "there is no adapter"),
        (chatting, "there is no adapter"),
        (_changed(adapter, tmp_path / "rank", r=3), "size mismatch"),
        (_changed(adapter, tmp_path / "kind", peft_type="IA3"), "only LoRA adapters"),
        (_changed(adapter, tmp_path / "other", target_modules=["q_b_proj", "o_proj"]), "belong to no weight"),
    ):
        done = invoke(command, chatting, "--adapter", folder, *options)
        said = " ".join(done.stderr.split())
        assert done.exit_code == 3 and reason in said and "give the" in said, said
        assert done.stdout in ("", PROMPT)


def _changed(adapter: Path, folder: Path, **options: Any) -> Path:
    shutil.copytree(adapter, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **options}))
    return folder
