"""Texts and chats: the tokens are those of transformers, parts come while they are generated, limits are named."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ciuic_cli import load
from ciuic_cli.cli.app import app
from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.serving.text_model import Sampling, TextModel

PROMPT = "Background: The island was"
GREEDY = Sampling(max_new_tokens=12, temperature=0)


def expected(folder: Path, prompt: str, count: int) -> str:
    """The greedy continuation by transformers itself."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load(folder, device="cpu")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def test_a_text_is_continued_part_by_part(sample: Path) -> None:
    parts: list[str] = []
    answer = TextModel(sample, "cpu").complete(PROMPT, GREEDY, parts.append)
    assert len(parts) > 3 and "".join(parts) == answer.text == expected(sample, PROMPT, 12)
    assert answer.new_tokens == 12


def test_a_seed_gives_the_same_text_again(sample: Path) -> None:
    model = TextModel(sample, "cpu")

    def text(seed: int) -> str:
        return model.complete(
            PROMPT, Sampling(16, temperature=1.5, top_p=0.9, seed=seed), lambda part: None
        ).text

    assert text(1) == text(1) != text(2)


def test_the_positions_are_the_limit(sample: Path) -> None:
    model = TextModel(sample, "cpu")
    long = "word " * 700
    with pytest.raises(UsageError, match="the model has 512 positions"):
        model.complete(long, Sampling(), lambda part: None)
    with pytest.raises(UsageError, match=r"need 5\d\d tokens"):
        model.complete(PROMPT, Sampling(max_new_tokens=510), lambda part: None)


def test_an_answer_continues_the_text_of_the_template(chatting: Path) -> None:
    messages = [
        {"role": "user", "content": "What was the island?"},
        {"role": "assistant", "content": "A colony."},
        {"role": "user", "content": "And then?"},
    ]
    text = "user: What was the island?\nassistant: A colony.\nuser: And then?\nassistant:"
    answer = TextModel(chatting, "cpu", chat=True).reply(messages, GREEDY, lambda part: None)
    assert answer.text == expected(chatting, text, 12)


def test_a_model_without_a_template_does_not_chat(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loading(*arguments: Any) -> None:
        raise AssertionError("refused only after the weights were loaded")

    monkeypatch.setattr("ciuic_cli.serving.text_model.open_model", no_loading)
    with pytest.raises(InputError, match="no chat template"):
        TextModel(sample, "cpu", chat=True)


# --- the commands


def invoke(*arguments: object, lines: str = "") -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=io.StringIO(lines).read())


def test_generate_prints_prompt_and_continuation(sample: Path) -> None:
    options = ("--prompt", PROMPT, "--temperature", 0, "--max-new-tokens", 12, "--device", "cpu")
    done = invoke("generate", sample, *options)
    assert done.exit_code == 0 and done.stdout == PROMPT + expected(sample, PROMPT, 12) + "\n"
    report = json.loads(invoke("generate", sample, *options, "--json").stdout)
    assert report["text"] == expected(sample, PROMPT, 12) and report["new_tokens"] == 12
    assert invoke("generate", sample, "--prompt", " ").exit_code == 2
    too_many = invoke("generate", sample, "--prompt", PROMPT, "--max-new-tokens", 100_000, "--device", "cpu")
    assert too_many.exit_code == 2 and too_many.stdout == "" and too_many.stderr.count("error:") == 1


def test_chat_answers_each_line_and_clears(chatting: Path) -> None:
    options = ("--temperature", 0, "--max-new-tokens", 8, "--device", "cpu", "--system-prompt", "Be brief.")
    done = invoke("chat", chatting, *options, lines="Hello\n!clear\n\nHello\n!exit\nnever\n")
    start = "system: Be brief.\nuser: Hello\nassistant:"
    answer = expected(chatting, start, 8)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{answer}\n" * 2


def test_chat_remembers_what_was_said(chatting: Path) -> None:
    done = invoke(
        "chat", chatting, "--temperature", 0, "--max-new-tokens", 8, "--device", "cpu", lines="Hello\nAnd?\n"
    )
    first = expected(chatting, "user: Hello\nassistant:", 8)
    second = expected(chatting, f"user: Hello\nassistant: {first}\nuser: And?\nassistant:", 8)
    assert done.exit_code == 0 and done.stdout == f"{first}\n{second}\n"


def test_a_chat_that_is_too_long_can_go_on(chatting: Path) -> None:
    lines = "word " * 700 + "\nHello\n"
    done = invoke("chat", chatting, "--temperature", 0, "--max-new-tokens", 8, "--device", "cpu", lines=lines)
    assert done.exit_code == 0 and "512 positions" in done.stderr and "!clear" in done.stderr
    assert done.stdout == expected(chatting, "user: Hello\nassistant:", 8) + "\n"


def test_chat_without_a_template_is_bad_input(sample: Path) -> None:
    done = invoke("chat", sample, "--device", "cpu")
    assert done.exit_code == 3 and "ciuic generate" in done.stderr and done.stdout == ""
