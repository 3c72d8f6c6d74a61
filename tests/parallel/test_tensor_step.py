"""What tensor parallelism costs and saves, counted: collectives, logits, parameters; and its refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel.tensor_models import WORDS, build, loss_sum, tensor_config, uneven_rows, write_model
from torch.utils._python_dispatch import TorchDispatchMode


def collectives(folder: Path, **options: Any) -> tuple[Counter[str], Counter[str]]:
    """Collectives of the tensor-parallel group in a forward and in its backward, by kind."""
    import torch.distributed as dist

    model, meshes = build(folder, **options)
    group, counts = meshes.tp.get_group(), Counter()
    for kind in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
        original = getattr(dist, kind)

        def counting(*args: Any, kind: str = kind, original: Any = original, **kwargs: Any) -> Any:
            if kwargs.get("group") is group:
                counts[kind] += 1
            return original(*args, **kwargs)

        setattr(dist, kind, counting)  # this process is one rank of one test
    loss = loss_sum(model, uneven_rows())
    forward = counts.copy()
    counts.clear()
    loss.backward()
    return forward, counts


@pytest.mark.parametrize(("layers", "recompute"), [(2, False), (3, True)])
def test_a_layer_gathers_twice_and_scatters_twice_each_way(layers, recompute, tmp_path, ranks):
    """Attention and MLP: gather in, reduce-scatter out. Beside the layers: the embedding's reduce-scatter,
    the gather before the head, two all-reduces of the cross entropy. Recomputation repeats a layer's gathers,
    and the scatter between its halves; its last scatter is not needed again.
    """
    folder = write_model(tmp_path / "model", "qwen3", num_hidden_layers=layers)
    for forward, backward in ranks.run(2, collectives, folder, tp_size=2, recompute=recompute):
        assert forward == {
            "all_gather_single": 2 * layers + 1, "reduce_scatter_single": 2 * layers + 1, "all_reduce": 2,
        }  # fmt: skip
        again = layers if recompute else 0
        assert backward == {
            "all_gather_single": 2 * layers + 1 + 2 * again,
            "reduce_scatter_single": 2 * layers + 1 + again,
        }


def sizes(folder: Path, **options: Any) -> tuple[int, int, int, list[tuple[int, ...]]]:
    """(most logits that the head made at once, numbers in this rank's embedding and head, in all parameters,
    shapes of what enters the layers)."""
    model, _ = build(folder, **options)
    logits: list[int] = []
    entering: list[tuple[int, ...]] = []
    words = model.lm_head.weight.to_local().shape[0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.ndim == 2 and result.shape[1] == words:
                logits.append(result.numel())
            return result

    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(
            lambda m, args, out: entering.append(tuple(args[0].shape))
        )
    with Watch():
        loss = loss_sum(model, uneven_rows())
    loss.backward()
    vocabulary = sum(
        parameter.to_local().numel()
        for name, parameter in model.named_parameters()
        if "embed" in name or "lm_head" in name
    )
    return max(logits), vocabulary, sum(p.to_local().numel() for p in model.parameters()), entering


def test_logits_vocabulary_and_residual_stream_are_a_quarter_with_tp_4(tmp_path, ranks):
    folder = write_model(tmp_path / "model", "qwen3", tie_word_embeddings=False)
    labelled = sum(label != -100 for _, labels in uneven_rows() for label in labels)
    tokens = sum(len(ids) for ids, _ in uneven_rows())
    assert tokens == 100
    hidden, inner, heads, kv_heads, head_dim = 32, 56, 8, 4, 8
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    whole = 2 * (2 * hidden + 2 * head_dim) + hidden
    for world in (1, 4):
        for rank in ranks.run(world, sizes, folder, tp_size=world):
            logits, vocabulary, parameters, entering = rank
            assert logits == labelled * WORDS // world
            assert vocabulary == 2 * WORDS * hidden // world
            assert parameters == (2 * WORDS * hidden + 2 * layer) // world + whole
            assert entering == [(1, tokens // world, hidden)] * 2


def all_logits(folder: Path, **options: Any) -> torch.Tensor:
    model, _ = build(folder, **options)
    ids = torch.tensor([[7, 2, 199, 101, 99, 0, 5]])
    with torch.no_grad():
        return model.eval()(input_ids=ids, position_ids=torch.arange(7)[None], doc_lens=(7,))


def test_all_logits_without_a_gradient_are_those_of_the_library(tmp_path, ranks):
    import transformers as hf

    folder = write_model(tmp_path / "model", "cohere2")
    library = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = library(input_ids=torch.tensor([[7, 2, 199, 101, 99, 0, 5]])).logits
    for logits in ranks.run(2, all_logits, folder, tp_size=2):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


def refusal_of(config: Any, *, attention: str | None = None, **options: Any) -> str:
    import transformers as hf

    from shardyard.config import ParallelConfig
    from shardyard.errors import UserError
    from shardyard.ops import DOCUMENTS_ATTENTION
    from shardyard.parallel.tensor import plan_tensor_parallel

    with torch.device("meta"):
        model: Any = hf.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention or DOCUMENTS_ATTENTION
        )
    with pytest.raises(UserError) as caught:
        plan_tensor_parallel(model, ParallelConfig(**options))
    return str(caught.value)


def test_a_family_that_was_not_measured_is_refused_by_name():
    import transformers

    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)
    text = refusal_of(config, attention="sdpa", tp_size=2)
    assert text.startswith("parallel.tp_size: 2 ") and "'gpt2'" in text and "qwen3_moe, smollm3" in text


@pytest.mark.parametrize(
    ("changes", "tp_size", "expected"),
    [
        (dict(vocab_size=199), 2, "199, vocab_size of this 'llama' model; sizes that do: 1, 199"),
        (dict(num_attention_heads=8, num_key_value_heads=2), 4, "2, num_key_value_heads of this 'llama'"),
        (dict(num_attention_heads=6, num_key_value_heads=6, hidden_size=36), 4, "6, num_attention_heads of"),
        (dict(intermediate_size=54), 4, "54, the input of model.layers.0.mlp.down_proj of"),
    ],
    ids=["vocabulary", "kv heads", "heads", "inner size"],
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(changes, tp_size, expected):
    text = refusal_of(tensor_config("llama_tied", **changes), tp_size=tp_size)
    assert text.startswith(f"parallel.tp_size: {tp_size} does not divide ") and expected in text


def test_a_pattern_cannot_split_what_the_family_mixes():
    text = refusal_of(tensor_config("phi3"), tp_size=2, tp_colwise=("*.qkv_proj",))
    assert text.startswith("parallel.tp_colwise: model.layers.0.self_attn.qkv_proj cannot be split so")
    text = refusal_of(tensor_config("qwen3"), tp_size=2, tp_rowwise=("*.gate_proj",))
    assert "model.layers.{*}.mlp.down_proj, model.layers.{*}.self_attn.o_proj" in text
    text = refusal_of(tensor_config("qwen3"), tp_size=2, tp_rowwise=("*.nothing",))
    assert text.startswith("parallel.tp_rowwise: *.nothing matches nothing")


def test_masks_and_dropout_of_partial_sums_are_refused():
    text = refusal_of(tensor_config("llama_tied"), attention="sdpa", tp_size=2)
    assert "the attention 'sdpa' takes a mask" in text
    text = refusal_of(tensor_config("starcoder2", residual_dropout=0.1), tp_size=2)
    assert "model.config_overrides: {residual_dropout: 0.0}" in text
