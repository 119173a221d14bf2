"""What tests make: small vocabularies, tokenizers, model folders, maps, and command lines."""

from __future__ import annotations

import base64
import io
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save, save_file
from sentencepiece import SentencePieceTrainer, sentencepiece_model_pb2
from small_tokenizers import CORPUS
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, normalizers, pre_tokenizers

import xtok
from xtok.alignment.aligner import ShiftedAlignment
from xtok.config import BuildConfig, MultitokenConfig
from xtok.maps import file as mapfile
from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.tokenizers import Encoding, Tokenizer, load_tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenEntry, TokenTable, TokenType, Vocabulary, decode_vocabulary
from xtok.training.losses import event_index, spelling_index
from xtok.training.losses.registry import EVENTS, LOSSES, MAP, LossName
from xtok.training.module import ProjectionModule

NO_SLOT = MultitokenConfig(scale_trick=False)


def byte_ranks(
    path: Path, *tokens: str | bytes, width: int | None = None, digits: int = 3
) -> Tokenizer:
    """A tokenizer of the 256 bytes (id = byte) and some tokens (256, 257, …)."""
    every = [bytes([b]) for b in range(256)]
    every += [t.encode() if isinstance(t, str) else t for t in tokens]
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(every)))
    pattern = rf"\p{{N}}{{1,{digits}}}| ?\p{{L}}+|\s+"
    return load_tokenizer(f"{path}@{pattern}", vocab_size=width)


@cache
def built(
    student: Tokenizer, teacher: Tokenizer, config: BuildConfig | None = None
) -> ProjectionMap:
    """A map, built once; its arrays cannot be changed."""
    found = xtok.build(student, teacher, config)
    for value in vars(found).values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    return found


def loss_map(name: LossName, pair: Pair) -> Any:
    """What a loss takes beside logits and a batch, on the CPU; None if nothing."""
    row = LOSSES[name]
    if row.map is None:
        return None
    if row.map is MAP:
        return ProjectionModule(built(*pair.tokenizers))
    if row.map is EVENTS:
        return event_index(xtok.events(*pair.tokenizers))
    return spelling_index(xtok.spellings(pair))


def nemo_values(name: str) -> dict[str, NDArray[Any]]:
    """NeMo-RL's own values (commit 7ea279a), which scripts/nemo_values.py makes."""
    return dict(np.load(Path(__file__).with_name("nemo_values") / f"{name}.npz"))


def same(a: ProjectionMap, b: ProjectionMap) -> bool:
    return mapfile.to_safetensors(a) == mapfile.to_safetensors(b)


def row(projection: ProjectionMap, i: int) -> list[tuple[int, float]]:
    ids, weights = projection.row(i)
    return list(zip(ids.tolist(), [round(float(w), 6) for w in weights], strict=True))


def table_of(tokenizer: Tokenizer) -> TokenTable:
    assert tokenizer.vocabulary.table is not None
    return tokenizer.vocabulary.table


def spelled(tokenizer: Tokenizer, data: bytes) -> list[bytes]:
    return [table_of(tokenizer)[i] for i in tokenizer.segment(data)]


def hf_folder_of_ranks(ranks: Path, pattern: str, folder: Path, normalizer: str | None) -> Path:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    # By position: the name of the last one, special tokens, depends on the version.
    converter = TikTokenConverter(str(ranks), pattern, False, [])  # type: ignore[no-untyped-call]
    rust = converter.converted()
    rust.model.ignore_merges = False
    if normalizer is not None:
        rust.normalizer = getattr(normalizers, normalizer)()
    return saved(folder, rust)


def tekken_file(path: Path, small: Path, **changed: Any) -> Path:
    """The small rank file in Mistral's form, with 30 special tokens before it.

    Changes of its config are single values, all others are whole parts.
    """
    lines = (small / "small.tiktoken").read_text().split("\n")[:-1]
    vocab = [
        {"rank": int(rank), "token_bytes": token, "token_str": None}
        for token, rank in (line.split() for line in lines)
    ]
    config = {
        "pattern": r"\p{N}{1,3}|[^\p{N}]+", "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(vocab) - 100 + 30, "default_num_special_tokens": 30,
        "version": "v3", **changed.pop("config", {}),
    }  # fmt: skip
    path.write_text(json.dumps({"config": config, "vocab": vocab, **changed}))
    return path


def unigram_model(**options: Any) -> bytes:
    """Train a small Unigram model of SentencePiece."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter("".join(CORPUS).splitlines()), model_writer=model,
        model_type="unigram", vocab_size=600, num_threads=1, minloglevel=2, **options,
    )  # fmt: skip
    return model.getvalue()


def sentencepiece_with(source: Path, path: Path, change: Callable[[Any], object]) -> Path:
    """Write a SentencePiece file that differs from another by a change of its model."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(source.read_bytes())
    change(proto)
    path.write_bytes(proto.SerializeToString())
    return path


