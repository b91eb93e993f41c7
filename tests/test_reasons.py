"""Fallback reasons: each tells a user what was seen and what to do."""

from __future__ import annotations

import re

import pytest

from hookgraph.reasons import Fallback, FallbackReason

each_reason = pytest.mark.parametrize("reason", list(FallbackReason), ids=lambda reason: reason.value)


@each_reason
def test_says_what_was_seen_and_what_to_do(reason: FallbackReason) -> None:
    for text in (reason.meaning, reason.remedy):
        assert text
        assert text == text.strip()
        assert not text.endswith("."), "the tables and the messages set their own punctuation"


@each_reason
def test_value_is_the_name_in_snake_case(reason: FallbackReason) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", reason.value)
    assert reason.value == reason.name.lower()
    assert FallbackReason(reason.value) is reason


def test_values_are_unique() -> None:
    # An Enum makes a repeated value an alias, which __members__ shows and iteration does not.
    assert (
        len(FallbackReason.__members__) == len(list(FallbackReason)) == len({reason.value for reason in FallbackReason})
    )


def test_meanings_are_unique() -> None:
    assert len({reason.meaning for reason in FallbackReason}) == len(FallbackReason)


@pytest.mark.parametrize(
    ("detail", "text"),
    [
        pytest.param("", "max_graphs signatures are retained already (raise", id="without detail"),
        pytest.param("x f32 (2,)", "max_graphs signatures are retained already: x f32 (2,) (raise", id="with detail"),
    ],
)
def test_a_fallback_reads_as_one_sentence(detail: str, text: str) -> None:
    assert str(Fallback(FallbackReason.LIMIT, detail)).startswith(f"limit: {text}")
