"""Read tiktoken rank files.

A rank file contains a line `base64(bytes) rank` per token, but no split pattern and no special
tokens.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from binascii import a2b_base64
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from xtok.errors import TokenizerError
from xtok.tokenizers._backend import AddedNames, Backend, Roles, chat_templates, damaged, is_panic
from xtok.tokenizers.table import MAX_WIDTH, TokenEntry, TokenType

if TYPE_CHECKING:
    from tiktoken import Encoding

    from xtok.tokenizers.hub import ModelFiles


class Family(NamedTuple):
    """Data of a family of tokenizers that the rank file does not contain."""

    pattern: str  # regular expression that splits text before merging
    control: Mapping[str, int] = {}  # special tokens: name → id
    text: Mapping[str, int] = {}  # added tokens that are not special: name → id
    roles: Mapping[str, str] = {}  # role → names


def _number(start: int, names: str) -> dict[str, int]:
    return {name: start + i for i, name in enumerate(names.split())}


def _llama_4_names() -> str:
    """Return the names of the 2,048 special tokens. `{2:6}` means the numbers 2, 3, 4, 5."""
    short = (
        "begin_of_text end_of_text fim_prefix fim_middle fim_suffix header_start header_end eom "
        "eot step text_post_train_{0:6} python_start python_end finetune_right_pad "
        "text_post_train_{8:69} image_start image_end vision_{0:2} tile_x_separator "
        "tile_y_separator vision_{2:6} image vision_{6:7} patch vision_{7:1048} reasoning_{0:8} "
        "reasoning_thinking_start reasoning_thinking_end {0:904}"
    )
    names: list[str] = []
    for word in short.split():
        part, _, bounds = word.rstrip("}").partition("{")
        span = range(*map(int, bounds.split(":"))) if bounds else ()
        names += [f"{part}reserved_special_token_{i}" for i in span] or [part]
    return " ".join(f"<|{name}|>" for name in names)


# Sources of patterns and special tokens: llama3/ and llama4/tokenizer.py of llama-models 0.3.0;
# dashscope/tokenizers/qwen_tokenizer.py of dashscope 2.0.2, with the names in
# tokenizer_config.json of Qwen/Qwen3-8B; tiktoken_ext/openai_public.py of tiktoken 0.14.0.
LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA_3_PATTERN.replace("{1,3}", "")
O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The pattern in published tekken files, and in `fix_mistral_regex` of Transformers. Unlike the
# o200k pattern, this pattern splits contractions and separates all digits.
TEKKEN_PATTERN = O200K_PATTERN.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
_LLAMA_3 = Family(
    pattern=LLAMA_3_PATTERN,
    control=_number(
        128_000,
        "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> "
        "<|reserved_special_token_1|> <|finetune_right_pad_id|> <|step_id|> <|start_header_id|> "
        "<|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|> <|image|> "
        + " ".join(f"<|reserved_special_token_{i}|>" for i in range(2, 246)),
    ),
    roles={
        "bos": "<|begin_of_text|>",
        "eos": "<|end_of_text|>",
        "pad": "<|finetune_right_pad_id|>",
    },
)
_LLAMA_4 = Family(
    pattern=O200K_PATTERN,
    control=_number(200_000, _llama_4_names()),
    roles={"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>", "pad": "<|finetune_right_pad|>"},
)
_QWEN = Family(
    pattern=QWEN_PATTERN,
    control=_number(
        151_643,
        "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> "
        "<|box_start|> <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> "
        "<|vision_pad|> <|image_pad|> <|video_pad|>",
    ),
    text=_number(
        151_657,
        "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> "
        "<|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>",
    ),
    # From the generation config of Qwen/Qwen3-8B. The eos token of the base model comes first.
    roles={"eos": "<|endoftext|> <|im_end|>", "pad": "<|endoftext|>"},
)
_CL100K = Family(
    pattern=r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    control=_number(100_257, "<|endoftext|> <|fim_prefix|> <|fim_middle|> <|fim_suffix|>")
    | {"<|endofprompt|>": 100_276},
    roles={"eos": "<|endoftext|>"},
)
_O200K = Family(
    pattern=O200K_PATTERN,
    control={"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018},
    roles={"eos": "<|endoftext|>"},
)
FAMILIES = {
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": _LLAMA_3,
    "d0bdbaf59b0762c8c807617e2d8ea51420eb1b1de266df2495be755c8e0ed6ed": _LLAMA_4,
    "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186": _QWEN,
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": _CL100K,
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": _O200K,
}
"""Tokenizer families by the sha256 digest of the rank file."""


def is_rank_file(head: bytes) -> bool:
    """Whether the first bytes of a file contain a line of a rank file."""
    return any(map(_token_and_rank, head.split(b"\n")[:20]))


_MAX_DIGITS = 9  # maximum number of digits in a rank (MAX_WIDTH has 8 digits)


def _token_and_rank(line: bytes) -> tuple[bytes, int] | None:
    try:
        word, digits = line.split()
        token = b"" if word == b"=" else base64.b64decode(word, validate=True)
    except ValueError:  # includes binascii.Error
        return None
    is_rank = digits.isdigit() and len(digits) <= _MAX_DIGITS and int(digits) < MAX_WIDTH
    return (token, int(digits)) if is_rank else None


def parse_ranks(data: bytes, source: str) -> dict[bytes, int]:
    """Parse the contents of a rank file to a dict from bytes to rank.

    tiktoken's own loader caches by path, so the loader would return the old contents of a changed
    file.
    """
    ranks: dict[bytes, int] = {}
    ids_seen: set[int] = set()
    for line_number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        parsed = _token_and_rank(line)
        if parsed is None:
            raise damaged(f"{source}, line {line_number}: expected a base64 token and a rank")
        token, rank = parsed
        if not token:  # multilingual.tiktoken of Whisper ends with an empty token
            continue
        if token in ranks or rank in ids_seen:
            raise damaged(f"{source}, line {line_number}: the token or the rank is repeated")
        ranks[token] = rank
        ids_seen.add(rank)
    require_single_bytes(ranks, source)
    return ranks


def require_single_bytes(ranks: Mapping[bytes, int], source: str) -> None:
    """Check that every byte is a token, because merging by rank starts with bytes."""
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise damaged(f"{source} has no tokens for {len(missing)} of the 256 bytes")


def _attempt(encoding: Encoding, text: str) -> list[int] | None:
    """Return the ids of a text, or None if the library raises a `ValueError` or panics."""
    try:
        return encoding.encode_ordinary(text)
    except BaseException as error:
        if not isinstance(error, ValueError) and not is_panic(error):
            raise
    return None


_SAMPLE_TEXT = "a1 \n.,A\u00e9\u0301\u4e2d\u00b2\u00a0$_\U0001f600\x00"
"""Characters of many kinds. A split pattern that does not match all these characters drops text."""


class RankBackend(Backend):
    """A tokenizer that merges bytes by rank, with the library `tiktoken`.

    Args:
        name: the file format, `tiktoken` or `tekken`.
        ranks: token → id. Tokens with lower ids are merged first.
        pattern: the regular expression that splits text before merging. If the expression cannot
            split text, a `ValueError` is raised.
        added: tokens without a rank.
        roles: role → names of added tokens.
        text: name → id of added tokens that are recognized in any text.
    """

    files: ModelFiles | None = None  # the model's folder or repo, for its chat templates

    def __init__(
        self,
        name: str,
        ranks: dict[bytes, int],
        pattern: str,
        added: Sequence[TokenEntry],
        roles: Mapping[str, str],
        text: Mapping[str, int] | None = None,
    ) -> None:
        from tiktoken import Encoding

        self.name, self._ranks, self._split_pattern = name, ranks, pattern
        # `add_configs` adds the contents of the folder's configs to `text_tokens` and `added`.
        self.text_tokens = dict(text or {})
        self.added = {entry.id: entry for entry in added}
        ids = {entry.content.decode(): entry.id for entry in added}
        self.roles: dict[str, Mapping[int, str]] = {
            role: {ids[name]: f"the {self.name} family" for name in names.split() if name in ids}
            for role, names in roles.items()
        }
        self.definitions = [json.dumps([pattern, sorted(self.text_tokens.items())]).encode()]
        self._make_encoding = functools.partial(Encoding, name, pat_str=pattern, special_tokens={})
        single_bytes = {bytes([byte]): byte for byte in range(256)}
        trial = self._make_encoding(mergeable_ranks=single_bytes)
        if _attempt(trial, "a 1") is None:
            raise ValueError("no match")
        encoded = _attempt(trial, _SAMPLE_TEXT)
        self.keeps_text = encoded is None or len(encoded) == len(_SAMPLE_TEXT.encode())

    @functools.cached_property
    def _encoding(self) -> Encoding:
        """The library's encoding, created at its first use because it copies all ranks."""
        return self._make_encoding(mergeable_ranks=self._ranks)

    @functools.cached_property
    def _text(self) -> AddedNames:
        return AddedNames(self.text_tokens)

    def entries(self) -> Iterable[TokenEntry]:
        yield from self.added.values()
        for token, rank in self._ranks.items():
            if rank not in self.added:
                yield TokenEntry(rank, TokenType.NORMAL, token)

    def definition(self) -> Iterable[bytes]:
        return self.definitions

    def declared_roles(self) -> Roles:
        return self.roles

    def chat_templates(self) -> Mapping[str, str]:
        return chat_templates(self.files) if self.files else {}

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        # `encode_batch` starts a thread for each text, and is 30 times slower for a vocabulary.
        return [self._text.encode(text, self._encode) for text in texts]

    def _encode(self, text: str) -> list[int]:
        """Encode a text. If the library fails, encode each half of the text.

        The library limits the backtracking steps of a regular expression, so encoding a million
        spaces in a row fails. The tokens next to the split can differ from the tokens of the whole
        text.
        """
        ids = _attempt(self._encoding, text)
        if ids is not None:
            return ids
        if len(text) < 2:
            return self._encoding._encode_single_piece(text.encode())
        middle = len(text) // 2
        return self._encode(text[:middle]) + self._encode(text[middle:])

    def spans(self, text: str, *, at_start: bool = True) -> Sequence[tuple[int, int]]:
        names = {i: name.encode() for name, i in self._text.ids.items()}
        token_bytes = self._encoding.decode_single_token_bytes
        tokens = [names.get(i) or token_bytes(i) for i in self.encode_texts([text])[0]]
        if b"".join(tokens) != text.encode():
            raise TokenizerError(
                f"the split pattern {self._split_pattern[:80]!r} does not match all of the text "
                f"{text[:40]!r}",
                hint="append |[\\s\\S] to the pattern, so that it matches all text",
            )
        return list(pairwise(accumulate(map(len, tokens), initial=0)))

    def encode_bytes(self, data: bytes) -> list[int] | None:
        return self._encoding._encode_single_piece(data)


