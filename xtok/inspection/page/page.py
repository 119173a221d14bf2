"""The report page: one HTML file that contains its style, script and data.

The page's content security policy allows only this style and script, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from math import log1p
from operator import attrgetter
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from xtok._lib.io import check_output, write
from xtok._lib.parsing import parse_json
from xtok._lib.progress import Progress, silent
from xtok._lib.shards import Paths
from xtok.alignment.aligner import chunks
from xtok.errors import OutputError
from xtok.inspection.bootstrap import format_interval
from xtok.inspection.measures import MapLosses
from xtok.inspection.page.pictures import overlap
from xtok.inspection.page.search import MOST_ENTRIES, cut_sizes, pack_columns
from xtok.inspection.report import PageData, Report, examine
from xtok.loss_names import LOSS_INFO
from xtok.maps.map_arguments import MapLike
from xtok.maps.records import RowKind
from xtok.tokenizers import display
from xtok.tokenizers.classes import class_label
from xtok.tokenizers.pairs import Pair

_MARKS = {
    "good": ("✓", "fits", "good"),
    "note": ("i", "note", "note"),
    "usable": ("!", "usable", "check"),
    "bad": ("✕", "does not fit", "bad"),
}
"""For each grade: a symbol, the text for a loss, and the text for a finding."""


def report(
    maps: MapLike | Sequence[MapLike],
    output: str | Path,
    *,
    data: bool = False,
    texts: Paths = (),
    pair: Pair | None = None,
    names: Sequence[str] = (),
    field: str = "text",
    progress: Progress = silent,
) -> Report:
    """Write an HTML page about one map, or two maps of the same pair, and return its contents.

    Args:
        maps: one or two maps, or their paths.
        output: the path of the page, which must end in `.html`.
        data: also write the contents as JSON next to the page.
        texts: paths and globs of text on which the maps are measured (see `evaluate`).
        pair: the maps' pair. Pieces, sentences and results on `texts` require the pair's
            tokenizers.
        names: names of the maps on the page.
        field: the field or column with the text.
        progress: called for each pass over a vocabulary or the text.

    Raises:
        OutputError: if a file cannot be written, or an existing JSON file has other contents.
        XtokError: if a map or a text is invalid; see `evaluate`.
    """
    paths = check_page(output, data)
    examined = examine(maps, texts=texts, pair=pair, names=names, field=field, progress=progress)
    contents = render_page(examined), f"{display.to_json(examined.report)}\n".encode()
    for path, content in zip(paths, contents, strict=False):
        write(path, [content])
    return examined.report


def check_page(output: str | Path, data: bool) -> list[Path]:
    """Check the output paths of `report` before any work."""
    paths = [check_output(output, [".html"], "page")]
    if data:
        path = check_output(Path(output).with_suffix(".json"), [".json"], "page")
        try:
            record = parse_json(path.read_bytes()) if path.exists() else {"pair": {}, "maps": []}
        except ValueError:
            record = None
        if not (isinstance(record, dict) and {"pair", "maps"} <= record.keys()):
            raise OutputError(
                f"{path} exists and is not replaced, because it does not contain a page's data",
                hint="move the file, or choose another name for the page",
            )
        paths.append(path)
    return paths


def render_page(examined: PageData) -> bytes:
    """Render the page about one map, or two maps of the same pair."""
    report = examined.report
    data = {
        "columns": pack_columns(examined),
        "long": [cut_sizes(table) for table in examined.pair.tables],
        "kinds": [[kind.name.lower() for kind in RowKind]] * len(examined.maps),
        "sides": [_name(name) for name in (report.pair.student, report.pair.teacher)],
    }
    text = json.dumps(data, separators=(",", ":"), sort_keys=True)  # ASCII
    measured = () if report.evaluation is None else report.evaluation.classes
    html = _template().render(
        report=report,
        most_entries=MOST_ENTRIES,
        is_whole=all(m.top_k <= MOST_ENTRIES for m in examined.maps),
        on_text={(c.name, c.token_class): c for c in measured},
        data=Markup(text.replace("<", "\\u003c")),  # the JSON is inside a script element
    )
    return html.encode("utf-8", "backslashreplace")


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("xtok.inspection.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    folder = files("xtok.inspection.page")
    for name, file in (("style", "page.css"), ("script", "page.js")):
        content = (folder / file).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        environment.globals |= {name: Markup(content), f"{name}_hash": f"sha256-{digest}"}
    environment.globals |= {
        "losses": LOSS_INFO,
        "marks": _MARKS,
        "overlap": overlap,
        "groupby": groupby,
        "by_group": attrgetter("group"),
        "largest_of": _largest,
        "chunks": chunks,
    }
    environment.filters |= {
        "count": lambda number: f"{number:,}",
        "percent": display.percent,
        "magnitude": log1p,
        "part_of": lambda value, whole: max(0.0, min(1.0, value / whole)) if whole else 0.0,
        "safe_text": display.printable,
        "token": lambda token: display.visible(display.shorten(token)),
        "name": _name,
        "plural": display.plural,
        "with_interval": format_interval,
        "weight": display.format_weight,
        "class_label": class_label,
        "shell": lambda words: shlex.join([display.printable(word) for word in words]),
    }
    return environment.get_template("page.html.jinja")


def _name(text: str) -> str:
    return display.shorten(display.printable(text))


def _largest(losses: Iterable[MapLosses]) -> float:
    return max(max(x.cross_entropy.value, x.recipe, x.floor) for x in losses)
