"""Every error of a user's, word for word: what causes it, its message, and its hint.

Elsewhere, tests name the kind of an error and the parameter at fault, or a word of its message. A
`…` at the end stands for what another library says, and for lists that grow.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from make_maps import FOREIGN, GOOD, TINY, edited, pt_bytes
from numpy.typing import NDArray
from pyarrow.parquet import write_table
from safetensors.torch import save as safetensors
from stored_teachers import predicted, write_distillkit
from tiny_models import tiny_model, with_layer

import xtok
from xtok import ProjectionMap, ProjectionModule, SpellingMap, XtokError, losses
from xtok.building.counting.texts import find_texts, read_batches, text_shards
from xtok.building.embeddings.input_layer import Model, input_layer
from xtok.cli.options import read_loss
from xtok.config import EventLoss
from xtok.conversation import render, tool_suffix
from xtok.conversation.files import read_conversations
from xtok.conversation.formats import FORMATS
from xtok.maps.events import EventMap
from xtok.maps.file import check_output, check_reverse, to_nemo, to_safetensors
from xtok.teachers.formats.caches import open_cache, read_cache
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import Decoded, TokenEntry, TokenType
from xtok.training.heads import find_heads
from xtok.training.objective import make_objective
from xtok.training.trainers import nemo_rl

Cause = Callable[[], object]


@pytest.fixture(autouse=True)
def here(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, in which `small` has the small tokenizers."""
    monkeypatch.chdir(tmp_path)
    Path("small").symlink_to(small)


def heads_of(wrong: str) -> object:
    """Look for the head of a model that has none, more positions, or another factor."""
    model: Any = torch.nn.Linear(2, 2) if wrong == "no head" else tiny_model(300, seed=0)

    def more(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, [0, 0, 1, 2]]
        return output

    if wrong == "more":
        model.model.register_forward_hook(more)
    if wrong == "other":
        model.lm_head.register_forward_hook(lambda module, args, logits: 2 * logits)
    return find_heads([model], [{"input_ids": torch.zeros(1, 3, dtype=torch.int64)}], [True], True)


def file(name: str, content: str | bytes = "") -> str:
    """Write a file, and return its name."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


CTC = {"type": "CTC", "pad_token": "", "word_delimiter_token": "|", "cleanup": True}
OWN: dict[str, Any] = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}


def there(name: str, make: Callable[[str], object]) -> str:
    make(name)
    return name


def spellings(student: str = "bytes") -> SpellingMap:
    made: SpellingMap = xtok.spellings(student, "bytes")
    return made


def tables(name: str) -> str:
    """Write both tables, and return the name of one."""
    spellings().save("t.pt")
    return name


def chat_of_named(messages: list[dict[str, Any]]) -> object:
    """Render by a tokenizer whose only template has a name."""
    named = [{"name": "rag", "template": "{{ messages[0].content }}"}]
    return render(load_tokenizer(folder("tokenizer_config", chat_template=named)), messages)


def folder(stem: str, content: str | None = None, **parts: object) -> str:
    """Copy a tokenizer's folder, with other content or other parts of a JSON file."""
    shutil.copytree("small/small-digits", "model")
    path = Path("model", f"{stem}.json")
    path.write_text(content or json.dumps({**json.loads(path.read_text()), **parts}))
    return "model"


def class_of(name: str, tokenizer_class: str, source: str = "small.model") -> str:
    """Write a folder of a tokenizer's file, under some name, and of a class."""
    os.mkdir("other")
    shutil.copy(f"small/{source}", f"other/{name}")
    config = {"tokenizer_class": tokenizer_class, "pad_token": "<|other|>"}
    file("other/tokenizer_config.json", json.dumps(config))
    return "other"


@cache
def small_one(name: str = "small-byte-level") -> Tokenizer:
    return load_tokenizer(f"small/{name}")


@cache
def bytes_pair() -> Pair:
    return xtok.pair("bytes", "bytes")


@cache
def of_bytes() -> ProjectionMap:
    return xtok.build("bytes", "bytes")


@cache
def to_pieces() -> Pair:
    return xtok.pair("bytes", small_one("small.model"))


def read_map(content: bytes, name: str = "map.safetensors", **options: Any) -> ProjectionMap:
    return ProjectionMap.load(file(name, content), **options)


def read_text(name: str, content: str | bytes) -> object:
    return batches(Path(file(name, content)))


def batches(path: Path, field: str = "text") -> object:
    return list(read_batches(text_shards(path), field))


def parquet(**columns: object) -> Path:
    write_table(pyarrow.table(columns), "a.parquet")
    return Path("a.parquet")


def read_chats(name: str, content: str | bytes) -> object:
    return list(read_conversations(Path(file(name, content))))


MATRIX = torch.zeros(4, 2)


def model_of(content: torch.Tensor | bytes, index: object = None, name: str = "wte.weight") -> Path:
    """Write a checkpoint of one matrix, or of these bytes, and an index if there is one."""
    data = content if isinstance(content, bytes) else safetensors({name: content})
    if index is not None:
        file("model/model.safetensors.index.json", json.dumps({"weight_map": index}))
    return Path(file("model/model.safetensors", data)).parent


def layer(*content: Any, **name: Any) -> object:
    """Look for the input embeddings of a model."""
    return input_layer(Model(model_of(*content, **name)))


def generate(embedding: str | None, student: str | Path = "bytes", **options: Any) -> object:
    pair = xtok.pair(student, "small/small-digits")
    return xtok.generate(pair, embedding, xtok.GenerateConfig(**options), offline=True)


TRANSPLANT = "init", "pad_to_multiple_of"  # options; the others change the model's config