def saved(folder: Path, rust: Rust, **roles: str) -> Path:
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=rust, **roles).save_pretrained(str(folder))
    return folder


def word_piece(folder: Path, *, lowercase: bool) -> Path:
    words = "[PAD] [UNK] [CLS] [SEP] the cat ##s ##ing run t h e a ##t ##h ##e ##a , . é É THE"
    rust = Rust(models.WordPiece({w: i for i, w in enumerate(words.split())}, unk_token="[UNK]"))
    rust.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece()
    roles = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return saved(folder, rust, unk_token="[UNK]", **roles)


Library = Callable[[str], list[int]]
PIECES = [
    "the", " words", " don't", "2024", "  ", "\n\n", "\t", " ", "<", "|", "think", "中文",
    " 日本語", "café", "cafe\u0301", "\u212b", "ﬁ", "①", "ｶﾞ", "\u0344", "o\u0323\u0302", "नमस्ते",
    "가\u1100\u1161", "👨\u200d👩", "\u00a0", "▁", "\u200b", "\x00", "Ω\u2126", "\u1e9b\u0323",
]  # fmt: skip


def pieces_for(tokenizer: Tokenizer, names: bool = True) -> list[str]:
    """Ordinary pieces of text, and names of control and user-defined tokens."""
    table = tokenizer.table
    added = [table[i].decode() for i in table.ids_of_type(TokenType.USER_DEFINED).tolist()][:40]
    control = [table.control_names[i] for i in table.ids_of_type(TokenType.CONTROL).tolist()][:40]
    return [*PIECES * 2, *filter(None, added), *(control if names else [])]


def texts(tokenizer: Tokenizer, names: bool = True, number: int = 60) -> Iterator[str]:
    """Texts of these pieces, the same ones each time."""
    rng, pieces = random.Random(0), pieces_for(tokenizer, names)
    for _ in range(number):
        yield "".join(rng.choices(pieces, k=rng.randint(0, 12)))


def check(tokenizer: Tokenizer, library: Library, text: str) -> Encoding:
    """Compare ids; every token that is in the text as it is must be at its bounds."""
    encoding, data = tokenizer.encode(text), text.encode()
    assert encoding.ids.tolist() == library(text)
    assert tokenizer.encode_batch([text, text]) == [library(text)] * 2
    bounds = encoding.bounds
    assert len(bounds) == len(encoding.ids) + 1
    assert np.all(np.diff(bounds) >= 0)
    assert bounds[-1] == len(data)
    if len(encoding.ids):
        assert bounds[0] == 0
    table, names = tokenizer.table, tokenizer.table.control_names
    added = set(table.ids_of_type(TokenType.CONTROL, TokenType.USER_DEFINED).tolist())
    parts = [names[i].encode() if i in names else table[i] for i in encoding.ids.tolist()]
    for i, part, start, end in zip(encoding.ids, parts, bounds[:-1], bounds[1:], strict=True):
        if int(i) in added or not encoding.num_changed:
            assert data[start:end].strip() == part.strip()
    return encoding


def copied(source: Path, folder: Path, **parts: dict[str, Any] | None) -> Path:
    """Copy a model's folder; JSON files, by their stems, get other parts, or are left out."""
    shutil.copytree(source, folder)
    for stem, changed in parts.items():
        path = folder / f"{stem}.json"
        if changed is None:
            path.unlink()
        else:
            path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    return folder


def qwen_like(small: Path, folder: Path, normalizer: str) -> Path:
    """The small byte-level folder with a normalizer, which `<think>` is matched before."""
    parts = {"normalizer": {"type": normalizer}}
    return copied(small / "small-byte-level", folder, tokenizer=parts)


def vocabulary(width: int, **fields: Any) -> Vocabulary:
    """A side of a map; without tokens, unless they are given."""
    given: dict[str, Any] = {
        "model_id": "m", "revision": None, "backend": None, "width_source": "map",
        "tokenizer_vocab_size": None, "table": None,
    }  # fmt: skip
    return Vocabulary(vocab_size=width, **(given | fields))


def tiny_map(rows: dict[int, list[tuple[int, float]]], **fields: Any) -> ProjectionMap:
    flat = [(s, t, w) for s, row in rows.items() for t, w in row]
    kind = np.zeros(4, np.uint8)
    kind[[row for row in rows if row < 4]] = 2
    return ProjectionMap(
        **{
            "student": vocabulary(4),
            "teacher": vocabulary(6),
            "student_ids": np.array([s for s, _, _ in flat], np.int32),
            "teacher_ids": np.array([t for _, t, _ in flat], np.int32),
            "weights": np.array([w for _, _, w in flat], np.float32),
            "row_kind": kind,
            "scale_slot": None,
            "method": "multitoken",
            "top_k": 3,
            **fields,
        }
    )


