"""Readers of make_text.py: each turns one package archive into (page name, plain text) pairs."""

from __future__ import annotations

import gzip
import io
import json
import re
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from text_markup import html_text, mallard_text, tidy

Pages = Callable[[Path], Iterator[tuple[str, str]]]


@lru_cache(maxsize=8)
def _tar(path: Path) -> dict[str, bytes]:
    """Text-like regular files of a Debian package or npm tarball: name -> content."""
    stream: io.BytesIO | None = None
    if path.suffix == ".deb":
        command = ["dpkg-deb", "--fsys-tarfile", str(path)]
        stream = io.BytesIO(subprocess.run(command, check=True, capture_output=True).stdout)
    picture = re.compile(r"\.(png|jpe?g|svg|gif|webm|woff2?|ttf|cat|qm|fab|obj|sif)$")
    with tarfile.open(None if stream else path, fileobj=stream) as archive:
        found = [m for m in archive.getmembers() if m.isfile() and not picture.search(m.name)]
        return {m.name: _bytes(archive.extractfile(m)) for m in found}


def _bytes(stream: object) -> bytes:
    if not hasattr(stream, "read"):
        raise ValueError("an archive member cannot be read")
    return bytes(stream.read())


def members(path: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Members whose name matches `pattern` (regular expression, searched)."""
    wanted = re.compile(pattern)
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if wanted.search(name):
                    yield name, archive.read(name)
    else:
        for name, data in sorted(_tar(path).items()):
            if wanted.search(name):
                yield name, data


def plain(pattern: str, suffix: str) -> Pages:
    """Files as they are."""

    def pages(path: Path) -> Iterator[tuple[str, str]]:
        for name, data in members(path, pattern):
            if name.endswith(suffix) and b"\0" not in data:
                yield name, tidy(data.decode("utf-8", "replace").expandtabs(4))

    return pages


def html(pattern: str, beside: tuple[str, str] | None = None) -> Pages:
    """HTML pages as text.

    With `beside` = (part of the name, its replacement), paragraphs that stayed untranslated (equal ones of
    the page of the replaced name) are left out, and so are pages of many such paragraphs.
    """

    def pages(path: Path) -> Iterator[tuple[str, str]]:
        for name, data in members(path, pattern):
            if name.endswith("/index.html"):  # title pages: contents and legal notices
                continue
            text = html_text(data)
            # The book's navigation and SQLite's page header come before the first heading.
            text = text[max(0, text.find("# ")) :] if re.search(r"(?m)^#+ ", text) else text
            key = name
            if beside:
                key = name.replace(*beside)
                original = _tar(path).get(key)
                if original is None:
                    continue
                translated = _without(text, html_text(original))
                if translated is None:
                    continue
                text = translated
            yield key, text

    return pages


def _without(text: str, original: str) -> str | None:
    """`text` without the paragraphs it shares with `original`; None where over 30 % of it is shared."""
    known = {p.strip() for p in original.split("\n\n")}
    kept = [p for p in text.split("\n\n") if p.strip() not in known or len(p) < 25]
    result = "\n\n".join(kept)
    return result if len(result) > 0.7 * len(text) else None


def mallard(language: str) -> Pages:
    """GNOME's user help in one language ("C" is English), only pages that are translated."""

    def pages(path: Path) -> Iterator[tuple[str, str]]:
        for name, data in members(path, rf"/help/{language}/[a-z-]+/[^/]+\.page$"):
            text = mallard_text(data)
            key = name.replace(f"/{language}/", "/C/")
            if language != "C":
                translated = _without(text, mallard_text(_tar(path)[key]))
                if translated is None:
                    continue
                text = translated
            yield key, text

    return pages


def _leaves(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "text" and value:
                yield str(value)
            else:
                for leaf in _leaves(value):
                    yield leaf if key == "text" else f"{key}: {leaf}"


_COUNTRY = r"package/(?!.*(package|world))[a-z-]+/[a-z]{2}\.json$"


def factbook(path: Path) -> Iterator[tuple[str, str]]:
    """Country profiles: the entries that hold prose, one section each."""
    for name, data in members(path, _COUNTRY):
        country = json.loads(data)
        sections = []
        for chapter, entries in country.items():
            for title, entry in entries.items():
                prose = [leaf for leaf in _leaves(entry) if len(leaf) > 220]
                # Lists of abbreviations, places and units are no prose.
                if title.startswith(("International org", "Administrative div", "Diplomatic", "Public debt")):
                    continue
                if prose:
                    sections.append(f"== {title} ==\n\n" + "\n\n".join(prose))
                elif chapter == "Geography" and title in (
                    "Location",
                    "Climate",
                    "Terrain",
                    "Natural hazards",
                ):
                    sections.append(f"== {title} ==\n\n" + "\n".join(_leaves(entry)))
        names = country.get("Government", {}).get("Country name", {})
        title = " ".join(_leaves(names.get("conventional short form", {}))) or Path(name).stem.upper()
        yield name, f"= {title} =\n\n" + "\n\n".join(sections)


def factbook_json(path: Path) -> Iterator[tuple[str, str]]:
    """Country profiles as indented JSON."""
    for name, data in members(path, _COUNTRY):
        body = json.dumps(json.loads(data), indent=2, ensure_ascii=False)
        yield name, "\n".join(line[:400] for line in body.split("\n"))


def austen(path: Path) -> Iterator[tuple[str, str]]:
    """Chapters of Jane Austen's novels.  R keeps each as zlib-compressed, serialised lines; a line is
    flags 0x00040009 (or 0x00008009), a big-endian uint32 length, and its bytes."""
    data = next(d for _, d in members(path, r"janeaustenr/data/Rdata\.rdb$"))
    while len(data) > 4:
        inflate = zlib.decompressobj()
        body = inflate.decompress(data[4:])
        data = inflate.unused_data
        lines, at = [], body.find(b"\0\x04\0\x09")
        while at >= 0 and body[at : at + 4] == b"\0\x04\0\x09":
            (length,) = struct.unpack(">I", body[at + 4 : at + 8])
            lines.append(body[at + 8 : at + 8 + length].decode("utf-8", "replace"))
            at += 8 + length
        book = lines[0].title()
        for index, chapter in enumerate(re.split(r"(?mi)^(?=chapter [0-9ivxl]+)", "\n".join(lines))[1:]):
            # The lines of a paragraph are joined: the books' line breaks carry no meaning.
            prose = "\n\n".join(" ".join(block.split()) for block in tidy(chapter).split("\n\n"))
            yield f"{book} {index}", f"{book}\n\n{prose}"


def speeches(since: int) -> Pages:
    """State of the Union addresses from the year `since` on, in paragraphs of about 600 characters."""

    def pages(path: Path) -> Iterator[tuple[str, str]]:
        for name, data in members(path, r"package/sotu/data/\d{4}_[a-z_]+\.txt$"):
            year, *speaker = Path(name).stem.split("_")[:-1]
            if int(year) < since:
                continue
            paragraphs = [""]
            # The archive has each address on one line.
            for sentence in re.split(r"(?<=[.!?]) (?=[A-Z\"])", data.decode("utf-8").strip()):
                if len(paragraphs[-1]) > 600:
                    paragraphs.append("")
                paragraphs[-1] = f"{paragraphs[-1]} {sentence}".strip()
            title = f"State of the Union Address, {' '.join(speaker).title()}, {year}"
            yield name, title + "\n\n" + "\n\n".join(paragraphs)

    return pages


def sky_cultures(language: str) -> Pages:
    """Stellarium's articles on the constellations of a culture, those alone that are under CC BY-SA.

    A culture's info.ini names its licence; others of the package are under ND, NC or GPL and stay out.
    """

    def pages(path: Path) -> Iterator[tuple[str, str]]:
        for name, data in members(path, r"/skycultures/[^/]+/info\.ini$"):
            if not re.search(rb"(?mi)^license\s*=\s*CC BY-SA", data):
                continue
            folder = name.rsplit("/", 1)[0]
            english = _tar(path).get(f"{folder}/description.en.utf8")
            found = _tar(path).get(f"{folder}/description.{language}.utf8")
            if found is None or english is None:
                continue
            text: str | None = html_text(found)
            if language != "en":
                text = _without(html_text(found), html_text(english))
            if text is not None:
                text = re.split(r"(?m)^#+ \d*\.?\s*(?:References|External links|Authors)", text)[0]
                # Rows of tables (cells stand two blanks apart) are no prose.
                rows = re.compile(r"\S  +\S.*\S  +\S|^ *\S+  +\S+$")
                yield Path(folder).name, tidy("\n".join(li for li in text.split("\n") if not rows.search(li)))

    return pages


def translated_docs(language: str) -> Pages:
    """FastAPI's documentation in one language, markdown as it is, named as the English page."""

    def pages(path: Path) -> Iterator[tuple[str, str]]:
        for name, data in members(path, rf"/docs/{language}/docs/(?!release-notes|external|newsl).*\.md$"):
            # Examples that the site inserts from other files leave empty fences here.
            text = re.sub(r"(?ms)^(=== \"[^\n]*\n+)?^ *```[^\n]*\n *\{!.*?^ *```\n", "", data.decode("utf-8"))
            text = re.sub(r"(?m)^\{[%!].*\n", "", text)
            yield name.replace(f"/docs/{language}/", "/docs/en/"), tidy(text)

    return pages


def jargon(path: Path) -> Iterator[tuple[str, str]]:
    """The Jargon File in stretches of about 12 KB, indentation removed."""
    data = next(d for _, d in members(path, r"jargon\.txt\.gz$"))
    text = re.sub(r"(?m)^ {1,3}", "", gzip.decompress(data).decode("utf-8", "replace"))
    blocks = tidy(re.sub(r"\{([^{}]*)\}", r"\1", text)).split("\n\n")
    stretch: list[str] = []
    for block in blocks:
        stretch.append(block)
        if sum(map(len, stretch)) > 12_000:
            yield stretch[0][:80], "\n\n".join(stretch)
            stretch = []


def dialogues(language: str, topics: tuple[str, ...]) -> Pages:
    """Dialogues, turns marked "User:" and "Assistant:"."""

    def pages(path: Path) -> Iterator[tuple[str, str]]:
        for name, data in members(path, rf"data/{language}/({'|'.join(topics)})\.yml$"):
            talks: list[list[str]] = []
            # The files are YAML of one fixed shape: "- - first turn", "  - next turn", deeper lines go on.
            for line in data.decode("utf-8").split("conversations:", 1)[1].split("\n"):
                if line.startswith("- - "):
                    talks.append([line[4:]])
                elif line.startswith("  - ") and talks:
                    talks[-1].append(line[4:])
                elif line.startswith("    ") and talks:
                    talks[-1][-1] += "\n" + line[4:]
                elif talks and not line.strip():
                    talks[-1][-1] += "\n"
            shown = []
            for talk in talks:
                turns = [_turn(t) for t in talk]
                names = ("User", "Assistant")
                shown.append("\n".join(f"{names[i % 2]}: {t}" for i, t in enumerate(turns)))
            yield name, "\n\n".join(shown)

    return pages


def _turn(text: str) -> str:
    text = text.strip()
    if text.startswith("|"):
        return text.lstrip("|-").strip("\n")
    text = re.sub(r"\s*\n\s*", " ", text)
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1].replace("''", "'") if quoted else text


def declarations(codes: tuple[str, ...]) -> Pages:
    """The Universal Declaration of Human Rights, another stretch of it in each language."""

    def pages(path: Path) -> Iterator[tuple[str, str]]:
        for index, code in enumerate(codes):
            for _, data in members(path, rf"/declaration/{code}\.html$"):
                blocks = html_text(data).split("\n\n")
                begin = len(blocks) * (index % 4) // 5
                yield code, "\n\n".join(blocks[begin : begin + len(blocks) // 4])

    return pages


def sky_authors(path: Path) -> dict[str, str]:
    """Author, where info.ini names one, and licence of each of Stellarium's sky cultures."""
    found: dict[str, str] = {}
    for name, data in members(path, r"/skycultures/[^/]+/info\.ini$"):
        fields = dict(re.findall(r"(?m)^(author|license)\s*=\s*(.*?)\s*$", data.decode("utf-8")))
        licence = fields.get("license", "").replace(" International Public License", "")
        author = re.sub(r"\s*(email: )?<?\S+@\S+>?", "", fields.get("author", ""))
        found[Path(name).parent.name] = ", ".join(filter(None, (author, licence)))
    return found