def transplanted(
    tokenizer: str = "small/small-byte-level", output: str | Path = "new", **changes: Any
) -> object:
    """Give a model another tokenizer."""
    folder = with_layer(Path("model"), Path("small/small-digits"), np.ones((896, 2), np.float32))
    config = {"model_type": "llama", "vocab_size": 896, "hidden_size": 2, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    options = {name: changes.pop(name) for name in TRANSPLANT if name in changes}
    return xtok.transplant(folder, tokenizer, output, **options)


CAUSAL = "give a model that AutoModelForCausalLM loads without custom code"
TEXT_ALONE = "give a model for text alone, with one input-embedding layer"


def weights(matrix: NDArray[np.float32]) -> str:
    return f"input:{with_layer(Path('model'), Path('small/small-digits'), matrix)}"


ASK = {"role": "user", "content": "x"}
ANSWER = {"role": "assistant", "content": "y"}
TURNS = [ASK, ANSWER]


def collated(**sample: object) -> object:
    """Make a batch of one sample, for two teachers."""
    collator = xtok.DistillationCollator(
        "bytes", ["bytes", "bytes"], student_template="plain", teacher_templates=["plain", "plain"]
    )
    return collator([sample])


TOLD = {"role": "tool", "content": "four"}
DROPS = "{% if m.role != 'tool' %}{{ m.role }}<|im_end|>{% endif %}"
WITHIN = "{% if m.role != 'tool' %}{{ m.role }}<|im_end|>{% if not loop.first %}"
WITHIN += "{{ messages[loop.index].content + m.content }}{% endif %}{% endif %}"


def chat(messages: list[Any], template: str | None = "chatml", **options: Any) -> object:
    return render(small_one(), messages, template=template, **options)


def suffix(body: str, *messages: dict[str, str]) -> object:
    return tool_suffix(small_one(), messages or [TOLD], template=each(body))


def each(body: str) -> str:
    """A template that writes the same for each message `m`."""
    return f"{{% for m in messages %}}{body}{{% endfor %}}"


def instead(module: str, cause: Cause, other: object = None) -> object:
    """Do something where a package is another one, or not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module, other)
        return cause()


def cache_of(about: dict[str, str] | None = None, **columns: object) -> object:
    """Check a neutral cache of the text "abc", in which these columns are others."""
    plain = {"input_ids": [*b"abc"], "topk_ids": [[], [98], [99, 98]]}
    values: dict[str, Any] = {**plain, "topk_logprobs": [[], [-0.5], [-1, -2.0]], **columns}
    table = pyarrow.table({name: [column] for name, column in values.items()})
    write_table(table.replace_schema_metadata(about), "a.parquet")
    return checked("a.parquet")


def projected(
    config: xtok.ProjectConfig | None = None, template: str | None = None, **columns: object
) -> object:
    """Project such a cache, of one tokenizer on itself."""
    cache_of(None, **columns)
    config = replace(
        config or xtok.ProjectConfig(), student_template=template, teacher_template=template
    )
    return to_bytes("a.parquet", "out.parquet", config)


def to_bytes(topk: str, output: str, config: xtok.ProjectConfig | None = None) -> object:
    """Project a cache of the tokenizer `bytes` to itself."""
    back_map = xtok.build("bytes", "bytes")
    return xtok.project(topk, bytes_pair(), output, config, back_map=back_map)


def empty_cache() -> Path:
    lists = pyarrow.list_(pyarrow.int32())
    columns = {"input_ids": lists, "topk_ids": pyarrow.list_(lists)}
    columns["topk_logprobs"] = pyarrow.list_(pyarrow.list_(pyarrow.float32()))
    return parquet(**{name: pyarrow.array([], kind) for name, kind in columns.items()})


def answers(*lines: object) -> object:
    """Check lines of answers."""
    return checked(file("a.jsonl", "".join(json.dumps(line) + "\n" for line in lines)))


def checked(path: str) -> object:
    found = open_cache(Path(path))
    rows = [of for shard in found.shards for of, _ in read_cache(found, shard)]
    return [found.check(one, bytes_pair().teacher) for one in rows]


def compressed(config: str | None) -> object:
    """Check compressed rows of DistillKit's with this config, or without one."""
    rows = [{"id": "a", **predicted(b"abc", 256, 8)}]
    path = write_distillkit(Path("a.parquet"), rows, compressed=True, d=256)
    about = path.with_name("compression_config.yaml")
    about.unlink() if config is None else about.write_text(config)
    return checked(str(path))


def vllm(*rows: object, ids: object = (97, 98)) -> dict[str, object]:
    return {"prompt_token_ids": ids and [*ids], "prompt_logprobs": [*rows]}  # type: ignore[misc]


def sglang(owns: list[object], tops: list[object]) -> object:
    return {"meta_info": {"input_token_logprobs": owns, "input_top_logprobs": tops}}


WHOSE = "pass the model that made these ids"
TRUE = "store natural log-probabilities at temperature 1"
NO_LOGITS = f"{TRUE}, not logits, and omit unknown values"
REST = f"{TRUE}; the rest is log(1 - sum of the probabilities)"
ROW_0 = "store the prediction of token i, from the tokens before it, in row i"
REMAKE = "create or download the cache again"
AS_GIVEN = "store the rows as the server returned them, with the ids of the request"
FOOTER = "correct or remove the footer"
VERSION = "write the cache as this version of xtok does"
CONFIG = "create or download the cache again, with its compression_config.yaml"
FIRST = "the first token has a prediction, but row 0 must be empty: row i predicts token i, not"
CACHES = (
    "give Parquet with the columns input_ids, topk_ids and topk_logprobs, DistillKit's Parquet "
    "(input_ids, token_ids, top_values), or JSON lines of responses of vLLM (prompt_logprobs) or "
    "SGLang (meta_info)"
)
VLLM = "request prompt_logprobs: K, return_token_ids: true and max_tokens: 1 from the server"
SGLANG = "request return_logprob, logprob_start_len: 0 and top_logprobs_num: K from the server"

RENEW = "download the file again"
AGAIN = "the file is damaged or has another format: download it again"
WIDTH = "set the width of the model's logits with vocab_size="
TYPES = "download the model's config.json or tokenizer_config.json into it"
TRAILER = "the tokenizer's files are damaged: download them again"
TEXTS = (
    "give text files (.txt, .jsonl, .parquet, also as .gz or .zst), or a glob in quotes: "
    "'corpus/*.jsonl.gz'"
)
READABLE = "check the path and its permissions; fetch a damaged file again"
AS_A_FILE = "write it to a file first; xtok reads the file more than once"
LINES = (
    "give rows that are JSON objects, and name their text field with field=; plain text needs a "
    "name that ends in .txt"
)
CHAT = (
    'write a conversation as [{"role": "user", "content": "…"}, …], or {"messages": […], '
    '"tools": […]}'
)
FORMAT = "change the message, or use a chat template that supports it"
TEMPLATE = "give a Jinja file with template=, or one of …"
OTHER = "change the messages, or use another template with template="
SUFFIX = "use a template with tools and end-of-turn tokens, with template="
MAP = "build the map again, or give another file"
PATHS = "give another path"
BOTH = "give both models with pair="
FOLDER = "give the path of a model's folder, or a repo id"
DEVICE = "give cpu, cuda or cuda:0 with device="
FLOATS = "give a checkpoint without quantization, or fetch it again"
WEIGHTS = "give a model with a safetensors checkpoint; save_pretrained writes one"
FETCH = "the checkpoint is damaged: fetch it again"
WHOLE = "train with whole logits: hidden_states=False of a trainer, wanted=False of find_heads"
EACH = "pass one for each teacher, as map= of the trainer or of make_loss"
OF_TEACHERS = "use a text, or a list with an item per teacher; null stands for the student's"
SAME_ANSWERS = "use the same answers in the same order on both sides; the rest may differ"
COLLATE = "use a TopKCollator for topk-kl, and a DistillationCollator for every other loss"

NO_MAP = "give the path of a .safetensors or .pt map; xtok build makes a map of two models"

ERRORS: list[tuple[Cause, str, str]] = [
    # Tokenizers
    (lambda: load_tokenizer("./none"), "no such file or folder: ./none",
     "give the path of a tokenizer file or folder, or a repo id such as Qwen/Qwen3-8B"),
    (lambda: load_tokenizer("none.model"), "no such file or folder: none.model",
     "check the path; for a repo on the hub, give hf:none.model"),
    (lambda: load_tokenizer("org/none", offline=True),
     "org/none is neither a local file or folder nor in the local cache, and xtok is offline",
     "check the spelling; to download the repo on a machine with a network: hf download org/none "
     "--include 'tokenizer*' --include '*config.json'"),
    (lambda: load_tokenizer(""), "the model's name is empty",
     "give a repo id, a folder, or a file"),
    (lambda: load_tokenizer("https://huggingface.co/Qwen/Qwen3-4B/tree/main"),
     "URLs are not supported: https://huggingface.co/Qwen/Qwen3-4B/tree/main",
     "give the repo id, such as Qwen/Qwen3-4B"),
    (lambda: load_tokenizer("spam:eggs"), "spam: is not a tokenizer prefix",
     "the prefixes are hf:, tekken:, tiktoken:, spm:, bytes:, null:; for a file name with a "
     "colon, give ./spam:eggs"),
    (lambda: load_tokenizer("~nobody-at-all/a.model"),
     "~nobody-at-all/a.model cannot be opened: …", "check the path and its permissions"),
    (lambda: load_tokenizer(there("empty", os.mkdir)),
     "empty has no tokenizer.json, so it has no fast tokenizer",
     "create it with AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER), or give the "
     "path of the .model or .tiktoken file"),
    (lambda: load_tokenizer(file("a.model")), "a.model is empty", RENEW),
    (lambda: load_tokenizer(f"spm:{file('a.model')}"), "a.model is empty", RENEW),
    (lambda: load_tokenizer(file("a.model",
         "version https://git-lfs.github.com/spec/v1\noid sha256:1\n")),
     "a.model is a Git LFS pointer, and the file itself is missing",
     "run git lfs pull in its repository"),
    (lambda: load_tokenizer(file("a.gguf", b"GGUF\3\0\0\0" + bytes(64))),
     "a.gguf is a .gguf file, which is unsupported",
     "give the repo or folder of the original model"),
    (lambda: load_tokenizer(file("a.json", '[{"rank": 0, "token_bytes": "AA=="}]')),
     "a.json is a Megatron vocabulary without a split pattern",
     "add its --tiktoken-pattern: 'a.json@v2', 'a.json@v1', or 'a.json@REGEX'"),
    (lambda: load_tokenizer(folder("tokenizer", decoder={
        "type": "Strip", "content": " ", "start": 1, "stop": 0})),
     "model has a Strip decoder of each token, so a text is not the concatenation of its tokens",
     "use a byte-level, SentencePiece-style or WordPiece tokenizer"),
    (lambda: load_tokenizer(file("a.json", "{}")),
     "a.json is JSON, but neither a tokenizer.json nor a tekken file: …",
     "give a tokenizer file or the folder of a Hugging Face tokenizer"),
    (lambda: load_tokenizer(file("a.model", "hello")),
     "a.model is neither a SentencePiece model nor a tiktoken file: …",
     "give a .model, .tiktoken or tekken.json file, or a Hugging Face folder"),
    (lambda: load_tokenizer("small/small.tiktoken"),
     "small/small.tiktoken is a tiktoken file of an unknown family, so xtok needs its split "
     "pattern",
     "append the tokenizer's regular expression to the name, in single quotes: "
     "'small/small.tiktoken@REGEX'"),
    (lambda: load_tokenizer("small/small.tiktoken@("),
     "the pattern for small/small.tiktoken is not a regular expression that splits text: …",
     "in a shell, write it in single quotes: 'small/small.tiktoken@\\p{L}+|\\s+'"),
    (lambda: load_tokenizer(r"small/small.tiktoken@\w+").encode("a."),
     r"the split pattern '\\w+' does not match all of the text 'a.'",
     r"append |[\s\S] to the pattern, so that it matches all text"),
    (lambda: load_tokenizer("small/small.model@x"), "small/small.model does not support @x",
     "use @ only for a repo's revision or the split pattern of a tiktoken file"),
    (lambda: load_tokenizer(f"{file('a.tiktoken', 'YWI= 0')}@x"),
     "a.tiktoken lacks 256 of the 256 single bytes", AGAIN),
    (lambda: load_tokenizer(
        file("a.tiktoken", b"AAA 0\n" + Path("small/small.tiktoken").read_bytes()) + "@x"),
     "a.tiktoken, line 1: expected a base64 token and a rank", AGAIN),
    (lambda: load_tokenizer(f"tekken:{file('tekken.json', '{}')}"),
     "tekken.json is not a tekken file: KeyError('config')", AGAIN),
    (lambda: load_tokenizer("bytes:1"), "bytes:1 is not a tokenizer: bytes takes no argument",
     "give bytes; for more than 256 ids, add vocab_size="),
    (lambda: load_tokenizer("bytes", vocab_size=10),
     "the vocabulary size 10 of bytes (as specified) is too small for its largest token id 255",
     WIDTH),
    (lambda: load_tokenizer("bytes", vocab_size=2**24 + 1),
     "the vocabulary size 16777217 of bytes (as specified) is outside 1..16777216", WIDTH),
    (lambda: load_tokenizer(small_one(), vocab_size=3000),
     "small-byte-level is already loaded with 1280 ids",
     "set the width when you load the tokenizer"),
    (lambda: load_tokenizer("null:none"),
     "null:none is not a tokenizer: none is not a number in 1..16777216",
     "give a number, as in null:32000; null means null:131072"),
    (lambda: load_tokenizer("null:100").encode("5 100"),
     "null cannot encode '5 100', expected ids below 100", "give numbers, as in '5 17 3'"),
    (lambda: load_tokenizer("null:5").segment(b"x"), "null:5 cannot spell the bytes b'x'",
     "use a tokenizer with byte tokens or a byte-level vocabulary"),
    (lambda: load_tokenizer(folder("tokenizer", "{")),
     "AutoTokenizer cannot load model: …",
     "check its tokenizer.json and tokenizer_config.json, or download them again"),
    (lambda: load_tokenizer(folder("tokenizer", decoder=None)),
     "model has no decoder, so the bytes of its tokens are unknown",
     "use a byte-level or SentencePiece-style tokenizer"),
    (lambda: load_tokenizer(folder("tokenizer", decoder=CTC)),
     "model has a CTC decoder of each token, so a text is not the concatenation of its tokens",
     "use a byte-level, SentencePiece-style or WordPiece tokenizer"),
    (lambda: load_tokenizer(folder("config", vocab_size=798)).encode("a <think> b"),
     "the text 'a <think> b' has the token '<think>' (id 799), but model has only 798 rows",
     "remove the token from the text: the model cannot read it"),
    (lambda: load_tokenizer(class_of("spiece.model", "LlamaTokenizer")),
     "AutoTokenizer does not read spiece.model in other: 997 of its 1,000 tokens are missing",
     "set tokenizer_class in its tokenizer_config.json, or give the file: other/spiece.model"),
    (lambda: load_tokenizer(class_of("tokenizer.model", "AlbertTokenizer")),
     "AutoTokenizer cannot load other: …",
     "check its tokenizer.model and tokenizer_config.json, or download them again; or give the "
     "path of that file"),
    (lambda: load_tokenizer(class_of("qwen.tiktoken", "Own", "small.tiktoken") + r"@\w+|\W+"),
     "the configs of other name special tokens without an id: <|other|>",
     "add them with their ids to added_tokens_decoder in tokenizer_config.json"),
    (lambda: load_tokenizer(folder("generation_config", "[1]")),
     "model/generation_config.json is not a generation config", "fix or delete it"),
    (lambda: load_tokenizer(folder("tokenizer_config", **OWN)),
     "model requires custom tokenizer code",
     "review the code, then allow it with trust_remote_code=; or give the path of its "
     "tokenizer.json, if it exists"),
    (lambda: load_tokenizer(Path(file("words/a.model", file("words/tekken.json"))).parent),
     "words has several tokenizers, but no config.json: a.model, tekken.json",
     "give the path of a single file, such as words/tekken.json"),
    (lambda: load_tokenizer(Path(file("words/vocab.txt", "a b")).parent),
     "words has vocab.txt, but no config.json that names the tokenizer's class", TYPES),
    (lambda: load_tokenizer(Path(file("words/merges.txt", "a b")).parent),
     "words has merges.txt, but no config.json that names the tokenizer's class", TYPES),
    (lambda: nemo_rl.NemoTokenAligner(3, "bytes"),
     "tokenizer has type int, expected a fast Hugging Face tokenizer",
     "load it with xtok.load_tokenizer, or with AutoTokenizer and use_fast=True"),
    (lambda: Decoded([TokenEntry(3, TokenType.NORMAL, b"x")] * 2),
     "token id 3 ('x') is repeated in the vocabulary", TRAILER),
    (lambda: Decoded([TokenEntry(0, TokenType.UNKNOWN, b"<" * 1025)]),
     "the name of the special token 0 has 1,025 bytes, expected at most 1,024",
     "fix the tokenizer's files"),
    # Texts
    (lambda: find_texts("none-*.txt"), "there is no file none-*.txt", TEXTS),
    (lambda: find_texts(there("folder", os.mkdir)), "folder is a folder", TEXTS),
    (lambda: read_text("a.txt", "Es war schön".encode("latin1")),
     "a.txt is not UTF-8: byte 0xf6 at offset 10, in line 1",
     "if the file is latin1, convert it: iconv -f latin1 -t UTF-8"),
    (lambda: read_text("a.txt", "the text".encode("utf-16-le")),
     "a.txt is not UTF-8: 8 of 16 bytes at offset 0 are zero",
     "if the file is UTF-16LE, convert it: iconv -f UTF-16LE -t UTF-8"),
    (lambda: read_text("a.txt", bytes(range(256))),
     "a.txt is not UTF-8: byte 0x80 at offset 128, in line 2; it also contains control characters",
     "give a text file: .txt, .jsonl or .parquet, also as .gz or .zst"),
    (lambda: find_texts("/dev/null"), "/dev/null is a device, not a regular file", AS_A_FILE),
    (lambda: read_text("a.txt.gz", gzip.compress(b"one")[:-9]),
     "the text a.txt.gz cannot be read: …", READABLE),
    (lambda: read_text("a.jsonl", '{"text": "x"}\n{"body": "x", "n": 1}'),
     "a.jsonl, line 2: no field 'text', but: body, n", LINES),
    (lambda: read_text("a.jsonl", '{"text": 3}'),
     "a.jsonl, line 1: the field 'text' is a number, not a string", LINES),
    (lambda: read_text("a.jsonl", '{"text": "x"'), "a.jsonl, line 1: not JSON: …", LINES),
    (lambda: read_text("a.jsonl", '["x"]'), "a.jsonl, line 1: not a JSON object", LINES),
    (lambda: batches(parquet(id=[1], body=["x"])),
     "a.parquet, row 0: no field 'text', but: id, body", LINES),
    (lambda: batches(parquet(id=[1]), field="id"),
     "a.parquet, row 0: the field 'id' is a number, not a string", LINES),
    (lambda: batches(parquet(text=pyarrow.array([b"a\xff"]).view(pyarrow.string()))),
     "the text a.parquet cannot be read: …", READABLE),
    (lambda: read_text("a.parquet", "one two three four"), "the text a.parquet cannot be read: …",
     READABLE),
    (lambda: instead("pyarrow", lambda: read_text("a.txt.zst", b"(\xb5/\xfd")),
     "a.txt.zst requires the package pyarrow, which is not installed",
     "pip install pyarrow, or in a clone of xtok: pip install -e '.[parquet]'"),
    (lambda: xtok.build("bytes", "bytes", texts=file("a.txt")),
     "the text has no shared token boundary: 0 documents, 0 bytes",
     "give non-empty text that both tokenizers can spell; xtok align shows how they differ"),
    # Conversations
    (lambda: read_chats("a.jsonl", '[{"role": "user", "content": "x"}]\n{"mess'),
     "a.jsonl, line 2: not JSON: …", CHAT),
    (lambda: read_chats("a.jsonl", '[{}] [{}]'), "a.jsonl, line 1: more than one JSON value", CHAT),
    (lambda: read_chats("a.parquet", parquet(text=["x"], id=[1]).read_bytes()),
     "a.parquet, row 0: no messages, only: text, id", CHAT),
    (lambda: read_chats("a.jsonl", '{"role": "user"}'),
     "a.jsonl, line 1: no messages, only: role", CHAT),
    (lambda: read_chats("a.json", "[[], []]"), "a.json, row 0: the list of messages is empty",
     CHAT),
    (lambda: read_chats("a.json", '{"messages": [{}], "tools": "x"}'),
     "a.json: the value of 'tools': not JSON: Expecting value at column 1", CHAT),
    (lambda: read_chats("a.json", '{"messages": [{}], "chat_template_kwargs": []}'),
     "a.json: the value of 'chat_template_kwargs' is not an object", CHAT),
    (lambda: read_chats("a.json", ""), "a.json: the file contains no conversation", CHAT),
    (lambda: read_chats("a.json", "3"), "a.json: the value of 'messages' is not a list", CHAT),
    (lambda: read_chats("a.json", '[{"role": "\xff"}]'.encode("latin1")),
     "a.json is not UTF-8: byte 0xff at offset 11, in line 1",
     "if the file is latin1, convert it: iconv -f latin1 -t UTF-8"),
    (lambda: chat([{"content": "x"}]), "message 0 has no role",
     'a message is an object such as {"role": "user", "content": "Hello"}'),
    (lambda: chat([{"role": "judge", "content": ""}]),
     "message 0 has the role 'judge', which the format chatml does not allow",
     "use one of its roles (system, user, assistant, tool), or use a chat template that "
     "supports it"),
    (lambda: chat([{"role": "user", "content": None}]),
     "message 0 is not plain text, which the format chatml does not allow", FORMAT),
    (lambda: chat([{"role": "assistant", "content": "a <image>"}]),
     "message 0 is the assistant's and has the image placeholder <image>, which the format "
     "chatml does not allow", FORMAT),
    (lambda: chat([{"role": "user", "content": "a\ud83d"}]),
     "message 0 contains '\\ud83d', half of a surrogate pair",
     "write the whole pair, or the character itself"),
    (lambda: chat([{"role": "user", "content": json.loads("[" * 900 + "]" * 900)}]),
     "message 0 is nested more than 100 deep", "give its content as text, or as a list of parts"),
    (lambda: chat([ASK], None), "small-byte-level has no chat template", TEMPLATE),
    (lambda: chat_of_named([ASK]), "model has no chat template named default; it has rag",
     f"use one of these names, or {TEMPLATE.removeprefix('give ')}"),
    (lambda: xtok.DistillationCollator(small_one(), "bytes", student_template="chatml")(
        [[ASK, {"role": "assistant", "content": "yes"}]]),
     "bytes has no chat template", TEMPLATE.replace("template=", "teacher_templates=")),
    (lambda: load_tokenizer("bytes").encode_batch(["ok", "a\ud83d"]),
     "text 1, 'a\\ud83d': '\\ud83d' is half of a surrogate pair, expected valid Unicode",
     "write the whole pair or the character"),
    (lambda: chat([ASK], "none.jinja"),
     "the chat template none.jinja is not a file", TEMPLATE),
    (lambda: chat([ASK], "{% for %}"),
     "the chat template of small-byte-level is not a Jinja template: line 1: …",
     "fix it, or use another template with template="),
    (lambda: chat([ASK], each("{{ raise_exception('no') }}")),
     "the chat template of small-byte-level raises at message 0, the user's: no", OTHER),
    (lambda: chat([ASK], each("{{ m.role }}")),
     "message 0, the user's: the template drops its content",
     "use a template that writes it, with template=, or remove it"),
    (lambda: chat([{**ASK, "content": "xy"}], each("{{ m.content[:1] }}")),
     "message 0, the user's: the template drops the part 'y' of its content",
     "use a template that writes it, with template=, or remove it"),
    (lambda: chat([ASK], tools=[{"name": "add"}]), "the template drops tools[0].name",
     "use a template that writes it, with template=, or remove it"),
    (lambda: chat([ASK], tools=[7]), "the tools are not a list of JSON schemas: one is '7'",
     'write them as [{"type": "function", "function": {"name": …}}, …]'),
    (lambda: chat([ASK], variables={"messages": []}),
     "the template's variables contain messages, which is also an argument",
     "remove it from the variables"),
    (lambda: chat([{"role": "assistant", "content": "yes", "weight": 0.5}]),
     "message 0, the assistant's, has the weight '0.5'", "use 1 to train on it, or 0"),
    (lambda: chat([{**ASK, "content": [{"type": "text", "text": b"yes"}]}],
                  each("{% for p in m.content %}{{ p.text }}{% endfor %}")),
     "message 0: content[0].text is a bytes, which is not a JSON type",
     "use text, numbers, lists and objects; array.tolist() returns a list"),
    (lambda: chat([ASK], "mistral-v1"),
     "small-byte-level has no </s>, which the format mistral-v1 needs", "use another format (…"),
    (lambda: render(small_one("small.model"), [{"role": "system", "content": "s"}],
         template="mistral"),
     "the format mistral of small.model raises: there is no user message that the system text "
     "could be in", OTHER),
    (lambda: FORMATS["llama3"].pad_id(small_one(r"small.tiktoken@\w+|\W+").table),
     "the vocabulary has no padding token for the format llama3",
     "pass pad_id to collate; the format uses <|finetune_right_pad_id|>, "
     "<|finetune_right_pad|>"),
    (lambda: suffix("{{ m.content + ' t' }}", ASK, ANSWER, {"role": "tool", "content": "he cat"}),
     "message 1, the assistant's, does not end with a token", SUFFIX),
    (lambda: suffix(DROPS, {"role": "tool", "content": ""}),
     "message 2, the tool's, is not in the text", SUFFIX),
    (lambda: suffix(WITHIN, ASK, ANSWER, TOLD),
     "message 1, the assistant's, goes on after the tools' messages", SUFFIX),
    # Maps
    (lambda: read_map(b""), "the map map.safetensors is empty", MAP),
    (lambda: ProjectionMap.load("none.pt"),
     "the map none.pt cannot be read: No such file or directory",
     NO_MAP),
    (lambda: ProjectionMap.load(there("folder", os.mkdir)),
     "the map folder cannot be read: Is a directory",
     "give the path of a .safetensors or .pt map; xtok build makes a map of two models; "
     "xtok doctor compares the models"),
    (lambda: ProjectionMap.load("nul\0.pt"), "the map nul\x00.pt has a NUL in its name", PATHS),
    (lambda: read_map(b"not a map"), "map.safetensors is not a whole safetensors file: …", MAP),
    (lambda: read_map(b"PK", "map.pt"), "map.pt is not a whole .pt file: …", MAP),
    (lambda: read_map(safetensors({"weights": torch.zeros(3)})),
     "map.safetensors is a safetensors file, but not an xtok map; its tensors: 'weights'", MAP),
    (lambda: read_map(b'{"model_type": "llama"}', "config.json"),
     "config.json is neither a .safetensors nor a .pt", NO_MAP),
    (lambda: read_map(pt_bytes({"step": 3, "model": {}}), "a.pt"),
     "a.pt is not a valid map: it contains a dict with the keys 'step', 'model', expected "
     "indices and likelihoods, counts of pairs, or a matrix", MAP),
    (lambda: read_map(pt_bytes([1]), "a.pt"),
     "a.pt is not a valid map: it contains list, expected indices and likelihoods, counts of "
     "pairs, or a matrix", MAP),
    (lambda: read_map(edited({"weights": None})),
     "map.safetensors is not a valid map: it lacks 'weights'", MAP),
    (lambda: read_map(edited({"weights": np.full(7, 0.5, np.float32)})),
     "map.safetensors is not a valid map: row 0 sums to 0.5, not 1",
     "if its weights were trained, convert the map once with normalize="),
    (lambda: read_map(to_safetensors(TINY).replace(TINY.teacher_ids.tobytes(), bytes(28))),
     "map.safetensors is not a valid map: its tensors changed after it was written",
     "if its weights were trained, convert the map once with normalize="),
    (lambda: read_map(Path(there("a.pt", TINY.save)).read_bytes().replace(b"org/s", b"org/t"),
         "map.pt"),
     "map.pt is not a whole .pt file: the checksum of its part …", MAP),
    (lambda: read_map(edited(format_version=2)),
     "map.safetensors is not a valid map: its format version is 2, expected 1", MAP),
    (lambda: read_map(pt_bytes({**FOREIGN, "x": print}), "map.pt"),
     "map.pt is damaged, or contains objects that could run code",
     "save only tensors, numbers and strings, or a dict of counts {(student_id, "
     "teacher_id): number}, or make it again"),
    (lambda: read_map(to_safetensors(TINY), teacher_vocab_size=5),
     "map.safetensors is 4 wide on the teacher's side, expected 5",
     "check that the map belongs to this pair: its models are org/student and org/teacher; or "
     "leave out teacher_vocab_size="),
    (lambda: read_map(pt_bytes(FOREIGN), "map.pt", teacher_vocab_size=2),
     "map.pt has the teacher id 3, expected a width of 2",
     "give the width of the logits with teacher_vocab_size=, at least 4"),
    (lambda: read_map(pt_bytes(FOREIGN), "map.pt", teacher_vocab_size=2**30),
     "map.pt cannot be 1073741824 wide", "give teacher_vocab_size= up to 16777216"),
    (lambda: read_map(pt_bytes(FOREIGN), "map.pt")["ab"],
     "the map contains no tokens of a/student: xtok did not write it",
     "give the token's id instead"),
    (lambda: TINY["abc"], "org/student has no token 'abc'",
     "spaces are part of a token, as in ' the'; write bytes as '\\xe4'"),
    (lambda: TINY["97"], "org/student has no token '97'",
     "spaces are part of a token, as in ' the'; write bytes as '\\xe4'; "
     "for the id, give --id 97, or in Python the number"),
    (lambda: TINY[-1], "org/student has no id -1, expected 0 to 5",
     "give another id, or the token"),
    (lambda: xtok.reapply_exact(GOOD), "the map contains no tokens of m: xtok did not write it",
     BOTH),
    (lambda: xtok.reapply_exact(xtok.multitoken(bytes_pair(),
         xtok.MultitokenConfig(token_form="raw"))),
     "the map was made with the token form raw, but has no display strings", BOTH),
    (lambda: xtok.reapply_exact(replace(TINY, history=({"stage": "multitoken",
         "options": {"special_tokens": "x"}},))),
     "the map's history contains unsupported options: special_tokens is 'x', and "
     "must be one of ('roles', 'fuzzy', 'off')",
     "rebuild the map, or use the version of xtok that made it"),
    (lambda: xtok.sort_cut(TINY, xtok.SortCutConfig(top_k=1)),
     "a row with one entry can only contain its scale slot",
     "set top_k= to 2 or more, or build the map without the scale trick"),
    (lambda: xtok.explain(GOOD, token_class="digits"),
     "the map contains no tokens of m: xtok did not write it", BOTH),
    (lambda: xtok.explain(TINY, token_class="digit"), "unknown class of tokens 'digit'",
     "the classes are: …"),
    (lambda: xtok.explain(TINY, kind="none"), "unknown kind of row 'none'",
     "give one of: empty, exact, pieces, role, similar, counted, mixed, relaxed"),
    (lambda: xtok.explain(of_bytes(), 1, pair=to_pieces()),
     "the teacher of the map (bytes) has other tokens than small.model",
     "give the models, or the maps, of one pair, student first; xtok inspect shows the pair of "
     "a map"),
    (lambda: xtok.explain(xtok.build(*to_pieces().tokenizers), 1, pair=to_pieces().reversed),
     "the sides are swapped: in the map, the student is bytes and the teacher small.model",
     "give the student first, as in the map, or build the map in the other direction"),
    (lambda: xtok.multitoken(bytes_pair(), initial=GOOD),
     "the student of the map (m) is 4 wide, but bytes is 256 wide",
     "give the map of this pair; xtok inspect shows the pair of a map; if the pair is right, set "
     "the width to 256 with student_vocab_size="),
    (lambda: xtok.build("bytes", "bytes", config=xtok.BuildConfig(ignore_teacher_ids=(256,))),
     "the teacher id 256 to ignore does not exist: bytes is 256 wide",
     "give ids from 0 to 255 with ignore_teacher_ids="),
    (lambda: to_nemo(replace(TINY, top_k=2**30)),
     "a .pt of 6 rows and 1073741824 columns would take 72 GiB",
     "cut the map first with xtok sort-cut, or write .safetensors"),
    (lambda: to_safetensors(replace(TINY, method="x" * (8 << 20))),
     "a map of org/student and org/teacher cannot be written: its metadata has 8389469 bytes, "
     "expected at most 8388608",
      "shorten the names of the special tokens in the tokenizer's files"),
    (lambda: check_output("map.txt", or_folder=True),
     "the output map.txt does not end in .safetensors or .pt",
     "name it map.safetensors, or map.txt/ if that is a folder"),
    (lambda: check_output("Llama-3.2", or_folder=True),
     "the output Llama-3.2 does not end in .safetensors or .pt",
     "name it Llama-3.2.safetensors, or Llama-3.2/ if that is a folder"),
    (lambda: TINY.save("folder/"), "the output folder does not end in .safetensors or .pt",
     "name it folder.safetensors"),
    (lambda: check_output("-"), "the output - is a stream, not a file", "name a file"),
    (lambda: check_output(f"{file('a-file')}/no/map.pt"),
     "the folder of the output, a-file, is a file", "give a path in a folder"),
    (lambda: check_output(there("folder.pt", os.mkdir)), "the output folder.pt is a folder",
     "name a file in it"),
    (lambda: TINY.save("nul\0.pt"), "the output nul\x00.pt contains a NUL character", PATHS),
    (lambda: TINY.save(there("loop.pt", lambda name: os.symlink(name, name))),
     "the output loop.pt is a symbolic link to itself",
     "delete it, or give another path"),
    (lambda: TINY.save(there("pipe.pt", os.mkfifo)), "the output pipe.pt is not a regular file",
     PATHS),
    (lambda: ProjectionMap.load(there("e.safetensors", xtok.events("bytes", "bytes").save)),
     "e.safetensors is an event map, not a projection map",
     "xtok verify checks it, xtok inspect shows it; xtok build makes a projection map"),
    (lambda: EventMap.load(there("m.safetensors", TINY.save)),
     "m.safetensors is a projection map, not an event map",
     "xtok verify checks it, xtok inspect shows it; xtok events makes an event map"),
    (lambda: xtok.evaluate(bytes_pair(), [of_bytes(), xtok.events("bytes", "bytes")], file("a.txt",
         "x")), "event maps cannot be measured together with maps, nor for a loss",
     "evaluate the event maps alone, without a loss"),
    # Spellings
    (lambda: ProjectionMap.load(there("s.safetensors", spellings().save)),
     "s.safetensors is a spelling map, not a projection map",
     "xtok verify checks it, xtok inspect shows it; xtok build makes a projection map"),
    (lambda: SpellingMap.load(there("m.safetensors", TINY.save)),
     "m.safetensors is a projection map, not a spelling map",
     "xtok verify checks it, xtok inspect shows it; xtok events --for csd makes a spelling map"),
    (lambda: xtok.evaluate(bytes_pair(), spellings(), file("a.txt", "x")),
     "spelling maps cannot be measured on text",
     "evaluate projection maps or event maps; xtok verify checks a spelling map"),
    (lambda: xtok.convert(there("s.safetensors", spellings().save), "t.pt", teacher_vocab_size=9),
     "s.safetensors is 256 wide on the teacher's side, expected 9",
     "check that the map belongs to this pair: its models are bytes and bytes; or leave out "
     "teacher_vocab_size="),
    (lambda: xtok.convert(there("s.safetensors", spellings().save), "t.pt", preserve_last=False),
     "s.safetensors is a spelling map, which has no weights", "leave out preserve_last="),
    (lambda: xtok.convert(there("s.safetensors", spellings().save), "t.pt", normalize=True),
     "s.safetensors is a spelling map, which has no weights", "leave out normalize="),
    (lambda: SpellingMap.load(tables("t.pt")),
     "t.pt contains a table for NeMo-RL, which xtok writes but does not read",
     "give the map as .safetensors; xtok events --for csd makes one"),
    (lambda: ProjectionMap.load("hf:owner/name"),
     "hf:owner/name does not name a file of a repo on the hub",
     "give hf:OWNER/NAME/FILE, or hf:OWNER/NAME@REVISION/FILE"),
    (lambda: TINY.save("hf:owner/name/map.safetensors"),
     "the output hf:owner/name/map.safetensors is on the hub, and xtok writes local files only",
     "write a local file, then share it: hf upload OWNER/NAME FILE"),
    (lambda: (file("t.reverse.pt", "mine"), tables("t.pt")),
     "t.reverse.pt exists and is not a table that xtok wrote; the teacher's table would replace it",
     "move it, or choose another output name than t.pt"),
    (lambda: check_reverse(Path(tables("t.pt")), "a", "b"),
     "t.reverse.pt exists and contains the table of bytes in bytes; the teacher's table would "
     "replace it",
     "move it, or choose another output name than t.pt"),
    # Embeddings
    (lambda: generate("small/small-digits"),
     "the embedding model small/small-digits does not name the embeddings to use",
     "give sentence:MODEL for its sentence embeddings, input:MODEL for its input-embedding "
     "layer, own for the two models' own layers, or spelling for none"),
    (lambda: generate("input:./none"), "no such folder: ./none", FOLDER),
    (lambda: generate("input:none/body@v1"),
     "none/body at revision v1 is neither a local file or folder nor in the local cache, and "
     "xtok is offline",
     "check the spelling; to download the repo on a machine with a network: "
     "hf download none/body"),
    (lambda: generate(f"input:{file('a-file')}"), "no such folder: a-file", FOLDER),
    (lambda: generate(f"input:{there('empty', os.mkdir)}"), "empty has no model.safetensors",
     WEIGHTS),
    (lambda: generate(f"input:{model_of(MATRIX)}"),
     "model has no tokenizer.json to segment tokens with",
     "give a folder that also contains the model's tokenizer"),
    (lambda: generate(weights(np.zeros((9, 4), np.float32))),
     "model, model.embed_tokens.weight: 9 rows, expected at least 800 (the tokenizer's ids)",
     "give a checkpoint and a tokenizer that belong together"),
    (lambda: generate(weights(np.full((896, 4), np.nan, np.float32))),
     "embeddings by model are not finite for 128 tokens: 0 '\\x00', 1 '\\x01', 2 '\\x02', …",
     "check the checkpoint, or give float32 with dtype="),
    (lambda: generate("own"), "bytes is a tokenizer file without embeddings",
     "give the model's folder or repo id, or another embedding_model="),
    (lambda: generate("own", "small/small-byte-level"),
     "small/small-byte-level has no model.safetensors", WEIGHTS),
    (lambda: generate(None, device="tpu"), "the device tpu cannot be used: unknown device",
     DEVICE),
    (lambda: generate(None, device="cpu:"), "the device cpu: cannot be used: …", DEVICE),
    (lambda: generate(None, device="cuda:\u0663"), "the device cuda:٣ cannot be used: …", DEVICE),
    (lambda: generate("spelling", top_k=4000),
     "top_k is 4000, expected at most the teacher's 896 tokens", "reduce top_k="),
    (lambda: instead("sentence_transformers", lambda: generate("sentence:small/small-digits")),
     "sentence embeddings need sentence-transformers",
     "pip install sentence-transformers, or in a clone of xtok: pip install -e '.[sentence]'"),
    (lambda: instead("sentence_transformers", lambda: generate("sentence:small/small-digits"),
         SimpleNamespace()),
     "small/small-digits has no modules.json, so it is not a sentence-transformers model",
     "give input:small/small-digits for its input-embedding layer, or another model"),
    (lambda: layer(torch.zeros(4)),
     "model/model.safetensors, wte.weight: torch.float32 [4], expected a matrix of floats", FLOATS),
    (lambda: layer(MATRIX, name="other"),
     "model: none of its 1 tensors is a known input-embedding layer",
     "give another model; known names include model.embed_tokens.weight, transformer.wte.weight "
     "and embeddings.word_embeddings.weight"),
    (lambda: layer(b"x"), "model/model.safetensors is not a whole safetensors file: …", FETCH),
    (lambda: layer(safetensors({"wte.weight": MATRIX})[:-1]),
     "model/model.safetensors is not a whole safetensors file: …", FETCH),
    (lambda: layer((3).to_bytes(8, "little") + b"[1]"),
     "model/model.safetensors is not a whole safetensors file: …", FETCH),
    (lambda: layer(MATRIX.to(torch.int8)),
     "model/model.safetensors, wte.weight: torch.int8 [4, 2], expected a matrix of floats", FLOATS),
    (lambda: layer(MATRIX, {"model.embed_tokens.weight": "model.safetensors"}),
     "model/model.safetensors is not a whole safetensors file: …", FETCH),
    (lambda: layer(MATRIX, []), "the model.safetensors.index.json of model is damaged", FETCH),
    (lambda: layer(b"x", [1]), "the model.safetensors.index.json of model is damaged", FETCH),
    (lambda: layer(b"x", {"wte.weight": "none.safetensors"}),
     "model lacks none.safetensors, listed in its model.safetensors.index.json", FETCH),
    # Transplant
    (lambda: transplanted(init="bytes"),
     "init is bytes, expected pieces, mean or the path of a map", "give one of these with init="),
    (lambda: xtok.transplant("small/small-digits", "small/small-byte-level", "new"),
     "small/small-digits has no model.safetensors", WEIGHTS),
    (lambda: xtok.transplant("small/small.model", "small/small-byte-level", "new"),
     "small.model is a tokenizer file without weights", "give a model's folder or repo id"),
    (lambda: transplanted("small/small.model"),
     "Transformers cannot load the tokenizer small.model",
     "give a folder or repo with a tokenizer.json"),
    (lambda: transplanted(pad_to_multiple_of=2**25),
     "small-byte-level, padded to a multiple of 33554432, has 33,554,432 rows, expected at most "
     "16,777,216", "pass a smaller multiple with pad_to_multiple_of="),
    (lambda: transplanted(quantization_config={"quant_method": "fp8"}),
     "the weights of model are quantized, expected floats",
     "give the checkpoint that it was quantized from"),
    (lambda: transplanted(model_type="t5"),
     "Transformers has no causal language model for the config.json of model: Unrecognized "
     "configuration class …", CAUSAL),
    (lambda: transplanted(model_type="none"),
     "Transformers has no causal language model for the config.json of model: Unrecognized "
     "model identifier: none. Should contain one of …", CAUSAL),
    (lambda: transplanted(model_type="gemma3", text_config={"num_hidden_layers": 1}),
     "model is a gemma3 model, which takes more than text: unsupported", TEXT_ALONE),
    (lambda: transplanted(model_type="gemma3n_text", hidden_size=8),
     "model is a gemma3n_text model, which has embeddings in each layer: unsupported",
     TEXT_ALONE),
    (lambda: transplanted(output=file("new")), "the output new is a file, expected a folder",
     "name a folder"),
    (lambda: transplanted(output=Path(file("new/a.txt")).parent),
     "the output folder new contains a.txt, which xtok did not write or which changed since",
     "name a new folder, or delete this one first"),
    (lambda: transplanted(output=Path(file("new")) / "a"),
     "the folder of the output, new, is a file", "give a path in a folder"),
    # Alignment
    (lambda: xtok.project_logprobs(xtok.TokenAligner(bytes_pair()), [*b"12"], [*b"7"], [-1.0]),
     'the texts differ at byte 0, after "": the student has "12", the teacher "7"',
     "score the text that the student wrote, or skip differences with partial=True"),
    (lambda: xtok.Retokenizer(xtok.pair("bytes", "null:5"))([[*b"The keeper"]]),
     "null:5 cannot spell 'The keeper' of the student's text",
     "use a teacher with byte tokens or a byte-level tokenizer"),
    # A teacher's predictions
    (lambda: cache_of(input_ids=[97, 999, 99]),
     "a.parquet, row 0, position 1: the id 999 is outside the vocabulary of bytes, 0..255", WHOSE),
    (lambda: cache_of(topk_logprobs=[[], [0.5], [-1, -2.0]]),
     "a.parquet, row 0, position 1: the log-probability of a candidate is 0.5, expected a number "
     "of at most 0", NO_LOGITS),
    (lambda: cache_of(topk_logprobs=[[], [-0.5], [-0.1, -0.2]]),
     "a.parquet, row 0, position 2: its probabilities sum to 1.724, expected at most 1", REST),
    (lambda: cache_of(rest_logprob=[None, -0.1, None]),
     "a.parquet, row 0, position 1: its probabilities and the rest sum to 1.511, expected 1", REST),
    (lambda: cache_of(rest_logprob=[None, -50.0, None]),
     "a.parquet, row 0, position 1: its probabilities and the rest sum to 0.6065, expected 1",
     REST),
    (lambda: cache_of(rest_logprob=[None, 3.0, None]),
     "a.parquet, row 0, position 1: the log-probability of the rest is 3, expected a number of at "
     "most 0", NO_LOGITS),
    (lambda: cache_of(rest_logprob=[None, math.inf, None]),
     "a.parquet, row 0, position 1: the log-probability of the rest is inf, expected a number of "
     "at most 0", NO_LOGITS),
    (lambda: cache_of(realized_logprob=[None, 3.0, None]),
     "a.parquet, row 0, position 1: the log-probability of the realized token is 3, expected a "
     "number of at most 0", NO_LOGITS),
    (lambda: cache_of(realized_logprob=[None, math.inf, None]),
     "a.parquet, row 0, position 1: the log-probability of the realized token is inf, expected a "
     "number of at most 0", NO_LOGITS),
    (lambda: cache_of(topk_ids=[[], [98], [99, 99]]),
     "a.parquet, row 0, position 2: the candidate 99 occurs twice", "store each candidate once"),
    (lambda: cache_of(topk_ids=[[], [7], [99, 98]], realized_logprob=[None, -0.1, -1.0]),
     "a.parquet, row 0, position 1: its candidates and its realized token sum to 1.511, expected "
     "at most 1", TRUE),
    (lambda: cache_of(topk_ids=[[97], [98], []], topk_logprobs=[[-1.0], [-0.5], []]),
     f"a.parquet, row 0, position 0: {FIRST} token i + 1", ROW_0),
    (lambda: cache_of(realized_logprob=[-1.0, None, None]),
     f"a.parquet, row 0, position 0: {FIRST} token i + 1", ROW_0),
    (lambda: cache_of(
        input_ids=[97, *b"abcdefgh" * 5], topk_ids=[[], *([i] for i in b"bcdefgha" * 5)],
        topk_logprobs=[[], *[[-0.5]] * 40]),
     "a.parquet, row 0: its rows are shifted by one: 98% of them list the next token, but only 0% "
     "their own token", ROW_0),
    (lambda: cache_of(topk_logprobs=[[], [-0.5], [-1.0]]),
     "a.parquet, row 0, position 2: 2 topk_ids, but 1 topk_logprobs", REMAKE),
    (lambda: cache_of(topk_ids=[[], [98]], topk_logprobs=[[], [-0.5]]),
     "a.parquet, row 0: 3 tokens, but 2 topk_ids", REMAKE),
    (lambda: cache_of(input_ids=[97, None, 99]),
     "a.parquet, row 0, position 1: input_ids contains null", REMAKE),
    (lambda: cache_of(input_ids=[97, 2**40, 99]),
     "a.parquet, row 0, position 1: input_ids contains 1099511627776, expected "
     "-2147483648..2147483647", REMAKE),
    (lambda: cache_of(input_ids=[97, 1.5, 99]),
     "a.parquet, row 0: input_ids has the type double, expected integers", REMAKE),
    (lambda: cache_of(topk_ids=[[], [2**32 + 98], [99, 98]]),
     "a.parquet, row 0, position 1: topk_ids contains 4294967394, expected "
     "-2147483648..2147483647", REMAKE),
    (lambda: cache_of({"k": "1"}),
     "a.parquet, row 0, position 2: a row has 2 candidates, but the footer has k=1", FOOTER),
    (lambda: cache_of({"k": "x"}), "a.parquet: its footer has k=x, expected a number", FOOTER),
    (lambda: cache_of({"vocab_size": "98"}),
     "a.parquet, row 0, position 1: it has the id 98, but the footer has vocab_size=98", FOOTER),
    (lambda: cache_of({"normalized": "topk"}),
     "a.parquet, row 0, position 1: its probabilities sum to 0.6065, but the footer has "
     "normalized=topk", FOOTER),
    (lambda: cache_of({"log_base": "2"}), "a.parquet: its footer has log_base=2, expected e",
     VERSION),
    (lambda: cache_of({"convention": "N"}), "a.parquet: its footer has convention=N, expected T",
     VERSION),
    (lambda: cache_of({"format_version": "99"}),
     "a.parquet: its footer has format_version=99, expected 1", VERSION),
    (lambda: compressed("d: 512\n"),
     "compression_config.yaml: invalid config: d, k or exact_k is missing", CONFIG),
    (lambda: compressed(None),
     "a.parquet: its rows are compressed, but compression_config.yaml is missing", CONFIG),
    (lambda: checked(file("a.parquet")), "a.parquet: the file is empty",
     "give a cache that has rows"),
    (lambda: checked(file("a.parquet", b"PAR1")), "the cache a.parquet cannot be read: …",
     READABLE),
    (lambda: checked(file("a.jsonl.gz", gzip.compress(b'{"prompt_logprobs": []}\n')[:-9])),
     "the cache a.jsonl.gz cannot be read: …", READABLE),
    (lambda: checked(file("a.jsonl", "{\n")), "a.jsonl, line 1: not JSON: …",
     "give one JSON object per line"),
    (lambda: open_cache(Path(file("a.jsonl", '{"prompt_logprobs": []}\n')), "neutral"),
     "a.jsonl: the file is not Parquet, so it is not a neutral cache", CACHES),
    (lambda: open_cache(parquet(input_ids=[[97]], logprobs=[[0.5]])),
     "a.parquet: the format is unknown; the columns are: input_ids, logprobs", CACHES),
    (lambda: answers({"text": "a"}),
     "a.jsonl: neither Parquet nor responses with prompt_logprobs or meta_info; line 1 has: text",
     CACHES),
    (lambda: answers(vllm(None, {"x": 1})),
     "a.jsonl, line 1, position 1: prompt_logprobs is not in vLLM's format", VLLM),
    (lambda: answers(vllm(None, {"98": {"logprob": -1}, f"{10**20}": {"logprob": -2}})),
     f"a.jsonl, line 1, position 1: candidates contains {10**20}, expected "
     "-2147483648..2147483647",
     REMAKE),
    (lambda: answers(vllm(None, {"98": {"logprob": -1}}, ids=[97, -(10**20)])),
     f"a.jsonl, line 1, position 1: prompt_token_ids contains -{10**20}, expected "
     "-2147483648..2147483647",
     REMAKE),
    (lambda: answers(vllm(None, {"98": {"logprob": -1}}, ids=None)),
     "a.jsonl, line 1: no prompt_token_ids for 2 rows", VLLM),
    (lambda: answers(vllm(None, {"98": {"logprob": -1}}, {"7": {"logprob": -1}}, ids=b"abc")),
     "a.jsonl, line 1, position 2: the realized token 99 is missing or has a different "
     "log-probability among the candidates", AS_GIVEN),
    (lambda: answers(sglang([[None, 97], [-1.0, 98]], [None, [[-1.0, 98], [-20.0, 98]]])),
     "a.jsonl, line 1, position 1: the candidate 98 occurs twice", "store each candidate once"),
    (lambda: answers(sglang([[None, 97], [-1.0, 98]], [None, [[-2.0, 98]]])),
     "a.jsonl, line 1, position 1: the realized token 98 is missing or has a different "
     "log-probability among the candidates", AS_GIVEN),
    (lambda: answers({"meta_info": {
        "input_token_logprobs": [[None, 98]], "input_top_logprobs": [None], "prompt_tokens": 3}}),
     "a.jsonl, line 1: contains only the last 1 of 3 prompt tokens", SGLANG),
    (lambda: answers({**vllm(None, {"98": {"logprob": -1}}), "loss_mask": [True]}),
     "a.jsonl, line 1: loss_mask has 1 values, expected one for each of 2 tokens", REMAKE),
    (lambda: answers({**vllm(None, {"98": {"logprob": -1}}), "labels": "x"}),
     "a.jsonl, line 1: labels is not a list", REMAKE),
    (lambda: answers({"meta_info": {"input_token_logprobs": []}}),
     "a.jsonl, line 1: no input_token_logprobs and input_top_logprobs of SGLang in a supported "
     "layout; meta_info has: input_token_logprobs", SGLANG),
    (lambda: answers({"prompt_logprobs": [], "prompt_token_ids": []}, {"error": "too long"}),
     "a.jsonl, line 2: the response is an error: too long",
     "request this text from the server again, or delete the line"),
    (lambda: projected(text="abd"),
     "a.parquet, row 0: its ids do not spell its text: they differ from byte 2 on",
     "pass the teacher that made these ids, or remove its text and messages, so that the text is "
     "decoded from the ids"),
    (lambda: projected(messages=[ASK], template="plain"),
     "a.parquet, row 0: its ids differ from its messages, rendered with the teacher's template",
     "pass the teacher and the template that made these ids, or remove its text and messages, so "
     "that the text is decoded from the ids"),
    (lambda: projected(xtok.ProjectConfig(source="vllm")),
     "a.parquet: the file is Parquet, so it is not a vllm cache", CACHES),
    (lambda: to_bytes(there("pipe.jsonl", os.mkfifo), "out.parquet"),
     "pipe.jsonl is a pipe, not a regular file",
     AS_A_FILE),
    (lambda: instead("pyarrow", lambda: to_bytes(file("a.jsonl"), "a.parquet")),
     "a.parquet requires the package pyarrow, which is not installed",
     "pip install pyarrow, or in a clone of xtok: pip install -e '.[parquet]'"),
    (lambda: to_bytes(file("a.parquet"), "a.parquet"),
     "the output a.parquet is an input", "choose a different path"),
    (lambda: to_bytes(str(empty_cache()), "out.parquet"),
     "the files contain no rows", "pass a cache with at least one row"),
    (lambda: (cache_of(when=b"\xff"), to_bytes(
        "a.parquet", "a.jsonl", xtok.ProjectConfig(to="vllm"))),
     "a.parquet: the column 'when' has the type binary, which JSON does not support",
     "drop the column, or convert it to strings or numbers"),
    (lambda: (cache_of(), xtok.project("a.parquet", to_pieces(), "out.parquet",
        back_map=there("forth.safetensors", xtok.build(*to_pieces().tokenizers).save))),
     "forth.safetensors: the map leads from bytes → small.model, expected small.model → bytes "
     "(teacher → student)",
     "build back_map= from the teacher to the student: the teacher is its first model"),
    (lambda: to_bytes(file("a.jsonl"), "a.txt"),
     "the output a.txt does not end in .parquet", "name it a.parquet"),
    # Training
    (lambda: read_loss("event-kl"), "event-kl does not use a map", "xtok events STUDENT TEACHER"),
    (lambda: read_loss("event_kl"), "event-kl does not use a map", "xtok events STUDENT TEACHER"),
    (lambda: read_loss("csd"), "csd does not use a map", "xtok events STUDENT TEACHER --for csd"),
    (lambda: read_loss("alm"), "alm does not use a map",
     "train without a file: this loss needs only the teacher's log-probabilities"),
    (lambda: read_loss("topk-kl"), "topk-kl does not use a map",
     "xtok project TOPK STUDENT TEACHER -o OUTPUT.parquet"),
    (lambda: read_loss("p_kl", EventLoss), "p-kl does not use an event map",
     "xtok build STUDENT TEACHER --for p-kl"),
    (lambda: losses.make_loss("p-kl"), "p-kl requires a map", EACH),
    (lambda: losses.make_loss("event-kl"),
     "event-kl requires an event map", EACH),
    (lambda: make_objective([None], "gold", GOOD), "gold needs a model as its teacher", COLLATE),
    (lambda: make_objective([xtok.pair("bytes", "small/small-digits")], "same-tokenizer"),
     "same-tokenizer needs one tokenizer, but bytes and small-digits have different ones",
     "use event-kl, with the output of `xtok events STUDENT TEACHER`"),
    (lambda: make_objective([bytes_pair()], "topk-kl"), "topk-kl needs stored predictions",
     COLLATE),
    (lambda: make_objective([bytes_pair()], "p-kl", ProjectionModule(of_bytes(), learnable=True)),
     "the map is learnable, but a trainer optimizes only its model",
     "train the map in your own loop, as scripts/examples/distill.py does, then pass the map "
     "that `to_map` returns"),
    (lambda: collated(messages=TURNS, tools="f"),
     "sample 0: the value of 'tools': not JSON: Expecting value at column 1", CHAT),
    (lambda: collated(text="a", teacher_context=3), "sample 0: teacher_context is not a text",
     OF_TEACHERS),
    (lambda: collated(text="a", teacher_context=["b"]),
     "sample 0: teacher_context has 1 values, expected 2, one per teacher", OF_TEACHERS),
    (lambda: collated(text="a", teacher_context=[3, None]),
     "sample 0: teacher_context is not a text", OF_TEACHERS),
    (lambda: collated(messages=TURNS, teacher_context="b"),
     "sample 0: teacher_context is not used together with messages",
     "use teacher_messages instead"),
    (lambda: collated(text="a", teacher_messages=TURNS),
     "sample 0: teacher_messages is not used together with text",
     "use teacher_context instead"),
    (lambda: collated(messages=TURNS, teacher_messages=[ASK, {**ANSWER, "content": "yä"}]),
     "sample 0: the content of message 1 of messages and of message 1 of teacher_messages differ "
     "from byte 1, expected equal answers", SAME_ANSWERS),
    (lambda: collated(messages=TURNS, teacher_messages=[ASK]),
     "sample 0: messages have 1 answers, but teacher_messages have 0", SAME_ANSWERS),
    (lambda: collated(messages=TURNS, teacher_messages=[{"content": "x"}]),
     "sample 0: teacher_messages: message 0 has no role",
     'a message is an object such as {"role": "user", "content": "Hello"}'),
    (lambda: collated(messages=TURNS, teacher_messages="x"),
     "sample 0: teacher_messages: the value of 'messages': not JSON: Expecting value at column 1",
     CHAT),
    (lambda: heads_of("no head"), "the student needs whole logits: Linear is not a decoder of "
     "Transformers", WHOLE),
    (lambda: heads_of("more"), "the student needs whole logits: LlamaForCausalLM has positions "
     "[1, 4] for ids [1, 3]", WHOLE),
    (lambda: heads_of("other"), "the student needs whole logits: the logits of LlamaForCausalLM "
     "differ from its head applied to its hidden states (configuration values used: logit_scale, "
     "logits_scaling, lm_head_multiplier, output_multiplier, final_logit_softcapping, "
     "logits_soft_cap)", WHOLE),
    (lambda: ProjectionModule(of_bytes())(torch.zeros(1, 1, 5)),
     "the student's logits are 5 wide, expected at least 256 (the map's width)",
     "use a map for this student, or build it 5 wide with vocab_size="),
    (lambda: ProjectionModule(read_map(pt_bytes(FOREIGN), "map.pt")),
     "the map file does not record the width of the teacher's logits (largest id: 3)",
     "load or convert the map with teacher_vocab_size="),
]  # fmt: skip


def says(found: str, expected: str) -> bool:
    return found.startswith(expected[:-1]) if expected.endswith("…") else found == expected


@pytest.mark.parametrize(("cause", "message", "hint"), ERRORS)
def test_an_error_says_what_is_wrong_and_what_to_do(
    small: Path, tmp_path: Path, cause: Cause, message: str, hint: str
) -> None:
    with pytest.raises(XtokError) as caught:
        cause()
    for found, expected in ((caught.value.message, message), (caught.value.hint, hint)):
        found = found.replace(f"{tmp_path}/", "").replace(str(small), "small")
        assert says(found, expected), found
        assert "\n" not in found
