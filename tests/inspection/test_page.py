"""`xtok report`: the contents and bytes of the page, and the page in a real browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from checks import not_none, works
from conftest import Cli, Load
from make_maps import TINY, built, vocabulary
from make_tokenizers import byte_ranks
from page_columns import unpack, unpack_map, unpack_weights

import xtok
from xtok.alignment.aligner import chunks
from xtok.errors import XtokError
from xtok.inspection.page import pictures
from xtok.inspection.page.page import render_page
from xtok.inspection.page.search import SHOWN_BYTES, packed, weight_codes
from xtok.inspection.pair_facts import SharedCounts
from xtok.inspection.report import BUILT_IN, PageData, Report, examine
from xtok.inspection.results import distinct_names
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.display import to_json
from xtok.tokenizers.pairs import Pair, require_table
from xtok.tokenizers.table import Decoded, TokenEntry, TokenType

TEXT = "201 lights of 2024, and the harbour.\n" * 20


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def plain(map_to_digits: ProjectionMap, pair: Pair) -> PageData:
    return examine(map_to_digits, pair=pair, names=["a.safetensors"])


@pytest.fixture(scope="session")
def measured(map_to_digits: ProjectionMap, pair: Pair, text: Path) -> PageData:
    maps = [map_to_digits, built(*pair.tokenizers, xtok.BuildConfig.for_loss("p-kl"))]
    return examine(maps, texts=[text], pair=pair, names=["a.safetensors", "b.safetensors"])


HOSTILE = (
    b"</script><script>document.title='owned'</script>",
    b"<img src=x onerror=\"document.title='owned'\">",
    b"{{ 7*7 }}{% raw %}${1}",
    "\u202edesrever".encode(),
    "\u2066\u0301a\u0300".encode(),
    b"<!--",
    b"\x1b[31m\x00\r\n\t\\x41",
    b"\xe4\xb8",
    b"\xed\xa0\x80",
    b"\"'><b>bold</b>&amp;",
    b"x" * 1_000_000,
)
SVG = "http://www.w3.org/2000/svg"  # a model's name, not an address
NAME = "<b onclick=alert(1)>\u202e&\"'"


def hostile_map() -> ProjectionMap:
    """A map with markup and scripts in its tokens, names, models and history."""
    contents = [*HOSTILE, b"ok"]
    entries = [TokenEntry(i, TokenType.NORMAL, token) for i, token in enumerate(contents)]
    entries.append(TokenEntry(len(contents), TokenType.CONTROL, b"</script><i>" + b"y" * 1_000))
    side = vocabulary(
        20, model_id=NAME, revision=NAME, backend=NAME, width_source="option",
        tokenizer_vocab_size=len(entries), table=Decoded(entries).table(20),
    )  # fmt: skip
    n = len(contents)
    return ProjectionMap(
        student=side,
        teacher=side,
        student_ids=np.repeat(np.arange(n, dtype=np.int32), 2),
        teacher_ids=np.stack([np.arange(n), np.arange(n)[::-1]], 1).ravel().astype(np.int32),
        weights=np.tile(np.array([0.75, 0.25], np.float32), n),
        row_kind=np.pad(np.full(n, RowKind.COUNTED, np.uint8), (0, 20 - n)),
        scale_slot=None,
        method=NAME,
        top_k=2,
        history=({"stage": NAME, "options": {NAME: NAME}, "xtok_version": NAME},),
    )


@pytest.fixture(scope="session")
def pages(plain: PageData, measured: PageData) -> dict[str, bytes]:
    hostile = examine(hostile_map(), names=[NAME])
    return {
        "plain": render_page(plain),
        "measured": render_page(measured),
        "hostile": render_page(hostile),
    }


class Elements(HTMLParser):
    """The elements of a page, and the text in its scripts."""

    def __init__(self, html: bytes) -> None:
        super().__init__()
        self._within = ""
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.links: list[str] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(html.decode())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._within = tag
        if tag in self.texts:
            self.texts[tag].append("")
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        if self._within in self.texts:
            self.texts[self._within][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._within = ""


# Contents of the page


def test_findings_of_a_map_without_text(plain: PageData, pages: dict[str, bytes]) -> None:
    report = plain.report
    grades = [finding.grade for finding in report.findings]
    assert 3 <= len(grades) <= 6
    assert grades == sorted(grades, key=["bad", "usable", "note", "good"].index)
    assert {finding.section for finding in report.findings} <= {"pair", "classes"}
    assert report.evaluation is None
    assert report.pair.text is None
    assert report.maps[0].fits[3].loss == "event-kl"
    assert "Pass text" in report.maps[0].fits[3].why  # the missing input
    for side in not_none(report.pair.spellings):
        assert f"{side.shared:,} shared, {side.spelled:,} spelled" in pages["plain"].decode()


def test_findings_count_tokens_without_a_counterpart(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "s.tiktoken", "20", "201", "202", "ab")
    teacher = byte_ranks(tmp_path / "t.tiktoken", "20", "ab", "cd", digits=1)
    m = xtok.build(student, teacher, xtok.BuildConfig.for_loss("gold"))
    findings = [(f.grade, f.number, f.section) for f in examine(m).report.findings]
    assert findings == [  # the user cannot change the first two
        ("note", "99%", "pair"),  # shared
        ("note", "2", "pair"),  # numbers
        ("good", "0", "classes"),  # empty rows
        ("good", "1", "classes"),  # columns in no row
    ]


def test_empty_rows_are_all_that_build_reports(digits: Tokenizer, sentencepiece: Tokenizer) -> None:
    m = xtok.build(digits, sentencepiece)
    table, empty = require_table(m.student), m.row_kind == RowKind.EMPTY
    special, text = empty[[*table.control_names]].sum(), empty[table.text_ids].sum()
    assert special > 0
    [finding] = [f for f in examine(m).report.findings if "empty" in f.text]
    assert finding.number == f"{special + text}"


def test_a_damaged_map_is_fit_for_no_loss(map_to_digits: ProjectionMap) -> None:
    broken = examine(replace(map_to_digits, weights=map_to_digits.weights[::-1].copy()))
    grades = [fit.grade for fit in broken.report.maps[0].fits]
    assert grades == ["bad", "bad", "bad", "good"]
    render_page(broken)


def test_a_map_onto_itself_is_all_the_same(byte_level: Tokenizer) -> None:
    report = examine(built(byte_level, byte_level)).report
    vocabulary = report.pair.vocabulary
    assert vocabulary.student == vocabulary.teacher == vocabulary.both
    assert report.advice.loss == "plain KL"
    assert len(report.findings) >= 3


def test_two_maps_with_text(measured: PageData, text: Path, pages: dict[str, bytes]) -> None:
    report = measured.report
    assert [m.name for m in report.maps] == ["a.safetensors", "b.safetensors"]
    assert not_none(report.comparison).weighted_by_text
    assert not_none(report.pair.text).num_bytes == len(text.read_bytes())
    assert report.evaluation is not None
    assert {f.map_number for f in report.findings} <= {None, 1, 2}
    assert not any(m.name in f.text for f in report.findings for m in report.maps)
    for part in (b"comparison", b"quality"):
        assert b'id="%b"' % part in pages["measured"]
    rows = re.findall(rb'class="n( strong| soft)" data-v="[^-]', pages["measured"])
    # figures from few samples are grey
    has_enough = [row.starts >= 100 for row in report.evaluation.classes]
    assert Counter(rows) == {b" strong": sum(has_enough), b" soft": 2 * has_enough.count(False)}
    assert 0 < sum(has_enough) < len(has_enough)


def test_sentences_are_spelled_by_both_sides(plain: PageData) -> None:
    sentences = plain.report.sentences
    assert [s.label for s in sentences] == [label for label, *_ in BUILT_IN]
    assert [s.label for s in sentences if s.direction == "rtl"] == ["Arabic"]
    for sentence in sentences:
        shown = list(chunks(sentence.alignment))
        assert {chunk.kind for chunk in shown} <= {"same", "split"}
        assert [i for c in shown for i, _ in c.student] == [*sentence.alignment.student_ids]
        assert [i for c in shown for i, _ in c.teacher] == [*sentence.alignment.teacher_ids]
        assert all((c.kind == "same") == (len(c.student) == len(c.teacher) == 1) for c in shown)


# The pictures


@pytest.mark.parametrize(
    "shared",
    [
        SharedCounts(*n)
        for n in ((100, 100, 50), (100, 10, 4), (1000, 1001, 999), (7, 100, 7), (5, 5, 0))
    ],
)
def test_overlaps_are_true_to_area(shared: SharedCounts) -> None:
    root = ElementTree.fromstring(str(pictures.overlap(shared, "a & b")))
    assert root.get("aria-label") == "a & b"
    first, second = ((float(c.get("cx", "")), float(c.get("r", ""))) for c in list(root)[:2])
    assert (first[1] / second[1]) ** 2 == pytest.approx(shared.student / shared.teacher, rel=1e-2)
    # The area that both circles cover, counted on a fine grid.
    x = np.linspace(-5, 300, 2000)[:, None]
    y = np.linspace(0, 148, 1000)
    inside = [(x - cx) ** 2 + (y - 74) ** 2 <= r * r for cx, r in (first, second)]
    both, student = (inside[0] & inside[1]).sum(), inside[0].sum()
    assert both / student == pytest.approx(shared.both / shared.student, abs=0.005)


# The bytes of the page


def test_weights_have_three_digits() -> None:
    weights = [1.0, 0.5, 0.7508, 0.0751, 0.00751, 0.1, 0.9999, 0.99949, 1e-7, 3.3e-12, 2.0]
    digits = [1.0, 0.5, 0.751, 0.0751, 0.00751, 0.1, 1.0, 0.999, 1e-7, 3.3e-12, 1.0]
    assert unpack_weights(weight_codes(np.array(weights))) == pytest.approx(digits)
    assert int(weight_codes(np.array([1e-45]))[0]) < 2**16


@pytest.mark.parametrize("numbers", [[], [0], [255], [256, 1], [70000, 2], [2**24, 2**32 - 1]])
def test_columns_are_unpacked_to_the_same_values(numbers: Sequence[int]) -> None:
    column = {"a": packed(np.array(numbers, np.int64))}
    assert unpack(column, "a").tolist() == list(numbers)


def test_the_page_contains_every_entry(measured: PageData) -> None:
    for number, m in enumerate(measured.maps):
        students, teachers, weights = zip(*unpack_map(measured, number), strict=True)
        assert [*students] == m.student_ids.tolist()
        assert [*teachers] == m.teacher_ids.tolist()
        assert [*weights] == pytest.approx(m.weights.tolist(), rel=0.005)


def test_a_long_row_has_its_heaviest_entries(byte_level: Tokenizer, digits: Tokenizer) -> None:
    m = xtok.multitoken(xtok.load_pair(byte_level, digits))
    examined = examine(m)
    rank = np.arange(m.nnz) - np.searchsorted(m.student_ids, m.student_ids)
    held = unpack_map(examined)
    assert [entry[:2] for entry in held] == [
        (int(s), int(t))
        for s, t in zip(m.student_ids[rank < 8], m.teacher_ids[rank < 8], strict=True)
    ]
    assert len(held) < m.nnz
    assert b"This page contains the 8 heaviest entries of each row." in render_page(examined)


def test_the_same_inputs_give_the_same_bytes(
    cli: Cli, map_to_digits: ProjectionMap, small: Path, tmp_path: Path, text: Path
) -> None:
    map_to_digits.save(tmp_path / "m.safetensors")
    models = ["-s", small / "small-byte-level", "-t", small / "small-digits"]
    for name in ("a.html", "folder/b.html"):
        line = "m.safetensors", *models, "--text", text, "-o", name, "--json", "-q"
        result = works(cli("report", *line))
        assert result.stderr == ""
        assert result.stdout.splitlines() == [name, name.replace(".html", ".json")]
    first, second = ((tmp_path / name).read_bytes() for name in ("a.html", "folder/b.html"))
    assert first == second
    data = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert list(data) == [f.name for f in fields(Report)]
    digest = hashlib.sha256((tmp_path / "m.safetensors").read_bytes()).hexdigest()
    assert data["maps"][0]["sha256"] == digest
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "folder/b.json").read_bytes()


def test_a_python_user_gets_the_same_page(
    map_to_digits: ProjectionMap, pair: Pair, plain: PageData, tmp_path: Path
) -> None:
    page = tmp_path / "a.html"
    written = xtok.report(map_to_digits, page, data=True, pair=pair, names=["a.safetensors"])
    assert page.read_bytes() == render_page(plain)
    assert page.with_suffix(".json").read_text(encoding="utf-8") == f"{to_json(written)}\n"


def test_the_policy_allows_only_the_style_and_script_of_the_page(pages: dict[str, bytes]) -> None:
    elements = Elements(pages["hostile"])
    policy = not_none(re.search(rb'Content-Security-Policy" content="([^"]+)"', pages["hostile"]))
    data, script = elements.texts["script"]
    style_hash, script_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (elements.texts["style"][0], script)
    )
    assert policy[1].decode() == (
        f"default-src 'none'; style-src 'sha256-{style_hash}'; script-src 'sha256-{script_hash}'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert "<" not in data
    assert data.isascii()
    assert json.loads(data)["sides"] == [NAME.replace("\u202e", "\\xe2\\x80\\xae")] * 2
    # In JSON, names are complete.
    assert json.loads(to_json(examine(hostile_map()).report))["pair"]["student"] == NAME


def test_a_vocabulary_adds_no_markup(pages: dict[str, bytes]) -> None:
    elements, html = Elements(pages["hostile"]), pages["hostile"].decode()
    assert {*elements.tags} <= {*Elements(pages["plain"]).tags}
    assert elements.tags.count("script") == 2
    assert elements.handlers == []
    assert all(link.startswith("#") for link in elements.links)
    assert "\u202e" not in html
    assert "x" * (SHOWN_BYTES + 1) not in html
    assert "{{ 7*7 }}" not in html.replace("{{␣7*7␣}}", "")
    assert len(pages["hostile"]) < 120_000
    for outside in ("http:", "https:", "url(", "@import", "//cdn"):
        assert outside not in html.replace("http-equiv", "").replace(SVG, "")


@pytest.fixture(scope="module")
def real_page(load_real: Load, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of Llama 3 to Qwen."""
    sides = load_real("llama3.tiktoken"), load_real("qwen.tiktoken")
    path = tmp_path_factory.mktemp("real") / "page.html"
    path.write_bytes(render_page(examine(built(*sides), pair=xtok.load_pair(*sides))))
    return path


