"""Run a hookgraph command: ``python -m hookgraph demo``."""

from __future__ import annotations

import sys

from hookgraph.cli import main

if __name__ == "__main__":
    sys.exit(main())
