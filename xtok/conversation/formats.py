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
    """How one family writes a conversation.

    Attributes:
        name: its name as a template.
        template: Jinja; it has the variables of `variables` beside those of every chat template.
        roles: the role of a message to what the format calls it; other roles are refused.
        pad_tokens: names of the padding token, the first that the vocabulary has counts; after
            them, the token of role `pad`, then of role `unk`.
        image_placeholders: what marks an image; the assistant may not write it.
        needs: control or added tokens that the vocabulary must have.
    """

    name: str
    template: str
    roles: Mapping[str, str]
    pad_tokens: tuple[str, ...] = ()
    image_placeholders: tuple[str, ...] = ("<image>",)
    needs: tuple[str, ...] = ()

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

_SYSTEM = """\
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content')
  | join('\\n\\n') %}
{%- if system and not users %}
{{- raise_exception('there is no user message that the system text could stand in') }}
{%- endif %}
"""

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
        template="""\
{%- for message in messages %}
{{- '<|im_start|>' + roles[message.role] + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>' + roles.assistant + '\\n' }}{% endif %}""",
        roles=_roles(),
        pad_tokens=("<|endoftext|>",),
        image_placeholders=("<image>", "<|image_pad|>", "<|vision_start|>"),
        needs=("<|im_start|>", "<|im_end|>"),
    ),
    PromptFormat(
        name="llama3",
        template="""\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + roles[message.role] + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>' + roles.assistant + '<|end_header_id|>\\n\\n' }}
{%- endif %}""",
        roles=_roles(tool="ipython"),
        pad_tokens=("<|finetune_right_pad_id|>", "<|finetune_right_pad|>"),
        image_placeholders=("<image>", "<|image|>"),
        needs=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    PromptFormat(
        name="mistral",
        template=_SYSTEM
        + """\
{{- '<s>' }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '[INST]' + space }}
{%- if system and message is sameas users[-1] %}{{- system + '\\n\\n' }}{% endif %}
{{- message.content + '[/INST]' }}
{%- elif message.role == 'assistant' %}
{{- space + message.content + '</s>' }}
{%- endif %}
{%- endfor %}""",
        roles=_PLAIN_CHAT,
        pad_tokens=("<pad>",),
        image_placeholders=("<image>", "[IMG]"),
        needs=("[INST]", "[/INST]"),
    ),
    PromptFormat(
        name="mistral-v1",
        template=_SYSTEM
        + """\
{{- '<s>' }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- ' [INST] ' }}
{%- if system and message is sameas users[0] %}{{- system + '\\n\\n' }}{% endif %}
{{- message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}
{{- ' ' + message.content + '</s>' }}
{%- endif %}
{%- endfor %}""",
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
        template="""\
{{- '<bos>' }}
{%- for message in messages %}
{{- '<start_of_turn>' + roles[message.role] + '\\n' + message.content | trim }}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>' + roles.assistant + '\\n' }}{% endif %}""",
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
