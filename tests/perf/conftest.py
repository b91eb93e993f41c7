"""Leaves the measurements out where pytest-benchmark is missing."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("pytest_benchmark") else ["test_*.py"]
