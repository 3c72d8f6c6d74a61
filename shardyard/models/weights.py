"""How a model gets its weights: from the seed, from the files of a folder, from a checkpoint of a run."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from shardyard.config import ModelConfig
from shardyard.errors import UserError, first_line
from shardyard.models.block_fp8 import dequantised
from shardyard.models.causal_lm import Placement
from shardyard.models.reading import refuse_scrambled
from shardyard.models.scratch import allocate, initialise_from_seed, persistent_buffers
from shardyard.models.weight_files import WeightFiles, weight_files
from shardyard.parallel import local
from shardyard.parallel.fsdp import free_what_was_read_around

logger = logging.getLogger("shardyard.models")

ReadWeights = Callable[[Any, Path], None]
"""(model, checkpoint folder): fills the live tensors of this rank's part of the model; every rank calls it.
The room of checkpoints hands it in from above. Raises UserError."""

_KEY = "model.model_name_or_path"


def from_seed(
    cls: Any, config: Any, attention: str | None, placement: Placement, seed: int
) -> PreTrainedModel:
    """A parallelised model with its initial weights."""
    model, device = _parallelised(cls, config, attention, placement)
    initialise_from_seed(model, seed, device)
    return model


def without_weights(cls: Any, config: Any, attention: str | None, placement: Placement) -> PreTrainedModel:
    """A parallelised model with memory, whose weights are NaN until `read_checkpoint` fills them."""
    model, device = _parallelised(cls, config, attention, placement)
    allocate(model, device)
    return model


def _parallelised(
    cls: Any, config: Any, attention: str | None, placement: Placement
) -> tuple[PreTrainedModel, torch.device]:
    config.distributed_config = placement.distributed_config
    with torch.device("meta"):
        model = cls._from_config(config, attn_implementation=attention, dtype=torch.float32)
    dc, home, meshes = cls.prepare_distribute_model(placement.distributed_config)
    return cls.maybe_distribute_model(model, dc, meshes), home or torch.device("cpu")


def read_checkpoint(model: Any, folder: Path, read: ReadWeights | None) -> None:
    """Fill the model that `without_weights` made (all stages of a pipeline at once) from a DCP folder.

    Raises:
        UserError: from ``read``, or a weight holds NaN or Inf, as one does into which nothing was read.
    """
    if read is None:
        raise UserError(
            f"{_KEY}: {folder} is a checkpoint folder, which cannot be read here; export it first"
        )
    read(model, folder)
    _refuse_not_finite(model, folder)


def from_files(
    cls: Any,
    config: Any,
    folder: Path,
    attention: str | None,
    options: ModelConfig,
    block: tuple[int, int] | None,
    distributed: DistributedConfig | None,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """A model, parallelised as ``distributed`` says, each rank's part read from the weight files in
    ``folder``.

    ``block``: the blocks that fp8 weights have a scale for each.

    Raises:
        UserError: there are none, or they do not fit the config.
    """
    if not weight_files(folder):
        raise UserError(
            f"{_KEY}: {folder} holds no weights (*.safetensors). To start from random weights "
            "set model.train_from_scratch: true."
        )
    extra = {"attn_implementation": attention} if attention else {}
    with WeightFiles(folder) as files:
        tensors = dequantised(files.tensors, block) if block else files.tensors
        try:
            model, info = cls.from_pretrained(
                None, state_dict=tensors, config=config, dtype=dtype, output_loading_info=True,
                distributed_config=distributed,
                trust_remote_code=options.trust_remote_code, **extra,
            )  # fmt: skip
        except (RuntimeError, ValueError, OSError, SafetensorError, pickle.UnpicklingError) as error:
            raise UserError(f"{_KEY}: the weights of {folder} cannot be read: {error}") from error
        except ImportError as error:  # of an attention whose package is missing
            raise UserError(f"model.attn_implementation {attention}: {first_line(error)}") from error
        refuse_scrambled(model)
        _refuse_incomplete(model, info, folder)
        free_what_was_read_around(model)
    if (folder / "generation_config.json").is_file():
        model.generation_config = _generation_config(folder)
    return model


def _generation_config(folder: Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:  # of every type, for JSON of another form and for values that contradict
        cause = first_line(error)
        raise UserError(
            f"{_KEY}: {folder / 'generation_config.json'} is not taken by transformers, so no export would "
            f"load: {cause}. Correct it, or remove the file"
        ) from error


def _refuse_incomplete(model: Any, info: dict[str, Any], source: Path) -> None:
    for kind, what in (("missing_keys", "lack"), ("mismatched_keys", "have another shape for")):
        if keys := sorted(map(str, info.get(kind) or ())):
            raise UserError(
                f"{_KEY}: the weights in {source} {what} {len(keys)} tensor(s) that config.json asks "
                f"for: {', '.join(keys[:5])}. Do they belong to this config.json?"
            )
    if unexpected := sorted(info.get("unexpected_keys") or ()):
        logger.warning(
            "%s holds %d tensors that this model does not use: %s", source, len(unexpected), unexpected[:5]
        )
    stage = getattr(model, "stage", None)
    elsewhere = stage is not None and not stage.is_last  # the tied output layer is on the last stage
    tied = {} if elsewhere else model.get_expanded_tied_weights_keys(all_submodels=True)
    for target, origin in tied.items():
        if model.get_parameter(target) is not model.get_parameter(origin):
            raise UserError(
                f"{_KEY}: config.json ties {target} to {origin}, but {source} holds two different "
                "tensors. Set model.config_overrides: {tie_word_embeddings: false} to train them apart."
            )
    _refuse_not_finite(model, source)


def _refuse_not_finite(model: Any, source: Path) -> None:
    """Also what tells a weight that nothing was read into: it is NaN until then."""
    for name, tensor in [*model.named_parameters(), *persistent_buffers(model)]:
        if not torch.isfinite(local(tensor)).all():
            raise UserError(f"{_KEY}: {name} in {source} holds NaN or Inf")
