#!/usr/bin/env bash
# Fine-tune SmolLM2-135M on a CPU: two ranks, 20 updates, a few minutes. Its default data is the quick start's, which
# `make train` writes.
set -eo pipefail
CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source examples/fsdp2/env_config.sh
source examples/fsdp2/launch.sh

NAME=tune_smollm2_135m_512_fsdp2_cpu
NPROC=${NPUS_PER_NODE:-${NPROC_PER_NODE:-2}}

launch "$NAME" "$NPROC" "examples/fsdp2/smollm2/$NAME.yaml" \
  --model.model_name_or_path "$(given "$MODEL_PATH" HuggingFaceTB/SmolLM2-135M-Instruct)" \
  --data.dataset "$(given "$DATA_PATH" ./examples/quickstart/assets/alpaca.parquet)" \
  --training.output_dir "$(given_folder "$OUTPUT_DIR" "./output/$NAME")" \
  "$@"
