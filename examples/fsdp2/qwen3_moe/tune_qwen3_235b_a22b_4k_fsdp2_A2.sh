#!/usr/bin/env bash
# Fine-tune Qwen3-235B-A22B on conversations of up to 4,096 tokens: sixteen Atlas A2 machines, 128 NPUs.
# On each machine: NNODES=16 NODE_RANK=<0 to 15> MASTER_ADDR=<first machine>
set -eo pipefail
CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-3600}" # the weights take long to read
source examples/fsdp2/env_config.sh
source examples/fsdp2/launch.sh

NAME=tune_qwen3_235b_a22b_4k_fsdp2_A2
NPROC=${NPUS_PER_NODE:-${NPROC_PER_NODE:-8}}

launch "$NAME" "$NPROC" "examples/fsdp2/qwen3_moe/$NAME.yaml" \
  --model.model_name_or_path "$(given "$MODEL_PATH" Qwen/Qwen3-235B-A22B)" \
  --data.dataset "$(given "$DATA_PATH" alpaca_full)" \
  --parallel.fsdp_size "$((NPROC * NNODES))" \
  --parallel.ep_size 1 \
  --parallel.ep_fsdp_size 1 \
  --training.per_device_train_batch_size 1 \
  --training.gradient_accumulation_steps 1 \
  --training.output_dir "$(given_folder "$OUTPUT_DIR" "./output/$NAME")" \
  "$@"
