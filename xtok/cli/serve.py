"""`xtok serve`."""

from dataclasses import dataclass
from pathlib import Path

import xtok
from xtok._lib.fields import MAIN, option
from xtok._lib.lines import read_text
from xtok.cli import console, options
from xtok.cli.command import command
from xtok.cli.stdout import print_result, result_stream
from xtok.config import ServeConfig


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServeConfig):
    """Options of `serve`, with the system text in a file."""

    teacher_system: str | None = option(
        None,
        "File with a system text that only the teacher reads. The text replaces a conversation's "
        "system text and precedes other texts. The field teacher_system of a request overrides "
        "the text.",
        metavar="FILE",
        parser=lambda path: read_text(Path(path).expanduser(), "the system text").strip(),
    )


@command
def serve(
    *,
    models: options.Models,
    teacher_url: str = option(
        ...,
        "Address of the teacher's vLLM or SGLang server, such as http://localhost:8000.",
        metavar="URL",
        panel=MAIN,
    ),
    config: ServeOptions,
    back_map: Path | None = options.BACK_MAP_FILE,
    widths: options.Widths,
) -> None:
    """Run a server that scores student ids with a teacher that has a different tokenizer.

    Trainers send student ids in the protocol of vLLM or SGLang. xtok requests the scores of the
    same text from the teacher's own server, and converts them to the student's tokens. When the
    server is ready, the command prints its address. SIGTERM stops the server.

    Example: xtok serve STUDENT TEACHER --teacher-url http://localhost:8000
    """
    from xtok.teachers.serving.service import check_config

    def on_ready(url: str) -> None:
        print_result(url)
        result_stream().flush()

    pair = models.pair(widths)
    check_config(pair, config)  # building a map takes longer
    xtok.serve(
        pair,
        teacher_url,
        config,
        back_map=options.get_back_map(pair, back_map),
        note=console.print_note,
        on_ready=on_ready,
    )
