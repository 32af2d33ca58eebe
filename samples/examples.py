"""Questions and answers from the sample's text, as training data: `python samples/examples.py TEXT FILE.jsonl`.

A country's fields become questions about the country; a verse becomes a question for the verse that follows it. The
sample model has never seen questions, so an adapter has something to learn. The text's calibration and held-out parts
are disjoint, and so are the examples made from them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

LONGEST = 400
"""Most characters of an answer or a quoted verse (chosen: with the question below the sample's 512 tokens)."""
_COUNTRY = "The World Factbook: "


def examples(text: str) -> Iterator[dict[str, str]]:
    """Prompts and completions of all documents: chapters and countries, which three line breaks separate."""
    for document in text.split("\n\n\n"):
        title, _, body = document.strip().partition("\n")
        lines = [line for line in body.splitlines() if line.strip()]
        if title.startswith(_COUNTRY):
            country = title.removeprefix(_COUNTRY)
            for line in lines:
                field, separator, value = line.partition(": ")
                if separator:
                    yield _example(f"{field} of {country}?", value)
        else:
            for verse, following in pairwise(lines):
                yield _example(f"{title}: what follows? {_cut(verse)}", following)


def _example(question: str, answer: str) -> dict[str, str]:
    return {"prompt": f"Question: {question}\nAnswer:", "completion": f" {_cut(answer)}"}


def _cut(text: str) -> str:
    """At most LONGEST characters, cut after a word."""
    return text if len(text) <= LONGEST else re.sub(r"\s\S*$", "", text[:LONGEST])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--most", type=int, help="keep this many, chosen at random with a fixed seed")
    options = parser.parse_args()
    found = list(examples(options.text.read_text(encoding="utf-8")))
    if options.most is not None and options.most < len(found):
        found = random.Random(0).sample(found, options.most)
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_text(
        "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in found), encoding="utf-8"
    )
    print(f"{options.file}: {len(found)} examples")


if __name__ == "__main__":
    main()
