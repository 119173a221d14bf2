"""Errors of tokenizers: causes, messages and hints."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from error_causes import Errors, create, file, folder, messages_test, small_tokenizer

from xtok.tokenizers import load_tokenizer
from xtok.tokenizers.table import Decoded, TokenEntry, TokenType

CTC = {"type": "CTC", "pad_token": "", "word_delimiter_token": "|", "cleanup": True}

OWN: dict[str, Any] = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}


def class_of(name: str, tokenizer_class: str, source: str = "small.model") -> str:
    """Write a folder of a tokenizer's file, under some name, and of a class."""
    os.mkdir("other")
    shutil.copy(f"small/{source}", f"other/{name}")
    config = {"tokenizer_class": tokenizer_class, "pad_token": "<|other|>"}
    file("other/tokenizer_config.json", json.dumps(config))
    return "other"


ERRORS: Errors = {
    "pass the path of a tokenizer file or folder, or a repo id such as Qwen/Qwen3-8B": [
        (lambda: load_tokenizer("./none"), "no such file or folder: ./none"),
    ],
    "check the path; for a repo on the hub, pass hf:none.model": [
        (lambda: load_tokenizer("none.model"), "no such file or folder: none.model"),
    ],
    "check the spelling; to download the repo on a machine with a network: hf download "
    "org/none --include 'tokenizer*' --include '*config.json'": [
        (
            lambda: load_tokenizer("org/none", offline=True),
            "org/none is neither a local file or folder nor in the local cache, and xtok is "
            "offline",
        ),
    ],
    "pass a repo id, a folder or a file": [
        (lambda: load_tokenizer(""), "the model name is empty"),
    ],
    "pass the repo id, such as Qwen/Qwen3-4B": [
        (
            lambda: load_tokenizer("https://huggingface.co/Qwen/Qwen3-4B/tree/main"),
            "URLs are not supported: https://huggingface.co/Qwen/Qwen3-4B/tree/main",
        ),
    ],
    "use one of the prefixes hf:, tekken:, tiktoken:, spm:, bytes:, null:; for a file name with a "
    "colon, pass ./spam:eggs": [
        (lambda: load_tokenizer("spam:eggs"), "unknown tokenizer prefix 'spam:'"),
    ],
    "check the path and its permissions": [
        (
            lambda: load_tokenizer("~nobody-at-all/a.model"),
            "~nobody-at-all/a.model cannot be opened: …",
        ),
    ],
    "run AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER), or pass the "
    "path of the .model or .tiktoken file": [
        (
            lambda: load_tokenizer(create("empty", os.mkdir)),
            "empty has no fast tokenizer, because tokenizer.json is missing",
        ),
    ],
    "download the file again": [
        (lambda: load_tokenizer(file("a.model")), "a.model is empty"),
        (lambda: load_tokenizer(f"spm:{file('a.model')}"), "a.model is empty"),
    ],
    "run git lfs pull in the file's repository": [
        (
            lambda: load_tokenizer(
                file(
                    "a.model",
                    "version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
                )
            ),
            "a.model is a Git LFS pointer instead of the file's contents",
        ),
    ],
    "use the repo or folder of the original model": [
        (
            lambda: load_tokenizer(file("a.gguf", b"GGUF\3\0\0\0" + bytes(64))),
            "a.gguf is a .gguf file, which xtok does not support",
        ),
    ],
    "append Megatron's split pattern: 'a.json@v2', 'a.json@v1', or 'a.json@REGEX'": [
        (
            lambda: load_tokenizer(file("a.json", '[{"rank": 0, "token_bytes": "AA=="}]')),
            "a.json is a Megatron vocabulary without a split pattern",
        ),
    ],
    "use a byte-level, SentencePiece-style or WordPiece tokenizer": [
        (
            lambda: load_tokenizer(
                folder(
                    "tokenizer",
                    decoder={"type": "Strip", "content": " ", "start": 1, "stop": 0},
                )
            ),
            "model has a Strip decoder that changes each token, so a text is not the "
            "concatenation of its tokens",
        ),
        (
            lambda: load_tokenizer(folder("tokenizer", decoder=CTC)),
            "model has a CTC decoder that changes each token, so a text is not the "
            "concatenation of its tokens",
        ),
        (
            lambda: load_tokenizer(
                folder(
                    "tokenizer",
                    decoder={"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
                )
            ),
            "model has a Replace decoder with a regular expression, so a text is not the "
            "concatenation of its tokens",
        ),
    ],
    "give a tokenizer file or the folder of a Hugging Face tokenizer": [
        (
            lambda: load_tokenizer(file("a.json", "{}")),
            "a.json is JSON, but neither a tokenizer.json nor a tekken file: …",
        ),
    ],
    "give a .model, .tiktoken or tekken.json file, or a Hugging Face folder": [
        (
            lambda: load_tokenizer(file("a.model", "hello")),
            "a.model is neither a SentencePiece model nor a tiktoken file: …",
        ),
    ],
    "append the tokenizer's regular expression to the name, in single quotes: "
    "'small/small.tiktoken@REGEX'": [
        (
            lambda: load_tokenizer("small/small.tiktoken"),
            "small/small.tiktoken is a tiktoken file of an unknown family, so xtok needs "
            "its split pattern",
        ),
    ],
    "in a shell, put the argument in single quotes: 'small/small.tiktoken@\\p{L}+|\\s+'": [
        (
            lambda: load_tokenizer("small/small.tiktoken@("),
            "the pattern for small/small.tiktoken is not a regular expression that splits text: …",
        ),
    ],
    "append |[\\s\\S] to the pattern, so that it matches all text": [
        (
            lambda: load_tokenizer(r"small/small.tiktoken@\w+").encode("a."),
            "the split pattern '\\\\w+' does not match all of the text 'a.'",
        ),
    ],
    "use @ only for a repo's revision or the split pattern of a tiktoken file": [
        (lambda: load_tokenizer("small/small.model@x"), "small/small.model does not support @x"),
    ],
    "the file is damaged or has another format: download it again": [
        (
            lambda: load_tokenizer(f"{file('a.tiktoken', 'YWI= 0')}@x"),
            "a.tiktoken has no tokens for 256 of the 256 bytes",
        ),
        (
            lambda: load_tokenizer(
                file(
                    "a.tiktoken",
                    b"AAA 0\n" + Path("small/small.tiktoken").read_bytes(),
                )
                + "@x"
            ),
            "a.tiktoken, line 1: expected a base64 token and a rank",
        ),
        (
            lambda: load_tokenizer(f"tekken:{file('tekken.json', '{}')}"),
            "tekken.json is not a tekken file: KeyError('config')",
        ),
    ],
    "remove the suffix; for more than 256 ids, add vocab_size=": [
        (lambda: load_tokenizer("bytes:1"), "bytes:1 is not a tokenizer, expected 'bytes'"),
    ],
    "set the width of the model's logits with vocab_size=": [
        (
            lambda: load_tokenizer("bytes", vocab_size=10),
            "the vocabulary size 10 of bytes (as specified) is too small for its largest "
            "token id 255",
        ),
        (
            lambda: load_tokenizer("bytes", vocab_size=2**24 + 1),
            "the vocabulary size 16777217 of bytes (as specified) is outside 1..16777216",
        ),
    ],
    "set the width when you load the tokenizer": [
        (
            lambda: load_tokenizer(small_tokenizer(), vocab_size=3000),
            "small-byte-level is already loaded with 1280 ids",
        ),
    ],
    "write the number of ids, for example null:32000; the default is null:131072": [
        (
            lambda: load_tokenizer("null:none"),
            "null:none is not a tokenizer, expected a number from 1 to 16777216",
        ),
    ],
    "pass a text that consists of ids, such as '5 17 3'": [
        (
            lambda: load_tokenizer("null:100").encode("5 100"),
            "'null' cannot encode '5 100', expected ids below 100",
        ),
    ],
    "use a tokenizer with byte tokens or a byte-level vocabulary": [
        (lambda: load_tokenizer("null:5").segment(b"x"), "null:5 cannot spell the bytes b'x'"),
    ],
    "check tokenizer.json and tokenizer_config.json, or download both files again": [
        (lambda: load_tokenizer(folder("tokenizer", "{")), "AutoTokenizer cannot load model: …"),
    ],
    "use a byte-level or SentencePiece-style tokenizer": [
        (
            lambda: load_tokenizer(folder("tokenizer", decoder=None)),
            "model has no decoder, so the bytes of its tokens are unknown",
        ),
    ],
    "remove the token from the text, because the model cannot read it": [
        (
            lambda: load_tokenizer(folder("config", vocab_size=798)).encode("a <think> b"),
            "the text 'a <think> b' contains the token '<think>' (id 799), but model has "
            "only 798 logits",
        ),
    ],
    "set tokenizer_class in tokenizer_config.json, or pass the path of the file: "
    "other/spiece.model": [
        (
            lambda: load_tokenizer(class_of("spiece.model", "LlamaTokenizer")),
            "AutoTokenizer does not read spiece.model in other: 997 of its 1,000 tokens are "
            "missing",
        ),
    ],
    "check tokenizer.model and tokenizer_config.json, or download both files again; or give "
    "the path of tokenizer.model": [
        (
            lambda: load_tokenizer(class_of("tokenizer.model", "AlbertTokenizer")),
            "AutoTokenizer cannot load other: …",
        ),
    ],
    "add the tokens and their ids to added_tokens_decoder in tokenizer_config.json": [
        (
            lambda: load_tokenizer(
                class_of("qwen.tiktoken", "Own", "small.tiktoken") + r"@\w+|\W+"
            ),
            "the configs of other list special tokens that have no id: <|other|>",
        ),
    ],
    "fix or delete the file": [
        (
            lambda: load_tokenizer(folder("generation_config", '{"eos_token_id": true}')),
            "model/generation_config.json: eos_token_id is True, expected token ids",
        ),
    ],
    "review the code, then allow the code with trust_remote_code=; or pass the path of the "
    "model's tokenizer.json, if available": [
        (
            lambda: load_tokenizer(folder("tokenizer_config", **OWN)),
            "model requires custom tokenizer code",
        ),
    ],
    "pass the path of a single file, such as words/tekken.json": [
        (
            lambda: load_tokenizer(Path(file("words/a.model", file("words/tekken.json"))).parent),
            "words has several tokenizers, but no config.json: a.model, tekken.json",
        ),
    ],
    "download the model's config.json or tokenizer_config.json into the folder": [
        (
            lambda: load_tokenizer(Path(file("words/vocab.txt", "a b")).parent),
            "words has vocab.txt, but no config.json that names the tokenizer's class",
        ),
    ],
    "the tokenizer's files are damaged: download them again": [
        (
            lambda: Decoded([TokenEntry(3, TokenType.NORMAL, b"x")] * 2),
            "token id 3 ('x') is repeated in the vocabulary",
        ),
    ],
    "fix the tokenizer's files": [
        (
            lambda: Decoded([TokenEntry(0, TokenType.UNKNOWN, b"<" * 1025)]),
            "the name of the special token 0 has 1,025 bytes, expected at most 1,024",
        ),
    ],
    "write both surrogates of the pair, or the character itself": [
        (
            lambda: load_tokenizer("bytes").encode_batch(["ok", "a\ud83d"]),
            "text 1, 'a\\ud83d', contains the unpaired surrogate '\\ud83d', expected valid Unicode",
        ),
    ],
}

test_tokenizer_errors = messages_test(ERRORS)
