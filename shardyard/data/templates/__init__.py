"""Chat templates: a conversation -> token ids, cut into what is given and what is trained."""

from shardyard.data.templates.base import Template, Turn
from shardyard.data.templates.build import build_template, exported_chat_template

__all__ = ["Template", "Turn", "build_template", "exported_chat_template"]
