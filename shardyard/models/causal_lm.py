"""The seam to transformers: a subclass, made at run time, of the class that a config names.

transformers owns the model code, the reading of sharded weights and the on-disk conversions. Four methods
are ours: `__init__` (which leaves of the model what a pipeline stage owns), `prepare_distribute_model`
(always both meshes, on the device that the device room chose), `maybe_distribute_model` (our own parallelism,
called between construction on meta and the reading of weights) and `forward` (from tokens to the sum of the
loss, all inside the FSDP root, since nothing may call the body or the head from outside it).
"""

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.utils import TransformersDeviceMesh

from shardyard.config import OptimizationConfig, ParallelConfig
from shardyard.device import Device
from shardyard.errors import UserError
from shardyard.models.head import LossHead, LossOptions, amplified
from shardyard.ops.apply import apply_operators
from shardyard.ops.registry import Row, Situation
from shardyard.ops.uncompiled import DocumentLengths, leave_attention_out_of_graphs
from shardyard.ops.vocabulary import (
    IGNORED,
    accumulated_in,
    cross_entropy_sum,
    gather_vocabulary,
    token_scores_,
)
from shardyard.parallel import EAGER, Compilation, Meshes, Precision, apply_parallelism
from shardyard.parallel.experts.routing import Routing
from shardyard.parallel.pipeline import Stage, prune, tied_weight_shared
from shardyard.parallel.sequence import SequenceLayout, SequenceShare


@dataclass(frozen=True)
class Placement:
    """Where and how a model is built."""

    parallel: ParallelConfig
    meshes: Meshes
    device: Device
    compilation: Compilation = EAGER
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    loss: LossOptions = field(default_factory=LossOptions)

    @cached_property
    def sequence(self) -> SequenceLayout:
        """How this rank shares the tokens of a micro-batch with others."""
        meshes, cp = self.meshes, self.meshes.layout.cp
        group = meshes.cp.get_group() if cp > 1 else None
        return SequenceLayout(cp, meshes.cp_rank, self.parallel.cp_type, meshes.layout.tp, group)

    @property
    def distributed_config(self) -> DistributedConfig:
        layout = self.meshes.layout
        return DistributedConfig(fsdp_size=layout.fsdp, dp_replicate_size=layout.dp_replicate)


