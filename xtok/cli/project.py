"""`xtok project`."""

from pathlib import Path
from typing import Literal

import xtok
from xtok._lib.fields import MAIN, option
from xtok.cli import console, options
from xtok.cli.command import command, full_path, show
from xtok.cli.stdout import print_path
from xtok.config import ProjectConfig


@command
def project(
    *,
    teacher_topk: str = option(
        ...,
        "File or quoted glob with the teacher's log-probabilities: a neutral cache (Parquet), "
        "DistillKit's Parquet, or JSON lines with the responses of vLLM (prompt_logprobs) or "
        "SGLang (also .gz or .zst).",
        argument="TEACHER_TOPK",
        parser=full_path,
    ),
    models: options.Models,
    back_map: Path | None = options.BACK_MAP_FILE,
    output: Path = option(
        ..., "Output: .parquet, or .jsonl with --to vllm.", short="-o", panel=MAIN
    ),
    config: ProjectConfig,
    widths: options.Widths,
    engine: Literal["local", "ray"] = option(
        "local",
        "Run on this machine, or on a Ray cluster, which tolerates the loss of nodes.",
        panel="Cluster",
    ),
    address: str = option(
        "auto",
        "Address of the Ray cluster (HOST:PORT). auto connects to the cluster of this machine.",
        needs={"engine": "ray"},
        panel="Cluster",
    ),
    json: bool = options.json_option(
        "paths, student, teacher, documents, teacher_tokens, student_tokens, first_tokens, "
        "targets, mean_rest, teacher_bits_per_byte, teacher_is_bound, notes"
    ),
) -> None:
    """Convert a teacher's stored log-probabilities to log-probabilities of the student's tokens.

    If the file has a column `messages` or `text`, the student's tokenizer encodes this column.
    Otherwise, the student's tokenizer encodes the text of the teacher's ids. After an interruption,
    the same command resumes the run.

    Example: xtok project teacher.parquet STUDENT TEACHER -o student.parquet
    """
    from xtok.teachers.cluster import Cluster
    from xtok.teachers.formats.caches import find_caches
    from xtok.teachers.project import open_caches

    paths, _ = find_caches(teacher_topk, output, config)  # before models are loaded
    pair = models.pair(widths)
    if back_map is None:  # check the files first, because building a map takes longer
        open_caches(paths, pair, config)
    cluster = None
    if engine == "ray":
        trust = models.trust_remote_code
        cluster = Cluster(**models.names(), address=address, trust_remote_code=trust)
    projected = xtok.project(
        teacher_topk,
        pair,
        output,
        config,
        back_map=options.get_back_map(pair, back_map),
        cluster=cluster,
        progress=console.progress_bar,
        note=console.print_note,
    )
    if not json:
        console.print_notes([*projected.sentences, *projected.notes])
    show(projected, lambda done: print_path(done.paths[0]), json=json)
