"""Print the memory per GPU for each placement of the teacher, without activations, as a table.

    python scripts/examples/teacher_memory.py           # 1B/8B and 8B/70B on 8 and 64 GPUs
    python scripts/examples/teacher_memory.py 1 8 8     # billions of parameters, number of GPUs

The student is trained by FSDP 2 in mixed precision: 4 bytes per parameter for weights, 4 for
gradients and 8 for AdamW, divided by the number of GPUs. The teacher has 2 bytes per parameter.
One layer at a time is gathered, and activations and the loss come on top.
"""

from __future__ import annotations

import sys

CASES = [(1.0, 8.0, 8), (1.0, 8.0, 64), (8.0, 70.0, 8), (8.0, 70.0, 64)]


def rows(student: float, teacher: float, gpus: int) -> list[tuple[str, str]]:
    """Return the placements, with gigabytes of the student and of the teacher per GPU."""
    own, whole = 16 * student / gpus, 2 * teacher
    return [
        ("replicated", f"{own:.1f} + {whole:.1f}"),
        ("sharded", f"{own:.1f} + {whole / gpus:.1f}"),
        ("stored", f"{own:.1f}"),
        ("served", f"{own:.1f}"),
    ]


def main() -> None:
    """Print a Markdown table."""
    given = [float(value) for value in sys.argv[1:4]]
    cases = [(given[0], given[1], int(given[2]))] if given else CASES
    names = [f"{s:g}B ← {t:g}B, {n} GPUs" for s, t, n in cases]
    print("| teacher |", " | ".join(names), "|")
    print("|---" * (len(cases) + 1) + "|")
    for columns in zip(*(rows(*case) for case in cases), strict=True):
        print("|", columns[0][0], "|", " | ".join(f"{value} GB" for _, value in columns), "|")


if __name__ == "__main__":
    main()
