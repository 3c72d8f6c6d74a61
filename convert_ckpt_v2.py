"""``shardyard convert`` under the reference's name: ``python convert_ckpt_v2.py --load-dir DIR ...``."""

import sys

from shardyard.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "convert_ckpt_v2.py", *sys.argv[1:]]))
