"""Examples from JSON lines: what is learned, and messages that name file and line for bad data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ciuic_cli.errors import InputError
from ciuic_cli.train.examples import IGNORED, Example, read_examples
from ciuic_cli.train.packing import batch_of, pack, row_of

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    """One token per byte; </s> (id 256) ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def read(path: Path, tokenizer: Any, lines: list[Any], **options: Any) -> list[Example]:
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return read_examples(path, tokenizer, **{"max_length": 64, "train_on_inputs": False, **options})


def learned(tokenizer: Any, example: Example) -> str:
    assert len(example.ids) == len(example.labels)
    assert all(label in (IGNORED, token) for token, label in zip(example.ids, example.labels, strict=True))
    return tokenizer.decode([label for label in example.labels if label != IGNORED])


def test_only_completions_are_learned(tmp_path: Path, tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": "ef"},
        {"role": "assistant", "content": "gh"},
    ]
    lines = [{"prompt": "say: ", "completion": "yes"}, b"", {"text": "hello"}, {"messages": chat}]
    found = read(tmp_path / "data.jsonl", tokenizer, lines)
    assert [learned(tokenizer, example) for example in found] == ["yes</s>", "ello</s>", "cd</s>gh</s>"]
    assert tokenizer.decode(found[2].ids) == "<user>ab</s><assistant>cd</s><user>ef</s><assistant>gh</s>"
    everything = read(tmp_path / "data.jsonl", tokenizer, lines, train_on_inputs=True)
    assert learned(tokenizer, everything[0]) == "ay: yes</s>"
    assert learned(tokenizer, everything[2]) == tokenizer.decode(found[2].ids[1:])


GOOD = {"text": "hello"}
USER = {"role": "user", "content": "a"}
BAD = {
    "broken": (b'{"text": "a', "not JSON"),
    "utf8": (b'{"text": "\xff"}', "not UTF-8"),
    "list": ([1], "not a JSON object"),
    "number": (3, "not a JSON object"),
    "no field": ({"question": "a"}, "the fields are"),
    "empty object": ({}, "the fields are"),
    "two forms": ({"text": "a", "prompt": "b", "completion": "c"}, "the fields are"),
    "no completion": ({"prompt": "a"}, "the fields are"),
    "empty completion": ({"prompt": "a", "completion": "  "}, "completion is empty"),
    "completion null": ({"prompt": "a", "completion": None}, "not a string"),
    "text list": ({"text": ["a"]}, "not a string"),
    "empty text": ({"text": ""}, "text is empty"),
    "one letter": ({"prompt": "", "completion": "x" * 64}, "more than the 64"),
    "too long": ({"text": "x" * 65}, "more than the 64"),
    "messages text": ({"messages": "hello"}, "not a list"),
    "no messages": ({"messages": []}, "not a list"),
    "wrong role": ({"messages": [{"role": "robot", "content": "a"}]}, "role 'robot'"),
    "no content": ({"messages": [{"role": "user"}]}, "no text in content"),
    "no assistant": ({"messages": [USER]}, "no message is the assistant's"),
    "silent assistant": ({"messages": [USER, {"role": "assistant", "content": ""}]}, "is empty"),
    "deep": (b"[" * 100_000, "not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named(name: str, tmp_path: Path, tokenizer: Any) -> None:
    line, message = BAD[name]
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path / "data.jsonl", tokenizer, [GOOD, line, GOOD])
    assert caught.value.message.startswith("line 2: ") and caught.value.remedy
    assert caught.value.file == str(tmp_path / "data.jsonl") and caught.value.exit_code == 3


def test_files_without_examples(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(InputError, match="no example"):
        read(tmp_path / "data.jsonl", tokenizer, [b"", b"  "])
    with pytest.raises(InputError, match="cannot be read"):
        read_examples(tmp_path / "absent", tokenizer, max_length=8, train_on_inputs=False)


def test_a_model_without_a_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="line 1: the model has no chat template"):
        read(
            tmp_path / "data.jsonl", tokenizer, [{"messages": [USER, {"role": "assistant", "content": "b"}]}]
        )


def test_a_template_that_rewrites_what_came_before(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages | length }}" + TEMPLATE
    answer = {"role": "assistant", "content": "b"}
    with pytest.raises(InputError, match="renders message 2 differently"):
        read(tmp_path / "data.jsonl", tokenizer, [{"messages": [USER, answer, USER, answer]}])


def test_rows_hold_every_example_once() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 40, (200,), generator=generator).tolist()
    examples = [Example([number] * n, [number] * n) for number, n in enumerate(lengths)]
    rows = pack(examples, 40)
    assert all(len(row["input_ids"]) <= 40 for row in rows)
    assert sorted(token for row in rows for token in row["input_ids"]) == sorted(
        token for example in examples for token in example.ids
    )
    assert len(rows) <= 11 / 9 * sum(lengths) / 40 + 2
    for row in rows:
        starts = [at for at, position in enumerate(row["position_ids"]) if position == 0]
        assert [row["labels"][at] for at in starts] == [IGNORED] * len(starts)
        assert sum(label != IGNORED for label in row["labels"]) == len(row["labels"]) - len(starts)


def test_padding_is_not_learned() -> None:
    batch = batch_of([row_of([Example([5, 6, 7], [IGNORED, 6, 7])]), row_of([Example([8], [8])])], 1)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 1, 1]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [IGNORED] * 3]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 0, 1]]
