"""The tokenizer of a run, from a folder or from the hub."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardyard.errors import UserError, first_line

if TYPE_CHECKING:
    from shardyard.config.sections.model import ModelConfig

_log = logging.getLogger("shardyard.data")


def load_tokenizer(model: ModelConfig) -> Any:
    """The tokenizer of ``tokenizer_name_or_path``, else of ``model_name_or_path``.

    One without a padding token pads with its eos token. ``split_special_tokens`` is not set here but given
    to the ``Encoder``: on the tokenizer it would split the template's own tokens too, and be exported.

    Raises:
        UserError: the folder is missing or holds no tokenizer, or the hub does not give one.
    """
    from transformers import AutoTokenizer

    key, name = "model.model_name_or_path", model.model_name_or_path
    if model.tokenizer_name_or_path is not None:
        key, name = "model.tokenizer_name_or_path", model.tokenizer_name_or_path
    name = os.path.expanduser(name)
    is_folder = _check_folder(key, name)
    if not is_folder:
        _log.info("%s: %s is no folder here; looking for it on the hub", key, name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name,
            use_fast=model.use_fast_tokenizer,
            trust_remote_code=model.trust_remote_code,
            revision=model.model_revision,
            cache_dir=model.cache_dir,
            token=model.hf_hub_token,
            local_files_only=is_folder,
        )
    except Exception as error:  # transformers, tokenizers and the hub client each raise types of their own
        reason = first_line(error)[:300]
        if is_folder:
            raise UserError(f"{key}: the folder {name} holds no tokenizer that loads: {reason}") from error
        raise UserError(
            f"{key}: {name!r} is no folder here, and the hub gives no tokenizer of this name: {reason}"
        ) from error
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _check_folder(key: str, name: str) -> bool:
    """Whether ``name`` is a folder; a hub id otherwise. Raises UserError if it can only be a missing path."""
    path = Path(name)
    if path.is_dir():
        return True
    if path.exists():
        raise UserError(f"{key}: {name} is a file; give the folder that holds the tokenizer")
    if name.startswith((".", "/", "~", os.sep)) or name.endswith("/") or name.count("/") > 1 or "\\" in name:
        raise UserError(f"{key}: no such folder: {name}")
    return False
