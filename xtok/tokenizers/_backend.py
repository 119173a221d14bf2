"""Define a common interface of tokenizer libraries, and read the config files of a model."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from xtok.errors import MALFORMED, TokenizerError

if TYPE_CHECKING:
    from xtok.tokenizers.hub import ModelFiles
    from xtok.tokenizers.table import TokenEntry

SPECIAL_NAMES = ("bos", "eos", "pad", "unk", "mask", "sep", "cls")
"""Roles that `tokenizer_config.json` can declare, with keys such as `bos_token`."""


GENERATION_CONFIG, MODEL = "generation_config.json", "its model"  # other sources of roles

Roles: TypeAlias = Mapping[str, Mapping[int, str]]
"""For each role, its ids and the source that declares each id.

Ids that the library declares come before other ids."""

TextChange: TypeAlias = tuple[str, str]
"""Name of a tokenizer component, and a description of its changes to a text."""


class Backend(ABC):
    """Interface of a tokenizer library. `Tokenizer` checks that the results are exact."""

    name: str
    notes: tuple[str, ...] = ()  # messages for the user about loading
    recognizes_names: bool = False  # whether the library recognizes added tokens in a text
    drops_text: bool = False  # whether the library silently drops text that has no token
    # Whether the ids cover the whole text, including spaces next to added tokens.
    keeps_text: bool = True
    text_changes: Sequence[TextChange] = ()
    other: tuple[str, Callable[[], Backend]] | None = None
    """Name and loader of a second reader of the same model.

    The reader is AutoTokenizer, or a function that reads only the tokenizer file."""

    @abstractmethod
    def entries(self) -> Iterable[TokenEntry]:
        """Return each id of the tokenizer once, in any order."""

    @abstractmethod
    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts as parts of a longer text. Names of control tokens are encoded as text."""

    def definition(self) -> Iterable[bytes]:
        """Return the data that determines the ids of a text, without tokens and roles."""
        return ()

    def encode_bytes(self, data: bytes) -> list[int] | None:
        """Apply the model's merges to bytes, which need not be valid UTF-8.

        Returns None if the model merges characters instead of bytes.
        """
        return None

    text_tokens: Mapping[str, int] = {}
    """Name → id of added text tokens that xtok recognizes, because the library does not."""

    def encode_starts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode the start of each text, with the prefix that the library adds.

        The start ends before the first added token. If the library recognizes added tokens, the
        start is the whole text.
        """
        return self.encode_texts(texts)

    def ids_before(self) -> Sequence[int]:
        """Return the ids that the library adds before a text."""
        return ()

    def spans(self, text: str, *, at_start: bool = True) -> Sequence[tuple[int, int]]:
        """Return the byte range `(start, end)` of each token in a text.

        The tokens are the result of `encode_starts`, or of `encode_texts` if `at_start` is False.
        The result is empty if the library never changes text.
        """
        return ()

    def declared_roles(self) -> Roles:
        """Return the roles that the files declare. A role with the value null has no ids."""
        return {}

    def library(self) -> Any:
        """Return the Transformers tokenizer of the same folder, or None for a single file."""
        return self.other[1]().library() if self.other else None

    def special_names(self) -> Mapping[str, str]:
        """Return the special tokens that chat templates can use, by keys such as `image_token`."""
        return {}

    def chat_templates(self) -> Mapping[str, str]:
        """Return the Jinja chat templates by name. A single template has the name `default`."""
        return {}


def damaged(
    problem: str, cause: str = "the file is damaged or has another format"
) -> TokenizerError:
    return TokenizerError(problem, hint=f"{cause}: download it again")


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a Rust library, which is not an `Exception`."""
    return type(error).__name__ == "PanicException"


@contextmanager
def no_panic(model: str) -> Iterator[None]:
    """Convert a panic or an error about an unreadable file to a `TokenizerError`."""
    try:
        yield
    except OSError as error:
        raise TokenizerError(
            f"{error.filename or model} cannot be read: {error.strerror or error}",
            hint="check that the file exists and that you may read it",
        ) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise TokenizerError(
            f"the tokenizers library panicked on {model}: {error}",
            hint="the tokenizer files may be damaged: download them again",
        ) from error


class AddedNames:
    """Recognizes the names of added tokens in a text, longest names first."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        longest_first = sorted(map(re.escape, ids), key=len, reverse=True)
        self.ids, self._pattern = ids, re.compile(f"({'|'.join(longest_first) or '(?!)'})")

    def split(self, text: str) -> list[str]:
        """Split a text at the names. In the result, the names have odd indices."""
        return self._pattern.split(text)

    def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Look up the names in a text, and call `encode` for the text between the names."""
        if not self._pattern.search(text):
            return encode(text)
        parts = enumerate(self.split(text))
        ids = ([self.ids[part]] if index % 2 else encode(part) for index, part in parts)
        return [*chain.from_iterable(ids)]


# Sections of config.json that describe the text model, and keys for its vocabulary size. The
# logits have the padded size, so this key comes first.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_WIDTHS = ("padded_vocab_size", "vocab_size")


def model_vocab_size(files: ModelFiles) -> tuple[int, str] | None:
    """Return the width of a model's logits and its source, or None if the width is unknown.

    If `config.json` lacks the width, the result is the default of the model type.
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
    except (*MALFORMED, ImportError, OSError, StrictDataclassError):
        # unknown model type, or a model without a vocabulary
        return None


def json_flag(entry: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return the boolean with the key `name` in a JSON object.

    Raises a `ValueError` for other values, such as the string "false".
    """
    value = entry.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, expected true or false")
    return value


def eos_ids(files: ModelFiles) -> list[int]:
    """Return the eos ids of a model's generation config."""
    eos: Any = files.json(GENERATION_CONFIG).get("eos_token_id")
    ids: list[int] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(i) is int for i in ids):  # `True` is an `int` in Python
        path = files.find(GENERATION_CONFIG)
        raise TokenizerError(
            f"{path}: eos_token_id is {eos!r}, expected token ids", hint="fix or delete the file"
        )
    return ids


def chat_templates(files: ModelFiles) -> dict[str, str]:
    """Return a model's chat templates by name.

    If there are template files, the templates in `tokenizer_config.json` are ignored.
    """
    paths = {"default": files.find("chat_template.jinja")}
    extra_paths = files.within("additional_chat_templates")
    paths |= {path.stem: path for path in extra_paths if path.suffix == ".jinja"}
    file_templates = {name: _template(path) for name, path in paths.items() if path is not None}
    templates: Any = files.json("tokenizer_config.json").get("chat_template")
    if file_templates:
        return file_templates
    if isinstance(templates, list):
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in templates}
        except (LookupError, TypeError) as error:
            raise bad_config(files, "chat_template") from error
    return {"default": templates} if isinstance(templates, str) else {}


def _template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"{path} cannot be read as UTF-8: {error}", hint="fix the file, or download it again"
        ) from error


def bad_config(files: ModelFiles, field: str) -> TokenizerError:
    return TokenizerError(
        f"the {field} in {files.find('tokenizer_config.json')} is malformed",
        hint="fix the file, or download it again",
    )
