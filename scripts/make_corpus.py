"""Create the study's texts: manual pages in five languages, and the source of Python's library.

    python scripts/make_corpus.py              # all languages, 18 MB of packages
    python scripts/make_corpus.py de en        # some of them
    python scripts/make_corpus.py --mirror https://snapshot.debian.org/archive/debian/20250520T000000Z

The manual pages come from pinned Debian packages, which the script downloads from a mirror without
apt or root; each sha256 is checked. The table in data/README.md lists them.
`LANGUAGE.train.jsonl.gz` and `LANGUAGE.valid.jsonl.gz` contain one object with `text` per line, and
different documents. The same packages give the same bytes. The Python source is the library of the
Python that runs this script.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import platform
import re
import sys
import sysconfig
import tarfile
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fetch_tokenizers import DATA, table_of

from xtok._lib.io import write
from xtok.errors import XtokError

DEFAULT_DIR = DATA / "corpus"
MIRROR = "http://deb.debian.org/debian"
VALID, TRAIN = 150_000, 1_500_000  # characters, at least
SHORTEST, LONGEST = 500, 40_000  # of a document, in characters

# Excluded from Python's library: tests, tables, other projects, machine-dependent files.
LEFT_OUT = re.compile(
    "tests?|idlelib|lib2to3|encodings|pydoc_data|site-packages|config-.*|_sysconfigdata.*"
)


class Package(NamedTuple):
    """A Debian package with manual pages: a row of the table in data/README.md."""

    language: str
    path: str  # on a mirror
    folder: str  # of the pages in the package
    sha256: str


_PACKAGE = re.compile(
    r"^\| `(\w+)` \| `(pool/.+\.deb)` \| `(.+)` \| .+ \| .+ \| `([0-9a-f]{64})` \|$", re.MULTILINE
)
_MADE = re.compile(r"^\| `(\w+\.\w+)\.jsonl\.gz` \| .+ \| `([0-9a-f]{64})` \|$", re.MULTILINE)
PACKAGES = tuple(Package(*cells) for cells in _PACKAGE.findall(table_of("Text")))
MADE = dict(_MADE.findall(table_of("Text")))
LANGUAGES = (*dict.fromkeys(package.language for package in PACKAGES), "python")


def documents_of(language: str, mirror: str) -> Iterator[str]:
    """Yield a language's documents, in any order.

    Raises:
        XtokError: A package is unavailable, or another one.
    """
    if language == "python":
        library = Path(sysconfig.get_path("stdlib"))
        for path in library.rglob("*.py"):
            if not any(map(LEFT_OUT.fullmatch, path.relative_to(library).parts)):
                yield path.read_text(encoding="utf-8", errors="ignore")
    for package in PACKAGES:
        if package.language == language:
            for page in pages_of(download(package, mirror), package.folder):
                yield plain(page)


def download(package: Package, mirror: str) -> bytes:
    """Return a package's bytes, checked."""
    address = f"{mirror.rstrip('/')}/{package.path}"
    print(f"downloading {address}", flush=True)
    try:
        with urllib.request.urlopen(address, timeout=60) as response:
            content: bytes = response.read()
    except OSError as error:
        hint = "check the network, or give another --mirror (data/README.md)"
        raise XtokError(f"{address}: {error}", hint=hint) from error
    if hashlib.sha256(content).hexdigest() != package.sha256:
        raise XtokError(
            f"{address} is another file than data/README.md names", hint="give --mirror"
        )
    return content


def pages_of(package: bytes, folder: str) -> Iterator[str]:
    """Yield the manual pages of a .deb file that are in a folder, without links."""
    with tarfile.open(fileobj=io.BytesIO(member(package, b"data.tar."))) as archive:
        for entry in archive:
            section = Path(entry.name).parent
            if entry.isfile() and section.parent == Path(folder) and section.name[:3] == "man":
                file = archive.extractfile(entry)
                assert file is not None  # of a regular file it never is
                content = file.read()
                content = gzip.decompress(content) if entry.name.endswith(".gz") else content
                yield content.decode("utf-8", errors="ignore")


def member(archive: bytes, name: bytes) -> bytes:
    """Return the first member of an `ar` archive with this prefix."""
    start = len(b"!<arch>\n")
    while start < len(archive):
        size = int(archive[start + 48 : start + 58])
        if archive[start:].startswith(name):
            return archive[start + 60 : start + 60 + size]
        start += 60 + size + size % 2
    raise XtokError("a package without data", hint="give another --mirror")


# Manual pages as plain text: the requests and escapes of man(7) that pages use (groff_man(7),
# groff_char(7)). Pages in mdoc(7) are skipped: their requests are part of the text.