class TrainableCausalLM:
    """Mixed in before a transformers class; see the module's docstring."""

    placement: Placement
    stage: Stage | None = None
    """None for a whole model; else the constructor leaves what this pipeline stage owns."""
    routing: Routing | None = None
    """Set once the model is built; None for one without routers."""
    loss_head: LossHead | None = None
    """None for a pipeline stage before the last."""
    operators: tuple[Row, ...] = ()
    """What runs for each operation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.stage is not None:
            prune(self, self.stage)

    @classmethod
    def prepare_distribute_model(
        cls, distributed_config: Any, device_map: Any = None
    ) -> tuple[Any, Any, Any]:
        meshes, device = cls.placement.meshes, cls.placement.device
        # None is the host: where a CPU computes, and where offloaded parameters live between uses.
        on_host = cls.placement.parallel.cpu_offload or not device.is_accelerator
        home = None if on_host else device.torch_device
        return distributed_config, home, TransformersDeviceMesh(meshes.dense, meshes.expert)

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        model.config.distributed_config = distributed_config
        model._mesh_manager = mesh_manager
        model._device_mesh = mesh_manager.get_mesh(("pp", "fsdp", "tp"))
        model._is_distributed_loading_by_transformers = True
        model._tp_size, model._fsdp_size = distributed_config.tp_size, distributed_config.fsdp_size
        placement = cls.placement
        if placement.compilation:
            leave_attention_out_of_graphs()
        dtype = Precision.of(placement.parallel, placement.device).compute
        situation = Situation(placement.device.torch_device, dtype, bool(placement.compilation))
        model.operators = apply_operators(model, placement.optimization, situation)
        # FSDP has to see a tied weight as one parameter of two modules; the loader ties it once more.
        model.tie_weights(recompute_mapping=False)
        if model.stage is None or model.stage.is_last:
            model.loss_head = LossHead.of(model, placement.loss, placement.meshes.tp_group)
        with tied_weight_shared(model):
            return apply_parallelism(
                model, placement.parallel, placement.meshes, placement.device, placement.compilation
            )

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        doc_lens: tuple[int, ...] | None = None,
        is_filler: bool = False,
        local_tokens: int | None = None,
    ) -> torch.Tensor:
        """This rank's part of the sum of the loss over labelled positions, fp32 []: the cross entropy, in
        training with the terms of `LossOptions`.

        ``input_ids``, ``position_ids``, ``labels`` are the micro-batch, [1, T], the same on all ranks that
        share it; labels are targets, shifted already, -100 where nothing is trained. Each cp rank sums over
        its own tokens, all tp ranks get the same number. Logits exist at labelled positions only, and a few
        rows at a time (`HeadLoss`). With ``labels`` None: all logits [1, T, V], on every rank. A filler's
        tokens count for no router. Inside `head.scoring`: [T, 2].

        In a pipeline the tokens are padded to ``local_tokens`` on each rank; what enters a later stage as
        ``input_ids``, and leaves one before the last, are hidden states [1, local_tokens / tp, H].
        """
        layout = self.placement.meshes.layout
        if doc_lens is None and layout.cp * layout.tp > 1:
            raise ValueError("ranks share a micro-batch by its documents, and their lengths are not given")
        share = self.placement.sequence.share(doc_lens or (position_ids.shape[1],), local_tokens)
        extra: dict[str, Any] = share.attention_kwargs() if doc_lens is not None else {}
        if self.placement.compilation:
            extra = DocumentLengths.hidden(extra)
        extra |= {"position_ids": share.cut_positions(position_ids), "use_cache": False}
        first, last = self.stage is None or self.stage.is_first, self.stage is None or self.stage.is_last
        extra |= {"input_ids": share.cut(input_ids, 0)} if first else {"inputs_embeds": input_ids}
        with self._routed(share, input_ids.device, is_filler):
            if not last:
                return self.base_model(**extra).last_hidden_state  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
            return self._loss_sum(share, labels, extra)

    def _loss_sum(
        self, share: SequenceShare, labels: torch.Tensor | None, arguments: dict[str, Any]
    ) -> torch.Tensor:
        """Body and output layer, and the loss or all logits; as `forward` says."""
        model: Any = self
        head, layer = self.loss_head, model.get_output_embeddings()
        assert head is not None
        if labels is None:
            return self._whole(self._own_logits(arguments), share)
        if head.checking:
            with amplified(layer):
                hidden = model.base_model(**arguments).last_hidden_state
                return head.difference(layer, hidden, self._own_logits(arguments))
        targets = share.cut(labels, IGNORED)[0]
        keep = torch.nonzero(targets != IGNORED).squeeze(-1)
        kept = targets.index_select(0, keep)
        if head.scoring:
            scores = self._scores(head, layer, arguments, keep, kept)
            every = scores.new_zeros(1, len(targets), 2).index_copy(1, keep, scores[None])
            return self._whole_sequence(every, share)[0]
        if head.unsuited is not None:
            logits = self._own_logits(arguments, keep)[0]
            terms = head.terms(training=model.training)
            return cross_entropy_sum(logits, kept, self.placement.meshes.tp_group, terms)
        hidden = model.base_model(**arguments).last_hidden_state[0].index_select(0, keep)
        return head.loss_sum(layer, hidden, kept, training=model.training)

    def _scores(
        self, head: LossHead, layer: Any, arguments: dict[str, Any], keep: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """[L, 2] of the positions ``keep`` [L] of this rank: see `head.scoring`."""
        model: Any = self
        if head.unsuited is not None:
            logits = self._own_logits(arguments, keep)[0]
            wide = logits.to(accumulated_in(logits.dtype), copy=True)
            return token_scores_(wide, targets, self.placement.meshes.tp_group)
        hidden = model.base_model(**arguments).last_hidden_state[0].index_select(0, keep)
        return head.scores(layer, hidden, targets)

    def _own_logits(self, arguments: dict[str, Any], keep: torch.Tensor | None = None) -> torch.Tensor:
        """[1, L, V/tp] of the family's own forward at the positions ``keep`` [L], or at all."""
        keeps = _keeps_logits(type(self))
        extra = {"logits_to_keep": 0 if keep is None else keep} if keeps else {}
        logits = super().forward(**arguments, **extra).logits  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
        return logits if keeps or keep is None else logits.index_select(1, keep)

    def _routed(
        self, share: SequenceShare, device: torch.device, is_filler: bool
    ) -> AbstractContextManager[None]:
        """What the routers of a training forward learn: which document each of their tokens belongs to."""
        if self.routing is None or not self.training:  # pyright: ignore[reportAttributeAccessIssue]
            return nullcontext()
        lengths = torch.tensor(share.real_lens)
        row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None]
        documents = share.cut(torch.full_like(row, -1) if is_filler else row, -1)[0].to(device)
        tp = self.placement.meshes.layout.tp
        mine = documents.chunk(tp)[self.placement.meshes.tp_rank] if tp > 1 else documents
        return self.routing.forward(mine, len(share.real_lens))

    def _whole(self, logits: torch.Tensor, share: SequenceShare) -> torch.Tensor:
        """[1, T_local, V/tp] of this rank -> [1, T, V] of the micro-batch."""
        meshes = self.placement.meshes
        return self._whole_sequence(gather_vocabulary(logits, meshes.tp_group), share)

    def _whole_sequence(self, rows: torch.Tensor, share: SequenceShare) -> torch.Tensor:
        """[1, T_local, ...] of each cp rank -> [1, T, ...] of the micro-batch, on all of them."""
        meshes, parts = self.placement.meshes, [rows]
        if meshes.layout.cp > 1:
            parts = [torch.empty_like(rows) for _ in range(meshes.layout.cp)]
            dist.all_gather(parts, rows.contiguous(), group=meshes.cp.get_group())
        return share.restore(torch.stack(parts))


