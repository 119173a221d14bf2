"""Draw the overlap of two vocabularies as SVG; `page.css` defines the colours."""

from __future__ import annotations

from math import acos, pi, sqrt

from markupsafe import Markup, escape

from xtok.inspection.pair_facts import SharedCounts

_RADIUS = 72


def overlap(shared: SharedCounts, label: str) -> Markup:
    """Draw two overlapping circles with areas in proportion to the counts."""
    totals = shared.student, shared.teacher
    largest = max(*totals, 1)
    a, b = (_RADIUS * sqrt(total / largest) for total in totals)
    distance = _distance(a, b, min(shared.both, *totals) / largest * pi * _RADIUS**2)
    left, right = min(-a, distance - b), max(a, distance + b)
    student, teacher = (
        f'cx="{x - left + 2:.2f}" cy="{_RADIUS + 2}" r="{r:.2f}"/>'
        for x, r in ((0, a), (distance, b))
    )
    return Markup(
        f'<svg class="overlap" viewBox="0 0 {right - left + 4:.2f} {2 * _RADIUS + 4}" '
        f'preserveAspectRatio="xMinYMid" role="img" aria-label="{escape(label)}">'
        f'<circle class="student" {student}<circle class="teacher" {teacher}'
        # the teacher's circle inside the student's; its position is relative to the teacher's box
        f'<circle class="both" clip-path="circle({a:.2f}px at {b - distance:.2f}px {b:.2f}px)" '
        f"{teacher}</svg>"
    )


def _distance(a: float, b: float, area: float) -> float:
    """Return the distance between the centres of two circles that overlap by this area."""
    low, high = abs(a - b), a + b
    if area <= 0:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _common(a, b, middle) > area else (low, middle)
    return low


def _common(a: float, b: float, distance: float) -> float:
    # The limits of the cosines make the area correct even if one circle contains the other.
    first = (distance**2 + a**2 - b**2) / (2 * distance)
    second = distance - first
    height = sqrt(max(0.0, a**2 - first**2))
    angles = acos(max(-1.0, min(1.0, first / a))), acos(max(-1.0, min(1.0, second / b)))
    return a * a * angles[0] + b * b * angles[1] - distance * height
