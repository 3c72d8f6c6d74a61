"""The reference's ``evaluation.py``: benchmarks by its own options, on any model that `shardyard` opens."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from shardyard.cli.convert_options import Parser, count
from shardyard.cli.evaluate_tasks import TaskJob, run_tasks
from shardyard.cli.inference_options import parse_verb, whole
from shardyard.cli.inference_ranks import is_rank
from shardyard.errors import UserError
from shardyard.evaluate.benchmarks import Benchmarks, require_lm_eval, task_names
from shardyard.evaluate.results import check_output
from shardyard.infer.opening import Choice

_SAID_BY_THE_FOLDER = (
    "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups",
    "--kv-channels", "--max-position-embeddings", "--position-embedding-type", "--rotary-base",
    "--rotary-percent", "--rope-scaling-type", "--normalization", "--norm-epsilon", "--num-experts",
    "--moe-router-topk", "--moe-ffn-hidden-size", "--make-vocab-size-divisible-by", "--padded-vocab-size",
    "--vocab-size", "--tokenizer-type", "--spec", "--init-method-std", "--transformer-impl",
)  # fmt: skip
"""Options with a value of which the model's own files decide."""
_WITHOUT_EFFECT = (
    "--micro-batch-size", "--global-batch-size", "--distributed-backend", "--attention-dropout",
    "--hidden-dropout", "--distributed-timeout-minutes", "--log-interval", "--lr",
)  # fmt: skip
_FLAGS_WITHOUT_EFFECT = (
    "--use-mcore-models", "--use-flash-attn", "--use-fused-rmsnorm", "--use-fused-swiglu",
    "--use-fused-rotary-pos-emb", "--use-rotary-position-embeddings", "--swiglu", "--disable-bias-linear",
    "--untie-embeddings-and-output-weights", "--add-qkv-bias", "--qk-layernorm", "--group-query-attention",
    "--attention-softmax-in-fp32", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion",
    "--no-gradient-accumulation-fusion", "--exit-on-missing-checkpoint", "--no-load-rng", "--no-load-optim",
    "--sequence-parallel", "--tokenizer-not-use-fast", "--moe-grouped-gemm", "--use-kv-cache", "--broadcast",
    "--origin-postprocess", "--overlap-grad-reduce", "--use-distributed-optimizer", "--hf-chat-template",
    "--finetune",
)  # fmt: skip
_REFUSED = {
    **dict.fromkeys(
        ("--lora-load", "--lora-r", "--lora-alpha", "--lora-target-modules", "--lora-fusion"),
        "adapters are not evaluated here yet; merge them into the model first",
    ),
    "--prompt-type": "name the template with `shardyard evaluate --template`, or train with it",
    "--repetition-penalty": "benchmarks' answers are judged as the model gives them",
}
DESCRIPTION = """\
evaluation.py --task NAME --task-data-path DIR --load MODEL --tokenizer-name-or-path DIR [options]

Benchmarks by the reference's options. `shardyard evaluate --tasks` does the same and more.
"""


def main(argv: Sequence[str]) -> int:
    """Run the script; its exit code."""
    if is_rank():
        from shardyard.cli.rank import guard

        return guard(lambda: _run(argv))
    try:
        return _run(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: Sequence[str]) -> int:
    job = read(argv)
    return 0 if job is None else run_tasks(job)


def read(argv: Sequence[str]) -> TaskJob | None:
    """The job of the reference's options; None when the help has been printed.

    Raises:
        UserError: an option that is unknown or refused, or what a task lacks.
    """
    words = _without_megatron(argv)
    options = parse_verb(_parser(), _not_refused(words))
    if options is None:
        return None
    _check_template(options.instruction_template)
    if options.chain_of_thought and options.alternative_prompt:
        raise UserError("--chain-of-thought with --alternative-prompt: they are two ways to ask; leave one")
    if not options.task:
        raise UserError("--task: name what is asked, as mmlu or gsm8k")
    names = task_names(options.task)
    folders = [Path(path) for path in options.task_data_path or ()]
    if len(folders) not in (0, 1, len(names)):
        raise UserError(f"--task-data-path: {len(folders)} folders for {len(names)} tasks; name one for each")
    data = dict(zip(names, folders, strict=True)) if len(folders) == len(names) else {"": folders[0]}
    asked = Benchmarks(
        tasks=names, data=data if folders else {}, variant=_variant(options),
        chat=False if options.no_chat_template else None, limit=options.max_eval_samples,
        batch_size=options.evaluation_batch_size, language=options.eval_language or "", seed=options.seed,
        max_length=options.seq_length, generation=_generation(options),
        allow_code=options.allow_code_execution, num_fewshot=options.num_fewshot,
    )  # fmt: skip
    if options.output:
        check_output(options.output)
    require_lm_eval()
    return TaskJob(_choice(options), asked, options.output)