@pytest.mark.real
def test_a_page_of_llama_3_to_qwen_has_the_whole_map(real_page: Path) -> None:
    html = real_page.read_bytes()
    assert len(html) <= 2_500_000
    assert b"This page contains the whole map." in html


# Maps that cannot be shown


def test_examine_refuses_other_pairs_and_missing_tokens(
    map_to_digits: ProjectionMap, byte_level: Tokenizer, pair: Pair
) -> None:
    """Maps of different pairs, a text without a pair, or a map without tokens are errors."""
    with pytest.raises(XtokError):
        examine([map_to_digits, built(byte_level, byte_level)])
    with pytest.raises(ValueError, match="texts require a pair"):
        examine(map_to_digits, texts=["a.txt"])
    student, teacher = (replace(v, table=None) for v in (pair.student, pair.teacher))
    bare = replace(map_to_digits, student=student, teacher=teacher)
    with pytest.raises(XtokError):
        examine(bare)
    render_page(examine(bare, pair=pair))


def test_a_repeated_name_is_numbered(map_to_digits: ProjectionMap) -> None:
    report = examine([map_to_digits] * 2, names=["a", "a"]).report
    assert [entry.name for entry in report.maps] == ["a", "a (2)"]
    assert distinct_names(["a", "a (2)", "a"]) == ["a", "a (2)", "a (3)"]


