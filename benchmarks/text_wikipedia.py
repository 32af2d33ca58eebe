"""Wiki markup to prose, for make_text.py."""

from __future__ import annotations

import bz2
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from text_markup import tidy
from text_sources import Pages, members

_NO_PROSE = re.compile(
    r"^=+\s*(references|see also|external links|notes|further reading|bibliography|footnotes|"
    r"citations|sources|notes and references|filmography|източници|външни препратки|вижте също|"
    r"бележки|литература)[^=]*=+$",
    re.I,
)
# WikiText, which compressed models are commonly measured on, was made of Wikipedia's good and featured articles.
_OF_WIKITEXT = re.compile(r"\{\{\s*(?:good|featured)[ _](?:article|list)|\{\{\s*[GF][AL]\s*\}\}", re.I)
_LISTING = re.compile(r"\{\{\s*(?:disambig|dab|hndis|geodis|given name|surname)", re.I)
_HOLE = "\0"
# Templates that leave no hole in a sentence when they go.
_SILENT = re.compile(
    r"^(cite|citation|sfn|harv|refn|efn|ref|infobox|main|see|further|details|about|redirect|other|use |pp|good"
    r"|featured|ipa|respell|pron|audio|cn$|fact|clarify|when|who|page needed|dubious|verify|dead|wayback|by whom"
    r"|specify|refimprove|unref|multiple image|image|css image|quote box|navbox|portal|commons|taxobox|automatic"
    r"|chembox|geobox|coord|reflist|notelist|clear|-$|toc|anchor|not|update|expand|more|original|pov|vague|weasel"
    r"|better|failed|according|full|self|primary|medical|side|wik|sister|for$|hatnote|distinguish|short|italic"
    r"|display|lowercase|authority|defaultsort|sfrac$|rp$|r$|col|div|end|refbegin|refend|stub|sup|contradict|flag)",
    re.I,
)
_TEXT_OF = re.compile(
    r"^(nowrap|nobr|quote|cquote|blockquote|em|strong|chem|math|mvar|var|small|sic|abbr)$", re.I
)
_MARKS = {
    "ndash": "–",
    "spaced ndash": " – ",
    "snd": " – ",
    "mdash": "—",
    "nbsp": " ",
    "circa": "c. ",
    "'": "'",
}


def _template(match: re.Match[str]) -> str:
    """What a template (without templates inside) leaves in the text; `_HOLE` where that is not known."""
    name, *fields = (field.strip() for field in match[1].split("|"))
    plain = [field for field in fields if not re.match(r"^\w+\s*=", field)]
    key = name.lower()
    if key in ("convert", "cvt") and len(plain) > 1:
        words: list[str] = []
        for field in plain:
            words.append(
                {"to": "to", "-": "–", "and": "and", "by": "by"}.get(field, field.replace("sqkm", "km²"))
            )
            if not re.match(r"^[\d.,/+-]+$|^(to|-|–|and|by|x)$", field):
                break
        return " ".join(words)
    if key in _MARKS:
        return _MARKS[key] + (plain[0] if plain else "")
    if key in ("lang", "transl") and plain:
        return plain[-1]
    if key == "as of" and plain:
        return "As of " + " ".join(plain)
    if key == "frac" and len(plain) > 1:
        return "/".join(plain[-2:])
    if _TEXT_OF.match(name) and plain:
        return plain[0]
    return "" if _SILENT.match(name) else _HOLE


def _without_templates(text: str) -> str:
    """`text` with templates worked in from the inside out, then without tables."""
    for pattern, replacement in ((r"\{\{([^{}]*)\}\}", _template), (r"\{\|(?:(?!\{\||\|\}).)*\|\}", "")):
        previous = ""
        while previous != text:
            previous, text = text, re.sub(pattern, replacement, text, flags=re.S)
    return text


def _wikitext(text: str) -> str:
    """Wiki markup to prose: headings stay as "== Heading ==", tables, references and templates go.

    Paragraphs in which an unknown template stood amid the words go too: their sentences would have holes.
    """
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(
        r"<ref[^>/]*/>|<ref.*?</ref>|<gallery.*?</gallery>|<timeline.*?</timeline>", "", text, flags=re.S
    )
    text = re.sub(
        r"<math[^>]*>(.*?)</math>", lambda m: f"${m[1].strip()}$".replace("{{", "{ {"), text, flags=re.S
    )
    text = _without_templates(text)
    media = r"\[\[(?:file|image|category|файл|картинка|категория)\s*:"
    media += r"(?:[^\[\]]|\[\[[^\[\]]*\]\]|\[[^\[\]]*\])*\]\]"
    text = re.sub(media, "", text, flags=re.I)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?:\S+\s*([^\]]*)\]", r"\1", text)
    text = re.sub(r"<[^<>]{1,200}>|'{2,}|__[A-Z]+__", "", text).replace("&nbsp;", " ")
    kept: list[str] = []
    skipping = False
    for line in text.split("\n"):
        line = re.sub(r"\(\s*[\0;,: ]*\s*\)", "", line.strip()).strip(_HOLE + " ")
        line = re.sub(r"\(\s*[;,:]?\s*(?=\S)", "(", line)
        line = re.sub(r"\s+([,.;:])(?=\s|$)", r"\1", re.sub(r"[ \u00a0]{2,}", " ", line))
        heading = re.match(r"^(=+)\s*([^=]+?)\s*=+$", line)
        if heading:
            skipping = bool(_NO_PROSE.match(line))
            line = f"\n{heading[1]} {heading[2]} {heading[1]}\n"
        broken = _HOLE in line or "{{" in line or "[[" in line
        if skipping or broken or line.startswith(("|", "!", "{", "}", ":|")):
            continue
        line = re.sub(r"^[:;]+\s*", "", re.sub(r"^[*#]+\s*", "- ", line))
        # What is left of a list of flags or of bare references.
        if not (line.startswith("-") and len(line) < 12):
            kept.append(line)
    text = tidy("\n".join(kept))
    text = re.sub(r"(?<=[^\n-])\n(?=[^\n=-])", "\n\n", text)
    return _without_empty_sections(text)


def _without_empty_sections(text: str) -> str:
    """Headings go when no prose follows before a heading of the same or a higher level, or the end."""
    kept: list[str] = []
    level = 1  # of the next thing that was kept; 99 for prose
    for block in reversed(text.split("\n\n")):
        heading = re.match(r"^(=+) [^\n]+ =+$", block)
        if heading and level <= len(heading[1]):
            continue
        level = len(heading[1]) if heading else 99
        kept.append(block)
    return "\n\n".join(reversed(kept))


def wikipedia(stem: str) -> Pages:
    """Articles of the excerpt of a Wikipedia dump that gensim carries for its tests, except those that were
    good or featured articles when the dump was made (2016): WikiText was made of these."""

    def pages(path: Path) -> Iterator[tuple[str, str]]:
        for _, data in members(path, rf"/{stem}.*\.bz2$"):
            root = ElementTree.fromstring(bz2.decompress(data))
            for page in root.iter():
                if not page.tag.endswith("}page"):
                    continue
                fields = {n.tag.split("}")[-1]: n.text or "" for n in page.iter()}
                text, title = fields.get("text", ""), fields.get("title", "")
                if fields.get("ns") != "0" or re.match(r"\s*#\w+", text) or "disambiguation" in title:
                    continue
                if _OF_WIKITEXT.search(text) or _LISTING.search(text) or title.startswith("List of"):
                    continue
                prose = _wikitext(text)
                if len(prose) > 3000:
                    yield title, f"= {title} =\n\n{prose}"

    return pages
