"""Read chat templates from Jinja files, or from a model's JSON files."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from xtok._lib.lines import read_text
from xtok._lib.parsing import json_problem, parse_json
from xtok.conversation.formats import FORMATS
from xtok.errors import ChatTemplateError

TEMPLATE_HINT = f"give a Jinja file with {{option}}, or one of the formats {', '.join(FORMATS)}"

_JSON = re.compile(r'\s*(\{\s*["}]|\[\s*(["\]]|\{\s*["}]))')  # Jinja begins with {{, {% or {#
_JINJA = re.compile(r"\{[{%]")


def template_source(template: str | Path) -> str:
    """Return the Jinja source of a template. `template` is a file or the Jinja source.

    A string that contains `{` is source, unless a file with this name exists. In a JSON file such
    as `tokenizer_config.json`, the template is the value of `chat_template`.
    """
    text, path, is_file = str(template), Path(template).expanduser(), False
    name = f"the chat template {template}"
    with suppress(OSError, ValueError):  # source text can be too long for a path, or contain NUL
        is_file = path.is_file()
    if is_file:
        text = read_text(path, "the chat template")
    elif isinstance(template, Path) or "{" not in text:
        raise _error(f"{name} is not a file")
    else:
        name = "the chat template"
    if _JSON.match(text):
        text = _template_from_json(text, name)
    if not _JINJA.search(text):
        raise _error(f"{name} contains no Jinja expression, such as {{{{ messages }}}}")
    return text


def _template_from_json(text: str, name: str) -> str:
    try:
        document = parse_json(text, allow_nan=True)
    except ValueError as error:
        raise _error(f"{name} is neither Jinja nor JSON: {json_problem(error)}") from error
    value: Any = document.get("chat_template") if isinstance(document, dict) else None
    if isinstance(value, list):  # a list of named templates
        value = {v.get("name"): v.get("template") for v in value if isinstance(v, dict)}
        value = value.get("default")
    if not isinstance(value, str):
        raise _error(f"{name} is a JSON file, but its chat_template contains no template")
    return value


def _error(problem: str) -> ChatTemplateError:
    return ChatTemplateError(problem, hint=TEMPLATE_HINT)
