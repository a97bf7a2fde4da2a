import inspect
import pickle

import pytest

from octavo_core import errors
from octavo_core.errors import ContextLengthError, OctavoError, OverloadedError, RequestError, UnknownModelError, nearest_name

TREE = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, OctavoError)]


@pytest.mark.parametrize("kind", TREE)
def test_every_error_stands_in_the_tree_drawn_in_the_docstring(kind: type[OctavoError]) -> None:
    line = next(line for line in (errors.__doc__ or "").splitlines() if kind.__name__ in line.split())
    parent = kind.__bases__[0]
    depth = 0 if kind is OctavoError else (line.index("──") - 4) // 4 + 1
    assert depth == len(kind.__mro__) - len(OctavoError.__mro__)
    assert parent in TREE or kind is OctavoError


@pytest.mark.parametrize("kind", TREE)
def test_every_error_has_a_message_and_an_http_status(kind: type[OctavoError]) -> None:
    assert str(kind("what was wanted")) == "what was wanted"
    assert kind.http_status in {400, 404, 500, 503}


def test_a_request_error_carries_param_and_code_through_pickle() -> None:
    error = pickle.loads(pickle.dumps(RequestError("m", param="top_p", code="c")))
    assert (str(error), error.param, error.code) == ("m", "top_p", "c")


def test_kinds_of_request_error_have_openai_codes() -> None:
    assert ContextLengthError("m").code == "context_length_exceeded"
    assert (UnknownModelError("m").code, UnknownModelError.http_status) == ("model_not_found", 404)
    assert RequestError("m").code is None


def test_an_overload_says_when_to_come_back() -> None:
    assert OverloadedError("m", retry_after_s=2.5).retry_after_s == 2.5


def test_the_nearest_name_is_offered_only_when_it_is_near() -> None:
    assert nearest_name("temprature", ["temperature", "top_p"]) == "; did you mean 'temperature'?"
    assert nearest_name("zzz", ["temperature"]) == ""
    assert nearest_name("x", []) == ""
