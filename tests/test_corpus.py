"""The texts that scripts/make_corpus.py makes from a package; the test builds the package."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import make_corpus
import pytest

PAGE = r"""'\" t
.\" A comment.
.TH LAMP 8 "1872"
.SH "NAME"
lamp \- lights the \fBbig\fP lamp \(aqat once\(aq
.de XX
a macro
..
.ie n \{\
.    ds X x
.\}
.SH DESCRIPTION
.PP
Run
.BR lamp (8)
with
.B \-\-on "at dusk"
\&.\|.\|. or 100\~km/h\c
.\" Another comment.
.TP
.BI \-\-height= METRES
\[u2191] as \(lqhigh\(rq as it goes: C:\\lamp\en \*(Aqx\*(Aq \s-1BIG\s0 \m[blue]URL\m[]
.IP \(bu 2
.UR https://lamp.example
.UE
.TS
l l.
a	b
.TE
"""
TEXT = """NAME
lamp - lights the big lamp 'at once'

DESCRIPTION

Run
lamp(8)
with
--on at dusk
... or 100 km/h

--height=METRES
↑ as “high” as it goes: C:\\lamp\\n 'x' BIG URL

•
https://lamp.example
a\tb
"""


def deb(pages: dict[str, str]) -> bytes:
    """Return a Debian package of manual pages: an `ar` archive."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, page in pages.items():
            content = gzip.compress(page.encode())
            entry = tarfile.TarInfo(f"./usr/share/man/{name}.gz")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        link = tarfile.TarInfo("./usr/share/man/de/man1/link.1.gz")
        link.type, link.linkname = tarfile.SYMTYPE, "lamp.8.gz"
        archive.addfile(link)
    package = b"!<arch>\n"
    for member, content in (("debian-binary", b"2.0\n!"), ("data.tar.xz", data.getvalue())):
        package += f"{member:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        package += content + b"\n" * (len(content) % 2)
    return package


def test_a_page_is_plain_text() -> None:
    assert make_corpus.plain(PAGE) == TEXT
    assert make_corpus.plain(".Dd May 1\n.Sh NAME\n.Nm lamp\n").strip() == ""


def test_a_package_becomes_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = {f"de/man8/lamp{i}.8": f".SH NAME\nlampe{i}\n" + "Licht\n" * 90 for i in range(9)}
    pages |= {"de/man1/again.1": pages["de/man8/lamp3.8"], "de/man1/short.1": "kurz\n"}
    package = deb({**pages, "man1/english.1": "light\n" * 90})
    mirror, output = tmp_path / "mirror", tmp_path / "made"
    (mirror / "pool").mkdir(parents=True)
    (mirror / "pool" / "de.deb").write_bytes(package)
    sha256 = hashlib.sha256(package).hexdigest()
    german = make_corpus.Package("de", "pool/de.deb", "usr/share/man/de", sha256)
    monkeypatch.setattr(make_corpus, "PACKAGES", (german,))
    monkeypatch.setattr(make_corpus, "VALID", 1000)
    monkeypatch.setattr(make_corpus, "TRAIN", 3000)
    arguments = ["de", f"--output-dir={output}", f"--mirror=file://{mirror}"]
    assert make_corpus.main(arguments) == 0
    bytes_of = {path.name: path.read_bytes() for path in output.iterdir()}
    assert sorted(bytes_of) == ["de.train.jsonl.gz", "de.valid.jsonl.gz"]
    texts = {
        name: [json.loads(line)["text"] for line in gzip.decompress(content).splitlines()]
        for name, content in bytes_of.items()
    }
    train, valid = texts["de.train.jsonl.gz"], texts["de.valid.jsonl.gz"]
    assert (len(train), len(valid)) == (6, 2)
    assert len({*train, *valid}) == 8
    assert {text[:10] for text in (*train, *valid)} == {"NAME\nlampe"}
    assert make_corpus.main(arguments) == 0
    assert bytes_of == {path.name: path.read_bytes() for path in output.iterdir()}
    assert "6 documents, " in capsys.readouterr().out

    (mirror / "pool" / "de.deb").write_bytes(package + b"\n")
    assert make_corpus.main(arguments) == 1
    assert "is another file than data/README.md names" in capsys.readouterr().err
    (mirror / "pool" / "de.deb").unlink()
    assert make_corpus.main(arguments) == 1
    assert "No such file" in capsys.readouterr().err