def test_small_weights_are_not_shown_as_0(cli: Cli, tmp_path: Path) -> None:
    weights = np.array([1, 1, 1, 0.00006, 1, 0.00004, 1e-30], np.float32)
    replace(TINY, weights=weights).save(tmp_path / "map.safetensors")
    printed = works(cli("inspect", "map.safetensors", "ab", r"\xff\xfe")).stdout
    shown = ["1.0000", "0.0001", "1.0000", "<0.0001", "<0.0001"]
    assert sorted(re.findall(r"<?\d\.\d+", printed)) == sorted(shown)


# In a browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no browser: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory, pages: dict[str, bytes]) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, content in pages.items():
        (folder / f"{name}.html").write_bytes(content)
    return {name: folder / f"{name}.html" for name in pages}


browsing = pytest.mark.xdist_group("browser")


def texts_of(browser: Browser, selector: str) -> list[str]:
    contents: list[str] = browser.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
    )
    return contents


@browsing
@pytest.mark.parametrize("name", ["plain", "measured", "hostile"])
def test_a_page_loads_without_requests_and_fits_the_window(
    browser: Browser, files: dict[str, Path], name: str
) -> None:
    browser.open(files[name])
    assert browser.messages == []
    assert browser.requests == [files[name].as_uri()]
    wide = "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth)"
    for width in (400, 1280):
        browser.resize(width)
        browser.open(files[name], "#search=x")
        assert browser.run("document.documentElement.scrollWidth") == width
        shades = browser.run(f"{wide}.map((e) => getComputedStyle(e).backgroundAttachment)")
        # a shadow at each edge with hidden content
        assert set(shades) <= {"local, local, scroll, scroll"}
        assert bool(shades) == (width == 400)