FONTS = {"B", "I", "SM", "SB", "UR", "MT"}  # the arguments are words
JOINED = {"BI", "BR", "IB", "IR", "RB", "RI"}  # the arguments are one word
HEADINGS = {"SH", "SS", "IP"}
BREAKS = {*HEADINGS, "PP", "P", "LP", "TP", "TQ", "HP", "sp", "br"}
CHARACTERS = {
    "em": "—", "en": "–", "hy": "-", "-": "-", "aq": "'", "Aq": "'", "oq": "‘", "cq": "’",
    "dq": '"', "lq": "“", "rq": "”", "Fo": "«", "Fc": "»", "bu": "•", "co": "©", "rg": "®",
    "tm": "™", "rs": "\\", "ti": "~", "ha": "^", "ga": "`", "at": "@", "sh": "#", "lB": "[",
    "rB": "]", "mu": "×", "+-": "±", "<=": "≤", ">=": "≥", "->": "→", "<-": "←", "ss": "ß",
    "de": "°",
}  # fmt: skip
_ESCAPE = re.compile(
    r"""\\(?: (?P<comment>["\#].*) | (?P<plain>[-'`e\\~0\ .])
    | \*? (?: \((?P<two>..) | \[(?P<name>[^]]*)\] )
    | [fFgkmMnVY] (?: \(.. | \[[^]]*\] | . ) | n?[-+] (?: \(.. | . )
    | s (?: [-+]?\d | \[[^]]*\] | '[^']*' | [-+]?\(.. ) | [hvwlLoDbxXZzN]'[^']*' | \*. | . | $ )""",
    re.VERBOSE,
)
_PLAIN = {"e": "\\", "~": " ", "0": " "}
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|((?:\\.|\S)+)')


def plain(page: str) -> str:
    """Return the text of a manual page without formatting; "" for a page in mdoc."""
    if re.search(r"^\.(Dd|Sh|so) ", page, re.MULTILINE):
        return ""
    text = "\n".join(lines_of(page.splitlines()))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def lines_of(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of text of a page's lines: without comments, macros, and table formats."""
    depth, in_macro, in_format = 0, False, False
    for line in lines:
        request, _, rest = line.lstrip(".' \t").partition(" ") if line[:1] in ".'" else ("", "", "")
        if in_macro or in_format:
            in_macro = in_macro and line.strip() != ".."
            in_format = in_format and not line.rstrip().endswith(".")
        elif depth or "\\{" in line:  # a condition, which text for terminals seldom meets
            depth += line.count("\\{") - line.count("\\}")
        elif request in ("de", "ig", "am"):
            in_macro = True
        elif request == "TS":
            in_format = True
        elif not request and line[:1] not in (".", "'"):
            yield unescaped(line.replace("T{", "").replace("T}", ""))
        else:
            words = [a.replace('""', '"') or b for a, b in _ARGUMENT.findall(rest)]
            yield from of_request(request, words[:1] if request == "IP" else words)


def of_request(request: str, words: Sequence[str]) -> Iterator[str]:
    """Yield the lines that a request stands for."""
    if request in BREAKS:
        yield ""
    if words and request in FONTS | JOINED | HEADINGS:
        yield unescaped(("" if request in JOINED else " ").join(words))


def unescaped(line: str) -> str:
    """Return a line of text without escapes."""
    return _ESCAPE.sub(_character, line).rstrip()


def _character(found: re.Match[str]) -> str:
    if plain := found["plain"]:
        return _PLAIN.get(plain, plain)
    name = found["two"] or found["name"] or ""
    if re.fullmatch("u[0-9A-F]{4,6}", name):
        return chr(int(name[1:], 16))
    return CHARACTERS.get(name, "")


def split(documents: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the training documents and the held-out documents.

    Documents have a minimum length, occur once, are cut at a line, and are sorted by digest.
    """
    cut = (document[: document.rfind("\n", 0, LONGEST) + 1] for document in documents)
    found = {hashlib.sha256(text.encode()).digest(): text for text in cut if len(text) >= SHORTEST}
    texts = iter([found[digest] for digest in sorted(found)])
    valid = list(until(VALID, texts))
    return list(until(TRAIN, texts)), valid


def until(characters: int, texts: Iterator[str]) -> Iterator[str]:
    """Yield texts until they have so many characters."""
    while characters > 0 and (text := next(texts, "")):
        characters -= len(text)
        yield text


def save(name: str, texts: Sequence[str], folder: Path) -> None:
    """Write a JSON Lines file, and print its size and digest."""
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    write(folder / f"{name}.jsonl.gz", [gzip.compress(lines.encode(), mtime=0)])
    digest = hashlib.sha256(lines.encode()).hexdigest()
    known = "as" if MADE.get(name) == digest else "not as"
    of = f"; Python {platform.python_version()}" if name.startswith("python") else ""
    path = os.path.relpath(folder / f"{name}.jsonl.gz")
    print(
        f"{path}: {len(texts)} documents, {sum(map(len, texts)):,} characters, "
        f"sha256 {digest[:12]}…, {known} in data/README.md{of}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add(
        "languages", nargs="*", metavar="LANGUAGE", help=f"of {', '.join(LANGUAGES)} (default: all)"
    )
    add("--output-dir", type=Path, default=DEFAULT_DIR, help="default: %(default)s")
    add("--mirror", default=MIRROR, help="of Debian (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.languages) - set(LANGUAGES):
        parser.error(f"unknown: {', '.join(sorted(unknown))} (choose from {', '.join(LANGUAGES)})")
    try:
        for language in arguments.languages or LANGUAGES:
            train, valid = split(documents_of(language, arguments.mirror))
            save(f"{language}.train", train, arguments.output_dir)
            save(f"{language}.valid", valid, arguments.output_dir)
    except XtokError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
