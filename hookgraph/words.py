"""Small words of sentences: articles, and lists that stop after a few."""

from __future__ import annotations

import re
from collections.abc import Sequence

_MOST_NAMED = 3
_AND = ", "


def with_article(noun: str) -> str:
    """A noun with its article.

    Example:
        >>> with_article("Tensor"), with_article("int")
        ('a Tensor', 'an int')
    """
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def first_few(names: Sequence[str]) -> str:
    """Up to three names, and how many more there are.

    Example:
        >>> first_few(["args[0]", "args[1]", "args[2]", "args[3]"])
        'args[0], args[1], args[2] and 1 more'
    """
    more = len(names) - _MOST_NAMED
    return _AND.join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def names_in(few: str) -> list[str]:
    """The names that ``first_few`` told, one by one.

    Example:
        >>> names_in("args[0], args[1], args[2] and 1 more")
        ['args[0]', 'args[1]', 'args[2]']
    """
    return re.sub(r" and \d+ more$", "", few).split(_AND)