def _without_megatron(argv: Sequence[str]) -> list[str]:
    """The words without options that mean nothing here; a line names them."""
    kept, left_out = [], []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if name in _FLAGS_WITHOUT_EFFECT:
            left_out.append(name)
        elif name in _SAID_BY_THE_FOLDER or name in _WITHOUT_EFFECT:
            left_out.append(name)
            while not equals and words and not words[0].startswith("--"):
                words.pop(0)
        else:
            kept.append(word)
    if left_out:
        print(f"of no effect here, as the model's folder decides: {' '.join(left_out)}", file=sys.stderr)
    return kept


def _not_refused(words: list[str]) -> list[str]:
    for word in words:
        if reason := _REFUSED.get(word.partition("=")[0]):
            raise UserError(f"{word.partition('=')[0]}: {reason}")
    return words


def _check_template(template: str | None) -> None:
    """Only the order that all tasks have: examples, then the question."""
    if template is not None and not re.fullmatch(r"\s*\{fewshot_template\}\s*\{question\}\s*", template):
        raise UserError(
            f"--instruction-template {template!r}: examples come first and then the question; for another "
            "prompt write the task as lm-eval's YAML and name its folder: shardyard evaluate --task-path"
        )


def _variant(options: argparse.Namespace) -> str:
    if options.chain_of_thought:
        return "chain_of_thought"
    return "alternative_prompt" if options.alternative_prompt else ""


def _generation(options: argparse.Namespace) -> dict[str, float | int | bool]:
    """Answers are greedy, as the reference's are, unless a temperature is asked for."""
    found: dict[str, float | int | bool] = {}
    if options.max_new_tokens is not None:
        found["max_gen_toks"] = options.max_new_tokens
    if options.temperature is not None and options.temperature > 0:
        found |= {"do_sample": True, "temperature": options.temperature}
        found |= {"top_p": options.top_p} if options.top_p is not None else {}
        found |= {"top_k": options.top_k} if options.top_k else {}
    elif options.top_p is not None or options.top_k is not None:
        raise UserError("--top-p, --top-k: they choose among drawn tokens; say --temperature too")
    return found


def _choice(options: argparse.Namespace) -> Choice:
    tokenizer = options.tokenizer_name_or_path
    has_config = tokenizer is not None and (Path(tokenizer).expanduser() / "config.json").is_file()
    sizes = [options.pipeline_model_parallel_size, options.expert_model_parallel_size]
    parallel = "tp" if options.tensor_model_parallel_size > 1 else "none"
    parallel = "fsdp" if any(size > 1 for size in sizes) else parallel
    own_config = (Path(options.load).expanduser() / "config.json").is_file()
    return Choice(
        options.load, tokenizer=tokenizer, config=tokenizer if has_config and not own_config else None,
        dtype="bf16" if options.bf16 else "fp16" if options.fp16 else "auto", parallel=parallel,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip


def _parser() -> Parser:
    parser = Parser(
        prog="evaluation.py", usage=argparse.SUPPRESS, description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--task", nargs="+", metavar="NAME", help="mmlu, mmlu_ppl, cmmlu, ceval, gsm8k, boolq, bbh, ...")
    add("--task-data-path", nargs="+", metavar="DIR", help="local copy of the set; one for each task")
    add("--load", required=True, metavar="PATH", help="a model: Megatron-core, DCP, Hugging Face or a run")
    add("--tokenizer-name-or-path", metavar="DIR", help="tokenizer, and config.json where the model has none")
    add("--evaluation-batch-size", type=count, default=1, metavar="N", help="answers at a time (default 1)")
    add("--max-eval-samples", type=count, metavar="N", help="the first N rows of each task")
    add("--no-chat-template", action="store_true", help="ask with the bare prompt")
    add("--eval-language", choices=["en", "zh"], help="of agieval and needlebench")
    add("--chain-of-thought", action="store_true", help="ask for the steps before the answer")
    add("--alternative-prompt", action="store_true", help="ask for an answer in words")
    add("--instruction-template", metavar="TEXT", help="only '{fewshot_template}{question}'")
    add("--max-new-tokens", type=count, metavar="N", help="longest answer; default: the task's")
    add("--seq-length", type=count, metavar="N", help="tokens of prompt and answer")
    add("--temperature", type=float, metavar="T", help="draw answers; greedy without it")
    add("--top-p", type=float, metavar="P")
    add("--top-k", type=whole, metavar="K")
    add("--seed", type=whole, default=0, metavar="N")
    add("--bf16", action="store_true")
    add("--fp16", action="store_true")
    add("--trust-remote-code", action="store_true")
    add(
        "--tensor-model-parallel-size", type=count, default=1, metavar="N", help="above 1: ranks share layers"
    )
    add("--pipeline-model-parallel-size", type=count, default=1, metavar="N", help="above 1: as fsdp")
    add("--expert-model-parallel-size", type=count, default=1, metavar="N", help="above 1: as fsdp")
    add("--num-fewshot", type=whole, metavar="N", help="not the reference's: examples that are shown")
    add("--output", type=Path, metavar="FILE.json", help="not the reference's: where results go")
    add("--allow-code-execution", action="store_true", help="run the programs of human_eval, in a sandbox")
    return parser
