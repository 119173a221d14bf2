"""`serve` and `check_server`: start a server, or check a teacher's server."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

from xtok._lib.progress import Note, silent_note
from xtok.config import ServeConfig
from xtok.conversation import render
from xtok.errors import XtokError, install_hint, naming_template
from xtok.maps.map_arguments import MapLike
from xtok.teachers.translator import Translator, bind_back_map
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair

if TYPE_CHECKING:
    from xtok.teachers.serving.check import ServerReport

PACKAGES = "starlette uvicorn httpx msgspec prometheus-client"


def serve(
    pair: Pair,
    teacher_url: str,
    config: ServeConfig | None = None,
    *,
    back_map: MapLike,
    note: Note = silent_note,
    on_ready: Callable[[str], object] = lambda url: None,
) -> None:
    """Run a server that scores the student's ids with a teacher that has a different tokenizer.

    The server converts the student's ids to the teacher's tokens, requests their log-probabilities
    from the teacher's server, and projects the log-probabilities onto the student's tokens. The
    server supports routes of vLLM (`/v1/completions` and `/inference/v1/generate`), of vLLM's demo
    server (`/generate`) and of SGLang (`/generate`). SIGTERM and Ctrl-C stop the server.

    Args:
        pair: the student and the teacher, with their tokenizers.
        teacher_url: the address of a vLLM or SGLang server that runs the teacher.
        config: the options; None uses the defaults.
        back_map: a map from the teacher (rows) to the student (columns), or its path; see
            `project`.
        note: called with notes for the user.
        on_ready: called with the server's address as soon as the server accepts requests.

    Raises:
        XtokError: if the teacher's server is not usable, the address is in use, a package is
            missing, or the teacher's chat template does not accept a system text.
    """
    config = ServeConfig.or_default(config)
    own_key, teacher_key = check_config(pair, config)
    from xtok.teachers.serving.connection import is_loopback
    from xtok.teachers.serving.server import ScoreService, bound
    from xtok.teachers.serving.teacher import TeacherClient

    pair, bound_map = bind_back_map(pair, back_map, note)
    student, teacher = pair.tokenizers

    async def run(listening: socket.socket) -> None:
        host, port = listening.getsockname()[:2]
        if not own_key and not is_loopback(host):
            note(f"every client that can reach {host} can send requests: set a key in XTOK_API_KEY")
        client = TeacherClient(
            teacher_url, teacher, api_key=teacher_key, concurrency=config.concurrency
        )
        async with aclosing(client):
            await client.connect(config.candidates, config.wait, note, student)
            translator = Translator(pair, bound_map, templates=config.templates, chat=config.chat)
            system = config.teacher_system or ""
            service = ScoreService(translator, client, own_key, teacher_system=system, note=note)
            await service.warm_up()
            note(
                f"serving {pair.teacher.model_id} at {client.url} ({client.kind}, "
                f"{client.candidates} candidates per token) in the tokens of "
                f"{pair.student.model_id}"
            )
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            await service.run(listening, lambda: on_ready(url))

    with bound(config.host, config.port) as listening:
        asyncio.run(run(listening))


def check_server(url: str, teacher: Tokenizer, *, api_key: str | None = None) -> ServerReport:
    """Check whether a vLLM or SGLang server that runs the teacher can score text.

    The check sends a few short requests, and reads the options that the server publishes.

    Args:
        url: the server's address.
        teacher: the teacher's tokenizer.
        api_key: sent as a Bearer token. By default, the value of XTOK_TEACHER_API_KEY.

    Returns:
        facts about the server, and a fix for each problem.

    Raises:
        XtokError: if the server does not respond or refuses the key, or a package is missing.
    """
    with _needed_packages():
        from xtok.teachers.serving.check import server_report
    return asyncio.run(server_report(url, teacher, _key(api_key, "teacher_api_key")))


@contextmanager
def _needed_packages() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise XtokError(
            f"a server needs the package {error.name}, which is not installed",
            hint=install_hint(PACKAGES),
        ) from error


def check_config(pair: Pair, config: ServeConfig) -> tuple[str | None, str | None]:
    """Check packages, keys and the system text before a map is built; return both keys.

    Raises:
        XtokError: if a package is missing, a key is invalid, or the teacher's chat template does
            not accept the system text.
    """
    with _needed_packages():
        import xtok.teachers.serving.server  # noqa: F401
    keys = _key(config.api_key, "api_key"), _key(config.teacher_api_key, "teacher_api_key")
    template, teacher = config.teacher_template, pair.tokenizers[1]
    if not (config.teacher_system and config.chat and (template or teacher.chat_templates)):
        return keys
    system = {"role": "system", "content": config.teacher_system}
    messages = [system, {"role": "user", "content": "x"}]
    with naming_template("teacher_template"):
        render(teacher, messages, template=template, add_generation_prompt=True)
    return keys


def _key(key: str | None, parameter: str) -> str | None:
    """Check the characters of a key, and return the key. The default is the environment's key."""
    key = key or os.environ.get(f"XTOK_{parameter.upper()}")
    if key and not (key.isascii() and key.isprintable() and key == key.strip()):
        problem = "the key starts or ends with a space or line break, or is not printable ASCII"
        hint = f"correct {{option}} or XTOK_{parameter.upper()}"
        raise XtokError(problem, hint=hint, parameter=parameter)
    return key
