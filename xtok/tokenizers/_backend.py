"""What one tokenizer library can do, and what the configs next to its files declare."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtok.errors import TokenizerError

if TYPE_CHECKING:
    from xtok.tokenizers.hub import ModelFiles
    from xtok.tokenizers.table import TokenEntry

SPECIAL_NAMES = ("bos", "eos", "pad", "unk", "mask", "sep", "cls")
"""The roles that `tokenizer_config.json` gives to tokens, each as `bos_token` and the like."""


GENERATION_CONFIG, MODEL = "generation_config.json", "its model"  # who declares more

Roles = Mapping[str, Mapping[int, str]]
"""Role to its ids, the library's own first, each with who declares it."""

TextChange = tuple[str, str]
"""A component of a tokenizer, and what it changes about a text before it becomes tokens."""


class Backend(ABC):
    """What one tokenizer library can do; `Tokenizer` catches everything that is not exact."""

    name: str
    notes: tuple[str, ...] = ()  # what the tokenizer's user should know about how it was loaded
    other: tuple[str, Callable[[], Backend]] | None = None
    """What else reads the same folder, by name: its file alone, or AutoTokenizer."""

    @abstractmethod
    def entries(self) -> Iterable[TokenEntry]:
        """Return every id of the tokenizer once, in any order."""

    @abstractmethod
    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode stretches from the middle of a text: no dummy prefix, control tokens are text."""

    def definition(self) -> Iterable[bytes]:
        """Return all that decides which ids a text becomes, but for the tokens and their roles."""
        return ()

    @property
    def drops_text(self) -> bool:
        """Whether the library leaves out, in silence, what it has no token for."""
        return False

    @property
    def keeps_text(self) -> bool:
        """Whether its ids are of all of a text, white space beside added tokens included."""
        return not self.drops_text

    def encode_bytes(self, data: bytes) -> list[int] | None:
        """Apply the model's own merges to any bytes; None if it merges characters."""
        return None

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Encode as `encode_texts` does, into arrays."""
        return [np.array(array("i", ids), np.int32) for ids in self.encode_texts(texts)]

    def encode_whole(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Encode whole texts, control tokens recognised; None if the library recognises none."""
        return None

    text_tokens: Mapping[str, int] = {}
    """Added tokens that are not control tokens, where the library does not find them itself."""

    def encode_start(self, text: str) -> list[int]:
        """Encode the beginning of a text, up to its first added token."""
        return self.encode_texts([text])[0]

    def ids_before(self) -> Sequence[int]:
        """Return what the library puts before a text that a model reads; nothing if it puts none.

        Files of SentencePiece, tiktoken and tekken do not declare it.
        """
        return ()

    def spans(self, text: str, *, at_start: bool = True) -> Sequence[tuple[int, int]]:
        """Return where each token of a text is, `(start, end)` in bytes.

        Of what `encode_whole` gives, else `encode_start` or, in the middle of a text,
        `encode_texts`; nothing from a library that changes no text.
        """
        return ()

    def declared_roles(self) -> Roles:
        """Return the roles of `SPECIAL_NAMES` that the library declares, without ids as none."""
        return {}

    def library(self) -> Any:
        """Return the tokenizer that Transformers makes of the same folder; None for a file."""
        return None

    def special_names(self) -> Mapping[str, str]:
        """Return the texts of special tokens that chat templates know by name, as `image_token`."""
        return {}

    def chat_templates(self) -> Mapping[str, str]:
        """Return the Jinja chat templates by name; `default` is the usual one."""
        return {}

    def text_changes(self) -> Sequence[TextChange]:
        """Return what keeps a text from being the concatenation of its tokens' bytes."""
        return ()


def damaged(problem: str, what: str = "the file is damaged or of another kind") -> TokenizerError:
    """Return the error for a file that was read, and is not what it should be."""
    return TokenizerError(problem, hint=f"{what}: fetch it again")


