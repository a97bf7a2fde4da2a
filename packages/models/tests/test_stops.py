import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_core.errors import RequestError
from octavo_models.text import StopStrings

WORDS = st.text("ab\n😀", min_size=1, max_size=5)


def first_complete(text, stops):
    """The slow definition: where the earliest-ending occurrence starts and ends, the longest where several end there."""
    found = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    return min(found) if found else None


def could_still_match(text, stops):
    """Length of the longest end of the text that begins a stop string."""
    return max((n for s in stops for n in range(len(s)) if n and text.endswith(s[:n])), default=0)


@given(st.text("ab\n😀", max_size=60), st.lists(WORDS, max_size=4), st.lists(st.integers(0, 7), max_size=60), st.booleans())
def test_any_cut_of_the_text_gives_what_find_gives_on_the_whole(text, stops, sizes, include):
    matcher = StopStrings(stops, include=include)
    out, seen, at, match = "", "", 0, None
    for size in [*sizes, len(text)]:
        piece, at = text[at : at + size], at + size
        shown, match = matcher.push(piece)
        out, seen = out + shown, seen + piece
        if match is not None:
            break
        assert len(out) == len(seen) - could_still_match(seen, stops)
    expected = first_complete(text, stops)
    if expected is None:
        assert match is None
        assert out + matcher.finish() == text
    else:
        end, start, stop = expected
        assert match == stop
        assert out == (text[:end] if include else text[:start])
        assert matcher.finish() == ""


def test_no_part_of_a_stop_string_over_several_tokens_is_shown():
    matcher = StopStrings(["world peace"])
    assert [matcher.push(p)[0] for p in ["Hello w", "orld ", "pea"]] == ["Hello ", "", ""]
    assert matcher.push("ce!") == ("", "world peace")


def test_held_text_is_shown_as_soon_as_it_can_become_no_stop_string():
    matcher = StopStrings(["world peace"])
    assert matcher.push("a world p") == ("a ", None)
    assert matcher.push("lan") == ("world plan", None)


def test_held_text_is_shown_at_the_end():
    matcher = StopStrings(["\n\n"])
    assert matcher.push("line\n") == ("line", None)
    assert matcher.finish() == "\n"


def test_order_of_the_list_does_not_matter():
    for stops in (["c", "b"], ["b", "c"]):
        assert StopStrings(stops).push("abc") == ("a", "b")


def test_nothing_is_shown_after_a_match():
    matcher = StopStrings(["b"])
    matcher.push("abc")
    assert matcher.push("more") == ("", "b")
    assert matcher.finish() == ""


def test_without_stop_strings_everything_passes():
    assert StopStrings([]).push("abc") == ("abc", None)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(RequestError, match="at least one character"):
        StopStrings(["a", ""])


def test_a_long_stop_string_costs_linear_time():
    matcher = StopStrings(["a" * 20_000 + "b"])
    shown = sum(len(matcher.push("a" * 50)[0]) for _ in range(2_000))
    assert shown == 100_000 - 20_000