GOOD = tiny_map({0: [(3, 0.75), (1, 0.25)], 2: [(5, 1.0)], 3: [(0, 0.5), (4, 0.5)]})
SLOT = np.array([1, 0, 0, 1], np.uint8)


def random_map(rows: int, columns: int, seed: int = 0) -> ProjectionMap:
    random = np.random.default_rng(seed)
    dense = np.where(random.random((rows, columns)) < 0.2, random.random((rows, columns)), 0)
    dense[:, 0] += 0.01
    dense /= dense.sum(1, keepdims=True)
    entries = {
        s: sorted(((int(t), float(row[t])) for t in np.flatnonzero(row)), key=lambda e: -e[1])
        for s, row in enumerate(dense)
    }
    flat = [(s, t, w) for s, row in entries.items() for t, w in row]
    return replace(
        tiny_map({}),
        student=replace(GOOD.student, vocab_size=rows),
        teacher=replace(GOOD.teacher, vocab_size=columns),
        student_ids=np.array([s for s, _, _ in flat], np.int32),
        teacher_ids=np.array([t for _, t, _ in flat], np.int32),
        weights=np.array([w for _, _, w in flat], np.float32),
        row_kind=np.full(rows, RowKind.MIXED, np.uint8),
        top_k=columns,
    )


def tiny_vocabulary(name: str, *tokens: bytes, width: int) -> Vocabulary:
    entries = [TokenEntry(0, TokenType.CONTROL, b"<s>")]
    entries += [TokenEntry(i, TokenType.NORMAL, token) for i, token in enumerate(tokens, 1)]
    table, _ = decode_vocabulary(entries, width=width)
    return vocabulary(
        width, model_id=name, revision="main", backend="hf", width_source="option",
        tokenizer_vocab_size=len(tokens) + 1, table=replace(table, roles={"bos": (0,)}),
    )  # fmt: skip


TINY = ProjectionMap(
    student=tiny_vocabulary("org/student", b"a", b"\xff\xfe", b"ab", width=6),
    teacher=tiny_vocabulary("org/teacher", b"a", b"b", width=4),
    student_ids=np.array([0, 1, 2, 2, 3, 3, 3], np.int32),
    teacher_ids=np.array([0, 1, 2, 3, 1, 2, 3], np.int32),
    weights=np.array([1, 1, 0.75, 0.25, 0.625, 0.125, 0.25], np.float32),
    row_kind=np.array([3, 1, 2, 2, 0, 0], np.uint8),
    scale_slot=np.array([0, 0, 1, 1, 0, 0], np.uint8),
    method="multitoken",
    top_k=4,
    history=({"stage": "multitoken", "options": {"top_k": 4}, "xtok_version": "0.1.0"},),
)


def edited(tensors: dict[str, Any] | None = None, **metadata: Any) -> bytes:
    """The file of `TINY` with other tensors, or metadata: `student__vocab_size=3`."""

    def change(found: dict[str, Any], fields: dict[str, Any]) -> None:
        found.update(tensors or {})
        for path, value in metadata.items():
            target, *rest = path.split("__")
            inner = fields
            for key in rest:
                inner, target = inner[target], key
            inner[target] = value

    return changed(mapfile.to_safetensors(TINY), change)


Change = Callable[[dict[str, Any], dict[str, Any]], object]
"""What changes a map's tensors and metadata."""


def changed(data: bytes, change: Change) -> bytes:
    """The file of a map whose tensors (None: to leave out) and metadata are changed.

    Like one of an earlier version, it has no digest of the tensors.
    """
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    fields = json.loads(header["__metadata__"]["xtok"])
    del fields["tensors_sha256"]
    tensors = {name: tensor.copy() for name, tensor in load_tensors(data).items()}
    change(tensors, fields)
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return save(kept, {"xtok": json.dumps(fields)})


FOREIGN: dict[str, Any] = {
    "indices": torch.tensor([[2, -1, -1], [1, 0, 3], [1, 1, 2], [0, 3, 3], [-1, -1, -1]]),
    "likelihoods": torch.tensor(
        [[1, 0, 0], [0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.5, 0.0, 0.25], [0, 0, 0]]
    ),
    "model_A_id": "a/student",
    "model_B_id": "b/teacher",
}
"""What another tool writes into a `.pt`."""


def pt_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_bytes(data: bytes, folder: Path, **options: Any) -> ProjectionMap:
    """Read a map's file; its contents tell the format."""
    path = folder / "foreign.pt"
    path.write_bytes(data)
    return ProjectionMap.load(path, **options)


