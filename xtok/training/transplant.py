"""`transplant`: give a model another tokenizer, and compute its embeddings from the old ones."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from xtok import __version__
from xtok._lib.io import atomic_folder, check_folder
from xtok._lib.progress import Progress, silent
from xtok.building.embeddings.input_layer import choose_layer
from xtok.building.embeddings.sources import require_embedding_rows
from xtok.config import DEFAULT_SHRINK
from xtok.errors import MALFORMED, EmbeddingError, TokenizerError, XtokError
from xtok.maps.edges import Edges, single_edges
from xtok.maps.map_arguments import MapLike, bind_map
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers import ModelLike, Tokenizer, load_pair, load_tokenizer
from xtok.tokenizers.checkpoint import INDEX, Checkpoint, checkpoint_of, read_header, read_tensor
from xtok.tokenizers.display import listed
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import MAX_WIDTH, TokenTable, TokenType
from xtok.training.running import evaluating

Init: TypeAlias = Literal["pieces", "mean"]
"""How to compute the row of a token that the model lacks: `pieces` (the mean of the rows of the
token's pieces), or `mean` (the mean of all rows)."""

RECORD = "xtok_transplant.json"
"""File that marks an output folder, with options, counts and file names."""

_COPIED_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "USE_POLICY.md")
_ID_LISTS = (
    "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids",
    "forced_decoder_ids", "sequence_bias",
)  # fmt: skip
_SENTENCEPIECE = "tokenizer.model"
_CONFIG, _GENERATION_CONFIG = "config.json", "generation_config.json"
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class Transplant:
    """The result of `transplant`: the new model's folder, and the number of rows by origin."""

    folder: str
    model: str
    tokenizer: str
    old_vocab_size: int
    vocab_size: int
    copied: int  # tokens that both tokenizers contain
    roles: int  # control tokens, copied from the token with the same role
    composed: int  # tokens computed from the rows of other tokens
    empty: int  # tokens without pieces, which get the mean of all rows
    padding: int  # rows without a token, filled with the mean of all rows
    bits_before: float | None = None  # bits per byte of the model with the old tokenizer
    bits_after: float | None = None
    notes: tuple[str, ...] = ()