@browsing
def test_search_finds_tokens_bytes_and_ids(
    browser: Browser, files: dict[str, Path], map_to_digits: ProjectionMap
) -> None:
    the = map_to_digits.student.ids_of(" the")[0]
    browser.open(files["plain"], "#search=%20the")
    assert texts_of(browser, "#students li button")[0] == f"␣the#{the}"
    [shown, *_] = texts_of(browser, "#detail .entries tbody td:last-child")
    entry = map_to_digits[" the"].entries[0]
    assert shown == f"{entry.token}#{entry.teacher_id}".replace(" ", "␣")
    browser.open(files["plain"], "#search=\\x20\\x74he")
    assert texts_of(browser, "#students li button")[0] == f"␣the#{the}"
    browser.open(files["plain"], f"#search=%23{the}")
    assert texts_of(browser, "#students li button") == [f"␣the#{the}"]
    browser.open(files["plain"], f"#student={the}")
    assert texts_of(browser, "#detail h3") == ["␣the"]
    browser.open(files["plain"], "#search=zzzzzz")
    assert texts_of(browser, "#found") == ["0 student and 0 teacher tokens"]
    browser.open(files["plain"], "#search=%")
    assert browser.messages == []


@browsing
def test_every_row_and_column_of_the_page_equals_the_map(
    browser: Browser, files: dict[str, Path], plain: PageData
) -> None:
    [projection] = plain.maps
    browser.open(files["plain"])
    rows = browser.run("Array.from({length: student.length}, (_, id) => maps[0].row(id))")
    held = [[(e["id"], e["isSlot"]) for e in row] for row in rows]
    assert held == [
        [(e.teacher_id, e.is_slot) for e in projection[i].entries] for i in range(len(rows))
    ]
    weights = [e["weight"] for row in rows for e in row]
    assert weights == pytest.approx(projection.weights.tolist(), rel=0.005)
    names = browser.run("Array.from({length: teacher.length}, (_, id) => teacher.shown(id))")
    table = not_none(projection.teacher.table)
    expected = [table.name(i).replace(" ", "␣") for i in range(len(table))]
    assert [name.removeprefix("◌") for name in names] == expected
    columns = browser.run("Array.from({length: teacher.length}, (_, id) => maps[0].column(id))")
    assert [sorted(e["id"] for e in column) for column in columns] == [
        sorted(projection.student_ids[projection.teacher_ids == t].tolist())
        for t in range(len(columns))
    ]
    student, other = plain.pair.tokenizers
    pieces = browser.run("Array.from({length: student.length}, (_, id) => student.piecesOf(id))")
    shared = other.table.canonical_ids()
    unshared = [i for i in student.table.text_ids.tolist() if student.table[i] not in shared]
    assert unshared
    for i in unshared:
        assert pieces[i] == other.segment(student.table[i])[:16]


