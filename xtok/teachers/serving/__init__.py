"""A live teacher with another tokenizer: a server that trainers ask by the student's ids."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from xtok._lib.progress import Note, silent_note
from xtok.config import ServeConfig
from xtok.conversation import render
from xtok.errors import XtokError, install_hint
from xtok.maps.map_arguments import MapLike
from xtok.teachers.back_map import bind_back_map
from xtok.teachers.translator import Translator
from xtok.tokenizers.pairs import Pair

NEEDED = "starlette uvicorn httpx msgspec prometheus-client"


def serve(
    pair: Pair,
    teacher_url: str,
    config: ServeConfig | None = None,
    *,
    back_map: MapLike,
    student_template: str | Path | None = None,
    teacher_template: str | Path | None = None,
    note: Note = silent_note,
    on_ready: Callable[[str], object] = lambda url: None,
) -> None:
    """Answer trainers as the teacher would if it had the student's tokenizer, until a signal.

    The student's ids become the same bytes in the teacher's tokens; what the teacher's server says
    of these is projected on the student's. It answers as vLLM (`/v1/completions`,
    `/inference/v1/generate`, and its demo's `/generate`) and as SGLang (`/generate`).

    Args:
        pair: the student and the teacher, with their tokenizers.
        teacher_url: the address of a vLLM or SGLang server of the teacher.
        config: the options; the defaults if None.
        back_map: the map from the teacher (rows) to the student (columns), or its path. `get_map`
            builds it with the options `xtok.config.BACK_MAP`.
        student_template: of conversations, as `conversation.render` takes it.
        teacher_template: the same for the teacher's side.
        note: called with what the user should know.
        on_ready: called with the address, when it answers.

    Raises:
        XtokError: if the teacher's server does not answer, is of another tokenizer, or allows too
            few candidates; if the address is taken; if a package is missing; if the teacher's
            template takes no system text.
    """
    try:
        from xtok.teachers.serving.server import Proxy, bound, is_here, run
        from xtok.teachers.serving.teacher import TeacherServer
    except ImportError as error:
        raise XtokError(
            f"a server needs the package {error.name}, which is not installed",
            hint=install_hint(NEEDED),
        ) from error
    config = ServeConfig.or_default(config)
    pair, bound_map = bind_back_map(pair, back_map, note)
    teacher = pair.tokenizers[1]
    teacher_system = config.teacher_system or ""
    if teacher_system and config.chat and (teacher_template or teacher.chat_templates):
        chat = [{"role": "system", "content": teacher_system}, {"role": "user", "content": "x"}]
        try:
            render(teacher, chat, template=teacher_template, add_generation_prompt=True)
        except XtokError as error:
            if error.parameter:
                error.renamed("teacher_template")
            raise
    own_key, teacher_key = (_key(config, name) for name in ("api_key", "teacher_api_key"))

    async def answer(opened: socket.socket) -> None:
        host, port = opened.getsockname()[:2]
        if not own_key and not is_here(host):
            note(
                f"anybody who can reach {host} can send requests: set XTOK_API_KEY to a key that "
                "clients send"
            )
        asked = TeacherServer(
            teacher_url, teacher, api_key=teacher_key, concurrency=config.concurrency
        )
        async with aclosing(asked):
            await asked.connect(config.candidates, config.wait, note, pair.tokenizers[0])
            templates = student_template, teacher_template
            translator = Translator(pair, bound_map, templates=templates, chat=config.chat)
            proxy = Proxy(
                translator, asked, api_key=own_key, teacher_system=teacher_system, note=note
            )
            await proxy.warm_up()
            note(
                f"{pair.teacher.model_id} at {asked.url} ({asked.kind}, {asked.candidates} "
                f"candidates per token) is answered in the tokens of {pair.student.model_id}"
            )
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            await run(proxy, opened, lambda: on_ready(url))

    with bound(config.host, config.port) as opened:
        asyncio.run(answer(opened))


def _key(config: ServeConfig, parameter: str) -> str | None:
    """Return a key, by default from the environment; one that no header can hold is an error."""
    key: str | None = getattr(config, parameter) or os.environ.get(f"XTOK_{parameter.upper()}")
    if key and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise XtokError(
            "a key has a space or line break at an end, or characters that no header can hold",
            hint=f"give {{option}} or XTOK_{parameter.upper()} without",
            parameter=parameter,
        )
    return key
