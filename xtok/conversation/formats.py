"""Named prompt formats, for tokenizers that bring no chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xtok.conversation.templates import Message
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer
from xtok.vocab.table import TokenTable, TokenType

# Sources. chatml: the markup of OpenAI's ChatML as in the chat template of Qwen/Qwen2.5. llama3:
# the model card of Llama 3, "Prompt Template". mistral: mistral-common's instruct tokenizers; the
# system text stands in the first user message in v1, in the last one in v2 and v3, and by itself
# from v7 on. gemma: ai.google.dev/gemma/docs/core/prompt-structure. nemotron: the chat template of
# nvidia/NVIDIA-Nemotron-Nano-9B-v2, roles capitalized; its padding by Megatron-LM. deepseek: the
# chat template of deepseek-ai/DeepSeek-V3. nemotron-h-aligned and identity: Megatron-LM's SFT
# tokenizer, whose targets are what stands in `generation` here. plain: our own.

_TURNS = """\
{{- bos_token if bos is none else bos }}
{%- for message in messages %}
{%- set before, behind = turns[message.role] %}
{%- set content = message.content | trim if trims else message.content %}
{%- if generates and message.role == 'assistant' %}
{%- generation %}{{- content + behind }}{% endgeneration %}
{%- else %}
{{- before + space + content + behind }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- turns.assistant[0] }}{% endif %}"""

_MERGING_SYSTEM = """\
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content')
  | join('\\n\\n') %}
{%- if system and not users %}
{{- raise_exception('there is no user message that the system text could stand in') }}
{%- endif %}
{{- bos }}
{%- for message in messages if message.role != 'system' %}
{%- set before, behind = turns[message.role] %}
{{- before + space }}
{%- if system and message is sameas users[system_place] %}{{- system + '\\n\\n' }}{% endif %}
{{- message.content + behind }}
{%- endfor %}"""

_PLAIN = """\
{{- bos_token }}
{%- for message in messages %}
{{- roles[message.role] + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content ~ (eos_token or '\\n\\n') }}{% endgeneration %}
{{- '\\n\\n' if eos_token else '' }}
{%- else %}
{{- message.content + '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- roles.assistant + '\\n' }}{% endif %}"""


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How one family writes a conversation."""

    name: str  # its name as a template
    roles: Mapping[str, str]  # of messages, to what the format calls them; others are refused
    turns: str | Mapping[str, str] = ""  # of any role, or by role, with its NAME and the CONTENT
    bos: str | None = None  # before the first turn; None for the tokenizer's own
    space: str | None = ""  # before each content; None for the one that the library adds to text
    trims: bool = False  # whether contents are written without the space around them
    generates: bool = False  # whether all of the assistant's turn is a target
    system_place: int = 0  # of the user's messages, the one that the system text stands in
    template: str = _TURNS  # Jinja, which reads these fields beside what every chat template has
    pad_tokens: tuple[str, ...] = ()  # before the tokens of the roles `pad` and `unk`
    image_placeholders: tuple[str, ...] = ("<image>",)  # which the assistant may not write
    needs: tuple[str, ...] = ()  # control or added tokens that the vocabulary must have

    def variables(self, table: TokenTable) -> dict[str, Any]:
        """Return what the template reads.

        SentencePiece, known by its tokens for bytes, adds a space wherever text begins.
        """
        added = " " * bool(np.any(table.types == TokenType.BYTE))
        turns = dict.fromkeys(self.roles, self.turns) if isinstance(self.turns, str) else self.turns
        return {
            **vars(self),
            "space": added if self.space is None else self.space,
            "turns": {
                role: turn.replace("NAME", self.roles[role]).split("CONTENT")
                for role, turn in turns.items()
            },
        }

    def pad_id(self, table: TokenTable) -> int:
        """Return the id that pads a batch.

        Raises:
            XtokError: if the vocabulary has none.
        """
        ids = {name: i for i, name in table.control_names.items()}
        known = [ids[name] for name in self.pad_tokens if name in ids]
        known += [*table.roles.get("pad", ()), *table.roles.get("unk", ())]
        if not known:
            raise XtokError(
                f"the vocabulary has no padding token for the format {self.name}",
                hint=f"it is one of {', '.join(self.pad_tokens)}; give a pad_id of your own",
            )
        return known[0]

    def check(self, messages: Sequence[Message], tokenizer: Tokenizer) -> None:
        """Check that the format can express the messages, and the tokenizer has its tokens.

        Raises:
            XtokError: if not; names the message, and what is wrong with it.
        """
        table = tokenizer.table
        ids, names = table.canonical_ids(), set(table.control_names.values())
        added = set(table.ids_of_type(TokenType.USER_DEFINED).tolist())
        missing = [n for n in self.needs if n not in names and ids.get(n.encode()) not in added]
        if missing:
            name = tokenizer.vocabulary.model_id
            raise XtokError(
                f"{name} has no {min(missing)}, which the format {self.name} needs",
                hint=f"take another format ({', '.join(FORMATS)}) or a chat template",
            )
        for i, message in enumerate(messages):
            role, content = message["role"], message.get("content")
            if role not in self.roles:
                problem = f"has the role {role!r}; it knows {', '.join(self.roles)}"
            elif not isinstance(content, str) or message.get("tool_calls"):
                problem = "is not plain text"
            elif role == "assistant" and (
                image := next((p for p in self.image_placeholders if p in content), None)
            ):
                problem = f"is the assistant's and has the image placeholder {image}"
            else:
                continue
            raise XtokError(
                f"message {i} {problem}, which the format {self.name} does not allow",
                hint="change the message, or give a chat template that takes it",
            )


_CHAT = {role: role for role in ("system", "user", "assistant")}
_CAPITALIZED = {role: role.capitalize() for role in _CHAT}
_WITH_TOOLS = {**_CHAT, "tool": "tool"}

_FORMATS = (
    PromptFormat(
        name="chatml",
        roles=_WITH_TOOLS,
        turns="<|im_start|>NAME\nCONTENT<|im_end|>\n",
        bos="",
        pad_tokens=("<|endoftext|>",),
        image_placeholders=("<image>", "<|image_pad|>", "<|vision_start|>"),
        needs=("<|im_start|>", "<|im_end|>"),
    ),
    PromptFormat(
        name="llama3",
        roles={**_CHAT, "tool": "ipython"},
        turns="<|start_header_id|>NAME<|end_header_id|>\n\nCONTENT<|eot_id|>",
        bos="<|begin_of_text|>",
        trims=True,
        pad_tokens=("<|finetune_right_pad_id|>", "<|finetune_right_pad|>"),
        image_placeholders=("<image>", "<|image|>"),
        needs=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    PromptFormat(
        name="mistral",
        template=_MERGING_SYSTEM,
        roles=_CHAT,
        turns={"user": "[INST]CONTENT[/INST]", "assistant": "CONTENT</s>"},
        bos="<s>",
        space=None,
        system_place=-1,
        pad_tokens=("<pad>",),
        image_placeholders=("<image>", "[IMG]"),
        needs=("[INST]", "[/INST]"),
    ),
    PromptFormat(
        name="mistral-v1",
        template=_MERGING_SYSTEM,
        roles=_CHAT,
        turns={"user": " [INST]CONTENT [/INST]", "assistant": "CONTENT</s>"},
        bos="<s>",
        space=" ",
        pad_tokens=("<pad>",),
        needs=("<s>", "</s>"),
    ),
    PromptFormat(
        name="mistral-v7",
        roles=_CHAT,
        turns={
            "system": "[SYSTEM_PROMPT]CONTENT[/SYSTEM_PROMPT]",
            "user": "[INST]CONTENT[/INST]",
            "assistant": "CONTENT</s>",
        },
        bos="<s>",
        space=None,
        pad_tokens=("<pad>",),
        image_placeholders=("<image>", "[IMG]"),
        needs=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
    ),
    PromptFormat(
        name="gemma",
        roles={"user": "user", "assistant": "model"},
        turns="<start_of_turn>NAME\nCONTENT<end_of_turn>\n",
        bos="<bos>",
        trims=True,
        pad_tokens=("<pad>",),
        image_placeholders=("<image>", "<start_of_image>", "<image_soft_token>"),
        needs=("<start_of_turn>", "<end_of_turn>"),
    ),
    PromptFormat(
        name="nemotron",
        roles=_CAPITALIZED,
        turns={
            "system": "<SPECIAL_10>System\nCONTENT\n",
            "user": "<SPECIAL_11>User\nCONTENT\n",
            "assistant": "<SPECIAL_11>Assistant\nCONTENT\n<SPECIAL_12>\n",
        },
        pad_tokens=("<SPECIAL_233>",),
        image_placeholders=("<image>", "<img>"),
        needs=("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
    ),
    PromptFormat(
        name="nemotron-h-aligned",
        roles=_CAPITALIZED,
        turns={
            "system": "<SPECIAL_10>System\nCONTENT\n",
            "user": "<SPECIAL_11>User\nCONTENT\n<SPECIAL_11>Assistant\n",
            "assistant": "CONTENT\n",
        },
        bos="",
        trims=True,
        generates=True,
        pad_tokens=("<SPECIAL_233>",),
        image_placeholders=("<image>", "<img>"),
        needs=("<SPECIAL_10>", "<SPECIAL_11>"),
    ),
    PromptFormat(
        name="deepseek",
        roles=_CHAT,
        turns={
            "system": "CONTENT",
            "user": "<｜User｜>CONTENT",
            "assistant": "<｜Assistant｜>CONTENT<｜end▁of▁sentence｜>",
        },
        bos="<｜begin▁of▁sentence｜>",
        pad_tokens=("<｜▁pad▁｜>",),
        needs=("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    ),
    PromptFormat(
        name="identity",
        roles=_WITH_TOOLS,
        turns="CONTENT",
        bos="",
        generates=True,
        pad_tokens=("<unk>",),
    ),
    PromptFormat(name="plain", template=_PLAIN, roles={**_CAPITALIZED, "tool": "Tool"}),
)
FORMATS: Mapping[str, PromptFormat] = {one.name: one for one in _FORMATS}
"""The formats by name; a new one is one more entry."""
