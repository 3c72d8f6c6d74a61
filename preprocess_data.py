"""``shardyard preprocess`` under the reference's name: ``python preprocess_data.py --input PATH ...``."""

import sys

from shardyard.cli import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
