"""A page to look at: one HTML file with its style, script and data inside, and nothing outside.

The content security policy lets the browser load nothing and run only this style and script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from xtok.inspection.bootstrap import Interval
from xtok.inspection.evaluate import MapMeasures
from xtok.inspection.page import Examined, MapClass, PairClass, Part
from xtok.inspection.pair_facts import Shared
from xtok.inspection.samples import SampleToken
from xtok.maps.projection_map import RowKind
from xtok.report.page import pictures
from xtok.report.page.pictures import Segment
from xtok.report.page.search import pack
from xtok.vocab.display import plural, printable, shortened

MAX_BYTES = 2_000_000
"""How large a page may be, unless asked for otherwise."""

_LEAST_ROOM = 65_536

_LOSSES = {"p-kl": "P-KL", "gold": "gold", "h-kl": "H-KL", "event-kl": "event KL"}
_LEVELS = {
    "good": ("✓", "fits"),
    "note": ("i", "note"),
    "care": ("!", "with care"),
    "bad": ("✕", "does not fit"),
}
_MARKS = {
    "good": ("✓", "good"),
    "note": ("i", "note"),
    "care": ("!", "look"),
    "bad": ("✕", "bad"),
}
_PLACES = {
    "pair": "the pair",
    "classes": "coverage",
    "quality": "quality",
    "provenance": "provenance",
}


def render(examined: Examined, *, command: Sequence[str] = (), max_bytes: int = MAX_BYTES) -> bytes:
    """Return the page of one map, or of two.

    Args:
        examined: what it shows.
        command: the command that makes the page, for its last part; none if empty.
        max_bytes: how large it may be. The search holds what fits; the page says what does not.
    """
    page = examined.page
    context = {"page": page, "command": _shell(command), "search": None, "data": ""}
    without = len(_rendered("page.html.jinja", **context))
    search = pack(examined, max(_LEAST_ROOM, max_bytes - without - 2048))
    data = {
        "columns": search.columns,
        "long": search.long,
        "kinds": [[kind.name.lower() for kind in RowKind] for _ in examined.maps],
        "sides": [shortened(printable(name)) for name in (page.student, page.teacher)],
    }
    return _rendered("page.html.jinja", **{**context, "search": search, "data": _data(data)})


def _rendered(template: str, **context: Any) -> bytes:
    html = _environment().get_template(template).render(**context)
    return html.encode("utf-8", "backslashreplace")


def _data(value: object) -> Markup:
    """Return JSON that stands in a script element: without `<`, and ASCII."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return Markup(text.replace("<", "\\u003c"))