def load_ranks(path: Path, pattern: str | None = None) -> RankBackend:
    """Load a rank file. The argument `pattern` is required if the family is unknown."""
    data = path.read_bytes()
    family = FAMILIES.get(hashlib.sha256(data).hexdigest())
    if pattern is not None:
        family = Family(pattern=pattern)
    if family is None:
        raise TokenizerError(
            f"{path} is a tiktoken file of an unknown family, so xtok needs its split pattern",
            hint="append the tokenizer's regular expression to the name, in single quotes: "
            f"'{path}@REGEX'",
        )
    kinds = ((TokenType.CONTROL, family.control), (TokenType.USER_DEFINED, family.text))
    added = [TokenEntry(i, kind, name.encode()) for kind, ids in kinds for name, i in ids.items()]
    # If the digest is known, all lines are valid. Omitting the checks saves 0.2 of 0.8 seconds.
    if pattern is None:
        words = data.split()
        ranks = dict(zip(map(a2b_base64, words[::2]), map(int, words[1::2]), strict=True))
    else:
        ranks = parse_ranks(data, str(path))
    try:
        return RankBackend("tiktoken", ranks, family.pattern, added, family.roles, family.text)
    except ValueError as error:
        raise bad_pattern(path, error) from error


def bad_pattern(path: Path, error: ValueError) -> TokenizerError:
    return TokenizerError(
        f"the pattern for {path} is not a regular expression that splits text: {error}",
        hint=f"in a shell, put the argument in single quotes: '{path}@\\p{{L}}+|\\s+'",
    )
