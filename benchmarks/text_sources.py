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
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

Pages = Callable[[Path], Iterator[tuple[str, str]]]


@lru_cache(maxsize=3)
def _tar(path: Path) -> dict[str, bytes]:
    """Text-like regular files of a Debian package or npm tarball: name -> content."""
    stream: io.BytesIO | None = None
    if path.suffix == ".deb":
        command = ["dpkg-deb", "--fsys-tarfile", str(path)]
        stream = io.BytesIO(subprocess.run(command, check=True, capture_output=True).stdout)
    picture = re.compile(r"\.(png|jpe?g|svg|gif|webm|woff2?|ttf)$")
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


def tidy(text: str) -> str:
    text = re.sub(r"[ \t]+\n", "\n", text.replace("\r\n", "\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def plain(pattern: str, suffix: str) -> Pages:
    """Files as they are."""

    def pages(path: Path) -> Iterator[tuple[str, str]]:
        for name, data in members(path, pattern):
            if name.endswith(suffix) and b"\0" not in data:
                yield name, tidy(data.decode("utf-8", "replace").expandtabs(4))

    return pages


class _Html(HTMLParser):
    """HTML to text: headings as markdown, lists as dashes, <pre> verbatim, navigation left out."""

    BLOCKS = frozenset(
        [
            "p",
            "div",
            "section",
            "table",
            "tr",
            "ul",
            "ol",
            "dl",
            "dt",
            "dd",
            "blockquote",
            "article",
            "header",
            "footer",
            "h1",
            "h2",
            "h3",
            "h4",
            "h5",
        ]
    )
    IGNORED = frozenset(["script", "style", "nav", "head", "button", "svg"])

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.out: list[str] = []
        self.ignored = 0
        self.pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        css = dict(attrs).get("class") or ""
        if tag in self.IGNORED or (tag in {"ul", "p"} and "docnav" in css):
            self.ignored += tag in self.IGNORED
        if tag == "pre":
            self.pre += 1
            self.out.append("\n\n")
        elif tag == "li":
            self.out.append("\n- ")
        elif tag == "br":
            self.out.append("\n")
        elif tag in {"td", "th"}:
            self.out.append("  ")
        elif tag in self.BLOCKS:
            self.out.append("\n" if tag == "tr" else "\n\n")
            if tag[0] == "h" and tag[1:].isdigit():
                self.out.append("#" * int(tag[1]) + " ")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.IGNORED:
            self.ignored = max(0, self.ignored - 1)
        if tag == "pre":
            self.pre = max(0, self.pre - 1)
        if tag in self.BLOCKS or tag == "pre":
            self.out.append("\n" if tag == "tr" else "\n\n")

    def handle_data(self, data: str) -> None:
        if not self.ignored:
            self.out.append(data if self.pre else re.sub(r"\s+", " ", data))

    def text(self) -> str:
        lines = [re.sub(r"(?<=\S)  +", "  ", line).rstrip() for line in "".join(self.out).split("\n")]
        joined = "\n".join(line[1:] if re.match(r" \S", line) else line for line in lines)
        joined = re.sub(r"- \n+(?=\S)", "- ", joined)
        return tidy(re.sub(r"\n{2,}(?=- )", "\n", joined))


def _html_text(data: bytes) -> str:
    parser = _Html()
    parser.feed(data.decode("utf-8", "replace"))
    return parser.text()


def html(pattern: str, beside: tuple[str, str] | None = None) -> Pages:
    """HTML pages as text.

    With `beside` = (part of the name, its replacement), paragraphs that stayed untranslated (equal ones of
    the page of the replaced name) are left out, and so are pages of many such paragraphs.
    """

    def pages(path: Path) -> Iterator[tuple[str, str]]:
        for name, data in members(path, pattern):
            if name.endswith("/index.html"):  # title pages: contents and legal notices
                continue
            text = _html_text(data)
            # The book's navigation and SQLite's page header come before the first heading.
            text = text[max(0, text.find("# ")) :] if re.search(r"(?m)^#+ ", text) else text
            key = name
            if beside:
                key = name.replace(*beside)
                original = _tar(path).get(key)
                if original is None:
                    continue
                translated = _without(text, _html_text(original))
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


def _mallard_text(data: bytes) -> str:
    """A page of GNOME's help (Mallard XML) as markdown-like text."""
    out: list[str] = []

    def inline(node: ElementTree.Element) -> str:
        parts = [node.text or ""]
        for child in node:
            inner = inline(child)
            if child.tag.endswith("}link") and not inner.strip():
                inner = (child.get("xref") or child.get("href") or "").replace("#", " ").replace("-", " ")
            parts += [inner, child.tail or ""]
        return (
            re.sub(r"\s+", " ", "".join(parts)).strip()
            if node.tag.endswith(("}p", "}title"))
            else "".join(parts)
        )

    def walk(node: ElementTree.Element, depth: int, bullet: str) -> None:
        tag = node.tag.split("}")[-1] if isinstance(node.tag, str) else "comment"
        if tag in {"info", "media", "comment", "links"}:
            return
        if tag == "title":
            out.append("#" * depth + " " + inline(node))
        elif tag in {"p", "code", "screen"}:
            out.append(bullet + inline(node))
        else:
            if tag == "section":
                depth += 1
            for index, child in enumerate(node):
                first = (
                    "- " if tag == "item" and index == 0 else bullet if index == 0 and tag != "page" else ""
                )
                walk(child, depth, first)

    walk(ElementTree.fromstring(data), 1, "")
    # Variants for other desktops repeat a paragraph.
    once = [block for index, block in enumerate(out) if index == 0 or block != out[index - 1]]
    return tidy(re.sub(r"\n\n(?=- )", "\n", "\n\n".join(once)))


def mallard(language: str) -> Pages:
    """GNOME's user help in one language ("C" is English), only pages that are translated."""

    def pages(path: Path) -> Iterator[tuple[str, str]]:
        for name, data in members(path, rf"/help/{language}/[a-z-]+/[^/]+\.page$"):
            text = _mallard_text(data)
            key = name.replace(f"/{language}/", "/C/")
            if language != "C":
                translated = _without(text, _mallard_text(_tar(path)[key]))
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
            yield f"{book} {index}", f"{book}\n\n{tidy(chapter)}"


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
                blocks = _html_text(data).split("\n\n")
                begin = len(blocks) * (index % 4) // 5
                yield code, "\n\n".join(blocks[begin : begin + len(blocks) // 4])

    return pages
