"""`xtok serve`."""

from pathlib import Path

import xtok
from xtok.cli import console
from xtok.cli.command import command
from xtok.cli.options import (
    BACK_MAP_FILE,
    STUDENT_CHAT_TEMPLATE,
    TEACHER_CHAT_TEMPLATE,
    ModelArguments,
    Widths,
)
from xtok.cli.stdout import print_result, result_stream
from xtok.config import MAIN, ServeConfig, option
from xtok.errors import XtokError


@command
def serve(
    *,
    models: ModelArguments,
    teacher_url: str = option(
        ...,
        "Address of the teacher's vLLM or SGLang server, such as http://localhost:8000.",
        metavar="URL",
        panel=MAIN,
    ),
    config: ServeConfig,
    back_map: Path | None = BACK_MAP_FILE,
    student_chat_template: str | None = STUDENT_CHAT_TEMPLATE,
    teacher_chat_template: str | None = TEACHER_CHAT_TEMPLATE,
    teacher_system: Path | None = option(
        None,
        "File of a system text that the teacher alone reads, in place of a conversation's own; "
        "before other sequences, as text. A request's field teacher_system replaces it.",
        metavar="FILE",
    ),
    widths: Widths,
) -> None:
    """Serve a teacher as if it had the student's tokenizer.

    Trainers send the student's ids, as to vLLM or SGLang; the teacher's server is asked for the
    same bytes in the teacher's tokens. Prints its address when it answers; SIGTERM ends it.

    Example: xtok serve STUDENT TEACHER --teacher-url http://localhost:8000
    """

    def on_ready(url: str) -> None:
        print_result(url)
        result_stream().flush()

    if back_map is None:
        console.print_note(
            "the first startup for two models takes up to half a minute once the teacher's server "
            "answers, to build the map from the teacher to the student, which is kept"
        )
    pair = models.pair(widths)
    xtok.serve(
        pair,
        teacher_url,
        config,
        back_map=back_map,
        student_template=student_chat_template,
        teacher_template=teacher_chat_template,
        teacher_system=_text_of(teacher_system),
        progress=console.progress_bar,
        note=console.print_note,
        on_ready=on_ready,
    )


def _text_of(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise XtokError(f"{path} is not UTF-8", hint="write it as UTF-8") from error