@browsing
def test_search_while_typing_and_by_keyboard(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["plain"])
    browser.run("document.getElementById('query').focus()")
    browser.type("the")
    assert "the" in texts_of(browser, "#students li button")[0]
    browser.press("Tab")
    browser.press("Tab")
    browser.press("Enter")
    assert browser.run("document.activeElement.id") == "detail"
    assert browser.run("location.hash").startswith("#student=")


@browsing
def test_a_click_on_a_heading_sorts_the_rows(
    browser: Browser, files: dict[str, Path], plain: PageData
) -> None:
    browser.open(files["plain"])
    classes = not_none(plain.report.maps[0].description.coverage)
    rows = sorted(row.rows for row in classes if row.token_class != "unused")
    for order, sort in (("descending", rows[::-1]), ("ascending", rows)):
        browser.run("document.querySelectorAll('#classes thead button')[1].click()")
        cells = texts_of(browser, "#classes tbody tr > td:nth-child(3)")
        assert [int(cell.replace(",", "")) for cell in cells] == sort
        header = "document.querySelectorAll('#classes thead th')[2]"
        assert browser.run(f"{header}.getAttribute('aria-sort')") == order


@browsing
def test_hostile_tokens_appear_as_text(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["hostile"], "#search=script")
    assert browser.run("document.title") != "owned"
    shown = browser.run("Array.from({length: 13}, (_, id) => student.shown(id))")
    table = not_none(hostile_map().student.table)
    for i in range(10):
        assert shown[i].removeprefix("◌") == table.name(i).replace(" ", "␣")
    assert shown[10] == "x" * SHOWN_BYTES + "… (1,000,000 bytes in all)"
    assert "</script><script>document.title='owned'</script>#0" in texts_of(
        browser, "#students li button"
    )
    for i in range(13):
        browser.run(f"choose(student, {i})")
    assert browser.run("document.querySelectorAll('img, b[onclick], #detail i').length") == 0
    assert browser.messages == []
    assert browser.requests == [files["hostile"].as_uri()]


@browsing
@pytest.mark.real
def test_search_of_128_000_rows_answers_at_once(browser: Browser, real_page: Path) -> None:
    browser.open(real_page)
    assert browser.messages == []
    for query in ("e", "the", r"\\xe4\\xb8", "#679", "zzzzz"):
        took = [
            browser.run(f"search('{query}'), Number(document.getElementById('found').dataset.ms)")
            for _ in range(3)
        ]
        assert min(took) < 50, query
    browser.run("search('#679')")
    assert texts_of(browser, "#students li button") == ["201#679"]
    assert texts_of(browser, "#detail .entries td:last-child")[:3] == ["2#17", "0#15", "1#16"]


def test_the_library_function_does_not_import_the_command_line() -> None:
    program = "import sys, xtok; xtok.report; print({'typer', 'xtok.cli'} & {*sys.modules})"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"set()\n"
