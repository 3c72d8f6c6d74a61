"""Opening a model for inference: its weights in one dtype, on one rank or shared by several."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from shardyard.checkpoint import read_weights
from shardyard.config import ModelConfig
from shardyard.data.tokenizer import load_tokenizer
from shardyard.device import Device, ProcessGroup, agree, agree_on_node, in_passing_thread
from shardyard.errors import UserError, first_line
from shardyard.infer import folder_facts
from shardyard.infer.opening import Choice, Found, cache_folder, find
from shardyard.infer.types import Sampling
from shardyard.models import Convert, ModelSource, load_model_config, resolve_source, tokenizer_options
from shardyard.models.block_fp8 import take_block_size
from shardyard.models.causal_lm import base_class
from shardyard.models.weights import from_files, read_checkpoint
from shardyard.parallel import local

logger = logging.getLogger("shardyard.infer")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OPTIONS = {
    "model.model_name_or_path": "--model",
    "model.tokenizer_name_or_path": "--tokenizer",
    "model.config_name_or_path": "--config",
    "model.attn_implementation": "--attn-implementation",
    "data.template": "--template",
}


@dataclass(frozen=True)
class Opened:
    """A model that can be asked.

    ``model`` is transformers' own, in eval mode; its generation config is empty, so that what decides about
    an answer stands in ``defaults``, ``stop_ids`` and the request alone.
    """

    model: Any
    tokenizer: Any
    """With the chat template of the training, or the chosen one."""
    config: Any
    name: str
    stop_ids: frozenset[int]
    defaults: Sampling
    context_length: int
    run: dict[str, Any] | None
    device: Device
    group: ProcessGroup
    choice: Choice
    found: Found
    generation: GenerationConfig
    """As it stands in the folder, for what ``defaults`` has no field for."""

    @property
    def parallel(self) -> str:
        """``none``, ``tp`` or ``fsdp``."""
        distributed = getattr(self.model.config, "distributed_config", None)
        if distributed is None:
            return "none"
        return "tp" if distributed.tp_size > 1 else "fsdp"


def open_model(
    choice: Choice, group: ProcessGroup, device: Device, *, convert: Convert | None = None
) -> Opened:
    """Read the model that ``choice`` names; every rank calls it, and more than one share the model.

    ``convert`` makes a Hugging Face folder of a Megatron-core one.

    Raises:
        UserError: nothing there that can be read, or a layout that the family does not support.
    """
    transformers_logging.disable_progress_bar()  # one bar a rank would run through each other
    try:
        return in_passing_thread(device, lambda: _open(choice, group, device, convert))
    except UserError as error:  # of rooms that know the keys of the YAML only
        text = str(error)
        for key, option in _OPTIONS.items():
            text = text.replace(key, option)
        raise UserError(text) from error


def _open(choice: Choice, group: ProcessGroup, device: Device, convert: Convert | None) -> Opened:
    if group.is_main:
        found = find(choice)
        agree(group, "infer/model", lambda: found.weights)
    else:
        agree(group, "infer/model", str)
        found = find(choice)
    options = ModelConfig(
        model_name_or_path=found.weights, tokenizer_name_or_path=choice.tokenizer,
        config_name_or_path=choice.config, trust_remote_code=choice.trust_remote_code,
        attn_implementation=choice.attn_implementation,
    )  # fmt: skip
    source = resolve_source(
        options, fetch_first=lambda fetch: agree_on_node(group, "infer/source", fetch), convert=convert,
        cache=cache_folder(),
    )  # fmt: skip
    config = load_model_config(options, source)
    tokenizer = load_tokenizer(tokenizer_options(options, source))
    folder_facts.set_template(tokenizer, choice, found)
    model = _build(options, config, source, choice, found, group, device)
    generation = folder_facts.generation_config(source)
    model.generation_config = GenerationConfig()
    return Opened(
        model=model,
        tokenizer=tokenizer,
        config=model.config,
        name=found.name,
        stop_ids=folder_facts.stop_ids(generation, config, tokenizer),
        defaults=folder_facts.defaults(generation),
        context_length=folder_facts.context_length(model.config, tokenizer),
        run=found.run,
        device=device,
        group=group,
        choice=choice,
        found=found,
        generation=generation,
    )


def _build(
    options: ModelConfig,
    config: Any,
    source: ModelSource,
    choice: Choice,
    found: Found,
    group: ProcessGroup,
    device: Device,
) -> Any:
    block = take_block_size(config)
    base, config = base_class(config, str(source.config), trust_remote_code=options.trust_remote_code)
    dtype = _dtype(choice, config, found, device)
    distributed = _distributed(choice, base, config, group)
    if source.form == "files":
        model = from_files(
            base, config, source.weights, options.attn_implementation, options, block, distributed, dtype
        )
    else:
        model = _of_checkpoint(base, config, options, source.weights, distributed, dtype)
    if distributed is None:
        model = model.to(device.torch_device)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device.torch_device:
                module._buffers[name] = buffer.to(device.torch_device)
    return model.eval().requires_grad_(False)


def _of_checkpoint(
    base: Any,
    config: Any,
    options: ModelConfig,
    folder: Path,
    distributed: DistributedConfig | None,
    dtype: torch.dtype,
) -> Any:
    """transformers' loader lays the model out, from NaN that takes no memory; the checkpoint fills it."""
    try:
        with torch.device("meta"):
            shell = base._from_config(config, attn_implementation=options.attn_implementation)
    except (ImportError, ValueError) as error:  # a missing package, or no such name
        raise UserError(
            f"model.attn_implementation {options.attn_implementation}: {first_line(error)}"
        ) from error
    nothing, tied = torch.full((), torch.nan), shell.get_expanded_tied_weights_keys(all_submodels=True)
    shapes = {name: tensor.shape for name, tensor in shell.state_dict().items() if name not in tied}
    model = base.from_pretrained(
        None, state_dict={name: nothing.expand(shape) for name, shape in shapes.items()},
        config=config, dtype=dtype, distributed_config=distributed,
        trust_remote_code=options.trust_remote_code, attn_implementation=options.attn_implementation,
    )  # fmt: skip
    for tensor in model.parameters():
        part = local(tensor.data)
        if part.untyped_storage().nbytes() != part.nbytes:  # a view of the one NaN, or of a larger tensor
            _own_memory(tensor)
    read_checkpoint(model, folder, read_weights)
    return model


