"""What a user will do with an export, tried out: plain transformers reads its config and its weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from shardyard.checkpoint.hf_files import Facts, facts_of_folder
from shardyard.checkpoint.state import any_stage
from shardyard.errors import UserError
from shardyard.models.causal_lm import TrainableCausalLM
from shardyard.parallel import Precision

logger = logging.getLogger("shardyard.checkpoint")

_PROBE_LENGTH = 8
_SAME = 1e-3
"""Largest difference of logits, relative to the largest logit, that the order of sums in fp32 may make."""
_ROUNDED = 0.5
"""Norm of the difference relative to that of the logits' spread, where weights or activations are rounded to
8 or 11 bits. Rounding makes a few hundredths, and more where a router then chooses other experts; a tensor in
the wrong place makes as much as logits vary, 1 and above."""


class Answer(NamedTuple):
    """Logits of the fixed prompt, fp32 [T, V] on the host; ``exact`` if they were computed in fp32."""

    logits: torch.Tensor
    exact: bool


def check_reads_back(facts: Mapping[str, Facts], folder: Path) -> None:
    """The config.json in ``folder`` makes a model (on meta, so without memory) with the tensors of ``facts``.

    Raises:
        UserError: transformers cannot read it, or makes another model of it.
    """
    _check_generation_config(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            rebuilt: Any = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a config class or a model's constructor raises
        raise UserError(
            f"config.json, as it would be exported, cannot be read back by transformers: {_line(error)}"
        ) from error
    theirs = {name: tuple(tensor.shape) for name, tensor in rebuilt.state_dict().items()}
    for name, (shape, _) in facts.items():
        if theirs.get(name) != shape:
            raise UserError(
                f"config.json, as it would be exported, makes another model: {name} is "
                f"{shape} here and {theirs.get(name, 'absent')} there"
            )


def _check_generation_config(folder: Path) -> None:
    if not (folder / "generation_config.json").is_file():
        return
    try:
        GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of every type, for JSON of another form and for values that contradict
        raise UserError(
            f"generation_config.json, as it would be exported, is not taken by transformers: {_line(error)}; "
            "correct it in the model's folder, or remove the file"
        ) from error


def answer_of(model: Any) -> Answer | None:
    """The live model's answer to the fixed prompt; every rank calls it and gets the same. None where the
    model's forward cannot be asked this way. Modes and shards are afterwards as they were.
    """
    one = any_stage(model)
    was_training = model.training
    model.eval()
    try:
        ids = _prompt(one.config.get_text_config())
        with torch.no_grad():
            if not isinstance(one, TrainableCausalLM):
                ids = ids.to(next(one.parameters()).device)
                return Answer(model(input_ids=ids, use_cache=False).logits[0].float().cpu(), _is_fp32(one))
            placement = one.placement
            ids = ids.to(placement.device.torch_device)
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            logits = model(input_ids=ids, position_ids=positions, doc_lens=(ids.shape[1],))
        compute = Precision.of(placement.parallel, placement.device).compute
        return Answer(logits[0].float().cpu(), compute == torch.float32)
    except Exception as error:  # a family's own forward
        logger.debug("the live model does not answer a fixed prompt: %s", _line(error))
        return None
    finally:
        model.train(was_training)
        # A forward without a backward leaves modules gathered; whoever lists parameters next, the export for
        # one, must find the sharded ones.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _is_fp32(model: Any) -> bool:
    return all(p.dtype == torch.float32 for p in model.parameters())


def probe(folder: Path, live: Answer | None) -> None:
    """Load the export as a user will, by plain transformers, and let it answer a fixed prompt.

    A model that loads but cannot be asked this way (its forward wants more than ids) is no worse for it: that
    is logged as an error, and the files stay.

    Raises:
        UserError: it does not load, with all tensors and no others, or it answers with NaN or Inf, or
            otherwise than ``live``, the trained model.
    """
    try:
        both: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
        )
    except Exception as error:  # of every type, as each part of transformers has its own
        raise UserError(f"plain transformers does not load the export: {_line(error)}") from error
    loaded, info = both
    faults = [
        f"{what}: {info[what]}"
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info[what]
    ]
    if faults:
        raise UserError(f"plain transformers does not read the export as it was meant: {'; '.join(faults)}")
    try:
        with torch.no_grad():
            logits = loaded(input_ids=_prompt(loaded.config.get_text_config()), use_cache=False).logits[0]
    except Exception as error:  # a family's own forward
        logger.error(
            "the export is complete and loads, but a forward on a fixed prompt failed: %s; try the model "
            "before you rely on it",
            _line(error),
        )
        return
    if not torch.isfinite(logits).all():
        raise UserError("the exported model answers a fixed prompt with NaN or Inf")
    if live is not None:
        _compare(logits.float(), live, exact=live.exact and _is_exact(folder))


def _is_exact(folder: Path) -> bool:
    """No parameter was rounded on its way to the file: all that floats is in fp32."""
    dtypes = {dtype for _, dtype in facts_of_folder(folder).values() if dtype.is_floating_point}
    return dtypes <= {torch.float32, torch.float64}


def _compare(logits: torch.Tensor, live: Answer, *, exact: bool) -> None:
    difference = logits - live.logits
    if exact:
        found = (difference.abs().max() / live.logits.abs().max().clamp_min(1e-12)).item()
        limit = _SAME
    else:
        spread = (live.logits - live.logits.mean()).norm().clamp_min(1e-12)
        found, limit = (difference.norm() / spread).item(), _ROUNDED
    logger.debug("logits of the export differ from the live model's by %.1e (up to %.0e)", found, limit)
    if not found <= limit:
        raise UserError(
            f"the exported model answers a fixed prompt otherwise than the trained one: their logits differ "
            f"by {found:.1e}, where rounding makes up to {limit:.0e}. The export is not kept; please report "
            "it. Checkpoints of this run are as they were"
        )


def _prompt(config: Any) -> torch.Tensor:
    """Ids 0, 1, 2, ... [1, 8], or fewer for a model with fewer positions."""
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    length = min([_PROBE_LENGTH, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])
    return torch.arange(length)[None] % config.vocab_size


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
