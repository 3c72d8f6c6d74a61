"""Benchmarks under the reference's name and options: ``python evaluation.py --task mmlu ...``."""

import sys

from shardyard.cli.evaluation_reference import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
