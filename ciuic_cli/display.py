"""Names from other people's files, harmless to show: what a terminal would obey becomes visible, what is long short."""

from __future__ import annotations

import unicodedata

MAX_NAME = 160
"""Characters of a name that are shown; the middle of a longer one is left out."""

_HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def printable(name: object, limit: int = MAX_NAME) -> str:
    """`name` as harmless text of at most `limit` characters and a count of those left out.

    Control characters, escape sequences, bidirectional and other invisible marks become backslash escapes.
    """
    text = str(name)
    cut = len(text) - limit
    if cut > 0:
        # Cut first: escaping a name of a megabyte would only make it longer.
        half = limit // 2
        text = f"{text[:half]}[... {cut} more characters ...]{text[-(limit - half) :]}"
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character == "\\" or unicodedata.category(character) not in _HIDDEN_CATEGORIES:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
