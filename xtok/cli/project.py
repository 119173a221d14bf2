"""`xtok project`."""

from pathlib import Path

import xtok
from xtok import report
from xtok.cli.command import command, expanded, show
from xtok.cli.counting import sources_of
from xtok.cli.options import (
    ADDRESS,
    ENGINE,
    JSON,
    STUDENT_CHAT_TEMPLATE,
    TEACHER_CHAT_TEMPLATE,
    Engine,
    ModelArguments,
    Widths,
    map_option,
)
from xtok.config import MAIN, ProjectConfig, option
from xtok.report.stdout import print_path


@command
def project(
    *,
    teacher_topk: str = option(
        ...,
        "The teacher's log-probabilities, a file or quoted glob: a neutral cache (Parquet), "
        "DistillKit's Parquet, or JSON lines of vLLM's prompt_logprobs or of SGLang's answers, "
        "also as .gz or .zst.",
        argument="TEACHER_TOPK",
        parser=expanded,
    ),
    models: ModelArguments,
    back_map: Path | None = map_option(
        "A map from the teacher to the student (xtok build TEACHER STUDENT); by default one is "
        "built.",
        name="map",
        panel=MAIN,
    ),
    output: Path = option(
        ..., "Where to write: .parquet, or .jsonl with --to vllm.", short="-o", panel=MAIN
    ),
    config: ProjectConfig,
    student_topk: str | None = option(
        None,
        "The student's own cache of this text: says whether the teacher is better on it.",
        metavar="FILE",
        parser=expanded,
        panel=MAIN,
    ),
    student_chat_template: str | None = STUDENT_CHAT_TEMPLATE,
    teacher_chat_template: str | None = TEACHER_CHAT_TEMPLATE,
    widths: Widths,
    engine: Engine = ENGINE,
    address: str = ADDRESS,
    json: bool = JSON,
) -> None:
    """Turn a teacher's stored top-k log-probabilities into a student's, for any trainer.

    Conversations (messages) and texts (text) that come with the rows are tokenized anew for the
    student; else its text is that of the teacher's ids. An interrupted run goes on where it was.
    """
    from xtok.projecting.files import find_files

    find_files(teacher_topk, student_topk or (), output, config)  # before models are loaded
    pair = models.pair(widths)
    try:
        projected = xtok.project(
            teacher_topk,
            pair,
            None,
            output,
            config,
            back_map=back_map,
            student_template=student_chat_template,
            teacher_template=teacher_chat_template,
            student_topk=student_topk or (),
            sources=sources_of(models, pair) if engine == "ray" else (),
            address=address,
            progress=report.progress_bar,
            text_progress=report.text_progress_bar,
            note=report.print_note,
        )
    except KeyboardInterrupt:
        message = "run the same command again to go on from what is done"
        raise KeyboardInterrupt(message) from None
    if not json:
        report.print_notes([*projected.sentences, *projected.notes])
    show(projected, lambda done: print_path(done.paths[0]), json=json)
