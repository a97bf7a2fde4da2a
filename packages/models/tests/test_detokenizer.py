import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_models.text import Detokenizer, Tokenizer

GLYPHS = "日本語 😀👍🏽 👨‍👩‍👧"


def joined(detokenizer, ids, sizes):
    out, at = "", 0
    for size in [*sizes, len(ids)]:
        out += detokenizer.push(ids[at : at + size])
        at += size
    return out + detokenizer.finish()


@given(st.lists(st.integers(0, 310), max_size=40), st.lists(st.integers(0, 4), max_size=40), st.booleans())
def test_pieces_join_to_the_decoded_whole(byte_backend, ids, sizes, skip):
    tokenizer = Tokenizer(byte_backend)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    assert joined(detokenizer, ids, sizes) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=40), st.lists(st.integers(0, 4), max_size=40))
def test_a_valid_text_streams_without_replacement_characters(byte_backend, text, sizes):
    tokenizer = Tokenizer(byte_backend)
    ids = tokenizer.encode(text, parse_special=False)
    assert joined(Detokenizer(tokenizer), ids, sizes) == text


@pytest.mark.parametrize("num_tokens", range(1, 31))
def test_glyphs_cut_at_any_token_are_whole_or_absent(smollm2, num_tokens):
    tokenizer, _ = smollm2
    ids = tokenizer.encode(GLYPHS)[:num_tokens]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([i]) for i in ids]
    text = "".join(pieces) + detokenizer.finish()
    assert "\ufffd" not in text
    assert GLYPHS.startswith(text)
    assert text == tokenizer.decode(ids)
    assert len(b"".join(map(tokenizer.token_bytes, ids))) - len(text.encode()) < 4


def test_bytes_that_can_be_no_character_are_replaced_at_once(byte_backend):
    tokenizer = Tokenizer(byte_backend)
    lone = byte_backend.token_to_id("ÿ")
    assert tokenizer.token_bytes(lone) == b"\xff"
    assert Detokenizer(tokenizer).push([lone]) == "\ufffd"


def test_an_unfinished_character_is_held_then_dropped(byte_backend):
    tokenizer = Tokenizer(byte_backend)
    ids = tokenizer.encode("é")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids[:1]) == ""
    assert detokenizer.num_held_bytes == 1
    assert detokenizer.finish() == ""
    assert tokenizer.decode(ids[:1]) == ""


def test_special_tokens_are_shown_when_asked_for(byte_backend):
    tokenizer = Tokenizer(byte_backend)
    assert Detokenizer(tokenizer).push([0, 1]) == ""
    assert Detokenizer(tokenizer, skip_special_tokens=False).push([0, 1]) == "<s></s>"