@functools.cache
def _keeps_logits(cls: type) -> bool:
    """Whether the family's own forward, the next one after ours, makes logits only where it is told to."""
    family = cls.__mro__[cls.__mro__.index(TrainableCausalLM) + 1]
    return "logits_to_keep" in inspect.signature(family.forward).parameters  # pyright: ignore[reportAttributeAccessIssue]


def base_class(
    config: PreTrainedConfig, source: str, *, trust_remote_code: bool
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class that AutoModelForCausalLM would make, and the config it takes.

    Raises:
        UserError: transformers carries no causal language model of this type, or it is more than one of text.
    """
    auto_map = getattr(config, "auto_map", None) or {}
    if trust_remote_code and "AutoModelForCausalLM" in auto_map:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(auto_map["AutoModelForCausalLM"], source), config
    mapping = AutoModelForCausalLM._model_mapping
    named = f"model.model_name_or_path: {source} is a {config.model_type!r} model"
    if type(config) not in mapping:
        raise UserError(f"{named}, and transformers has no causal language model of that type")
    found: Any = mapping[type(config)]
    candidates = found if isinstance(found, tuple) else (found,)
    by_name = [cls for cls in candidates if cls.__name__ in (config.architectures or [])]
    cls = (by_name or candidates)[0]
    if cls.config_class is config.sub_configs.get("text_config"):  # the text part of a model of several media
        config = config.get_text_config()
    if config.sub_configs.keys() & {"vision_config", "audio_config"}:
        raise UserError(f"{named}, which reads more than text; such models are not trained here")
    if getattr(config, "is_decoder", None) is False and not _is_causal(cls):
        raise UserError(
            f"{named}, an encoder; set model.config_overrides: {{is_decoder: true}} to make it causal"
        )
    return cls, config


def _is_causal(cls: type) -> bool:
    """Encoders that transformers also offers as causal models share their module with a masked one."""
    module = inspect.getmodule(cls)
    return not any(name.endswith("ForMaskedLM") for name in vars(module or cls))


def trainable_class(
    base: type[PreTrainedModel], placement: Placement, stage: Stage | None = None
) -> type[PreTrainedModel]:
    """``base`` with our methods. It keeps the name and module, which end in the exported config."""
    members = {"__module__": base.__module__, "placement": placement, "stage": stage}
    return type(base.__name__, (TrainableCausalLM, base), members)
