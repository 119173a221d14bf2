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


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How one family writes a conversation."""

    name: str  # its name as a template
    template: str  # Jinja, which reads `variables` beside what every chat template has
    roles: Mapping[str, str]  # of messages, to what the format calls them; others are refused
    pad_tokens: tuple[str, ...] = ()  # before the tokens of the roles `pad` and `unk`
    image_placeholders: tuple[str, ...] = ("<image>",)  # which the assistant may not write
    needs: tuple[str, ...] = ()  # control or added tokens that the vocabulary must have

    def variables(self, table: TokenTable) -> dict[str, Any]:
        """Return what the template reads: `roles`, and the `space` that the library adds to text.

        SentencePiece, known by its tokens for bytes, adds one wherever text begins.
        """
        return {"roles": self.roles, "space": " " * bool(np.any(table.types == TokenType.BYTE))}

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


def _roles(**changed: str) -> dict[str, str]:
    return {role: changed.get(role, role) for role in ("system", "user", "assistant", "tool")}


_CAPITALIZED = {role: role.capitalize() for role in ("system", "user", "assistant")}
_PLAIN_CHAT = {role: role for role in ("system", "user", "assistant")}

_HEADERS = """\
{{- 'BOS' }}
{%- for message in messages %}
{{- 'START' + roles[message.role] + 'HEADER' + message.content + 'END' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'START' + roles.assistant + 'HEADER' }}{% endif %}"""

_MISTRAL = """\
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content')
  | join('\\n\\n') %}
{%- if system and not users %}
{{- raise_exception('there is no user message that the system text could stand in') }}
{%- endif %}
{{- '<s>' }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- OPEN }}
{%- if system and message is sameas users[PLACE] %}{{- system + '\\n\\n' }}{% endif %}
{{- message.content + CLOSE }}
{%- elif message.role == 'assistant' %}
{{- SPACE + message.content + '</s>' }}
{%- endif %}
{%- endfor %}"""


def _filled(template: str, **values: str) -> str:
    for name, value in values.items():
        template = template.replace(name, value)
    return template


# Sources. chatml: the markup of OpenAI's ChatML as in the chat template of Qwen/Qwen2.5. llama3:
# the model card of Llama 3, "Prompt Template". mistral: mistral-common's instruct tokenizers; the
# system text stands in the first user message in v1, in the last one in v2 and v3, and by itself
# from v7 on. gemma: ai.google.dev/gemma/docs/core/prompt-structure. nemotron: the chat template of
# nvidia/NVIDIA-Nemotron-Nano-9B-v2, roles capitalized; its padding by Megatron-LM. deepseek: the
# chat template of deepseek-ai/DeepSeek-V3. nemotron-h-aligned and identity: Megatron-LM's SFT
# tokenizer, whose targets are what stands in `generation` here. plain: our own.
_FORMATS = (
    PromptFormat(
        name="chatml",
        template=_filled(_HEADERS, BOS="", START="<|im_start|>", HEADER="\\n", END="<|im_end|>\\n"),
        roles=_roles(),
        pad_tokens=("<|endoftext|>",),
        image_placeholders=("<image>", "<|image_pad|>", "<|vision_start|>"),
        needs=("<|im_start|>", "<|im_end|>"),
    ),
    PromptFormat(
        name="llama3",
        template=_filled(
            _HEADERS.replace("message.content", "message.content | trim"),
            BOS="<|begin_of_text|>",
            START="<|start_header_id|>",
            HEADER="<|end_header_id|>\\n\\n",
            END="<|eot_id|>",
        ),
        roles=_roles(tool="ipython"),
        pad_tokens=("<|finetune_right_pad_id|>", "<|finetune_right_pad|>"),
        image_placeholders=("<image>", "<|image|>"),
        needs=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    PromptFormat(
        name="mistral",
        template=_filled(
            _MISTRAL, OPEN="'[INST]' + space", PLACE="-1", CLOSE="'[/INST]'", SPACE="space"
        ),
        roles=_PLAIN_CHAT,
        pad_tokens=("<pad>",),
        image_placeholders=("<image>", "[IMG]"),
        needs=("[INST]", "[/INST]"),
    ),
    PromptFormat(
        name="mistral-v1",
        template=_filled(_MISTRAL, OPEN="' [INST] '", PLACE="0", CLOSE="' [/INST]'", SPACE="' '"),
        roles=_PLAIN_CHAT,
        pad_tokens=("<pad>",),
        needs=("<s>", "</s>"),
    ),
    PromptFormat(
        name="mistral-v7",
        template="""\
{{- '<s>' }}
{%- for message in messages %}
{%- if message.role == 'system' %}
{{- '[SYSTEM_PROMPT]' + space + message.content + '[/SYSTEM_PROMPT]' }}
{%- elif message.role == 'user' %}
{{- '[INST]' + space + message.content + '[/INST]' }}
{%- else %}
{{- space + message.content + '</s>' }}
{%- endif %}
{%- endfor %}""",
        roles=_PLAIN_CHAT,
        pad_tokens=("<pad>",),
        image_placeholders=("<image>", "[IMG]"),
        needs=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
    ),
    PromptFormat(
        name="gemma",
        template=_filled(
            _HEADERS.replace("message.content", "message.content | trim"),
            BOS="<bos>",
            START="<start_of_turn>",
            HEADER="\\n",
            END="<end_of_turn>\\n",
        ),
        roles={"user": "user", "assistant": "model"},
        pad_tokens=("<pad>",),
        image_placeholders=("<image>", "<start_of_image>", "<image_soft_token>"),
        needs=("<start_of_turn>", "<end_of_turn>"),
    ),
    PromptFormat(
        name="nemotron",
        template="""\
{{- bos_token }}
{%- for message in messages %}
{{- '<SPECIAL_10>' if message.role == 'system' else '<SPECIAL_11>' }}
{{- roles[message.role] + '\\n' + message.content + '\\n' }}
{%- if message.role == 'assistant' %}{{- '<SPECIAL_12>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<SPECIAL_11>' + roles.assistant + '\\n' }}{% endif %}""",
        roles=_CAPITALIZED,
        pad_tokens=("<SPECIAL_233>",),
        image_placeholders=("<image>", "<img>"),
        needs=("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
    ),
    PromptFormat(
        name="nemotron-h-aligned",
        template="""\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content | trim + '\\n' }}{% endgeneration %}
{%- else %}
{{- '<SPECIAL_10>' if message.role == 'system' else '<SPECIAL_11>' }}
{{- roles[message.role] + '\\n' + message.content | trim + '\\n' }}
{%- if message.role == 'user' %}{{- '<SPECIAL_11>' + roles.assistant + '\\n' }}{% endif %}
{%- endif %}
{%- endfor %}""",
        roles=_CAPITALIZED,
        pad_tokens=("<SPECIAL_233>",),
        image_placeholders=("<image>", "<img>"),
        needs=("<SPECIAL_10>", "<SPECIAL_11>"),
    ),
    PromptFormat(
        name="deepseek",
        template="""\
{{- '<｜begin▁of▁sentence｜>' }}
{%- for message in messages %}
{%- if message.role == 'system' %}
{{- message.content }}
{%- elif message.role == 'user' %}
{{- '<｜User｜>' + message.content }}
{%- else %}
{{- '<｜Assistant｜>' + message.content + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{% endif %}""",
        roles=_PLAIN_CHAT,
        pad_tokens=("<｜▁pad▁｜>",),
        needs=("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    ),
    PromptFormat(
        name="identity",
        template="""\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content }}{% endgeneration %}
{%- else %}
{{- message.content }}
{%- endif %}
{%- endfor %}""",
        roles=_roles(),
        pad_tokens=("<unk>",),
    ),
    PromptFormat(
        name="plain",
        template="""\
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
{%- if add_generation_prompt %}{{- roles.assistant + '\\n' }}{% endif %}""",
        roles={**_CAPITALIZED, "tool": "Tool"},
    ),
)
FORMATS: Mapping[str, PromptFormat] = {one.name: one for one in _FORMATS}
"""The formats by name; a new one is one more entry."""