def _shell(command: Sequence[str]) -> str:
    return shlex.join([printable(word) for word in command])


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("xtok.report.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    style, script = (_asset(name) for name in ("page.css", "page.js"))
    environment.globals |= {
        "style": Markup(style),
        "script": Markup(script),
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "losses": _LOSSES,
        "levels": _LEVELS,
        "marks": _MARKS,
        "places": _PLACES,
        "pictures": pictures,
        "groupby": groupby,
        "shell": _shell,
        "overlap_of": _overlap,
        "pair_bar": _pair_bar,
        "rows_bar": _rows_bar,
        "columns_bar": _columns_bar,
        "count_of": _count_of,
        "quality_of": _quality,
    }
    environment.filters |= {
        "count": lambda number: f"{number:,}",
        "percent": _percent,
        "safe_text": printable,
        "token": _token,
        "name": lambda text: shortened(printable(text)),
        "plural": plural,
        "spread": _spread,
    }
    return environment


def _asset(name: str) -> str:
    return (files("xtok.report.page") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256-{digest}"


def _percent(share: float, digits: int = 1) -> str:
    return f"{share:.{digits}%}"


def _token(token: str | SampleToken) -> str:
    """Return an escaped token as it is shown: cut, its spaces visible."""
    text = shortened(token.token if isinstance(token, SampleToken) else token)
    text = text.replace(" ", "␣")
    return f"◌{text}" if _is_mark(text[:1]) else text


def _is_mark(char: str) -> bool:
    return unicodedata.category(char or " ")[0] == "M"


def _spread(interval: Interval | None, digits: int = 3) -> str:
    if interval is None:
        return "–"
    if interval.low is None or interval.high is None:
        return f"{interval.value:.{digits}f}"
    return f"{interval.value:.{digits}f} ± {(interval.high - interval.low) / 2:.{digits}f}"


def _overlap(shared: Shared, what: str) -> Markup:
    return pictures.overlap(
        shared,
        f"{what}: {shared.student:,} of the student, {shared.teacher:,} of the teacher, "
        f"{shared.both:,} of both",
    )


def _pair_bar(one: PairClass) -> Markup:
    shared = one.shared
    parts = (
        ("student", max(0, shared.student - shared.both), "only in the student"),
        ("both", shared.both, "in both"),
        ("teacher", max(0, shared.teacher - shared.both), "only in the teacher"),
    )
    words = [f"{count:,} {what}" for _, count, what in parts]
    return pictures.bar(
        [Segment(style, count) for style, count, _ in parts],
        f"{one.label}: {', '.join(words)}",
        tip="\n".join([one.label, *words]),
    )


_COLUMN_STYLES = {"in rows": "teacher", "in no row": "absent"}


def _rows_bar(one: MapClass) -> Markup:
    return _parts_bar(one.label, one.rows, {part.name: part.name for part in one.rows})


def _columns_bar(one: MapClass) -> Markup:
    return _parts_bar(one.label, one.columns, _COLUMN_STYLES)


def _parts_bar(label: str, parts: Sequence[Part], styles: dict[str, str]) -> Markup:
    words = [f"{part.count:,} {part.name}" for part in parts]
    tips = [f"{about}: {_examples(part)}" for about, part in zip(words, parts, strict=True)]
    return pictures.bar(
        [Segment(styles[part.name], part.count) for part in parts],
        f"{label}: {', '.join(words) or 'none'}",
        tip="\n".join([label, *tips]) if parts else "",
    )


def _examples(part: Part) -> str:
    """Return tokens beside each other, each isolated, so that scripts keep to their places."""
    tokens = " ".join(f"\u2068{_token(token)}\u2069" for token in part.examples)
    return tokens + " …" * (part.count > len(part.examples))


def _count_of(parts: Sequence[Part], *names: str) -> int:
    return sum(part.count for part in parts if not names or part.name in names)


@dataclass(frozen=True)
class _Line:
    """The maps on one group of text, where one measure decides."""

    group: str
    starts: int
    recipe: float
    floor: float
    maps: tuple[MapMeasures, ...]
    values: tuple[Interval, ...]
    closed: tuple[Interval | None, ...]
    picture: Markup


def _quality(measures: Sequence[MapMeasures], of: str) -> list[_Line]:
    """Return a line for each group of text; `of` is `chunk_` or nothing, as the fields begin."""
    groups = [tuple(found) for _, found in groupby(measures, key=lambda m: m.group)]
    field = f"{of}cross_entropy"
    largest = max(
        max(getattr(m, field).value, getattr(m, f"{of}recipe"), getattr(m, f"{of}floor"))
        for m in measures
    )
    lines = []
    for maps in groups:
        first = maps[0]
        recipe, floor = getattr(first, f"{of}recipe"), getattr(first, f"{of}floor")
        values = tuple(getattr(m, field) for m in maps)
        words = ", ".join(f"map {n} {v.value:.3f}" for n, v in enumerate(values, start=1))
        label = f"{first.group}: floor {floor:.3f}, {words}, recipe {recipe:.3f} nats"
        lines.append(
            _Line(
                group=first.group,
                starts=first.starts,
                recipe=recipe,
                floor=floor,
                maps=maps,
                values=values,
                closed=tuple(getattr(m, f"{of}closed") for m in maps),
                picture=pictures.span(floor, recipe, [v.value for v in values], largest, label),
            )
        )
    return lines
