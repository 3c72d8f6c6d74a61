"""Which rank of a Megatron-core run holds which layers and experts, and what its folder is called."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardyard.convert.mcore.families import Model
from shardyard.errors import UserError

Implementation = Literal["local", "transformer_engine"]
Dialect = Literal["megatron", "mindspeed"]


class Rank(NamedTuple):
    """A rank's place in the three dimensions that have files of their own."""

    tp: int
    pp: int
    ep: int


class Place(NamedTuple):
    """Where a layer is: its stage, its chunk of that stage (virtual stage), its number in the chunk."""

    pp: int
    chunk: int
    local: int


@dataclass(frozen=True)
class McoreLayout:
    """How a model is cut; the defaults cut nothing. Names and rules: REFERENCE 6.2, megatron-core 0.16.1."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    """How often the rows of an expert are cut: as tp says (None), or not at all (1)."""
    vpp: int | None = None
    """Layers per virtual stage."""
    num_layer_list: tuple[int, ...] | None = None
    """Layers of each stage, where they are not the same number."""
    noop_layers: tuple[int, ...] = ()
    """Places that hold no layer; they are counted in the division and skipped in the numbering."""
    grouped: bool = False
    """All local experts of a layer in joined tensors (moe_grouped_gemm)."""
    moe_tp_extend_ep: bool = False
    """Experts are divided over ep x tp ranks and cut no further."""
    implementation: Implementation = "local"
    schedules_method: Literal["dualpipev"] | None = None
    """dualpipev: a stage holds a piece of the front and the matching piece of the back."""
    make_vocab_size_divisible_by: int | None = None
    """Rows of zeros are added until the vocabulary divides by this times tp; None: none are."""
    mtp_layers: int | None = None
    """Layers that predict further tokens: as many as the weights have (None), or this many of them."""
    mla_mm_split: bool = False
    """For MindSpeed: the projections from latent to heads are stored by the parts of a head."""
    dialect: Dialect = "megatron"
    """Who is to read latent attention and MTP layers: megatron-core and MindSpeed name them differently."""

    @property
    def expert_count(self) -> int:
        """The number of parts that a layer's experts are divided into."""
        return self.ep * self.tp if self.moe_tp_extend_ep else self.ep

    @property
    def expert_shards(self) -> int:
        """The number of parts that each expert is cut into."""
        return 1 if self.moe_tp_extend_ep or self.expert_tp == 1 else self.tp

    def positions(self, model: Model) -> int:
        """Layers and places without one."""
        return model.layers + len(self.noop_layers)

    def chunks(self, model: Model) -> int:
        """Virtual stages of each stage; 1 without vpp."""
        if self.schedules_method == "dualpipev":
            return 2
        if self.vpp is None:
            return 1
        return self.positions(model) // self.pp // self.vpp

    @property
    def has_chunks(self) -> bool:
        """Whether files name their chunks (model0, model1, ...)."""
        return self.vpp is not None or self.schedules_method == "dualpipev"

    def last(self, model: Model) -> tuple[int, int]:
        """Stage and chunk of the final norm, the head and the MTP layers."""
        if self.schedules_method == "dualpipev":
            return 0, 1
        return self.pp - 1, self.chunks(model) - 1

    def places(self, model: Model) -> list[Place]:
        """The place of each layer; the layout is `check`-ed."""
        positions = (p for p in range(self.positions(model)) if p not in self.noop_layers)
        return [self._place(model, position) for position in positions]

    def _place(self, model: Model, position: int) -> Place:
        if self.num_layer_list is not None:
            for stage, count in enumerate(self.num_layer_list):
                if position < count:
                    return Place(stage, 0, position)
                position -= count
            raise IndexError(position)
        per_block = self.positions(model) // self.pp // self.chunks(model)
        block, local = divmod(position, per_block)
        if self.schedules_method == "dualpipev" and block >= self.pp:
            return Place(2 * self.pp - 1 - block, 1, local)
        chunk, stage = divmod(block, self.pp)
        return Place(stage, chunk, local)

    def ranks(self) -> Iterator[Rank]:
        """All ranks that have a file."""
        for pp in range(self.pp):
            for ep in range(self.ep):
                for tp in range(self.tp):
                    if self.has_file(tp, ep):
                        yield Rank(tp, pp, ep)

    def has_file(self, tp: int, ep: int) -> bool:
        """With whole experts on each tensor-parallel rank only matching pairs of tp and ep are written."""
        if self.expert_tp != 1 or self.tp == 1 or self.ep == 1:
            return True
        return ep == tp % self.ep if self.tp % self.ep == 0 else tp == ep % self.tp

    def folder_of(self, rank: Rank) -> str:
        """The name of a rank's folder."""
        name = f"mp_rank_{rank.tp:02d}"
        if self.pp > 1:
            name += f"_{rank.pp:03d}"
        return f"{name}_{rank.ep:03d}" if self.ep > 1 else name

    def padded_vocabulary(self, model: Model) -> int:
        """Rows of the embedding, padding included."""
        unit = (self.make_vocab_size_divisible_by or 1) * self.tp
        if self.make_vocab_size_divisible_by is None:
            return model.vocabulary
        return -(-model.vocabulary // unit) * unit

    def check(self, model: Model) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: the first fault, with the option, what was found and what would fit.
        """
        for key in ("tp", "pp", "ep"):
            if getattr(self, key) < 1:
                raise UserError(f"{key} is {getattr(self, key)}; a whole number above 0 is needed")
        if self.implementation not in ("local", "transformer_engine"):
            raise UserError(
                f"transformer_impl is {self.implementation!r}; there are local and transformer_engine"
            )
        if self.schedules_method not in (None, "dualpipev"):
            raise UserError(f"schedules_method is {self.schedules_method!r}; there is dualpipev")
        self._check_tensors(model)
        self._check_stages(model)
        if model.experts:
            self._check_experts(model)
        else:
            self._check_dense(model)
        if self.mla_mm_split and not (model.query_rank and self.dialect == "mindspeed"):
            raise UserError("mla_mm_split is MindSpeed's form of latent attention with a latent query only")
        if self.mtp_layers is not None and self.mtp_layers < 0:
            raise UserError(f"mtp_num_layers is {self.mtp_layers}; a whole number from 0 on is needed")
        if self.mtp_layers and not model.family.mtp:
            raise UserError(f"mtp_num_layers is {self.mtp_layers}, but {model.model_type} has no MTP layers")

    def _check_tensors(self, model: Model) -> None:
        unit = self.make_vocab_size_divisible_by
        if unit is not None and unit < 1:
            raise UserError(f"make_vocab_size_divisible_by is {unit}; a whole number above 0 is needed")
        if model.heads % model.groups:
            raise UserError(
                f"config.json: num_attention_heads ({model.heads}) is no multiple of num_key_value_heads "
                f"({model.groups})"
            )
        heads, what = (
            (model.heads, "attention heads") if model.family.latent else (model.groups, "key-value heads")
        )
        if heads % self.tp:
            raise UserError(
                f"tp is {self.tp}, which does not divide the {heads} {what} of the model; "
                f"{_divisors(heads)} would"
            )
        if self.padded_vocabulary(model) % self.tp:
            raise UserError(
                f"tp is {self.tp}, which does not divide the vocabulary of {model.vocabulary}; "
                "make_vocab_size_divisible_by: 1 pads it"
            )

    def _check_stages(self, model: Model) -> None:
        self._check_noops(model)
        total = self.positions(model)
        if self.num_layer_list is not None:
            self._check_layer_list(model)
            return
        counted = f"{total} layers" + (f" (with {len(self.noop_layers)} noop)" if self.noop_layers else "")
        if total % self.pp:
            raise UserError(
                f"pp is {self.pp}, which does not divide {counted}; name the layers of each stage with "
                "num_layer_list, or add noop_layers"
            )
        stage = total // self.pp
        if self.schedules_method == "dualpipev":
            if self.vpp is not None and self.vpp * 2 != stage:
                raise UserError(
                    f"schedules_method: dualpipev halves the {stage} layers of a stage; vpp is {self.vpp}"
                )
            if stage % 2:
                raise UserError(f"schedules_method: dualpipev halves stages; a stage has {stage} layers")
        elif self.vpp is not None:
            if self.pp == 1:
                raise UserError("vpp cuts the stages of a pipeline, and pp is 1")
            if self.vpp < 1 or stage % self.vpp:
                raise UserError(
                    f"vpp is {self.vpp} layers per virtual stage, which does not divide the {stage} layers "
                    "of a stage"
                )
            if self.vpp == stage:
                raise UserError(f"vpp is {self.vpp} layers per virtual stage, which is the whole stage")

    def _check_noops(self, model: Model) -> None:
        total = self.positions(model)
        if len(set(self.noop_layers)) != len(self.noop_layers):
            raise UserError(f"noop_layers names a place twice: {_joined(self.noop_layers)}")
        for place in self.noop_layers:
            if not 0 <= place < total:
                raise UserError(
                    f"noop_layers names place {place}; {model.layers} layers and "
                    f"{len(self.noop_layers)} noop make places 0 to {total - 1}"
                )

    def _check_layer_list(self, model: Model) -> None:
        counts = self.num_layer_list or ()
        if self.vpp is not None or self.noop_layers or self.schedules_method:
            other = "vpp" if self.vpp is not None else "noop_layers" if self.noop_layers else "dualpipev"
            raise UserError(f"num_layer_list and {other} exclude each other")
        if len(counts) != self.pp:
            raise UserError(f"num_layer_list names {len(counts)} stages, but pp is {self.pp}")
        if min(counts) < 0 or sum(counts) != model.layers:
            raise UserError(
                f"num_layer_list {_joined(counts)} makes {sum(counts)} layers; the model has {model.layers}"
            )

    def _check_dense(self, model: Model) -> None:
        wrong = [key for key in ("grouped", "moe_tp_extend_ep") if getattr(self, key)]
        if self.ep > 1 or wrong:
            asked = f"ep is {self.ep}" if self.ep > 1 else f"{wrong[0]} is asked for"
            raise UserError(f"{asked}, but {model.model_type} as configured has no experts")

    def _check_experts(self, model: Model) -> None:
        if self.expert_tp not in (None, 1, self.tp):
            raise UserError(
                f"expert_tp is {self.expert_tp}; experts are cut as tp says ({self.tp}) or not (1)"
            )
        if self.expert_tp == 1 and self.tp > 1:
            if self.moe_tp_extend_ep:
                raise UserError("moe_tp_extend_ep leaves experts whole already; drop expert_tp: 1")
            if self.tp % self.ep and self.ep % self.tp:
                raise UserError(f"expert_tp: 1 needs tp ({self.tp}) to divide ep ({self.ep}) or the reverse")
        if model.experts % self.expert_count:
            sizes = f"ep x tp is {self.expert_count}" if self.moe_tp_extend_ep else f"ep is {self.ep}"
            raise UserError(
                f"{sizes}, which does not divide the {model.experts} experts; "
                f"{_divisors(model.experts)} would"
            )


def parse_list(text: str, key: str) -> tuple[int, ...]:
    """``"1,2"`` as numbers; an empty text is no number.

    Raises:
        UserError: the text holds anything but whole numbers and commas.
    """
    if not text.strip():
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        raise UserError(f"{key} is {text!r}; whole numbers with commas between are needed, as in 1,2")
    return tuple(int(word) for word in words)


def _joined(numbers: tuple[int, ...]) -> str:
    return ",".join(str(number) for number in numbers)


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
