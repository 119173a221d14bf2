"""`transplant`: a model with another tokenizer, for several architectures."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import fails, fits_80_columns, killed, on_a_full_disk, printed_json, works
from conftest import Cli
from forked import Forks
from safetensors.torch import load_file, save_file
from tiny_models import logged, tiny_model

import xtok
from xtok.errors import OutputError
from xtok.tokenizers import load_tokenizer
from xtok.tokenizers.table import TokenType
from xtok.training.transplant import RECORD, Transplant, bits_per_byte

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, untied": ("llama", {"tie_word_embeddings": False}),
    "gemma, scaled": ("gemma3_text", {"head_dim": 8, "layer_types": ["full_attention"]}),
    "gpt2, without its prefix": ("gpt2", {"n_positions": 64}),
    "phi, a bias of the head": ("phi", {}),
    "gpt_neox, another head": ("gpt_neox", {"tie_word_embeddings": False}),
    "opt, a decoder inside": ("opt", {"word_embed_proj_dim": 16, "ffn_dim": 32}),
    "falcon_h1, infinity in its config": (
        "falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4},
    ),
    "xglm, an id that cannot be null": (
        "xglm", {"d_model": 16, "ffn_dim": 32, "num_layers": 1, "attention_heads": 2},
    ),
}  # fmt: skip
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def saved_model(
    folder: Path, tokenizer: Path, kind: str, options: dict[str, Any], **saved: Any
) -> Path:
    """Write a random model with the tokenizer of a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    old = load_tokenizer(tokenizer)
    roles = old.table.roles
    config = AutoConfig.for_model(
        kind, **SIZES, vocab_size=old.vocabulary.vocab_size, **options,
        bos_token_id=roles["bos"][0], eos_token_id=roles["eos"][0], pad_token_id=roles["pad"][0],
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    for parameter in model.parameters():  # biases as well
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, **saved)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    return folder


@pytest.fixture
def model(tmp_path: Path, small: Path) -> Path:
    """A Llama model with tied embeddings and the tokenizer `small-digits`."""
    return saved_model(tmp_path / "model", small / "small-digits", *CONFIGS["llama, tied"])


@pytest.fixture
def new(small: Path) -> Path:
    return small / "small-byte-level"


def loaded(folder: Path) -> tuple[Any, Any]:
    """Load a folder with Transformers, and require all weights to come from the checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, about = loaded
    assert not any(about.values()), about
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def weights_of(folder: Path, get: str = "get_input_embeddings") -> Any:
    return getattr(loaded(folder)[0], get)().weight.detach()


def config_of(folder: Path, name: str = "config") -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return values


def change_config(folder: Path, **values: Any) -> Path:
    """Change values of a folder's config.json."""
    (folder / "config.json").write_text(json.dumps(config_of(folder) | values))
    return folder


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_new_model_predicts_shared_tokens_as_the_original(
    name: str, tmp_path: Path, small: Path, new: Path
) -> None:
    """Input, body, head and bias together: the logits of shared tokens are equal."""
    source = saved_model(tmp_path / "model", small / "small-digits", *CONFIGS[name])
    if "prefix" in name:
        path = source / "model.safetensors"
        weights = {k.removeprefix("transformer."): v for k, v in load_file(path).items()}
        save_file(weights, path, {"format": "pt"})
    result = xtok.transplant(source, new, tmp_path / "new")
    pair = xtok.load_pair(new, source)
    new_ids = np.flatnonzero(pair.equal_bytes >= 0)[:64]
    old_ids = pair.equal_bytes[new_ids]
    (ours, library), (theirs, _) = loaded(tmp_path / "new"), loaded(source)
    with torch.no_grad():
        mine, original = (
            model(input_ids=torch.from_numpy(ids)[None]).logits[0]
            for model, ids in ((ours, new_ids), (theirs, old_ids))
        )
    assert torch.equal(mine[:, new_ids], original[:, old_ids])
    assert mine.shape[1] == result.vocab_size == len(library) == 1200
    for parameter, value in theirs.state_dict().items():
        if value.shape[:1] != (result.old_vocab_size,):
            assert torch.equal(ours.state_dict()[parameter], value), parameter


