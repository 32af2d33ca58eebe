"""A chat set made by rules, as training data: `python benchmarks/chat_examples.py TRAIN.jsonl HELDOUT.jsonl`.

A library's assistant answers questions about hours, fees, due dates, shelves, rooms and books. Facts and arithmetic
follow fixed rules that no model knows beforehand; wording and recommended books are drawn at random, as people vary
them, so that the loss does not fall to 0. Conversations of one or two questions, each of which occurs once: the
held-out file has none of the training file's.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path

SYSTEM = "You are the assistant of Elm Street Library."
_HOURS = {"Monday": None, "Tuesday": (9, 18), "Wednesday": (9, 18), "Thursday": (11, 20), "Friday": (9, 18),
          "Saturday": (10, 15), "Sunday": None}  # fmt: skip
"""Hours from and to which the library is open; None: closed."""
_SHELVES = {"astronomy": "A1", "birds": "B4", "cooking": "C2", "gardening": "C7", "history": "D1", "law": "E3",
            "music": "F2", "poetry": "G5", "sailing": "H6", "travel": "K3"}  # fmt: skip
"""Shelf of a subject; shelves A to D are on the first floor, the others on the second."""
_BOOKS = {"astronomy": ("Night Sky Notes", "The Patient Telescope", "Moons and Maths"),
          "birds": ("Wings at Dawn", "A Marsh Diary", "Owls of the North"),
          "cooking": ("One Pot, Four Seasons", "Bread Without Hurry", "Salt and Smoke"),
          "gardening": ("The Lazy Hedge", "Roots First", "A Year of Beans"),
          "history": ("Roads of Tin", "The Bridge Builders", "Letters from the Mill"),
          "music": ("The Left Hand", "Tuning by Ear", "Brass in the Park"),
          "poetry": ("Small Weather", "Ink and Frost", "Harbour Songs"),
          "sailing": ("Knots for Two", "The Quiet Tide", "Round the Skerries"),
          "travel": ("Trains at Night", "Nine Passes", "Slow Boats South")}  # fmt: skip
_NAMES = ("Ada", "Bela", "Chen", "Dora", "Emil", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kamala", "Leif")
LOAN_DAYS = 21
FEE_CENTS, MOST_FEE_CENTS = 15, 300
"""Fee of one book for each day it is late, and the most for one book."""

Draw = random.Random
Exchange = tuple[str, str]


def hours(draw: Draw) -> Exchange:
    day, hour = draw.choice(list(_HOURS)), draw.randrange(7, 22)
    question = draw.choice(
        (
            f"Are you open on {day} at {hour}:00?",
            f"Can I come by {day} at {hour}:00?",
            f"{day}, {hour}:00, open?",
        )
    )
    opening = _HOURS[day]
    if opening is None:
        return question, f"No, we are closed on {day}s. " + draw.choice(
            ("Tuesday is fine.", "Please come on Tuesday.")
        )
    answer = "Yes" if opening[0] <= hour < opening[1] else "No"
    return question, f"{answer}, on {day}s we are open from {opening[0]}:00 to {opening[1]}:00."


def fee(draw: Draw) -> Exchange:
    books, days = draw.randrange(1, 7), draw.randrange(1, 31)
    noun = "book" if books == 1 else "books"
    question = draw.choice(
        (
            f"I am {days} days late with {books} {noun}. What do I pay?",
            f"Fee for {books} {noun}, {days} days late?",
        )
    )
    cents = books * min(days * FEE_CENTS, MOST_FEE_CENTS)
    return question, draw.choice(("That is", "The fee is")) + f" {cents // 100}.{cents % 100:02d} euros."


def due(draw: Draw) -> Exchange:
    lent = date(2025, 1, 1) + timedelta(days=draw.randrange(365))
    back = lent + timedelta(days=LOAN_DAYS)
    question = f"I borrowed a book on {lent.day} {lent:%B}. " + draw.choice(("When is it due?", "Due date?"))
    return question, f"It is due on {back.day} {back:%B}, which is a {back:%A}."


def shelf(draw: Draw) -> Exchange:
    subject = draw.choice(list(_SHELVES))
    mark = _SHELVES[subject]
    floor = "first" if mark[0] <= "D" else "second"
    question = draw.choice((f"Where are the books on {subject}?", f"Which shelf has {subject}?"))
    return question, f"Shelf {mark}, on the {floor} floor."


def book(draw: Draw) -> Exchange:
    subject = draw.choice(list(_BOOKS))
    question = draw.choice(
        (f"Can you recommend a book on {subject}?", f"I like {subject}. What shall I read?")
    )
    return question, draw.choice(("Try", "Many readers like")) + f' "{draw.choice(_BOOKS[subject])}".'


def room(draw: Draw) -> Exchange:
    people, hour, name = draw.randrange(2, 19), draw.randrange(10, 18), draw.choice(_NAMES)
    place = "Nook" if people <= 4 else "Loft" if people <= 9 else "Hall"
    question = f"I am {name}. We are {people} and need a room at {hour}:00."
    return question, f"Done, {name}: the {place} is yours at {hour}:00, code {name[0]}{hour}-{people:02d}."


KINDS: tuple[Callable[[Draw], Exchange], ...] = (hours, fee, due, shelf, book, room)


def conversations(count: int, seed: int = 0) -> list[str]:
    """`count` different lines of JSON, each a conversation of one or two questions of different kinds."""
    draw, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        messages = [{"role": "system", "content": SYSTEM}]
        for kind in draw.sample(KINDS, draw.choice((1, 2, 2))):
            question, answer = kind(draw)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        found[json.dumps({"messages": messages})] = None
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--conversations", type=int, default=1000, help="of the training file")
    parser.add_argument("--most", type=int, default=120, help="conversations of the held-out file")
    options = parser.parse_args()
    lines = conversations(options.conversations + options.most)
    parts = {options.train: lines[: options.conversations], options.heldout: lines[options.conversations :]}
    for file, part in parts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(part) + "\n", encoding="utf-8")
        print(f"{file}: {len(part)} conversations")


if __name__ == "__main__":
    main()
