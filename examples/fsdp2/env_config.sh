# Sourced by every script here: the environment of a run on Ascend NPUs. Without CANN it changes nothing.
# A value that is already set is kept.

if [ -z "${ASCEND_OPP_PATH:-}" ]; then # CANN's own script has not been sourced in this shell
  for cann in "${ASCEND_TOOLKIT_HOME:-/usr/local/Ascend/ascend-toolkit}" /usr/local/Ascend/cann "$HOME/Ascend/ascend-toolkit"; do
    if [ -f "$cann/set_env.sh" ]; then
      source "$cann/set_env.sh"
      break
    fi
  done
fi

if [ -n "${ASCEND_OPP_PATH:-}" ]; then
  # seconds that the ranks wait for each other at the first collective: large weights take long to read
  export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1800}"
  # operators are launched from a queue of their own, so that the host runs ahead of the device
  export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-2}"
  # each rank's threads stay on the cores next to its device
  export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-1}"
  # memory that another stream has finished with is reused at once: a lower peak
  export MULTI_STREAM_MEMORY_REUSE="${MULTI_STREAM_MEMORY_REUSE:-2}"
  # segments of device memory that grow: less is lost between blocks of different sizes
  export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"
fi
