"""A reply's text -> its thought, its words and its calls: the inverse of what the chat template writes."""

from shardyard.infer.replies.format import CallFormat, ReplyFormat
from shardyard.infer.replies.parser import Delta, Reply, ReplyParser, parse_reply
from shardyard.infer.replies.probe import find_reply_format

__all__ = [
    "CallFormat",
    "Delta",
    "Reply",
    "ReplyFormat",
    "ReplyParser",
    "find_reply_format",
    "parse_reply",
]