def is_panic(error: BaseException) -> bool:
    """Whether it is of a Rust library; the class is not an `Exception`, and cannot be imported."""
    return type(error).__name__ == "PanicException"


@contextmanager
def no_panic(model: str) -> Iterator[None]:
    """Turn a panic, or a file that cannot be read, into a `TokenizerError` that names it."""
    try:
        yield
    except OSError as error:
        raise TokenizerError(
            f"{error.filename or model} cannot be read: {error.strerror or error}",
            hint="check its permissions, and that it is still there",
        ) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise TokenizerError(
            f"the tokenizers library panicked on {model}: {error}",
            hint="its files are damaged, or its pattern is too costly: fetch them again",
        ) from error


def splitting_at(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern to `split` a text: names at odd indices, the text in between at even."""
    longest_first = sorted(map(re.escape, names), key=len, reverse=True)
    return re.compile(f"({'|'.join(longest_first) or '(?!)'})")


# Parts of a config.json that are of a model's text, and names of the width, the logits' first.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_WIDTHS = ("padded_vocab_size", "vocab_size")


def model_vocab_size(files: ModelFiles) -> tuple[int, str] | None:
    """Return the width of a model's logits by its config.json, and its source; None without one.

    Read from the file if it is there, so that a model of a new or custom type needs no code;
    else the default of its type, from transformers' `get_text_config().vocab_size`.
    """
    if files.find("config.json") is None:
        return None
    config = files.json("config.json")
    for part in (*map(config.get, _TEXT_CONFIGS), config):
        for size in map(part.get, _WIDTHS) if isinstance(part, dict) else ():
            if type(size) is int:
                return size, "config"
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        loaded = AutoConfig.from_pretrained(
            files.model,
            revision=files.commit or files.revision,
            local_files_only=files.offline,
            trust_remote_code=False,
        )
        return int(loaded.get_text_config().vocab_size), "model type"
    except (
        AttributeError,
        ImportError,
        LookupError,
        OSError,
        StrictDataclassError,
        TypeError,
        ValueError,
    ):  # a type that Transformers does not know, or without a vocabulary
        return None


def json_flag(entry: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a true or false of a JSON object; a `ValueError` for anything else, as "false"."""
    value = entry.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, which is neither true nor false")
    return value


def eos_ids(files: ModelFiles) -> list[int]:
    """Return the ids that a model's generation config ends a text with.

    Raises:
        TokenizerError: if it is not a JSON object, or these are not ids.
    """
    eos: Any = "unknown"
    with suppress(TokenizerError):
        eos = files.json(GENERATION_CONFIG).get("eos_token_id")
    ids: list[int] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(i, int) for i in ids):
        path = files.find(GENERATION_CONFIG)
        raise TokenizerError(f"{path} is not a generation config", hint="fix it, or remove it")
    return ids


def chat_templates(files: ModelFiles) -> dict[str, str]:
    """Return a model's chat templates by name: files of them, else those of its config.

    Raises:
        TokenizerError: if the one is not text, or the other malformed.
    """
    paths = {"default": files.find("chat_template.jinja")}
    more = files.within("additional_chat_templates")
    paths |= {path.stem: path for path in more if path.suffix == ".jinja"}
    of_files = {name: _template(path) for name, path in paths.items() if path is not None}
    templates: Any = files.json("tokenizer_config.json").get("chat_template")
    if of_files:
        return of_files
    if isinstance(templates, list):
        try:
            return {str(one["name"]): str(one["template"]) for one in templates}
        except (LookupError, TypeError) as error:
            raise bad_config(files, "chat_template") from error
    return {"default": templates} if isinstance(templates, str) else {}


def _template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"{path} cannot be read as UTF-8: {error}", hint="fix it, or fetch it again"
        ) from error


def bad_config(files: ModelFiles, field: str) -> TokenizerError:
    return TokenizerError(
        f"the {field} in {files.find('tokenizer_config.json')} is malformed",
        hint="fix it, or fetch it again",
    )
