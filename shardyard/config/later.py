"""Settings whose feature comes with a later release; the release that brings it takes its row out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Later:
    """A setting that is refused away from its default, or only at the values ``refused``."""

    feature: str
    refused: tuple[object, ...] = ()

    def refuses(self, value: object, default: object) -> bool:
        """Whether ``value`` asks for what is not there yet."""
        return value in self.refused if self.refused else value != default


_QUANT = "low-precision training"
_TOKENS = "adding tokens to a model"
_PROFILE = "profiling"

LATER: dict[str, Later] = {
    "model.resize_vocab": Later(_TOKENS),
    "model.add_tokens": Later(_TOKENS),
    "model.add_special_tokens": Later(_TOKENS),
    "model.new_special_tokens_config": Later(_TOKENS),
    "model.init_special_tokens": Later(_TOKENS),
    "model.quant_recipe_name": Later(_QUANT),
    "model.quant_apply_modules": Later(_QUANT),
    "model.quant_ignored_modules": Later(_QUANT),
    "model.quant_converters": Later(_QUANT),
    "model.enable_fsdp_low_precision_all_gather": Later(_QUANT),
    "model.fsdp_low_precision_all_gather_mode": Later(_QUANT),
    "data.eval_num_beams": Later("evaluation by generation"),
    "training.indexer_loss_coeff": Later("the sparse-attention indexer's loss"),
    "training.mtp_loss_scaling_factor": Later("multi-token prediction"),
    "training.profile": Later(_PROFILE),
    "optimization.pre_tokens": Later("windows of fused attention"),
    "optimization.next_tokens": Later("windows of fused attention"),
    "optimization.gdn_chunk_size": Later("the gated delta rule's operators"),
}
"""``section.key`` -> what the setting will bring."""
