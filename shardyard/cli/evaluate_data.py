"""The part of ``shardyard evaluate`` that is about the loss of data sets."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardyard import __version__
from shardyard.cli.inference_options import choice_of
from shardyard.config import Config, load_config
from shardyard.durable import temporary_name, write_durably
from shardyard.errors import UserError
from shardyard.evaluate.results import check_output
from shardyard.infer.opening import RESOLVED_CONFIG, Choice, Found, find

if TYPE_CHECKING:
    from shardyard.device import Device, ProcessGroup
    from shardyard.evaluate.data_loss import DataLoss

_YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class DataJob:
    """``choice`` None: the model is that of the settings."""

    words: tuple[str, ...]
    """Of the settings: file and overrides."""
    choice: Choice | None
    data: tuple[str, ...]
    output: Path | None
    into_metrics: bool


def read_data(options: argparse.Namespace, settings: Sequence[str]) -> DataJob:
    """The job of the options; the settings are checked here, without torch.

    Raises:
        UserError: an option or a setting is wrong.
    """
    named = [word for words in options.data or () for word in words]
    files = [word for word in named if word.endswith(_YAML)]
    data = tuple(word for word in named if not word.endswith(_YAML))
    if options.config_file:
        files.insert(0, options.config_file)
    if len(files) > 1:
        raise UserError(f"two YAML files, {files[0]} and {files[1]}; give one")
    if options.config_file and not options.config_file.endswith(_YAML):
        raise UserError(f"{options.config_file}: settings are a .yaml file; a data set is named by --data")
    if not files and not options.model:
        raise UserError("evaluate: say which model with --model PATH, or name a CONFIG.yaml")
    if options.parallel != "auto":
        raise UserError(
            f"--parallel {options.parallel}: the loss of data sets knows every layout of training; set "
            "--parallel.tp_size N, --parallel.fsdp_size N and the like"
        )
    choice = choice_of(options) if options.model else None
    if choice is None:
        _refuse_without_model(options)
    if options.output:
        check_output(options.output)
    words = (*_words(choice, files, data, settings), *settings)
    load_config(words)
    return DataJob(words, choice, data, options.output, options.into_metrics)


def _refuse_without_model(options: argparse.Namespace) -> None:
    given = {
        "--checkpoint": options.checkpoint != "latest", "--tokenizer": options.tokenizer,
        "--config": options.config, "--dtype": options.dtype != "auto", "--template": options.template,
        "--attn-implementation": options.attn_implementation, "--into-metrics": options.into_metrics,
        "--trust-remote-code": options.trust_remote_code,
        "--enable-thinking": options.enable_thinking is not None,
    }  # fmt: skip
    if wrong := [name for name, value in given.items() if value]:
        raise UserError(f"{wrong[0]} is of --model PATH; without it, set it in the settings")


def _words(
    choice: Choice | None, files: Sequence[str], data: Sequence[str], settings: Sequence[str]
) -> list[str]:
    """The settings' file, or what stands for it."""
    if files:
        return [files[0]]
    assert choice is not None
    found = find(choice)
    if found.run_dir is not None and found.run is not None:
        return [str(found.run_dir / RESOLVED_CONFIG)]
    if not data:
        raise UserError(
            f"--data: {choice.model} is no run that knows its data; name a data set, a file or a CONFIG.yaml"
        )
    stage = (
        [f"--data.template={choice.template}"]
        if choice.template
        else ["--training.stage=pt", "--data.data_manager_type=mg"]
    )
    return [
        f"--model.model_name_or_path={choice.model}", "--training.output_dir=unused",
        f"--data.dataset={','.join(data)}", *stage,
    ]  # fmt: skip


def run_data(job: DataJob) -> int:
    """Score, print the table, write the file; on every rank."""
    from shardyard.allocator import tune_for_tensors
    from shardyard.cli.inference_ranks import convert_to_hf, log_to_stderr

    log_to_stderr()
    tune_for_tensors()
    from transformers.utils import logging as transformers_logging

    from shardyard.device import detect_device, start_process_group
    from shardyard.evaluate.data_loss import score_data

    transformers_logging.set_verbosity_error()
    device = detect_device()
    group = start_process_group(device)
    try:
        found = _found(job.choice, group)
        config = _config(job, found)
        loss = score_data(config, group, device, convert=convert_to_hf)
        if loss is not None:
            _tell(job, config, found, loss, device)
    except UserError:
        group.leave_together()
        raise
    group.stop()
    return 0


def _found(choice: Choice | None, group: ProcessGroup) -> Found | None:
    """What ``--model`` names; rank 0 looks first, so that all see the same checkpoint."""
    from shardyard.device import agree

    if choice is None:
        return None
    found = find(choice) if group.is_main else None
    agree(group, "evaluate/model", lambda: found.weights if found else "")
    return found or find(choice)


def _config(job: DataJob, found: Found | None) -> Config:
    """The settings with the model and the data that the words name."""
    from shardyard.evaluate.data_loss import metrics_path, trained_weights

    config = load_config(job.words).config
    data: dict[str, Any] = {}
    if job.data:
        named = job.data[0] if len(job.data) == 1 else job.data
        data = {"eval_dataset": named, "val_size": 0, "tokenized_path": None}
    if found is None or job.choice is None:
        return config.model_copy(update={"data": config.data.model_copy(update=data)})
    if job.into_metrics:
        metrics_path(found)
    choice = job.choice
    model: dict[str, Any] = {
        "model_name_or_path": trained_weights(found), "train_from_scratch": False, "config_overrides": None,
        "config_name_or_path": choice.config, "tokenizer_name_or_path": choice.tokenizer,
    }  # fmt: skip
    if choice.attn_implementation:
        model["attn_implementation"] = choice.attn_implementation
    if choice.trust_remote_code:
        model["trust_remote_code"] = True
    if choice.template:
        data["template"] = choice.template
    if choice.enable_thinking is not None:
        data["enable_thinking"] = choice.enable_thinking
    parallel = {} if choice.dtype == "auto" else {"param_dtype": choice.dtype}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "data": config.data.model_copy(update=data),
            "parallel": config.parallel.model_copy(update=parallel),
        }
    )


def _tell(job: DataJob, config: Config, found: Found | None, loss: DataLoss, device: Device) -> None:
    from shardyard.evaluate.data_loss import as_json, metrics_path, table

    for line in table(loss):
        print(line)
    if job.output:
        import torch
        import transformers

        told = {
            "model": found.name if found else config.model.model_name_or_path,
            "settings": {
                "words": list(job.words), "data": list(job.data), "layout": loss.layout,
                "device": str(device.type), "choice": asdict(job.choice) if job.choice else None,
            },
            "versions": {
                "shardyard": __version__, "torch": torch.__version__,
                "transformers": transformers.__version__, "python": platform.python_version(),
            },
            "sets": as_json(loss),
        }  # fmt: skip
        temporary = temporary_name(job.output)
        write_durably(temporary, json.dumps(told, ensure_ascii=False, indent=1) + "\n")
        temporary.replace(job.output)
        print(f"results: {job.output}")
    if job.into_metrics and found is not None:
        from shardyard.monitor.metrics import METRICS_FILE, MetricsWriter

        run_dir, step = metrics_path(found)
        writer = MetricsWriter(run_dir / METRICS_FILE)
        writer.write_validation(step, loss.result)
        writer.close()
