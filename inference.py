"""The reference's entry for Megatron models: ``[torchrun ...] inference.py --load DIR --task greedy ...``."""

import sys

from shardyard.cli.inference_reference import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