class NewRows(NamedTuple):
    """The new rows as weighted sums of old rows: W · E_old, mixed with the mean of E_old."""

    edges: Edges  # W: new ids (sorted), old ids, weights
    mean_share: NDArray[np.float32]  # [V_new], share of the mean in each row
    old_ids: NDArray[np.int64]  # old rows that contribute to the mean

    def without_shrinkage(self) -> NewRows:
        """Return the rows without shrinkage. Rows without edges still get the mean."""
        share = np.ones_like(self.mean_share)
        share[self.edges.student_ids] = 0
        return self._replace(mean_share=share)

    def blocks(self, old: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the new rows of a tensor `[V_old, ...]` in blocks, in the tensor's dtype."""
        dtype = torch.promote_types(old.dtype, torch.float32)
        some = torch.from_numpy(self.old_ids).split(_ROWS_AT_ONCE)  # in float64
        total = sum((old[ids].double().sum(0) for ids in some), torch.zeros(old.shape[1:]))
        mean = (total / len(self.old_ids)).to(dtype)
        per_row = (-1, *[1] * (old.ndim - 1))
        for start in range(0, len(self.mean_share), _ROWS_AT_ONCE):
            share = torch.from_numpy(self.mean_share[start : start + _ROWS_AT_ONCE]).to(dtype)
            first, last = np.searchsorted(self.edges.student_ids, [start, start + len(share)])
            new_ids, old_ids, weights = (torch.tensor(array[first:last]) for array in self.edges)
            rows = torch.zeros((len(share), *mean.shape), dtype=dtype)
            rows.index_add_(0, new_ids - start, old[old_ids] * weights.to(dtype).reshape(per_row))
            share = share.reshape(per_row)
            yield ((1 - share) * rows + share * mean).to(old.dtype)


def transplant(
    model: str | PathLike[str],
    tokenizer: ModelLike,
    folder: str | PathLike[str],
    *,
    init: Init | MapLike = "pieces",
    shrink: float = DEFAULT_SHRINK,
    pad_to_multiple_of: int = 1,
    documents: Sequence[str] = (),
    progress: Progress = silent,
) -> Transplant:
    """Give a model another tokenizer, and write the model to a folder that Transformers can load.

    A token that the old tokenizer also contains keeps its row, and a control token gets the row of
    the old token with the same role. All other rows are weighted means of old rows. Train the new
    model afterwards, with the original model as the teacher.

    Args:
        model: a folder or repo with safetensors weights.
        tokenizer: the new tokenizer, which Transformers must be able to load.
        folder: the output folder, which must be missing, empty, or an unchanged result of
            `transplant`.
        init: how to compute the row of a token that the model lacks. `pieces`: the mean of the rows
            of the old tokens that spell the token. `mean`: the mean of all rows. A map from the new
            tokenizer (rows) to the old tokenizer (columns): the mean of old rows, weighted by the
            map.
        shrink: share of the mean of all rows, from 0 to 1, that is mixed into the rows of tokens
            that the model lacks. If the model's head is separate from its input embeddings,
            `shrink` affects only the head.
        pad_to_multiple_of: round the number of rows up to a multiple of this number.
        documents: texts for measuring the bits per byte of the original and the new model.
        progress: called for each pass over a vocabulary or the weights.

    Raises:
        EmbeddingError: if the model has no usable weights, or its architecture is not supported.
        TokenizerError: if xtok or Transformers cannot load a tokenizer.
        OutputError: if the folder cannot be written, or contains other files.
        XtokError: if `init` is unknown, or the map belongs to other tokenizers.
        ValueError: if `shrink` is not from 0 to 1, or `documents` is a string.
    """
    if not 0 <= shrink <= 1:
        raise ValueError(f"shrink is {shrink}, expected a number from 0 to 1")
    if isinstance(documents, str):  # a string would be read as a list of one-character documents
        raise ValueError(f"documents is the string {documents[:20]!r}, expected a list of strings")
    if isinstance(init, str) and init not in get_args(Init) and not Path(init).is_file():
        raise XtokError(
            f"init is {init}, expected {', '.join(get_args(Init))} or the path of an existing map",
            hint="pass an expected value with {option}",
            parameter="init",
        )
    target = check_folder(folder, record=RECORD)
    old = load_tokenizer(model)
    new = _at_own_width(load_tokenizer(tokenizer), pad_to_multiple_of)
    pair = Pair(new.vocabulary, old.vocabulary, new, old)
    source = checkpoint_of(old)
    if source is None:
        raise EmbeddingError(
            f"{old.vocabulary.model_id} is a tokenizer file without weights",
            hint="give a model's folder or repo id",
        )
    source.tensor_files()  # before longer work
    rows, counts = new_rows(pair, init, shrink, progress)
    widths = range(pair.shape[0], pair.shape[1] + 1, pad_to_multiple_of)  # the padded width
    is_same = new.definition_sha256 == old.definition_sha256 and pair.shape[1] in widths
    plan = None if is_same else _plan_weights(source, old, rows)
    bits_before = _measure_bits(source.folder(), old, documents)
    with atomic_folder(target) as temporary:
        if plan is None:
            notes = [f"{old.vocabulary.model_id} already has this tokenizer; the folder is a copy"]
            for path in filter(Path.is_file, source.folder().iterdir()):
                shutil.copyfile(path, temporary / path.name)
        else:
            _write_weights(plan, temporary, progress)
            notes = [*_first_token_notes(pair), *_write_settings(source, pair, temporary)]
            _write_tokenizer(new, temporary)
        result = Transplant(
            folder=str(folder), model=old.vocabulary.model_id, tokenizer=new.vocabulary.model_id,
            old_vocab_size=pair.shape[1], vocab_size=pair.shape[1 if is_same else 0],
            **counts, notes=tuple(notes),
        )  # fmt: skip
        _write_record(result, init, shrink, temporary)
    bits_after = bits_before if is_same else _measure_bits(target, new, documents)
    return replace(result, bits_before=bits_before, bits_after=bits_after)


def new_rows(
    pair: Pair, init: Init | MapLike, shrink: float, progress: Progress = silent
) -> tuple[NewRows, dict[str, int]]:
    """Return the new rows as weighted sums of old rows, and the number of rows by origin.

    In `pair`, the new tokenizer is the student, and the old one is the teacher.
    """
    table, old_table = pair.tables
    old_eos = old_table.roles.get("eos", ())
    partners = pair.equal_bytes.copy()
    for new_id, old_id in pair.equal_roles.items():
        # A model predicts the end of a text, but never padding, so the two must not share a row.
        roles = table.roles_by_id.get(new_id, ())
        if not ("pad" in roles and "eos" not in roles and old_id in old_eos):
            partners[new_id] = old_id
    # All positions attend to the first token, so a token that begins texts gets the row of the old
    # first token, even if the token also begins turns. A token that also ends texts keeps the row
    # of an end token.
    for new_id in set(table.roles.get("bos", ())) - set(table.roles.get("eos", ())):
        partners[new_id] = next(iter(old_table.roles.get("bos", ())), partners[new_id])
    # If several ids have the same bytes (`<0x0A>` and a newline), the tokenizer emits only one. If
    # both had the same row, each would get half of the probability.
    partners[np.setdiff1d(table.text_ids, table.emitted_ids)] = -1
    copied = np.flatnonzero(partners >= 0)
    missing = table.emitted_ids[partners[table.emitted_ids] < 0]
    parts = [single_edges(copied, partners[copied]), _compose(pair, init, missing, progress)]
    edges = Edges.concatenate(parts)
    edges = edges.take(np.argsort(edges.student_ids, kind="stable"))
    share = np.ones(len(table), np.float32)
    share[edges.student_ids] = shrink
    share[copied] = 0
    num_equal = int((partners[table.emitted_ids] >= 0).sum())
    counts = {
        "copied": num_equal,
        "roles": len(copied) - num_equal,
        "composed": len(np.unique(parts[1].student_ids)),
        "padding": int((table.types == TokenType.UNUSED).sum()),
    }
    counts["empty"] = len(table) - sum(counts.values())
    old_ids = np.flatnonzero(old_table.types != TokenType.UNUSED)
    return NewRows(edges, share, old_ids), counts


def _compose(pair: Pair, init: Init | MapLike, ids: NDArray[np.int64], progress: Progress) -> Edges:
    """Return edges for tokens that the old tokenizer lacks; each token's weights sum to 1."""
    if init == "mean":
        return single_edges((), ())
    if init == "pieces":
        pieces, counts = pair.pieces(ids, progress)
        return Edges(np.repeat(ids, counts), pieces, np.repeat(1 / np.maximum(counts, 1), counts))
    projection = ProjectionMap.of(init)
    new, old = pair.tokenizers
    if not projection.student.is_lower_bound:  # the map can contain rows for padding
        new = new.at_width(projection.student.vocab_size)
    projection, _ = bind_map(projection, load_pair(new, old))
    edges: Edges = projection.edges.take(~projection.is_slot)
    return edges.take(np.isin(edges.student_ids, ids)).normalized()


_NewWeights: TypeAlias = tuple[dict[Path, dict[str, Any]], dict[str, NewRows]]
"""The header of each safetensors file, and the new rows of each tensor."""


def _plan_weights(source: Checkpoint, old: Tokenizer, rows: NewRows) -> _NewWeights:
    name, settings, files = old.vocabulary.model_id, source.json(_CONFIG), source.tensor_files()
    if "quantization_config" in settings:
        raise EmbeddingError(
            f"the weights of {name} are quantized, expected floats",
            hint="give the original checkpoint, before quantization",
        )
    layer = choose_layer(files, source)
    has_rows_by_class, is_tied = _vocabulary_tensors(source, name)
    paths = [source.shard(file) for file in dict.fromkeys(files.values())]
    headers = {path: read_header(path) for path in paths}
    shapes = {t: info["shape"] for header in headers.values() for t, info in header.items()}
    num_rows = shapes[layer][0]
    require_embedding_rows(old, num_rows, layer)

    def has_rows(tensor: str) -> bool:
        matches = [
            has_rows_by_class[t]
            for t in has_rows_by_class
            if f".{t}".endswith(f".{tensor}") or tensor.endswith(f".{t}")
        ]
        return tensor == layer or (any(matches) if matches else shapes[tensor][:1] == [num_rows])

    input_rows = rows if is_tied else rows.without_shrinkage()
    return headers, {t: input_rows if t == layer else rows for t in shapes if has_rows(t)}


def _vocabulary_tensors(source: Checkpoint, name: str) -> tuple[dict[str, bool], bool]:
    """Return whether each tensor of a model's class has one row per token, by tensor name.

    The second value is True if the model uses its input embeddings as its head.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source.find(_CONFIG) or "", trust_remote_code=False)
        wider = copy.deepcopy(config)
        wider.vocab_size += 1
        from_config: Any = AutoModelForCausalLM.from_config
        with torch.device("meta"):
            tensors, wider_tensors = (
                from_config(each, trust_remote_code=False).state_dict() for each in (config, wider)
            )
    except (*MALFORMED, ImportError, OSError, StrictDataclassError) as error:
        problem = " ".join(str(error).split())[:200]
        raise EmbeddingError(
            f"Transformers has no causal language model for the config.json of {name}: {problem}",
            hint="give a model that AutoModelForCausalLM loads without custom code",
        ) from error
    problem = ""
    if config.get_text_config() is not config:
        problem = "also reads input other than text"
    elif getattr(config, "vocab_size_per_layer_input", 0) and config.hidden_size_per_layer_input:
        problem = "has embeddings in each layer"
    elif any(a.shape[1:] != wider_tensors[n].shape[1:] for n, a in tensors.items()):
        problem = "has a tensor with one column per token"
    if problem:
        raise EmbeddingError(
            f"the model {name} ({config.model_type}) {problem}, which is not supported",
            hint="use a text-only model with one input-embedding layer",
        )
    is_tied = bool(getattr(config, "tie_word_embeddings", True))
    return {n: tensor.shape != wider_tensors[n].shape for n, tensor in tensors.items()}, is_tied


def _write_weights(plan: _NewWeights, folder: Path, progress: Progress) -> None:
    """Write the weights file by file. At most one old matrix is in memory."""
    (headers, new_rows), names, total = plan, dict[str, str](), 0
    for path, tensors in headers.items():
        header, size = _new_header(tensors, new_rows)
        encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        encoded += b" " * (-len(encoded) % 8)
        old = np.memmap(path, mode="r")
        start = 8 + int(old[:8].view("<u8")[0])
        with (folder / path.name).open("wb") as file, progress(f"writing {path.name}", size) as add:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for name, info in tensors.items():
                if name in new_rows:
                    for block in new_rows[name].blocks(read_tensor(path, name, (1, 2))):
                        add(file.write(block.view(torch.uint8).numpy().data))
                else:
                    first, last = info["data_offsets"]
                    add(file.write(old[start + first : start + last].data))
        names, total = names | dict.fromkeys(tensors, path.name), total + size
    if len(headers) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        _write_json(folder / INDEX, index)


def _new_header(
    tensors: Mapping[str, Any], new_rows: Mapping[str, NewRows]
) -> tuple[dict[str, Any], int]:
    header, size = dict[str, Any](), 0
    for name, info in tensors.items():
        (first, last), shape = info["data_offsets"], info["shape"]
        length = last - first
        if name in new_rows:
            num_rows = len(new_rows[name].mean_share)
            length, shape = length // shape[0] * num_rows, [num_rows, *shape[1:]]
        header[name] = {**info, "shape": shape, "data_offsets": [size, size + length]}
        size += length
    return header, size


def _first_token_notes(pair: Pair) -> list[str]:
    (new, old), (table, old_table) = pair.tokenizers, pair.tables
    if old.bos_id is None or new.bos_id is not None:
        return []
    bos = table.roles.get("bos", ())
    fix = f"begin each text with {table.name(bos[0])} yourself" if bos else "it has no bos token"
    old_first = old_table.name(old.bos_id)
    return [
        f"the model's tokenizer begins each text with {old_first}, but {new.vocabulary.model_id} "
        f"adds no first token; {fix}"
    ]


def _write_settings(source: Checkpoint, pair: Pair, folder: Path) -> list[str]:
    """Write both config files, copy the licence, and return notes."""
    table, old_table = pair.tables
    ends, old_ends = [*table.roles.get("eos", ())], old_table.roles.get("eos", ())
    for i in table.roles.get("turn_end", ()):  # a token with an old end token's row ends texts
        ends += [i] if i not in ends and pair.equal_roles.get(i) in old_ends else []
    config, generation = source.json(_CONFIG), source.json(_GENERATION_CONFIG)
    config.pop("tokenizer_class", None)
    dropped = [key for settings in (config, generation) for key in _set_ids(settings, table)]
    config["vocab_size"] = len(table)
    generation["eos_token_id"] = ends if len(ends) > 1 else generation["eos_token_id"]
    _write_json(folder / _CONFIG, config)
    _write_json(folder / _GENERATION_CONFIG, generation)
    for path in filter(None, map(source.find, _COPIED_FILES)):
        shutil.copyfile(path, folder / path.name)
    notes = [f"keys removed from the configs (ids of the old tokenizer): {listed(dropped)}"]
    return notes if dropped else []


def _set_ids(settings: dict[str, Any], table: TokenTable) -> list[str]:
    """Set special-token ids in a config, and return the keys without a new id."""
    dropped, always = [], dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    for key in {**always, **settings}:
        if key.endswith("_token_id"):
            old, ids = settings.pop(key, None), table.roles.get(key.removesuffix("_token_id"), ())
            if ids or key in always:  # other ids cannot be null (XGLM)
                settings[key] = ids[0] if ids else None
            dropped += [key] if old is not None and not ids else []
        elif key in _ID_LISTS and settings[key]:
            del settings[key]
            dropped.append(key)
    return dropped


def _write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer's files, and check that Transformers loads the same tokenizer."""
    from transformers import AutoTokenizer

    library, files = tokenizer.library, checkpoint_of(tokenizer)
    library.save_pretrained(folder)
    path = None if files is None else files.find(_SENTENCEPIECE)  # for llama.cpp's converter
    if path is not None:
        shutil.copyfile(path, folder / path.name)
    # The class that Transformers chooses can depend on the model's type.
    reloaded = AutoTokenizer.from_pretrained(folder)
    if reloaded.backend_tokenizer.to_str() != library.backend_tokenizer.to_str():
        raise TokenizerError(
            f"in the model's folder, Transformers loads {tokenizer.vocabulary.model_id} as "
            f"{type(reloaded).__name__}, which differs from {type(library).__name__}",
            hint="add the tokenizer's class to its tokenizer_config.json",
        )


def _at_own_width(tokenizer: Tokenizer, multiple: int) -> Tokenizer:
    """Return a tokenizer with the width of its largest id + 1, rounded up to `multiple`."""
    name, library = tokenizer.vocabulary.model_id, tokenizer.library
    if library is None or not hasattr(library, "backend_tokenizer"):
        raise TokenizerError(
            f"Transformers cannot load the tokenizer {name}",
            hint="use a folder or repo with a tokenizer.json",
        )
    width = math.ceil((1 + max(library.get_vocab().values())) / multiple) * multiple
    if width > MAX_WIDTH:
        raise XtokError(
            f"{name}, padded to a multiple of {multiple}, has {width:,} rows, expected at most "
            f"{MAX_WIDTH:,}",
            hint="pass a smaller multiple with {option}",
            parameter="pad_to_multiple_of",
        )
    return tokenizer.at_width(width)


def _write_record(result: Transplant, init: Init | MapLike, shrink: float, folder: Path) -> None:
    excluded = "folder", "notes", "bits_before", "bits_after"
    record = {key: value for key, value in asdict(result).items() if key not in excluded}
    record |= {"init": init if init in get_args(Init) else "map", "shrink": shrink}
    record["files"] = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    _write_json(folder / RECORD, {"xtok": __version__, **record})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _measure_bits(folder: Path, tokenizer: Tokenizer, documents: Sequence[str]) -> float | None:
    if not documents:
        return None
    from transformers import AutoModelForCausalLM

    return bits_per_byte(AutoModelForCausalLM.from_pretrained(folder), tokenizer, documents)


def bits_per_byte(model: Any, tokenizer: Tokenizer, texts: Iterable[str]) -> float:
    """Return the cross-entropy of texts in bits per byte.

    Values of models with different tokenizers are comparable. A bos token precedes each text, or an
    eos token if the tokenizer has no bos token. If a model has n positions, each text is cut to n
    bytes, so that all tokenizers are measured on the same bytes.
    """
    bits, num_bytes, roles = 0.0, 0, tokenizer.table.roles
    first = [*roles.get("bos", ()), *roles.get("eos", ())][:1]
    longest = getattr(model.config, "max_position_embeddings", None)
    with torch.no_grad(), evaluating([model]):
        for text in texts:
            text = text.encode("utf-8", "replace")[:longest].decode("utf-8", "ignore")
            encoded, bounds, _ = tokenizer.encode(text)
            ids = torch.tensor([*first, *encoded.tolist()][:longest], device=model.device)
            if len(ids) < 2:
                continue
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
            nats = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
            bits += float(nats) / math.log(2)
            num_bytes += int(bounds[len(ids) - len(first)] - bounds[1 - len(first)])
    return bits / max(num_bytes, 1)
