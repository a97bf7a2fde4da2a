"""Whatever tokens come, cut wherever: what a stream shows is what the whole text says, and no part of a stop string."""

import json

from hypothesis import given
from hypothesis import strategies as st

from octavo_server._src.sse import encode_event
from octavo_server._src.text import TextStream

TOKENS = st.lists(st.integers(3, 399), max_size=40)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_an_event_is_one_line_however_its_reader_splits_lines_and_comes_back(value) -> None:
    event = encode_event({"value": value})
    assert event.endswith(b"\n\n")
    text = event.decode()
    assert text.splitlines() == [text[:-2], ""]
    assert json.loads(text.removeprefix("data: ")) == {"value": value}


def streamed(tokenizer, tokens, stops, **options):
    """What is shown, and the stop string that ended it."""
    stream = TextStream(tokenizer, stops=stops, include_stop=False, skip_special_tokens=True, **options)
    shown = ""
    for token in tokens:
        text, matched = stream.push(token)
        shown += text
        assert not any(stop in shown for stop in stops)
        if matched is not None:
            return shown, matched
    text, matched = stream.finish()
    return shown + text, matched


def whole_of(tokenizer, tokens) -> str:
    return streamed(tokenizer, tokens, [])[0]


@given(tokens=TOKENS)
def test_streamed_text_is_the_decoded_text_but_for_a_character_cut_off_at_the_end(tokenizer, tokens) -> None:
    shown, whole = whole_of(tokenizer, tokens), tokenizer.decode(tokens)
    raw = b"".join(tokenizer.token_bytes(token) for token in tokens)
    assert shown == whole or (whole.startswith(shown) and set(whole[len(shown) :]) == {"\ufffd"})
    valid = raw.decode(errors="ignore") if raw.decode(errors="replace").count("\ufffd") == 0 else None
    assert valid is None or shown == valid


@given(tokens=TOKENS, data=st.data())
def test_text_ends_before_the_stop_string_that_comes_first_and_shows_no_part_of_it(tokenizer, tokens, data) -> None:
    whole = whole_of(tokenizer, tokens)
    pieces = st.tuples(st.integers(0, max(len(whole) - 1, 0)), st.integers(1, 6)).map(lambda cut: whole[cut[0] : cut[0] + cut[1]])
    stops = data.draw(st.lists((pieces if whole else st.nothing()) | st.text("the qx\ufffd", min_size=1, max_size=4), max_size=3))
    stops = [stop for stop in stops if stop]
    shown, matched = streamed(tokenizer, tokens, stops)
    assert whole.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if matched is None:
        assert shown == whole
    else:
        assert matched in stops
        assert whole[len(shown) :].startswith(matched)
