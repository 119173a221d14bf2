"""Render conversations to ids with target masks and spans, and convert ids back."""

from xtok.conversation._tracking import Run as Run
from xtok.conversation._tracking import to_json_types as to_json_types
from xtok.conversation.batching import collate as collate
from xtok.conversation.batching import unpad as unpad
from xtok.conversation.reading import ReadBack as ReadBack
from xtok.conversation.reading import read_back as read_back
from xtok.conversation.rendering import Conversation as Conversation
from xtok.conversation.rendering import is_prefix_preserving as is_prefix_preserving
from xtok.conversation.rendering import render as render
from xtok.conversation.rendering import tool_suffix as tool_suffix
from xtok.conversation.writing import render_file as render_file