def read_pt(folder: Path, value: Any, **options: Any) -> ProjectionMap:
    return load_bytes(pt_bytes(value), folder, **options)


def random_vectors(count: int, dimension: int, seed: int = 0) -> NDArray[np.float32]:
    random = np.random.default_rng(seed)
    return random.standard_normal((count, dimension), dtype=np.float32)


def with_layer(folder: Path, tokenizer: Path, matrix: NDArray[np.float32]) -> Path:
    """A model of which nothing is there but its tokenizer and its input-embedding layer."""
    shutil.copytree(tokenizer, folder)
    save_file({"model.embed_tokens.weight": matrix}, folder / "model.safetensors")
    return folder


def random_model(folder: Path, tokenizer: Path, size: int) -> Path:
    width = load_tokenizer(tokenizer).vocabulary.vocab_size
    return with_layer(folder, tokenizer, random_vectors(width, size, seed=size))


TURNS = "{% for m in messages %}[header {{ m.role }}]\n{{ m.content | trim }}\n\n{% endfor %}"


def alignment(
    student: Any, teacher: Any, valid: Any = None, correct: Any = None
) -> ShiftedAlignment:
    """The alignment of positions; a chunk at position 0 may begin with token 0, before it."""
    import torch

    s, t = torch.as_tensor(student), torch.as_tensor(teacher)
    chunks = max(int(s.max()), int(t.max())) + 1
    pair_valid = torch.ones((len(s), chunks)).bool() if valid is None else torch.as_tensor(valid)
    has_start = torch.ones_like(pair_valid)
    has_start[:, 0] = (s[:, :1] != 0).all(1) & (t[:, :1] != 0).all(1)
    return ShiftedAlignment(
        has_start=has_start,
        pair_valid=pair_valid,
        pair_is_correct=pair_valid if correct is None else torch.as_tensor(correct),
        student_exact_partition_mask=torch.zeros_like(s),
        teacher_exact_partition_mask=torch.zeros_like(t),
        student_chunk_id=s,
        teacher_chunk_id=t,
        num_chunks=pair_valid.sum(1),
    )


def run_python(code: str, *args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program of Python in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, args)]
    given = {"capture_output": True, "text": True, "check": False, **options}
    done: subprocess.CompletedProcess[str] = subprocess.run(command, **given)
    return done


def two_files(small: Path) -> list[str]:
    """A pair whose tokenizers load in no time."""
    model = str(small / "small.model")
    return ["--student-model", model, "--teacher-model", model]


HEAVY = [
    *("torch", "transformers", "numba", "sentencepiece", "tiktoken", "tokenizers"),
    *("starlette", "uvicorn", "httpx", "msgspec", "prometheus_client"),
]


def write_documents(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    return path


def token(tokenizer: Tokenizer, data: bytes) -> int:
    [found] = tokenizer.segment(data)
    return found


PAIR = ["--student-model", "small.model", "--teacher-model", "bytes"]
WORK: dict[str, Sequence[str]] = {
    "build": [*PAIR, "-o", "map.safetensors"],
    "inspect": ["map.safetensors"],
    "verify": ["map.safetensors", *PAIR],
    "convert": ["map.safetensors", "-o", "map.pt"],
    "doctor": ["small.model"],
    "evaluate": ["map.safetensors", *PAIR, "--text", "text.txt"],
    "align": [*PAIR, "in 2012"],
    "vocab": ["small.model", "-t", "bytes", "-o", "vocab.jsonl"],
    "report": ["map.safetensors", "-o", "report.html"],
    "multitoken": [*PAIR, "-o", "first.safetensors"],
    "reapply-exact": ["first.safetensors", "-o", "exact.safetensors"],
    "sort-cut": ["exact.safetensors", "-k", "4", "-o", "cut.safetensors"],
    "generate": ["model", "model", "--embedding-model", "own", "-o", "near.safetensors"],
    "events": [*PAIR, "-o", "events.safetensors"],
    "transplant": ["model", "model", "-o", "copy.model"],
    "render": ["chat.json", "-m", "bytes", "--chat-template", "plain", "-o", "chat.jsonl"],
    "serve": ["--help"],  # it would need a teacher's server, and not end
    "project": ["teacher.jsonl", *PAIR, "--to", "vllm", "-o", "student.jsonl"],
}
"""The arguments of one use of each command."""
TEACHER = (
    '{"prompt_token_ids": [97, 98], '
    '"prompt_logprobs": [null, {"98": {"logprob": -0.5, "rank": 1}}]}'
)
"""What `project` reads: an answer of a teacher of bytes."""
FIRST = ["build", "multitoken", "reapply-exact", "sort-cut"]
"""These write what the others read."""
