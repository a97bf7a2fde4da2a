"""A large body is read piece by piece, and means what it means as a whole."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_core.errors import RequestError
from octavo_server._src import body as module
from octavo_server._src.body import parse_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=25,
)


@pytest.fixture(scope="module", autouse=True)
def everything_is_large():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_PIECE", 4)
        yield


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=5), st.sampled_from([None, 1]), st.booleans())
def test_a_body_means_what_it_means_as_a_whole(value, indent, ascii_only):
    body = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    assert parse_json(body) == msgspec.json.decode(body)


@given(st.dictionaries(st.text(max_size=5), VALUES, min_size=1, max_size=5), st.data())
def test_a_damaged_body_is_refused_in_the_same_words(value, data):
    body = bytearray(json.dumps(value).encode())
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    assert understood(parse_json, bytes(body)) == understood(read_at_once, bytes(body))


def read_at_once(body):
    """What `parse_json` would be if every body were small."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_PIECE", len(body))
        return parse_json(body)


def understood(parse, body):
    try:
        return parse(body)
    except RequestError as error:
        return str(error)


def test_nesting_costs_no_more_than_a_few_looks(monkeypatch):
    looks = []
    whole = module._in_pieces

    def counted(data, depth):
        looks.append(depth)
        return whole(data, depth)

    monkeypatch.setattr(module, "_in_pieces", counted)
    assert parse_json(b'{"a":' + b"[" * 50 + b"]" * 50 + b"}")
    assert looks == list(range(module._PIECES_DEPTH + 1))
