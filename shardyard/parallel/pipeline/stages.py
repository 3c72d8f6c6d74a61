"""A model cut down to one pipeline stage, on the meta device, before its weights are read.

Modules of other stages become identities; lists keep their length, so layer indices, names and with them
seeds, checkpoints and exports are those of the whole model. A tied embedding is held by the first and the
last stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from shardyard.errors import UserError
from shardyard.parallel.pipeline.split import Costs, StagePlan

_PROBE_TOKENS = 3


@dataclass(frozen=True)
class WholeModel:
    """What a stage alone does not know of the model."""

    parameters: tuple[str, ...]
    """In the order of the model, tied ones once."""
    buffers: tuple[str, ...]
    """Persistent ones, in the order of the model."""
    modules: tuple[str, ...]
    tied: dict[str, str]
    """Parameter -> the parameter that it is tied to."""
    num_parameters: int

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters, then buffers."""
        return self.parameters + self.buffers

    def names_of(self, parameter: str) -> list[str]:
        """The name of a parameter and of those tied to it, be they on this rank or not."""
        return [parameter, *(name for name, origin in self.tied.items() if origin == parameter)]


@dataclass(frozen=True)
class Stage:
    """Stage ``index`` of the plan. It also tells transformers' loader whose a key is that it cannot place."""

    index: int
    plan: StagePlan
    whole: WholeModel

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.plan.num_stages - 1

    @property
    def pp_rank(self) -> int:
        """The loader's word for this stage."""
        return self.index

    def find_rank_for_key(self, key: str, num_layers: int, base_model_prefix: str) -> int | None:
        """The stage that owns a tensor of the files; None for one that the model does not have."""
        del num_layers
        inner = key.removeprefix(f"{base_model_prefix}.")
        if inner.startswith("embed_tokens."):
            return 0
        if inner.startswith(("norm.", "lm_head.")):
            return self.plan.num_stages - 1
        parts = inner.split(".")
        if len(parts) > 2 and parts[0] == "layers" and parts[1].isdecimal():
            return self.plan.stage_of_layer(int(parts[1]))
        return None


class ForeignModule(nn.Module):
    """Stands for a module of another stage: hands on its first argument."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


def describe_whole(model: Any) -> WholeModel:
    """Of a whole model; without memory, on the meta device."""
    buffers = [
        name
        for name, _ in model.named_buffers()
        if name.rpartition(".")[2]
        not in model.get_submodule(name.rpartition(".")[0])._non_persistent_buffers_set
    ]
    return WholeModel(
        parameters=tuple(name for name, _ in model.named_parameters()),
        buffers=tuple(buffers),
        modules=tuple(name for name, _ in model.named_modules()),
        tied=dict(getattr(model, "all_tied_weights_keys", None) or {}),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def costs_of(model: Any) -> Costs:
    """Weights per layer, of embedding and of output layer, from a whole model on the meta device.

    Of experts a token meets ``num_experts_per_tok`` of as many as their stacked weights hold.
    """
    body = _body(model)
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 0
    computes, held = [], []
    for layer in body.layers:
        sizes = [(p.numel(), p.numel() * chosen / p.shape[0] if p.ndim == 3 and chosen else p.numel())
                 for p in layer.parameters()]  # fmt: skip
        held.append(float(sum(size for size, _ in sizes)))
        computes.append(float(sum(met for _, met in sizes)))
    table, head = body.embed_tokens.weight.numel(), model.lm_head.weight.numel()
    return Costs(tuple(computes), tuple(held), float(table), float(head))


def prune(model: Any, stage: Stage) -> None:
    """Leave of a whole model, on the meta device, what ``stage`` owns."""
    body = _body(model)
    start, end = stage.plan.bounds[stage.index]
    keeps_tied = bool(stage.whole.tied) and stage.is_last
    if not stage.is_first and not keeps_tied:
        body.embed_tokens = ForeignModule()
    for index in range(len(body.layers)):
        if not start <= index < end:
            body.layers[index] = ForeignModule()
    if not stage.is_last:
        body.norm = ForeignModule()
        model.lm_head = ForeignModule()
        model.all_tied_weights_keys = {}
    model._pp_stage = stage


def check_hands_on(model: Any) -> None:
    """Whether the family's body does nothing but call embedding, layers and norm.

    ``model`` is a whole one on the meta device and is used up: with identities for all of them, hidden states
    have to come out as they went in. A body that scales its embeddings, or adds positions to them, would do
    so once per stage.

    Raises:
        UserError: the family cannot be cut into stages.
    """
    body, kind = _body(model), model.config.model_type
    body.embed_tokens = body.norm = ForeignModule()
    for index in range(len(body.layers)):
        body.layers[index] = ForeignModule()
    model.lm_head = ForeignModule()
    body.to_empty(device="cpu")
    hidden = torch.linspace(-1, 1, _PROBE_TOKENS * model.config.get_text_config().hidden_size)
    hidden = hidden.view(1, _PROBE_TOKENS, -1)
    try:
        with torch.no_grad():
            output = body(
                inputs_embeds=hidden.clone(), position_ids=torch.arange(_PROBE_TOKENS)[None], use_cache=False
            ).last_hidden_state
    except Exception as error:  # a family's own forward
        raise UserError(
            f"parallel.pp_size: {kind} models cannot be cut into pipeline stages: their body takes no hidden "
            f"states ({type(error).__name__}: {(str(error).splitlines() or [''])[0]}); set pp_size to 1"
        ) from error
    if output.shape != hidden.shape or not torch.equal(output, hidden):
        raise UserError(
            f"parallel.pp_size: {kind} models cannot be cut into pipeline stages: their body changes the "
            "hidden states between embedding and layers; set pp_size to 1"
        )


@contextmanager
def tied_weight_shared(model: Any) -> Iterator[None]:
    """While the last stage of a tied model is parallelised, only its output layer has the weight.

    The embedding is not called there, and FSDP would wait for it. Afterwards it shows the parallelised weight
    under its own name, which checkpoints and the loader go by.
    """
    stage: Stage | None = getattr(model, "_pp_stage", None)
    if stage is None or stage.is_first or not stage.is_last or not stage.whole.tied:
        yield
        return
    table = _body(model).embed_tokens
    table.register_parameter("weight", None)
    try:
        yield
    finally:
        table.register_parameter("weight", model.lm_head.weight)


def _body(model: Any) -> Any:
    """The module with embedding, layers and norm.

    Raises:
        UserError: the family keeps them elsewhere.
    """
    body = getattr(model, model.base_model_prefix, None)
    parts = [getattr(body, name, None) for name in ("embed_tokens", "layers", "norm")]
    head = getattr(model, "lm_head", None)
    if body is None or any(not isinstance(part, nn.Module) for part in (*parts, head)):
        raise UserError(
            f"parallel.pp_size: {model.config.model_type} models have no {model.base_model_prefix}."
            "embed_tokens, layers and norm with an lm_head, by which a pipeline is cut; set pp_size to 1"
        )
    return body
