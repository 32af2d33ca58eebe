"""HTML and Mallard to markdown-like text, for make_text.py."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree


def tidy(text: str) -> str:
    """No blanks at line ends, no more than one empty line in a row."""
    text = re.sub(r"[ \t]+\n", "\n", text.replace("\r\n", "\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


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
        # A list item that holds a paragraph or nothing.
        joined = re.sub(r"(?m)^-\s*\n+(?=[^\s-])", "- ", joined)
        joined = re.sub(r"(?m)^-\s*$", "", joined).replace("¶", "")
        return tidy(re.sub(r"\n{2,}(?=- )", "\n", joined))


def html_text(data: bytes) -> str:
    """An HTML page (UTF-8) as text with markdown headings."""
    parser = _Html()
    # Links to the chapters before and after, in books made by Publican.
    parser.feed(re.sub(r'(?s)<ul class="docnav.*?</ul>', "", data.decode("utf-8", "replace")))
    return parser.text()


def mallard_text(data: bytes) -> str:
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
