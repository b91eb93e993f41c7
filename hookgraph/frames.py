"""Rows as a pandas data frame, where pandas is there."""

from __future__ import annotations

from typing import Any

from hookgraph.errors import HookgraphError


def frame(rows: list[dict[str, Any]], columns: list[str]) -> Any:
    """Give rows as a ``pandas.DataFrame``; the columns are there without rows, too.

    Raises:
        HookgraphError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise HookgraphError(f"a data frame needs pandas: pip install 'hookgraph[notebook]' ({error})") from error
    return pandas.DataFrame(rows, columns=columns)
