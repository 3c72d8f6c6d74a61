"""The loss from hidden states equals that of the family's own logits, whatever it does to them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from support.training import Recipe, build_step, largest_relative_difference, micro_batches_of, whole

WORDS = 200
_COMMON: dict[str, Any] = dict(
    vocab_size=WORDS, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip
_WINDOW: dict[str, Any] = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
_NO_DROPOUT: dict[str, Any] = dict(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "divided": ("GraniteConfig", dict(logits_scaling=0.125)),
    "multiplied": ("Cohere2Config", _WINDOW | dict(logit_scale=4.0)),
    "bounded": ("Gemma2Config", _WINDOW | dict(head_dim=8, final_logit_softcapping=1.5)),
    "biased head": ("PhiConfig", dict(tie_word_embeddings=False)),
    "gpt2": ("GPT2Config", _NO_DROPOUT | dict(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4)),
    "bounded, gemma3": ("Gemma3TextConfig", _WINDOW | dict(head_dim=8, final_logit_softcapping=1.5)),
    "bounded, nanochat": ("NanoChatConfig", dict(final_logit_softcapping=1.5)),
    "multiplied by its scaling": ("HyperCLOVAXConfig", dict(logits_scaling=4.0)),
    "divided before": ("MiniCPM3Config", dict(dim_model_base=8)),
    "moe, divided": ("GraniteMoeConfig", dict(logits_scaling=0.125, num_local_experts=4)),
    "gpt_neox": ("GPTNeoXConfig", dict(tie_word_embeddings=False)),
    "olmo2": ("Olmo2Config", {}),
    "phi3": ("Phi3Config", {}),
    "glm4": ("Glm4Config", dict(head_dim=8)),
    "starcoder2": ("Starcoder2Config", {}),
    "smollm3": ("SmolLM3Config", {}),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4)),
    "bloom": ("BloomConfig", dict(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4)),
    "opt": ("OPTConfig", dict(ffn_dim=56, word_embed_proj_dim=16, dropout=0.0, enable_bias=False)),
    "codegen": (
        "CodeGenConfig",
        _NO_DROPOUT | dict(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
    ),
}
"""What is done to logits -> (class of the config, what differs from _COMMON or replaces it)."""
OWN_CONFIG = {"gpt2", "bloom", "codegen"}
QUICK = ("divided", "multiplied", "bounded", "biased head")
ROWS = [
    (list(range(3, 20)), [-100] * 6 + [*range(10, 20), -100]),
    (list(range(40, 52)), [*range(41, 52), -100]),
    (list(range(60, 70)), [-100] * 10),
]
LABELLED = 21


def write(folder: Path, family: str, **changes: Any) -> Path:
    """Weights large enough for bounds and scales to matter, and no bias that is zero."""
    import torch
    import transformers

    name, differences = FAMILIES[family]
    keys = (differences if family in OWN_CONFIG else _COMMON | differences) | changes
    config = getattr(transformers, name)(**keys)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            is_norm = "norm" in key or ".ln_" in key
            tensor.copy_(1 + 0.1 * noise if is_norm and "weight" in key else 0.2 * noise)
    model.save_pretrained(folder)
    return folder


def by_transformers(folder: Path) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of the library's own code, one row at a time."""
    import torch
    import torch.nn.functional as F
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    total = 0.0
    for ids, labels in ROWS:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        loss = F.cross_entropy(logits, torch.tensor(labels), reduction="sum", ignore_index=-100)
        (loss / LABELLED).backward()
        total += loss.item()
    return total / LABELLED, {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}


def against_transformers(folder: Path) -> tuple[str | None, list[float]]:
    """(why the family's own logits are used, differences of loss and of gradients) for each way to chunk."""
    from shardyard.models import LossOptions

    loss, gradients = by_transformers(folder)
    built, step, _ = build_step(folder, Recipe())
    head, found = built.model.loss_head, []
    for chunk in (None, 4):
        head.options = LossOptions(chunk=chunk)
        batches = micro_batches_of(ROWS, 1, 0, 1)
        (ours,) = step._forward_backward(batches, step._agree(batches))
        grads = whole({n: p.grad for n, p in built.model.named_parameters() if p.grad is not None})
        step.optimizer.zero_grad(set_to_none=True)
        found += [abs(ours.item() / LABELLED - loss) / loss, largest_relative_difference(grads, gradients)]
    return head.unsuited, found


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.soak) for f in FAMILIES]
)
def test_loss_and_gradients_equal_the_family_s_own(ranks, tmp_path, family):
    unsuited, differences = ranks.run(1, against_transformers, write(tmp_path / "model", family))[0]
    assert unsuited is None
    assert max(differences) <= 1e-4, differences


