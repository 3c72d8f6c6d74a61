"""The tensors of each rank's file, each linked to the Hugging Face tensors it is made of.

Sources of the names: REFERENCE 6.2 and megatron-core 0.16.1 (models/gpt/gpt_layer_specs.py,
transformer/multi_latent_attention.py, transformer/multi_token_prediction.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardyard.convert.mcore.families import Model
from shardyard.convert.mcore.layout import McoreLayout, Rank
from shardyard.convert.mcore.rules import (
    Cut,
    Gated,
    GroupedDown,
    GroupedGated,
    HeadParts,
    Interleaved,
    Replicated,
    Rule,
    Stacked,
    Vocabulary,
)

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
ROWS, COLUMNS, SAME = Cut(0), Cut(1), Replicated()


@dataclass(frozen=True)
class Link:
    """A tensor of a rank's file: part ``index`` of ``count`` of what ``rule`` makes of the tensors ``hf``."""

    name: str
    hf: tuple[str, ...]
    rule: Rule
    index: int = 0
    count: int = 1
    also: tuple[str, ...] = ()
    """Further tensors of the file that hold parts of the same Hugging Face tensor, if there are any."""


@dataclass(frozen=True)
class Plan:
    """Everything about one model in one layout."""

    model: Model
    layout: McoreLayout
    mtp_layers: int
    """Layers behind the last one that the conversion carries."""

    def chunk_key(self, chunk: int) -> str:
        """The entry of a file that holds a chunk."""
        return f"model{chunk}" if self.layout.has_chunks else "model"

    def links(self, rank: Rank) -> dict[int, list[Link]]:
        """The tensors of a rank's file, by chunk, in the order in which they are stored."""
        layout, model = self.layout, self.model
        found: dict[int, list[Link]] = {chunk: [] for chunk in range(layout.chunks(model))}
        if rank.pp == 0:
            found[0].append(self._vocabulary(WORD_EMBEDDINGS, EMBEDDING, rank))
        for layer, place in enumerate(layout.places(model)):
            if place.pp == rank.pp:
                found[place.chunk] += self._layer(f"decoder.layers.{place.local}.", layer, rank)
        stage, chunk = layout.last(model)
        if stage == rank.pp:
            found[chunk] += self._end(rank)
        return found

    def copies(self) -> dict[str, str]:
        """Tensors that MTP layers repeat in Hugging Face files, and what they repeat."""
        head = EMBEDDING if self.model.tied else HEAD
        found = {}
        for layer in self._mtp_numbers():
            found[f"model.layers.{layer}.embed_tokens.weight"] = EMBEDDING
            found[f"model.layers.{layer}.shared_head.head.weight"] = head
        return found

    def _mtp_numbers(self) -> range:
        return range(self.model.layers, self.model.layers + self.mtp_layers)

    def _vocabulary(self, name: str, hf: str, rank: Rank) -> Link:
        rows = Vocabulary(self.model.vocabulary, self.layout.padded_vocabulary(self.model))
        return Link(name, (hf,), rows, rank.tp, self.layout.tp)

    def _end(self, rank: Rank) -> Iterator[Link]:
        """What stands behind the last layer: norm, head, MTP layers."""
        if self.mtp_layers and self.layout.pp > 1:
            yield self._vocabulary(WORD_EMBEDDINGS, EMBEDDING, rank)
        for number, layer in enumerate(self._mtp_numbers()):
            yield from self._mtp_layer(number, layer, rank)
        mindspeed = self.layout.dialect == "mindspeed" and self.mtp_layers
        yield Link("final_layernorm.weight" if mindspeed else "decoder.final_layernorm.weight", (NORM,), SAME)
        if not self.model.tied:
            yield self._vocabulary("output_layer.weight", HEAD, rank)
        elif self.layout.pp > 1:
            yield self._vocabulary("output_layer.weight", EMBEDDING, rank)

    def _mtp_layer(self, number: int, layer: int, rank: Rank) -> Iterator[Link]:
        own, hf = f"mtp.layers.{number}.", f"model.layers.{layer}."
        yield Link(f"{own}enorm.weight", (f"{hf}enorm.weight",), SAME)
        yield Link(f"{own}hnorm.weight", (f"{hf}hnorm.weight",), SAME)
        yield Link(f"{own}eh_proj.weight", (f"{hf}eh_proj.weight",), ROWS, rank.tp, self.layout.tp)
        yield from self._layer(f"{own}transformer_layer.", layer, rank)
        norm = f"{own}final_layernorm.weight"
        if self.layout.dialect == "mindspeed":
            norm = f"mtp.final_layernorms.{number}.weight"
        yield Link(norm, (f"{hf}shared_head.norm.weight",), SAME)

    def _layer(self, own: str, layer: int, rank: Rank) -> Iterator[Link]:
        """A whole decoder layer; ``own`` is the prefix of its tensors in the rank's file."""
        hf = f"model.layers.{layer}."
        links = self._latent_attention() if self.model.family.latent else self._attention()
        links += self._moe() if self.model.is_moe(layer) else self._dense_mlp()
        for link in links:
            # a rule that does not cut gives every rank shard 0, so that readers know replicas as such
            cut = not isinstance(link.rule, Replicated | Stacked)
            yield replace(
                link,
                name=own + link.name,
                hf=tuple(hf + name for name in link.hf),
                also=tuple(own + name for name in link.also),
                index=rank.tp if cut else 0,
                count=self.layout.tp if cut else 1,
            )
        if self.model.is_moe(layer):
            for link in self._experts(rank):
                yield replace(link, name=own + link.name, hf=tuple(hf + name for name in link.hf))

    @property
    def _fused_norms(self) -> bool:
        """Transformer Engine keeps a norm with the projection behind it."""
        return self.layout.implementation == "transformer_engine"

    def _attention(self) -> list[Link]:
        model, family = self.model, self.model.family
        joined = Interleaved(model.groups, model.heads // model.groups, model.head_dim)
        projections = [f"self_attn.{part}_proj" for part in "qkv"]
        norm = (
            "self_attention.linear_qkv.layer_norm_weight" if self._fused_norms else "input_layernorm.weight"
        )
        links = [
            Link(norm, ("input_layernorm.weight",), SAME),
            Link("self_attention.linear_qkv.weight", tuple(f"{p}.weight" for p in projections), joined),
        ]
        if model.has(family.qkv_bias):
            links.append(
                Link("self_attention.linear_qkv.bias", tuple(f"{p}.bias" for p in projections), joined)
            )
        if model.has(family.qk_norm):
            for part in "qk":
                links.append(
                    Link(f"self_attention.{part}_layernorm.weight", (f"self_attn.{part}_norm.weight",), SAME)
                )
        links.append(Link("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), COLUMNS))
        if model.has(family.output_bias):
            links.append(Link("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",), SAME))
        return links

    def _latent_attention(self) -> list[Link]:
        own, hf = "self_attention.", "self_attn."
        mindspeed = self.layout.dialect == "mindspeed"
        fused = self._fused_norms and not mindspeed
        # megatron-core's own linear layer cuts the latent projections' rows, Transformer Engine's does not
        down = SAME if self._fused_norms else ROWS
        query = "q_a_proj" if self.model.query_rank else "q_proj"
        links = [Link("input_layernorm.weight", ("input_layernorm.weight",), SAME)]
        if mindspeed:
            if self._fused_norms:
                links = [Link(f"{own}linear_qkv.layer_norm_weight", ("input_layernorm.weight",), SAME)]
            rows = Stacked((self.model.query_rank or self.model.query_width, self._kv_rows))
            joined = (f"{hf}{query}.weight", f"{hf}kv_a_proj_with_mqa.weight")
            links.append(Link(f"{own}linear_qkv.weight", joined, rows))
        else:
            name, rule = ("linear_q_down_proj", down) if self.model.query_rank else ("linear_q_proj", ROWS)
            links.append(Link(f"{own}{name}.weight", (f"{hf}{query}.weight",), rule))
            links.append(Link(f"{own}linear_kv_down_proj.weight", (f"{hf}kv_a_proj_with_mqa.weight",), down))
        for part in ("q", "kv") if self.model.query_rank else ("kv",):
            norm = (
                f"{own}linear_{part}_up_proj.layer_norm_weight" if fused else f"{own}{part}_layernorm.weight"
            )
            links.append(Link(norm, (f"{hf}{part}_a_layernorm.weight",), SAME))
            links += self._up_projection(part)
        links.append(Link(f"{own}linear_proj.weight", (f"{hf}o_proj.weight",), COLUMNS))
        return links

    def _up_projection(self, part: str) -> list[Link]:
        """From latent to heads: one tensor, or one for each part of a head."""
        own, source = "self_attention.linear_", (f"self_attn.{part}_b_proj.weight",)
        if not self.layout.mla_mm_split:
            return [Link(f"{own}{part}_up_proj.weight", source, ROWS)]
        names = ("qk_nope", "qk_rope") if part == "q" else ("kv_nope", "v")
        sizes = ("qk_nope_head_dim", "qk_rope_head_dim" if part == "q" else "v_head_dim")
        widths = tuple(self.model.latent(size) for size in sizes)
        return [
            Link(f"{own}{names[0]}.weight", source, HeadParts(self.model.heads, widths, 0),
                 also=(f"{own}{names[1]}.weight",)),
            Link(f"{own}{names[1]}.weight", source, HeadParts(self.model.heads, widths, 1)),
        ]  # fmt: skip

    @property
    def _kv_rows(self) -> int:
        return self.model.latent("kv_lora_rank") + self.model.latent("qk_rope_head_dim")

    def _dense_mlp(self) -> list[Link]:
        norm = "mlp.linear_fc1.layer_norm_weight" if self._fused_norms else "pre_mlp_layernorm.weight"
        return [
            Link(norm, ("post_attention_layernorm.weight",), SAME),
            Link("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), Gated()),
            Link("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), COLUMNS),
        ]

    def _moe(self) -> list[Link]:
        """What all ranks of a layer with experts hold."""
        experts = self.model.family.experts
        assert experts is not None
        links = [
            Link("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), SAME),
            Link("mlp.router.weight", (experts.router,), SAME),
        ]
        if experts.router_bias:
            links.append(Link("mlp.router.expert_bias", (experts.router_bias,), SAME))
        if self.model.has_shared_experts:
            gate, up, down = experts.shared_parts
            links.append(Link("mlp.shared_experts.linear_fc1.weight", (gate, up), Gated()))
            links.append(Link("mlp.shared_experts.linear_fc2.weight", (down,), COLUMNS))
        return links

    def local_experts(self, rank: Rank) -> range:
        """The numbers of a rank's experts in the whole model."""
        share = self.model.experts // self.layout.expert_count
        bucket = rank.ep * self.layout.tp + rank.tp if self.layout.moe_tp_extend_ep else rank.ep
        return range(bucket * share, (bucket + 1) * share)

    def _experts(self, rank: Rank) -> Iterator[Link]:
        experts, layout = self.model.family.experts, self.layout
        assert experts is not None
        own = [
            tuple(part.format(expert=number) for part in experts.parts) for number in self.local_experts(rank)
        ]
        shards = layout.expert_shards
        shard = (rank.tp if shards > 1 else 0, shards)
        if layout.grouped and layout.implementation == "local":
            both = tuple(name for gate, up, _ in own for name in (gate, up))
            downs = tuple(down for _, _, down in own)
            hidden = self.model.hidden
            yield Link("mlp.experts.weight1", both, GroupedGated(len(own), hidden), *shard)
            yield Link("mlp.experts.weight2", downs, GroupedDown(len(own), hidden), *shard)
            return
        for number, (gate, up, down) in enumerate(own):
            names = f"mlp.experts.local_experts.{number}.linear_fc{{}}.weight"
            if layout.grouped:
                names = f"mlp.experts.linear_fc{{}}.weight{number}"
            yield Link(names.format(1), (gate, up), Gated(), *shard)
            yield Link(names.format(2), (down,), COLUMNS, *shard)
