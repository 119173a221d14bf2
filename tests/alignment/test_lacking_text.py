"""Texts with characters that are missing from one vocabulary: chunks never pair different text."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from make_tokenizers import saved, word_piece
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models

import xtok
from xtok import DistillationCollator, Retokenizer, TokenAligner
from xtok.errors import TokenizerError
from xtok.tokenizers import Tokenizer, load_tokenizer

WORDS = ["the", "lamp", "a", "keeper", "lit", "ß", "ßa", "théa", "é", "éé", "🌊", "\n", "\r\n"]
FEW = 100  # texts per kind and direction (four in all)


def texts(seed: int, count: int = FEW) -> list[str]:
    """Return short and long texts of a few words, so that sequences of words repeat."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.choice((2, 4, 6, 30)))) for _ in range(count)]


ALPHABET = "thelampkriéß \n"
MERGES = [("t", "h"), ("th", "e"), (" ", "the"), ("l", "a"), ("la", "m"), ("lam", "p"), (" ", "a"),
          ("k", "e"), ("ke", "e"), ("ß", "a")]  # fmt: skip


def lacking(folder: Path, kind: str, without: str) -> Tokenizer:
    """Return a tokenizer without some characters: it drops them or uses an unknown token."""

    if kind == "word-piece":
        return load_tokenizer(word_piece(folder, lowercase=False))
    alphabet = [c for c in ALPHABET if c not in without]
    merges = [(x, y) for x, y in MERGES if not set(x + y) & set(without)]
    tokens = ["<unk>", *alphabet, *(x + y for x, y in merges)]
    ids = {token: i for i, token in enumerate(tokens)}
    unknown = None if kind == "drops" else "<unk>"
    model: Any = models.BPE(ids, merges, unk_token=unknown, fuse_unk=kind == "fused")
    if kind == "unigram":
        scores = [(t, -3.0 / len(t)) for t in tokens]
        model = models.Unigram(scores, unk_id=0, byte_fallback=False)
    rust = Rust(model)
    rust.decoder = decoders.Fuse()
    return load_tokenizer(saved(folder, rust))


KINDS = ("unknown", "fused", "unigram", "drops", "word-piece")
Sides = tuple[Tokenizer, Tokenizer]


def stretch(data: bytes, spans: list[tuple[int, int]]) -> tuple[int, int]:
    start, end = min(a for a, _ in spans), max(b for _, b in spans)
    inner = data[start:end]
    if not inner.strip():
        return start, end
    return end - len(inner.lstrip()), start + len(inner.rstrip())


def num_shared(student: list[tuple[int, int]], teacher: list[tuple[int, int]]) -> int:
    """Return the number of byte offsets at which a token ends on both sides."""
    return len({end for _, end in student} & {end for _, end in teacher})


@pytest.fixture(scope="module", params=[(k, other) for k in KINDS for other in ("bytes", "lacks")])
def sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sides:
    kind, other = request.param
    folder = tmp_path_factory.mktemp(kind)
    first = lacking(folder / "one", kind, "é\n")
    if other == "bytes":
        return first, load_tokenizer("bytes")
    return first, lacking(folder / "other", "unknown", "ß\n")


load_rust = cache(Rust.from_file)


def spans(tokenizer: Tokenizer, text: str) -> list[tuple[int, int]]:
    """Return the byte spans of tokens according to the library."""
    if tokenizer.vocabulary.model_id == "bytes":
        return [(i, i + 1) for i in range(len(text.encode()))]
    library = load_rust(f"{tokenizer.location}/tokenizer.json")
    offsets = library.encode(text, add_special_tokens=False).offsets
    return [(len(text[:a].encode()), len(text[:b].encode())) for a, b in offsets]


def check_chunks(
    text: str, pair: Sides, ids: list[list[int]], text_spans: list[list[tuple[int, int]]],
    chunks: list[list[int]],
) -> int:  # fmt: skip
    """Check that each chunk covers the same bytes on both sides, without an unknown token."""
    count = max([-1, *chunks[0]]) + 1
    stretches: list[list[tuple[int, int]]] = []
    for tokenizer, own_spans, own, chunk in zip(pair, text_spans, ids, chunks, strict=True):
        members: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        for at, token, number in zip(own_spans, own, chunk[: len(own)], strict=True):
            if number >= 0:
                members[number].append(at)
                assert tokenizer.table[token]
        stretches.append([stretch(text.encode(), chunk_tokens) for chunk_tokens in members])
    assert stretches[0] == stretches[1], text
    return count


@pytest.mark.parametrize("turned", [False, True])
def test_text_after_different_control_tokens_is_aligned(turned: bool, tmp_path: Path) -> None:
    pair, begins = [], []
    for name, without, special in (
        ("one", "é", ("<|im_start|>",)), ("other", "ß", ("<bos>", "<start_of_turn>")),
    ):  # fmt: skip
        lacking(tmp_path / "plain", "drops", without)
        rust = Rust.from_file(str(tmp_path / "plain" / "tokenizer.json"))
        rust.add_special_tokens(list(special))
        pair.append(load_tokenizer(saved(tmp_path / name, rust)))
        begins.append([rust.get_vocab()[token] for token in special])
    if turned:
        pair, begins = pair[::-1], begins[::-1]
    assert all(tokenizer.drops_text for tokenizer in pair)
    aligner = TokenAligner(xtok.load_pair(*pair))
    ids = [tokenizer.encode_batch(["the lamp a keeper"])[0] for tokenizer in pair]
    document = aligner.align_document(*ids)
    assert document.num_chunks[0] > 3
    for num_before in ([1, 1], [1, 2], [2, 1], [0, 2], [1, 0]):
        starts = [own[:count] for own, count in zip(begins, num_before, strict=True)]
        rows = [[*start, *own] for start, own in zip(starts, ids, strict=True)]
        alignment = aligner.align_document(*rows)
        for side, start in zip(("student", "teacher"), starts, strict=True):
            chunk = getattr(alignment, f"{side}_chunk_id")[len(start) :]
            assert chunk[0] >= 0
            assert (chunk - chunk[0]).tolist() == getattr(document, f"{side}_chunk_id").tolist()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.filterwarnings("ignore:.* cannot represent a part of the text")
