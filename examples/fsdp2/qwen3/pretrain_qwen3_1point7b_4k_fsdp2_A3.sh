#!/usr/bin/env bash
# Pretrain Qwen3-1.7B on a stream of text in windows of 4,096 tokens: 4 NPUs of one Atlas A3 machine.
set -eo pipefail
CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source examples/fsdp2/env_config.sh
source examples/fsdp2/launch.sh

export TORCH_HCCL_ZERO_COPY="${TORCH_HCCL_ZERO_COPY:-1}" # A3: collectives read and write tensors in place

NAME=pretrain_qwen3_1point7b_4k_fsdp2_A3
NPROC=${NPUS_PER_NODE:-${NPROC_PER_NODE:-4}}

launch "$NAME" "$NPROC" "examples/fsdp2/qwen3/$NAME.yaml" \
  --model.model_name_or_path "$(given "$MODEL_PATH" Qwen/Qwen3-1.7B)" \
  --data.dataset "$(given "$DATA_PATH" alpaca_full)" \
  --parallel.fsdp_size "$((NPROC * NNODES))" \
  --training.per_device_train_batch_size 1 \
  --training.gradient_accumulation_steps 1 \
  --training.output_dir "$(given_folder "$OUTPUT_DIR" "./output/$NAME")" \
  "$@"
