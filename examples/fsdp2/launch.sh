# Sourced by every script here, after it has gone to the repository's root: starts the ranks and keeps their log.
#
# The environment decides: NPUS_PER_NODE or NPROC_PER_NODE (ranks on this machine), NNODES, NODE_RANK, MASTER_ADDR,
# MASTER_PORT, MODEL_PATH (a folder, or an id on the hub), DATA_PATH (a file, a folder, a glob, or a name of
# configs/fsdp2/data/dataset_info.json) and OUTPUT_DIR. Words after the script's name override the YAML.

NNODES=${NNODES:-1}

# given VALUE DEFAULT: VALUE if it is set, a path in it being meant from where the user stood; else DEFAULT
given() {
  if [ -z "$1" ]; then
    echo "$2"
  elif [[ $1 != /* ]] && [ -e "$CALLED_FROM/$1" ]; then
    echo "$CALLED_FROM/$1"
  else
    echo "$1"
  fi
}

# given_folder VALUE DEFAULT: the same for a folder that need not exist yet
given_folder() {
  if [ -z "$1" ] || [[ $1 == /* ]]; then echo "${1:-$2}"; else echo "$CALLED_FROM/$1"; fi
}

# launch NAME NPROC YAML [OVERRIDES]: what the ranks print goes to logs/NAME_<time>.log too; fails if a rank fails
launch() {
  local name=$1 nproc=$2 words=("${@:3}") address=()
  if [ "$NNODES" -gt 1 ]; then
    address=(--node_rank "${NODE_RANK:-0}" --master_addr "${MASTER_ADDR:-localhost}" --master_port "${MASTER_PORT:-6499}")
  elif [ -n "${MASTER_PORT:-}" ]; then # one machine needs none: torchrun takes a free port
    address=(--master_addr "${MASTER_ADDR:-localhost}" --master_port "$MASTER_PORT")
  fi
  mkdir -p logs
  torchrun --nproc_per_node "$nproc" --nnodes "$NNODES" "${address[@]}" train_fsdp2.py "${words[@]}" 2>&1 |
    tee "logs/${name}_$(date +%Y-%m-%d_%H-%M-%S).log"
}