@pytest.mark.filterwarnings("ignore:no chunk of this batch aligns")
def test_no_chunk_of_different_text_is_valid(sides: Sides, turned: bool) -> None:
    pair = sides[::-1] if turned else sides
    collator = DistillationCollator(*pair, bos=False)
    aligner = TokenAligner(xtok.load_pair(*pair))
    known = total = by_ids = 0
    for text in texts(int(turned)):
        ids = [tokenizer.encode_batch([text])[0] for tokenizer in pair]
        text_spans = [spans(tokenizer, text) for tokenizer in pair]
        [side] = collator([text])["teachers"]
        alignment = side["alignment"]
        if any(tokenizer.encode(text).num_changed for tokenizer in pair):
            assert bool(alignment.pair_is_correct[alignment.pair_valid].all())
        chunks = [alignment.student_chunk_id[0].tolist(), alignment.teacher_chunk_id[0].tolist()]
        known += check_chunks(text, pair, ids, text_spans, chunks)
        total += num_shared(*text_spans)
        flat = aligner.align_document(*ids)
        chunks = [flat.student_chunk_id.tolist(), flat.teacher_chunk_id.tolist()]
        by_ids += check_chunks(text, pair, ids, text_spans, chunks)
        shown = xtok.align(*pair, text)
        assert [p.student_tokens for p in shown.pairs] == runs(
            alignment.student_chunk_id[0].tolist()
        )
    assert by_ids <= known
    # After a dropped character, the library's offsets are shifted, so few chunks can be confirmed.
    kind = Path(str(sides[0].location)).parent.name.rstrip("0123456789")
    least = {"drops": 0.1, "word-piece": 0.05}.get(kind, 0.65)
    assert known > least * total


def test_unknown_tokens_are_unaligned(tmp_path: Path) -> None:
    student = lacking(tmp_path / "one", "unknown", "é\n")
    pair = xtok.load_pair(student, "bytes")
    shown = xtok.align(student, "bytes", "the é the the")
    assert all(len(p.student_ids) == 1 for p in shown.pairs)
    assert (shown.student_unaligned, shown.teacher_unaligned) == (1, 2)
    assert shown.num_correct == len(shown.pairs)
    ids = [tokenizer.encode("the é the the").ids for tokenizer in pair.tokenizers]
    by_ids = TokenAligner(pair).align_document(*ids)
    assert by_ids.is_correct.all()
    assert (by_ids.student_chunk_id[3:] < 0).all()


def test_unaligned_text_is_noted(tmp_path: Path) -> None:
    for kind in ("unknown", "drops"):
        collator = DistillationCollator("bytes", lacking(tmp_path / kind, kind, "é\n"))
        with pytest.warns(UserWarning, match="cannot represent"):
            collator(["the é the"])


@pytest.mark.filterwarnings("ignore:.*the targets contain no end-of-turn token")
def test_chats_with_unknown_text(tmp_path: Path) -> None:
    student = lacking(tmp_path / "one", "unknown", "é")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the é the the"}]
    templates: Any = {"student_template": "plain", "teacher_templates": ["plain"]}
    [side] = DistillationCollator(student, "bytes", **templates)([chat])["teachers"]
    alignment = side["alignment"]
    assert bool(alignment.pair_is_correct[alignment.pair_valid].all())
    assert int((alignment.student_chunk_id[0] >= 0).sum()) >= 4


# The student's bytes as the teacher's tokens


@pytest.mark.parametrize("kind", ["unknown", "fused", "unigram", "drops"])
def test_retokenizer_refuses_text_that_it_cannot_spell(kind: str, tmp_path: Path) -> None:
    teacher = lacking(tmp_path / kind, kind, "é\n")
    retokenize = Retokenizer(xtok.load_pair("bytes", teacher))
    for text in (*texts(7, 40), "the lamp", "a lamp lit", "é", "a\r\nb"):
        row = list(text.encode())
        if set(text) <= set(ALPHABET) - {"é", "\n"}:
            [ids] = retokenize([row])
            assert b"".join(teacher.table[i] for i in ids) == text.encode()
        else:
            with pytest.raises(TokenizerError, match="cannot spell"):
                retokenize([row])


def test_unknown_tokens_of_the_student_are_in_no_chunk(tmp_path: Path) -> None:
    student = lacking(tmp_path / "one", "unknown", "é")
    ids = torch.tensor([student.encode("the é the").ids.tolist()])
    collator = DistillationCollator(student, "bytes")
    [side] = collator.from_student_ids(ids, torch.ones_like(ids), ids)["teachers"]
    unknown = torch.isin(ids, torch.tensor(student.table.roles["unk"]))
    assert torch.equal(side["alignment"].student_chunk_id < 0, unknown)
    assert bool(side["alignment"].pair_is_correct[side["alignment"].pair_valid].all())


def runs(chunk: list[int]) -> list[tuple[int, int]]:
    """Return the first token and the end of each chunk."""
    return [
        (chunk.index(number), len(chunk) - chunk[::-1].index(number))
        for number in sorted({*chunk} - {-1})
    ]
