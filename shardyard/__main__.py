"""``python -m shardyard`` is the ``shardyard`` command."""

from __future__ import annotations

import sys

from shardyard.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
