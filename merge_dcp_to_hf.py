"""``shardyard convert`` under the reference's name: ``python merge_dcp_to_hf.py --load-dir DIR ...``."""

import sys

from shardyard.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "merge_dcp_to_hf.py", *sys.argv[1:]]))