def fallback(folder: Path) -> tuple[str | None, list[float], list[str]]:
    """As `against_transformers`, and what was logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardyard.models").addHandler(handler)
    logging.getLogger("shardyard.models").setLevel(logging.INFO)
    return *against_transformers(folder), lines


@pytest.mark.parametrize(
    "key", ["final_logit_softcapping", pytest.param("logits_scaling", marks=pytest.mark.soak)]
)
def test_a_family_with_another_tail_than_its_config_says_keeps_its_own_logits(ranks, tmp_path, key):
    """These do nothing in this family; the first would only show at logits of 5 and more."""
    folder = write(tmp_path / "model", "olmo2", **{key: {"logits_scaling": 2.0}.get(key, 20.0)})
    unsuited, differences, lines = ranks.run(1, fallback, folder)[0]
    assert unsuited is not None and "logits differ" in unsuited
    assert max(differences) <= 1e-4, differences
    assert [line for line in lines if "whole logits of the labelled positions" in line and unsuited in line]


def refusal(folder: Path) -> str:
    from shardyard.errors import UserError

    try:
        build_step(folder, Recipe(optimization={"chunk_loss_size": 4}))
    except UserError as error:
        return str(error)
    return ""


def test_such_a_family_refuses_a_chunk_size(ranks, tmp_path):
    folder = write(tmp_path / "model", "olmo2", logits_scaling=2.0)
    (message,) = ranks.run(1, refusal, folder)
    assert message.startswith("optimization.chunk_loss_size: 4 needs the output layer")
    assert message.endswith("leave it out")


TERMS = {"z_loss_coef": 0.02, "label_smoothing": 0.1}


def with_terms(folder: Path) -> tuple[list[tuple[float, float]], float, float]:
    """Sums of the loss with both terms and in a validation, from our head and from the family's own logits;
    and what these are, term by term.
    """
    import torch
    import torch.nn.functional as F
    import transformers

    from shardyard.evaluate.forwards import forward_parts

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trained = plain = 0.0
    for ids, labels in ROWS:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].detach()
        lse = logits.logsumexp(-1)
        for row, target in enumerate(labels):
            if target != -100:
                nll = lse[row] - logits[row, target]
                trained += float(0.9 * nll + 0.1 * (lse[row] - logits[row].mean()) + 0.02 * lse[row] ** 2)
        plain += F.cross_entropy(logits, torch.tensor(labels), reduction="sum", ignore_index=-100).item()
    built, step, _ = build_step(folder, Recipe(training=TERMS))
    batches, found = micro_batches_of(ROWS, 1, 0, 1), []
    for unsuited in (None, "asked by the test"):
        built.model.loss_head.unsuited = unsuited
        result = step(batches, step=1, lr=0.0)
        built.model.eval()
        with torch.no_grad():
            (part,) = forward_parts(batches[0], 1, device=step.device, packed=True)
            validation = built.model(**part).item()
        built.model.train()
        found.append((result.loss * LABELLED, validation))
    return found, trained, plain


def test_terms_are_those_of_the_formulas_and_validation_has_none(ranks, tmp_path):
    found, trained, plain = ranks.run(1, with_terms, write(tmp_path / "model", "olmo2"))[0]
    assert len(found) == 2 and trained > 1.01 * plain
    for ours, validation in found:
        assert ours == pytest.approx(trained, rel=1e-5)
        assert validation == pytest.approx(plain, rel=1e-5)


def test_what_amplifying_takes_out_of_fp16_is_no_difference():
    """Hidden states of 1000 are none in fp16 any more at 2^7 times; the other rows still compare."""
    import torch

    from shardyard.models.head import LossHead, LossOptions, amplified
    from shardyard.ops.linear_cross_entropy import Tail

    layer = torch.nn.Linear(2, 3, bias=False, dtype=torch.float16)
    torch.nn.init.constant_(layer.weight, 0.5)
    hidden = torch.tensor([1000.0, 1.0], dtype=torch.float16).expand(1, 8, 2)

    def difference(factor: float, first: float = 1.0) -> float:
        head, start = LossHead(Tail(), LossOptions(), None, None), hidden.clone()
        start[0, 0] *= first
        with amplified(layer):
            return head.difference(layer, start, layer(start) * factor).item()

    with amplified(layer):
        assert not torch.isfinite(layer(hidden)[0, 7]).any()
    assert difference(1.0) == 0.0
    assert difference(0.5) == pytest.approx(1.0)
    assert not difference(1.0, first=1e3) <= 1e-2, "the model's own logits are no numbers"