def test_rows_are_copied_or_the_mean_of_their_pieces(
    model: Path, new: Path, tmp_path: Path
) -> None:
    result = xtok.transplant(model, new, tmp_path / "new", shrink=0.0, pad_to_multiple_of=128)
    ours, theirs, pair = weights_of(tmp_path / "new"), weights_of(model), xtok.load_pair(new, model)
    table, old = pair.tables
    mean = theirs[torch.from_numpy(old.types != TokenType.UNUSED)].double().mean(0).float()
    for i in range(len(ours)):
        token, partner = (table[i], pair.partners[i]) if i < len(table) else (b"", -1)
        pieces = theirs[pair.pieces(np.array([i])).ids] if token else mean[None]
        if partner >= 0:
            assert torch.equal(ours[i], theirs[partner])
        else:
            torch.testing.assert_close(ours[i], pieces.mean(0))
    assert (result.copied, result.roles, result.composed) == (782, 5, 413)
    assert (result.empty, result.padding) == (0, 80)
    assert (result.old_vocab_size, result.vocab_size, len(ours)) == (896, 1280, 1280)
    assert (result.model, result.tokenizer) == ("model", "small-byte-level")
    assert (result.bits_before, result.bits_after, result.notes) == (None, None, ())


def test_ids_that_the_tokenizer_never_emits_have_the_mean_row(
    model: Path, small: Path, tmp_path: Path
) -> None:
    """A second row for a newline (`<0x0A>`) would take half of its probability."""
    result = xtok.transplant(model, small / "small-hf", tmp_path / "new")
    ours, theirs = weights_of(tmp_path / "new"), weights_of(model)
    table, old = xtok.load_pair(small / "small-hf", model).tables
    mean = theirs[torch.from_numpy(old.types != TokenType.UNUSED)].double().mean(0).float()
    num_duplicates = 0
    for token, emitted in table.canonical_ids().items():
        for i in set(table.ids_of(token)) - {emitted}:
            num_duplicates += 1
            torch.testing.assert_close(ours[i], mean)
            assert not torch.allclose(ours[emitted], mean)
    assert num_duplicates == len(table.text_ids) - len(table.canonical_ids()) > 50
    assert result.empty >= num_duplicates


def test_shrink_mixes_pieces_with_the_mean_row(model: Path, new: Path, tmp_path: Path) -> None:
    pair = xtok.load_pair(new, model)
    composed = np.flatnonzero(pair.partners[:1200] < 0)
    rows = {}
    kinds: dict[str, dict[str, Any]] = {
        "pieces": {"shrink": 0.0}, "mean": {"init": "mean"}, "shrunk": {}, "all": {"shrink": 1.0}
    }  # fmt: skip
    for name, options in kinds.items():
        xtok.transplant(model, new, tmp_path / name, **options)
        rows[name] = weights_of(tmp_path / name)
    others = np.setdiff1d(np.arange(1200), composed)
    for name in rows:
        assert torch.equal(rows[name][others], rows["pieces"][others])
    ours = {name: matrix[composed] for name, matrix in rows.items()}
    torch.testing.assert_close(ours["shrunk"], 0.8 * ours["pieces"] + 0.2 * ours["mean"])
    assert torch.equal(ours["all"], ours["mean"])
    assert (ours["mean"] == ours["mean"][0]).all()
    assert not torch.equal(ours["pieces"], ours["mean"])


def test_only_an_untied_head_is_shrunk(small: Path, new: Path, tmp_path: Path) -> None:
    """In the input embeddings, the mean row increases the loss; see the guide."""
    model = saved_model(tmp_path / "model", small / "small-digits", *CONFIGS["llama, untied"])
    composed = np.flatnonzero(xtok.load_pair(new, model).partners[:1200] < 0)
    for name, shrink in (("plain", 0.0), ("new", 0.3), ("mean", 1.0)):
        xtok.transplant(model, new, tmp_path / name, shrink=shrink)
    inputs, heads = (
        {name: weights_of(tmp_path / name, get)[composed] for name in ("plain", "new", "mean")}
        for get in ("get_input_embeddings", "get_output_embeddings")
    )
    assert torch.equal(inputs["new"], inputs["plain"])
    assert torch.equal(inputs["mean"], inputs["plain"])
    torch.testing.assert_close(heads["new"], 0.7 * heads["plain"] + 0.3 * heads["mean"])
    assert not torch.equal(heads["new"], heads["plain"])