def _own_memory(parameter: torch.nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        parameter._local_tensor = parameter._local_tensor.clone(memory_format=torch.contiguous_format)
    else:
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def _dtype(choice: Choice, config: Any, found: Found, device: Device) -> torch.dtype:
    if choice.dtype != "auto":
        return _DTYPES[choice.dtype]
    if not device.is_accelerator:
        return torch.float32
    trained = ((found.run or {}).get("parallel") or {}).get("param_dtype")
    if trained in _DTYPES:
        return _DTYPES[trained]
    stated = getattr(config, "dtype", None)
    return stated if isinstance(stated, torch.dtype) else device.default_param_dtype


def _distributed(choice: Choice, base: Any, config: Any, group: ProcessGroup) -> DistributedConfig | None:
    """How the ranks share the model; None for one rank."""
    ranks, wanted = group.world_size, choice.parallel
    if ranks == 1:
        if wanted in ("tp", "fsdp"):
            logger.info("--parallel %s: one rank has the whole model", wanted)
        return None
    if wanted == "none":
        raise UserError(f"--parallel none: {ranks} ranks were started; start one, or share the model by tp")
    unsuited = _unsuited_to_tp(base, config, ranks)
    if wanted == "tp" and unsuited:
        raise UserError(f"--parallel tp: {unsuited}; use --parallel fsdp")
    kind = "fsdp" if wanted == "fsdp" or unsuited else "tp"
    logger.info("%d ranks share the model by %s%s", ranks, kind, f" ({unsuited})" if unsuited else "")
    return DistributedConfig(tp_size=ranks) if kind == "tp" else DistributedConfig(fsdp_size=ranks)


def _unsuited_to_tp(base: Any, config: Any, ranks: int) -> str:
    """Why ``ranks`` cannot share each layer of the model; "" if they can."""
    text = config.get_text_config()
    if not (getattr(text, "base_model_tp_plan", None) or getattr(base, "_tp_plan", None)):
        return f"transformers has no tensor-parallel plan for {config.model_type}"
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        size = getattr(text, key, None)
        if isinstance(size, int) and size % ranks:
            return f"{key} {size} is not divisible by {ranks} ranks"
    return ""
