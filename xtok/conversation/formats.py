"""Named prompt formats, for tokenizers that bring no chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xtok.conversation.templates import Message
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer
from xtok.vocab.table import TokenTable


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How one family writes a conversation.

    Attributes:
        name: its name as a template.
        template: Jinja; it has the variable `roles` beside those of every chat template.
        roles: the role of a message to what the format calls it; other roles are refused.
        pad_tokens: names of the padding token, the first that the vocabulary has counts; after
            them, the token of role `pad`, then of role `unk`.
        image_placeholders: what marks an image; the assistant may not write it.
        needs: control tokens that the vocabulary must have.
    """

    name: str
    template: str
    roles: Mapping[str, str]
    pad_tokens: tuple[str, ...] = ()
    image_placeholders: tuple[str, ...] = ("<image>",)
    needs: tuple[str, ...] = ()

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
        missing = set(self.needs) - set(tokenizer.table.control_names.values())
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

# Sources. chatml: the markup of OpenAI's ChatML as in the chat template of Qwen/Qwen2.5. llama3:
# the model card of Llama 3, "Prompt Template". mistral: mistral-common's instruct tokenizer for
# SentencePiece v3 vocabularies; the system text stands before that of the first user turn, as in
# v1. gemma: ai.google.dev/gemma/docs/core/prompt-structure. nemotron: the chat template of
# nvidia/NVIDIA-Nemotron-Nano-9B-v2, roles capitalized; its padding by Megatron-LM.
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
        template="""\
{{- '<s>' }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- set ns.system = message.content + '\\n\\n' %}
{%- elif message.role == 'user' %}
{{- '[INST] ' + ns.system + message.content + '[/INST]' }}
{%- set ns.system = '' %}
{%- else %}
{{- ' ' + message.content + '</s>' }}
{%- endif %}
{%- endfor %}""",
        roles={role: role for role in ("system", "user", "assistant")},
        pad_tokens=("<pad>",),
        image_placeholders=("<image>", "[IMG]"),
        needs=("[INST]", "[/INST]"),
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
)
FORMATS: Mapping[str, PromptFormat] = {one.name: one for one in _FORMATS}
"""The formats by name; a new one is one more entry."""
