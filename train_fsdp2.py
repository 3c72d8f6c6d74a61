"""The torchrun entry: ``torchrun --nproc_per_node N train_fsdp2.py FILE.yaml [--section.key value ...]``."""

import sys

from shardyard.cli.rank import run_rank

if __name__ == "__main__":
    sys.exit(run_rank(sys.argv[1:]))
