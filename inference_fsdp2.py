"""A conversation with the model of a YAML: ``[torchrun ...] inference_fsdp2.py FILE.yaml [overrides]``."""

import sys

from shardyard.cli.inference_fsdp2 import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
