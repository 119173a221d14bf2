"""Tokenizers with the chat templates of real models and the control tokens of these templates."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import fetch_tokenizers

TEMPLATES = fetch_tokenizers.DEFAULT_DIR / "chat-templates"
_CONTROLS = re.compile(
    r"<\|[\w/]+\|>|<\|[\w\"]+>|<\w+\|>|<\|\"\|>|<｜[^｜<>]+｜>|\[gMASK\]|<sop>|<(?:start|end)_of_\w+>"
)
_EOS = {
    "cohere2": "<|END_OF_TURN_TOKEN|>", "deepseekv3_training": "<｜end▁of▁sentence｜>",
    "gptoss": "<|return|>", "smolvlm": "<end_of_utterance>",
    **dict.fromkeys(["llama3", "llama3_1", "llama3_training"], "<|eot_id|>"),
    **dict.fromkeys(["lfm2", "nemotron_3_nano", "qwen2_5", "qwen3", "qwen3_5_think"], "<|im_end|>"),
    **dict.fromkeys(["qwen3_training", "qwen3_vl"], "<|im_end|>"),
}  # fmt: skip
_STOPS = {"glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"]}
"""End-of-sequence tokens for the generation config, by template.

GLM 4.5 has no token at the end of a turn. Generation stops at the first token of the next turn.
"""
NAMES = tuple(sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
CHAT = [
    {"role": "user", "content": "How many steps?"},
    {"role": "assistant", "content": "There are 201 steps."},
]
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "123456789",
            "type": "function",
            "function": {"name": "add", "arguments": {"a": 2, "b": "zwei"}},
        }
    ],
}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "123456789", "content": "four"}


def write(name: str, source: Path, folder: Path, templates: Path = TEMPLATES) -> Any:
    """Copy a tokenizer's folder with a template and its control tokens; return the tokenizer."""
    from transformers import AutoTokenizer

    library: Any = AutoTokenizer.from_pretrained(str(source))
    template = (templates / f"{name}.jinja").read_text(encoding="utf-8")
    eos = _EOS.get(name, "<|end_of_text|>")
    stops = _STOPS.get(name, [])
    names = sorted({*_CONTROLS.findall(template), eos, *stops})
    library.add_special_tokens({"additional_special_tokens": names})
    library.eos_token = eos
    library.chat_template = template
    library.save_pretrained(folder)
    if stops:
        ids = {"eos_token_id": library.convert_tokens_to_ids(stops)}
        (folder / "generation_config.json").write_text(json.dumps(ids), encoding="utf-8")
    return library


def trl_templates() -> list[Path]:
    """Return the chat templates in the TRL package; an empty list if TRL is not installed."""
    spec = importlib.util.find_spec("trl")
    folder = Path(spec.origin).parent / "chat_templates" if spec and spec.origin else Path()
    return sorted(folder.glob("*.jinja")) if folder.name else []


TURNS = "{% for m in messages %}[header {{ m.role }}]\n{{ m.content | trim }}\n\n{% endfor %}"
