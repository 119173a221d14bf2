"""Errors of texts, embeddings and the stages of a map: causes, messages and hints."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import torch
from error_causes import Errors, bytes_pair, create, file, messages_test, parquet, with_module
from make_maps import GOOD, TINY
from numpy.typing import NDArray
from safetensors.torch import save as safetensors
from tiny_models import with_layer

import xtok
from xtok.building.embeddings.input_layer import input_layer
from xtok.conversation.texts import find_texts, read_batches, text_shards
from xtok.tokenizers.checkpoint import Checkpoint


def read_text(name: str, content: str | bytes) -> object:
    return batches(Path(file(name, content)))


def batches(path: Path) -> object:
    return list(read_batches(text_shards(path), "text"))


MATRIX = torch.zeros(4, 2)


def model_of(content: torch.Tensor | bytes, index: object = None, name: str = "wte.weight") -> Path:
    """Write a checkpoint with one matrix, or with these bytes, and optionally an index."""
    data = content if isinstance(content, bytes) else safetensors({name: content})
    if index is not None:
        file("model/model.safetensors.index.json", json.dumps({"weight_map": index}))
    return Path(file("model/model.safetensors", data)).parent


def layer(*content: Any, **name: Any) -> object:
    """Search for the input embeddings of a model."""
    return input_layer(Checkpoint(model_of(*content, **name)))


def generate(embedding: str | None, student: str | Path = "bytes", **options: Any) -> object:
    pair = xtok.load_pair(student, "small/small-digits")
    return xtok.generate(pair, embedding, xtok.GenerateConfig(**options), offline=True)


def weights(matrix: NDArray[np.float32]) -> str:
    return f"input:{with_layer(Path('model'), Path('small/small-digits'), matrix)}"


ERRORS: Errors = {
    "pass text files (.txt, .jsonl, .parquet, also .gz or .zst), or a quoted glob such as "
    "'corpus/*.jsonl.gz'": [
        (lambda: find_texts("none-*.txt"), "no file matches none-*.txt"),
        (lambda: find_texts(create("folder", os.mkdir)), "folder is a folder"),
    ],
    "if the file is latin1, convert it: iconv -f latin1 -t UTF-8": [
        (
            lambda: read_text("a.txt", "Es war schön".encode("latin1")),
            "a.txt is not UTF-8: byte 0xf6 at offset 10, in line 1",
        ),
    ],
    "if the file is UTF-16LE, convert it: iconv -f UTF-16LE -t UTF-8": [
        (
            lambda: read_text("a.txt", "the text".encode("utf-16-le")),
            "a.txt is not UTF-8: 8 of 16 bytes at offset 0 are zero",
        ),
    ],
    "give a text file: .txt, .jsonl or .parquet, also as .gz or .zst": [
        (
            lambda: read_text("a.txt", bytes(range(256))),
            "a.txt is not UTF-8: byte 0x80 at offset 128, in line 2; the file also contains "
            "control characters",
        ),
    ],
    "write the data to a file first; xtok reads the file more than once": [
        (lambda: find_texts("/dev/null"), "/dev/null is a device, not a regular file"),
    ],
    "check the path and its permissions; if the file is damaged, download it again": [
        (
            lambda: read_text("a.txt.gz", gzip.compress(b"one")[:-9]),
            "the text a.txt.gz cannot be read: …",
        ),
        (
            lambda: batches(parquet(text=pyarrow.array([b"a\xff"]).view(pyarrow.string()))),
            "the text a.parquet cannot be read: …",
        ),
        (
            lambda: read_text("a.parquet", "one two three four"),
            "the text a.parquet cannot be read: …",
        ),
    ],
    "write each row as a JSON object, and name its text field with field=; a plain-text file "
    "must have a name that ends in .txt": [
        (
            lambda: read_text("a.jsonl", '{"text": "x"}\n{"body": "x", "n": 1}'),
            "a.jsonl, line 2: the row has no field 'text', only: body, n",
        ),
        (
            lambda: read_text("a.jsonl", '{"text": 3}'),
            "a.jsonl, line 1: the field 'text' is a number, not a string",
        ),
        (lambda: read_text("a.jsonl", '{"text": "x"'), "a.jsonl, line 1: not JSON: …"),
        (lambda: read_text("a.jsonl", '["x"]'), "a.jsonl, line 1: the row is not a JSON object"),
    ],
    "pip install pyarrow, or in a clone of xtok: pip install -e '.[parquet]'": [
        (
            lambda: with_module("pyarrow", lambda: read_text("a.txt.zst", b"(\xb5/\xfd")),
            "a.txt.zst requires the package pyarrow, which is not installed",
        ),
    ],
    "use non-empty text that both tokenizers can spell; xtok align shows the tokens of both": [
        (
            lambda: xtok.build("bytes", "bytes", texts=file("a.txt")),
            "the text contains no shared token boundary (0 documents, 0 bytes)",
        ),
    ],
    "give both models with pair=": [
        (
            lambda: xtok.reapply_exact(GOOD),
            "the map has no token table for m: xtok did not create the map",
        ),
        (
            lambda: xtok.reapply_exact(
                xtok.multitoken(bytes_pair(), xtok.MultitokenConfig(token_form="raw"))
            ),
            "the map was built with the token form 'raw', but contains no display strings",
        ),
    ],
    "rebuild the map, or use the version of xtok that made it": [
        (
            lambda: xtok.reapply_exact(
                replace(
                    TINY,
                    history=({"stage": "multitoken", "options": {"special_tokens": "x"}},),
                )
            ),
            "the map's history contains unsupported options: special_tokens is 'x', "
            "expected one of ('roles', 'fuzzy', 'off')",
        ),
    ],
    "set top_k= to 2 or more, or build the map without scale slots": [
        (
            lambda: xtok.sort_cut(TINY, xtok.SortCutConfig(top_k=1)),
            "a row with a scale slot needs at least 2 entries",
        ),
    ],
    "give the map of this pair; xtok inspect shows the pair of a map; if the pair is correct, "
    "set the width to 256 with student_vocab_size=": [
        (
            lambda: xtok.multitoken(bytes_pair(), initial=GOOD),
            "the student of the map (m) has width 4, but bytes has width 256",
        ),
    ],
    "pass ids from 0 to 255 with ignore_teacher_ids=": [
        (
            lambda: xtok.build(
                "bytes", "bytes", config=xtok.BuildConfig(ignore_teacher_ids=(256,))
            ),
            "the ignored teacher id 256 does not exist, because bytes has width 256",
        ),
    ],
    "pass sentence:MODEL (a sentence-transformers model), input:MODEL (the input embeddings of a "
    "model), 'own' (the input embeddings of both models) or 'spelling'": [
        (
            lambda: generate("small/small-digits"),
            "the embedding model small/small-digits does not specify which embeddings to use",
        ),
    ],
    "pass the path of a model's folder, or a repo id": [
        (lambda: generate("input:./none"), "no such folder: ./none"),
        (lambda: generate(f"input:{file('a-file')}"), "no such folder: a-file"),
    ],
    "check the spelling; to download the repo on a machine with a network: hf download none/body": [
        (
            lambda: generate("input:none/body@v1"),
            "none/body at revision v1 is neither a local file or folder nor in the local "
            "cache, and xtok is offline",
        ),
    ],
    "save the model with save_pretrained, or use a model with a safetensors checkpoint": [
        (lambda: generate(f"input:{create('empty', os.mkdir)}"), "empty has no model.safetensors"),
        (
            lambda: generate("own", "small/small-byte-level"),
            "small/small-byte-level has no model.safetensors",
        ),
    ],
    "use a folder that also contains the model's tokenizer": [
        (
            lambda: generate(f"input:{model_of(MATRIX)}"),
            "model has no tokenizer.json, which is needed to segment tokens",
        ),
    ],
    "use a checkpoint and a tokenizer that belong together": [
        (
            lambda: generate(weights(np.zeros((9, 4), np.float32))),
            "model, model.embed_tokens.weight: 9 rows, expected at least 800 (the tokenizer's ids)",
        ),
    ],
    "check the checkpoint, or pass float32 with dtype=": [
        (
            lambda: generate(weights(np.full((896, 4), np.nan, np.float32))),
            "embeddings from model are not finite for 128 tokens: 0 '\\x00', 1 '\\x01', "
            "2 '\\x02', …",
        ),
    ],
    "use the model's folder or repo id, or choose a different embedding_model=": [
        (lambda: generate("own"), "bytes is a tokenizer file without embeddings"),
    ],
    "pass cpu, cuda or cuda:0 with device=": [
        (lambda: generate(None, device="tpu"), "the device tpu cannot be used: unknown device"),
        (lambda: generate(None, device="cuda:\u0663"), "the device cuda:٣ cannot be used: …"),
    ],
    "reduce top_k=": [
        (
            lambda: generate("spelling", top_k=4000),
            "top_k is 4000, expected at most 896 (the teacher's width)",
        ),
    ],
    "pip install sentence-transformers, or in a clone of xtok: pip install -e '.[sentence]'": [
        (
            lambda: with_module(
                "sentence_transformers",
                lambda: generate("sentence:small/small-digits"),
            ),
            "sentence embeddings need sentence-transformers",
        ),
    ],
    "pass input:small/small-digits for its input-embedding layer, or another model": [
        (
            lambda: with_module(
                "sentence_transformers",
                lambda: generate("sentence:small/small-digits"),
                SimpleNamespace(),
            ),
            "small/small-digits has no modules.json, so it is not a sentence-transformers model",
        ),
    ],
    "use a checkpoint without quantization, or download the checkpoint again": [
        (
            lambda: layer(torch.zeros(4)),
            "model/model.safetensors, wte.weight: torch.float32 [4], expected a matrix of floats",
        ),
        (
            lambda: layer(MATRIX.to(torch.int8)),
            "model/model.safetensors, wte.weight: torch.int8 [4, 2], expected a matrix of floats",
        ),
    ],
    "use another model; known names include model.embed_tokens.weight, "
    "transformer.wte.weight and embeddings.word_embeddings.weight": [
        (
            lambda: layer(MATRIX, name="other"),
            "model: none of its 1 tensors has a known input-embedding name",
        ),
    ],
    "the checkpoint is damaged: download it again": [
        (lambda: layer(b"x"), "model/model.safetensors is not a complete safetensors file: …"),
        (
            lambda: layer((3).to_bytes(8, "little") + b"[1]"),
            "model/model.safetensors is not a complete safetensors file: …",
        ),
        (
            lambda: layer(MATRIX, {"model.embed_tokens.weight": "model.safetensors"}),
            "model/model.safetensors is not a complete safetensors file: …",
        ),
        (lambda: layer(MATRIX, []), "the model.safetensors.index.json of model is damaged"),
        (lambda: layer(b"x", [1]), "the model.safetensors.index.json of model is damaged"),
        (
            lambda: layer(b"x", {"wte.weight": "none.safetensors"}),
            "model has no none.safetensors, but its model.safetensors.index.json lists this file",
        ),
    ],
}

test_building_errors = messages_test(ERRORS)
