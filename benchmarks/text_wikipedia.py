"""Wiki markup to prose, for make_text.py."""

from __future__ import annotations

import bz2
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from text_sources import Pages, members, tidy

_NO_PROSE = re.compile(
    r"^=+\s*(references|see also|external links|notes|further reading|bibliography|footnotes|"
    r"citations|sources|notes and references|filmography|източници|външни препратки|вижте също|"
    r"бележки|литература)[^=]*=+$",
    re.I,
)


def _wikitext(text: str) -> str:
    """Wiki markup to prose; headings stay as "== Heading ==", tables, references and templates go."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(
        r"<ref[^>/]*/>|<ref.*?</ref>|<gallery.*?</gallery>|<timeline.*?</timeline>", "", text, flags=re.S
    )
    text = re.sub(r"<math[^>]*>(.*?)</math>", r"$\1$", text, flags=re.S)
    text = re.sub(r"\{\{\s*(?:convert|cvt)\s*\|([^|{}]*)\|([^|{}]*)[^{}]*\}\}", r"\1 \2", text, flags=re.I)
    text = re.sub(r"\{\{\s*(?:lang|transl)\s*\|[^|{}]*\|([^|{}]*)\}\}", r"\1", text, flags=re.I)
    kept_first = r"\{\{\s*(?:nowrap|nobr|quote|cquote|blockquote|em|chem)\s*\|([^|{}]*)[^{}]*\}\}"
    text = re.sub(kept_first, r"\1", text, flags=re.I)
    for pattern in (r"\{\{[^{}]*\}\}", r"\{\|(?:(?!\{\||\|\}).)*\|\}"):
        previous = ""
        while previous != text:
            previous, text = text, re.sub(pattern, "", text, flags=re.S)
    media = r"\[\[(?:file|image|category|файл|картинка|категория)\s*:"
    media += r"(?:[^\[\]]|\[\[[^\[\]]*\]\]|\[[^\[\]]*\])*\]\]"
    text = re.sub(media, "", text, flags=re.I)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?:\S+\s*([^\]]*)\]", r"\1", text)
    text = re.sub(r"<[^<>]{1,200}>|'{2,}|__[A-Z]+__", "", text).replace("&nbsp;", " ")
    kept: list[str] = []
    skipping = False
    for line in text.split("\n"):
        line = re.sub(r"\(\s*[;,:]?\s*\)", "", line.strip())
        line = re.sub(r"\(\s*[;,:]\s*", "(", line)
        line = re.sub(r"\s+([,.;:])", r"\1", re.sub(r"[ \u00a0]{2,}", " ", line))
        if line.startswith("="):
            skipping = bool(_NO_PROSE.match(line))
            line = "\n" + line + "\n"
        if not skipping and not line.startswith(("|", "!", "{", "}", ":|")):
            kept.append(re.sub(r"^[:;]+\s*", "", re.sub(r"^\*+\s*", "- ", line)))
    text = tidy("\n".join(kept))
    text = re.sub(r"(?<=[^\n-])\n(?=[^\n=-])", "\n\n", text)
    # A heading whose section had no prose goes too.
    return re.sub(r"(?m)^(=+) [^\n]*\n+(?=\1 |\1[^=])", lambda m: "" if len(m[1]) > 1 else m[0], text)


def wikipedia(stem: str) -> Pages:
    """Articles of the excerpt of a Wikipedia dump that gensim carries for its tests."""

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
                prose = _wikitext(text)
                if len(prose) > 3000:
                    yield title, f"= {title} =\n\n{prose}"

    return pages