def test_the_rows_of_a_map(model: Path, new: Path, tmp_path: Path) -> None:
    """Shared tokens are copied even if a map is given. Scale slots are ignored."""
    pair = xtok.load_pair(new, model)
    projection = xtok.build(pair)
    projection.save(tmp_path / "map.safetensors")
    path = str(tmp_path / "map.safetensors")
    result = xtok.transplant(model, new, tmp_path / "new", init=path, shrink=0.0)
    ours, theirs = weights_of(tmp_path / "new"), weights_of(model)
    edges = projection.edges.take(~projection.is_slot).normalized()
    for i in np.flatnonzero(pair.partners[:1200] < 0).tolist():
        row_edges = edges.take(edges.student_ids == i)
        expected = torch.from_numpy(row_edges.weights).float() @ theirs[row_edges.teacher_ids]
        torch.testing.assert_close(ours[i], expected)
    assert torch.equal(ours[:256], weights_of(tmp_path / "new")[:256])
    assert (result.copied, result.composed, result.empty) == (782, 413, 0)
    assert config_of(tmp_path / "new", "xtok_transplant")["init"] == "map"


def test_the_folder_has_all_files_of_a_model(model: Path, new: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    source = shutil.copytree(new, tmp_path / "tokenizer")
    (source / "chat_template.jinja").write_text(template)
    (model / "LICENSE").write_text("free")
    change_config(model, sep_token_id=3, tokenizer_class="GPT2Tokenizer")
    generation = {"suppress_tokens": [7], "max_new_tokens": 5, "eos_token_id": [795, 797]}
    (model / "generation_config.json").write_text(json.dumps(generation))
    result = xtok.transplant(model, source, tmp_path / "new")
    assert result.notes == (
        "keys removed from the configs (ids of the old tokenizer): sep_token_id, suppress_tokens",
    )
    assert file_names(tmp_path / "new") == [
        "LICENSE", "chat_template.jinja", "config.json", "generation_config.json",
        "model.safetensors", "tokenizer.json", "tokenizer_config.json", RECORD,
    ]  # fmt: skip
    config, expected = config_of(tmp_path / "new"), config_of(model)
    ids = {"bos_token_id": 1194, "eos_token_id": 1195, "pad_token_id": 1198}
    del expected["tokenizer_class"], expected["sep_token_id"]
    assert config == expected | ids | {"vocab_size": 1200}
    generation = config_of(tmp_path / "new", "generation_config")
    assert generation == ids | {"eos_token_id": [1195, 1197], "max_new_tokens": 5}
    ours, library = loaded(tmp_path / "new")
    assert library.chat_template == template
    assert ours.generation_config.eos_token_id == [1195, 1197]
    text = "In 2012 there were größer 日本 😀 of them.\n"
    assert library(text).input_ids == load_tokenizer(new).library(text).input_ids
    record = config_of(tmp_path / "new", "xtok_transplant")
    assert record["files"] == {
        name: (tmp_path / "new" / name).stat().st_size
        for name in file_names(tmp_path / "new")
        if name != RECORD
    }
    assert str(tmp_path) not in json.dumps(record)


def test_an_end_of_turn_ends_a_text_if_its_row_does(model: Path, new: Path, tmp_path: Path) -> None:
    """The tokenizer declares a single end, but the model has two."""
    source = shutil.copytree(new, tmp_path / "tokenizer")
    (source / "generation_config.json").unlink()
    xtok.transplant(model, source, tmp_path / "new")
    assert config_of(tmp_path / "new", "generation_config")["eos_token_id"] == [1195, 1197]
    assert config_of(tmp_path / "new")["eos_token_id"] == 1195


def test_padding_does_not_get_the_row_of_an_end(small: Path, new: Path, tmp_path: Path) -> None:
    """Otherwise, a model with its end of text as padding would predict padding at the end."""
    source = shutil.copytree(small / "small-digits", tmp_path / "tokenizer")
    config = config_of(source, "tokenizer_config") | {"pad_token": "<|end_of_text|>"}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    model = saved_model(tmp_path / "model", source, *CONFIGS["llama, tied"])
    result = xtok.transplant(model, new, tmp_path / "new")
    rows = weights_of(tmp_path / "new")
    assert torch.equal(rows[1195], weights_of(model)[795])
    assert not torch.equal(rows[1198], rows[1195])
    assert (result.roles, result.empty) == (4, 1)


@pytest.mark.parametrize(("name", "old_id"), [("<|im_start|>", 794), ("<|end_of_text|>", 795)])
def test_a_token_that_begins_texts_has_that_row(
    name: str, old_id: int, model: Path, new: Path, tmp_path: Path
) -> None:
    """This includes a bos that starts turns (SmolLM2), but not a bos that is also eos (GPT-2)."""
    source = shutil.copytree(new, tmp_path / "tokenizer")
    config = config_of(source, "tokenizer_config") | {"bos_token": name}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    xtok.transplant(model, source, tmp_path / "new")
    [bos] = load_tokenizer(tmp_path / "new").table.roles["bos"]
    names = load_tokenizer(model).table.control_names
    assert names[old_id] == ("<|begin_of_text|>" if name == "<|im_start|>" else name)
    assert torch.equal(weights_of(tmp_path / "new")[bos], weights_of(model)[old_id])


@pytest.mark.parametrize("has_bos", [True, False])
def test_a_note_reports_that_no_first_token_is_added(
    has_bos: bool, model: Path, new: Path, tmp_path: Path
) -> None:
    """An example is Gemma with SmolLM2's tokenizer."""
    assert xtok.transplant(model, new, tmp_path / "adds").notes == ()
    source = shutil.copytree(new, tmp_path / "tokenizer")
    fields = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    (source / "tokenizer.json").write_text(json.dumps(fields | {"post_processor": None}))
    if not has_bos:
        config = config_of(source, "tokenizer_config") | {"bos_token": None}
        (source / "tokenizer_config.json").write_text(json.dumps(config))
    [note, *_] = xtok.transplant(model, source, tmp_path / "new").notes
    fix = "begin each text with <|begin_of_text|> yourself" if has_bos else "it has no bos token"
    assert note == (
        "the model's tokenizer begins each text with <|begin_of_text|>, but tokenizer adds no "
        f"first token; {fix}"
    )


def test_shards_and_their_index(model: Path, new: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole, sharded = tmp_path / "whole", shutil.copytree(model, tmp_path / "sharded")
    xtok.transplant(model, new, whole)
    (sharded / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) == 2
    xtok.transplant(sharded, new, tmp_path / "new")
    ours, expected = loaded(tmp_path / "new")[0], loaded(whole)[0]
    assert all(torch.equal(ours.state_dict()[n], v) for n, v in expected.state_dict().items())
    index = config_of(tmp_path / "new", "model.safetensors.index")
    size = sum(p.numel() * 4 for p in ours.parameters())
    assert index["metadata"] == {"total_size": size}
    assert index["weight_map"] == config_of(sharded, "model.safetensors.index")["weight_map"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_stays(dtype: torch.dtype, model: Path, new: Path, tmp_path: Path) -> None:
    path = model / "model.safetensors"
    save_file({n: w.to(dtype) for n, w in load_file(path).items()}, path, {"format": "pt"})
    change_config(model, dtype=str(dtype).removeprefix("torch."))
    xtok.transplant(model, new, tmp_path / "new")
    weights, old = load_file(tmp_path / "new" / "model.safetensors"), load_file(path)
    assert {w.dtype for w in weights.values()} == {dtype}
    pair = xtok.load_pair(new, model)
    ids = np.flatnonzero(pair.equal_bytes >= 0)
    layer = "model.embed_tokens.weight"
    assert torch.equal(weights[layer][ids], old[layer][pair.equal_bytes[ids]])
    assert list(weights) == list(old)


def test_extra_tensors_are_resized(model: Path, new: Path, tmp_path: Path) -> None:
    """An example are embeddings for multi-token prediction, which Transformers does not load."""
    path = model / "model.safetensors"
    weights = load_file(path)
    extra = {"mtp.embed.weight": weights["model.embed_tokens.weight"] * 2, "mtp.x": torch.ones(3)}
    save_file(weights | extra, path, {"format": "pt"})
    xtok.transplant(model, new, tmp_path / "new")
    ours = load_file(tmp_path / "new" / "model.safetensors")
    assert torch.equal(ours["mtp.embed.weight"], ours["model.embed_tokens.weight"] * 2)
    assert torch.equal(ours["mtp.x"], torch.ones(3))


@pytest.mark.parametrize(
    ("tokenizer", "counts"), [("small-digits", (782, 5, 13)), ("small-hf", (778, 2, 143))]
)
def test_a_smaller_vocabulary(
    tokenizer: str, counts: tuple[int, ...], small: Path, new: Path, tmp_path: Path
) -> None:
    model = saved_model(tmp_path / "model", new, *CONFIGS["llama, tied"])
    result = xtok.transplant(model, small / tokenizer, tmp_path / "new")
    ours, library = loaded(tmp_path / "new")
    text = "In 2012 there were größer 日本 😀 of them."
    assert library(text).input_ids == load_tokenizer(small / tokenizer).library(text).input_ids
    assert ours(torch.tensor([library(text).input_ids])).logits.shape[2] == result.vocab_size
    assert (result.copied, result.roles, result.composed) == counts
    assert result.vocab_size == sum(counts) + result.empty


def test_the_same_tokenizer(model: Path, small: Path, tmp_path: Path) -> None:
    result = xtok.transplant(model, small / "small-digits", tmp_path / "new")
    assert result.notes == ("model already has this tokenizer; the folder is a copy",)
    assert (result.vocab_size, result.old_vocab_size) == (896, 896)
    for path in model.iterdir():
        assert (tmp_path / "new" / path.name).read_bytes() == path.read_bytes()
    padded = xtok.transplant(model, small / "small-digits", tmp_path / "a", pad_to_multiple_of=500)
    assert (padded.vocab_size, padded.notes) == (1000, ())
    again = xtok.transplant(
        tmp_path / "a", small / "small-digits", tmp_path / "b", pad_to_multiple_of=300
    )
    assert (again.old_vocab_size, again.vocab_size) == (1000, 900)


def test_only_a_folder_of_transplant_is_replaced(model: Path, new: Path, tmp_path: Path) -> None:
    target = tmp_path / "new"
    target.mkdir()
    xtok.transplant(model, new, target)
    xtok.transplant(model, new, target, init="mean")
    assert config_of(target, "xtok_transplant")["init"] == "mean"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    trained = loaded(target)[0]
    trained.save_pretrained(target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(OutputError, match="which has changed since"):
        xtok.transplant(model, new, target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"thesis\.txt"):
        xtok.transplant(model, new, tmp_path / "other")
    with pytest.raises(OutputError, match="a file"):
        xtok.transplant(model, new, tmp_path / "other" / "thesis.txt")


def test_the_old_folder_returns_if_the_new_one_cannot_be_renamed(
    model: Path, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, replace = tmp_path / "new", Path.replace
    xtok.transplant(model, new, target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}

    def fail(path: Path, other: Path) -> Path:
        if other == target and not (path / "config.json").samefile(old_config):
            raise OSError("no rename")
        return replace(path, other)

    old_config = tmp_path / "config"
    old_config.hardlink_to(target / "config.json")
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OutputError, match="cannot be written"):
        xtok.transplant(model, new, target, init="mean")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert file_names(tmp_path) == ["config", "model", "new"]


@pytest.mark.parametrize(("stop", "code"), [("SIGTERM", 143), ("SIGKILL", 137), ("SIGINT", 130)])
def test_a_killed_run_leaves_no_incomplete_folder(
    stop: str, code: int, model: Path, new: Path, tmp_path: Path, forks: Forks
) -> None:
    """No output is incomplete, and a run an hour later removes the files of a killed run."""
    hook = """
def stop_at_the_second_file(event, args):
    if event == "open" and str(args[0]).endswith("/generation_config.json") and args[1] == "w":
        os.kill(os.getpid(), stop)
sys.addaudithook(stop_at_the_second_file)
"""
    args = ["transplant", str(model), str(new), "-o", "new"]
    result = killed(hook, stop, args, tmp_path, forks)
    assert result.returncode in (code, code - 128 - 2 * (code - 128)), result.stderr
    assert not (tmp_path / "new").exists()
    hidden = [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert len(hidden) == (stop == "SIGKILL")
    for folder in hidden:
        for path in (*folder.iterdir(), folder):
            os.utime(path, (0, 0))
    xtok.transplant(model, new, tmp_path / "new")
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_full_disk(model: Path, new: Path, tmp_path: Path, forks: Forks) -> None:
    args = ["transplant", str(model), str(new), "-o", "deep/new"]
    fails(
        on_a_full_disk(forks, 50_000, args, tmp_path), "cannot be written: File too large", "free"
    )
    assert file_names(tmp_path) == ["model"]


def test_transplant_prints_bits_and_writes_a_record(
    model: Path, new: Path, tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "text.txt").write_text("In 2012 there were 201 of them.\n" * 9, encoding="utf-8")
    args = [str(model), str(new), "--text", "text.txt"]
    result = works(cli("transplant", *args, "-o", "new"))
    values = printed_json(cli("transplant", *args, "-o", "again", "--json"))
    assert "782" in result.stdout
    assert f"{values['bits_after']:.3f} (before: {values['bits_before']:.3f})" in result.stdout
    assert fits_80_columns(result.stdout)
    assert set(values) == {f.name for f in fields(Transplant)}
    assert json.loads((tmp_path / "new" / RECORD).read_text()) == json.loads(
        (tmp_path / "again" / RECORD).read_text()
    )
    assert (tmp_path / "new" / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors"
    ).read_bytes()


def test_bits_per_byte(model: Path, new: Path, tmp_path: Path) -> None:
    """The text follows the bos token; a model of equal logits needs log2(V) bits for each token."""
    text = "In 2012 there were größer of them."
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode(text).ids
    flat = tiny_model(896, seed=0)
    for parameter in flat.parameters():
        torch.nn.init.zeros_(parameter)
    bits = bits_per_byte(flat, tokenizer, [text, text])
    assert bits == pytest.approx(np.log2(896) * len(ids) / len(text.encode()))
    real = loaded(model)[0]
    row = torch.tensor([[794, *ids.tolist()]])
    logs = real(row).logits.detach()[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])
    expected = -float(logs.sum()) / np.log(2) / len(text.encode())
    assert bits_per_byte(real, tokenizer, [text]) == pytest.approx(expected, rel=1e-5)


def test_bits_per_byte_of_long_and_empty_texts(small: Path) -> None:
    """A text has as many bytes as the model has positions, so the tokenizer does not matter."""
    text = "In 2012 there were 201 of them. " * 20
    for name in ("small.model", "small-byte-level"):
        tokenizer = load_tokenizer(small / name)
        first = next(i for role in ("bos", "eos") for i in tokenizer.table.roles[role])
        ids, bounds, _ = tokenizer.encode(text[:16])
        assert bounds[-1] == 16
        model = tiny_model(tokenizer.vocabulary.vocab_size, seed=0)
        model.config.max_position_embeddings = 16
        row = torch.tensor([[first, *ids.tolist()]])
        logs = model(row).logits.detach()[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])
        expected = -float(logs.sum()) / np.log(2) / 16
        assert bits_per_byte(model, tokenizer, ["", text]) == pytest.approx(expected, rel=1e-5)
    bytes_alone = load_tokenizer("bytes")  # excluding the first token
    flat = tiny_model(256, seed=0)
    torch.nn.init.zeros_(flat.lm_head.weight)
    assert bits_per_byte(flat, bytes_alone, ["", "h", "high"]) == pytest.approx(8)


def test_doctor_has_no_finding(model: Path, new: Path, tmp_path: Path) -> None:
    source = shutil.copytree(new, tmp_path / "tokenizer")
    (source / "chat_template.jinja").write_text(CHATML)
    xtok.transplant(model, source, tmp_path / "new")
    diagnosis = xtok.doctor(tmp_path / "new")
    checks = [check for report in diagnosis.tokenizers for check in report.checks]
    assert [check for check in checks if check.level not in ("ok", "note")] == []
    assert not diagnosis.failed


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_trl_trains_the_new_model(model: Path, new: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    xtok.transplant(model, new, tmp_path / "new")
    args = SFTConfig(
        output_dir=str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=2,
        report_to=[], save_strategy="no", use_cpu=True, logging_steps=1,
    )  # fmt: skip
    rows = Dataset.from_list([{"text": f"In {year} there were 201 of them."} for year in range(8)])
    trainer = SFTTrainer(str(tmp_path / "new"), args, train_dataset=rows)
    trainer.train()
    assert len(logged(trainer)) == 2


def test_converters_find_the_fields_that_they_require(
    model: Path, new: Path, tmp_path: Path
) -> None:
    """llama.cpp's tables contain each tensor and special token, and vLLM gets the expected rows.

    The test does not run llama.cpp's converter or vLLM.
    """
    import gguf

    xtok.transplant(model, new, tmp_path / "new")
    special = gguf.SpecialVocab(tmp_path / "new", load_merges=True)
    assert special.special_token_ids == {"bos": 1194, "eos": 1195, "pad": 1198}
    assert special.merges
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    weights = load_file(tmp_path / "new" / "model.safetensors")
    assert [n for n in weights if names.get_name(n, try_suffixes=(".weight",)) is None] == []
    width = config_of(tmp_path / "new")["vocab_size"]
    assert len(weights["model.embed_tokens.weight"]) == width
    assert width > max(loaded(tmp_path / "new")[1].get_vocab().values())
