"""A Jinja sandbox that bounds time and memory, as far as a model's own template can ask for them.

On top of Jinja's own sandbox every loop turn and call counts against a budget, and text or lists that would grow past a limit are
refused before they are made. Knows nothing of chats.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS: Final = 16 * 2**20
MAX_ITEMS: Final = 2**20
MAX_TURNS = 100_000
_WIDE: Final = re.compile(r"%[-+ #0]*(\d{5}|\*)|\.(\d{5}|\*)|:[^{}]*\d{5}")
_turns_left: contextvars.ContextVar[list[int]] = contextvars.ContextVar("octavo_template_turns")


@contextlib.contextmanager
def budget() -> Iterator[None]:
    """Allow what is rendered inside `MAX_TURNS` loop turns and calls."""
    token = _turns_left.set([MAX_TURNS])
    try:
        yield
    finally:
        _turns_left.reset(token)


def _spend() -> None:
    left = _turns_left.get()
    left[0] -= 1
    if left[0] < 0:
        raise SecurityError("the template takes too many loop turns or calls")


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _spend()
        yield item


def _capped(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_CHARS:
        raise SecurityError(f"the template makes a text of more than {MAX_CHARS} characters")
    if isinstance(value, list | tuple) and len(value) > MAX_ITEMS:
        raise SecurityError(f"the template makes a list of more than {MAX_ITEMS} items")
    return value


def _refuse_large(*arguments: Any) -> None:
    """Integer arguments are how a short template asks for a long text (`center(10**9)`)."""
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MAX_CHARS:
            raise SecurityError(f"the template uses a number above {MAX_CHARS} as an argument")


def _check_format(pattern: str) -> None:
    if _WIDE.search(pattern):
        raise SecurityError("the template formats with a width or precision of more than four digits")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a budget; render inside `budget()`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.filters["_counted"] = _counted
        self.filters["_capped"] = _capped
        self.filters["tojson"] = _to_json
        for name in ("center", "indent", "batch", "slice", "truncate", "round", "format", "replace", "join"):
            self.filters[name] = _guard(name, self.filters[name])
        for name in ("wordwrap", "urlize", "xmlattr"):
            del self.filters[name]
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        return tree

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Count the call and bound what it makes."""
        _spend()
        _refuse_large(*args, *kwargs.values())
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _refuse_string_method(owner, getattr(obj, "__name__", ""), (*args, *kwargs.values()))
        return _capped(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        """`str.format` with its widths bounded."""
        owner = getattr(value, "__self__", None)
        if isinstance(owner, str) and getattr(value, "__name__", "") in ("format", "format_map"):
            _check_format(owner)
        return super().wrap_str_format(value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse arithmetic whose result would be enormous before it is computed."""
        if operator == "**" and (not isinstance(right, int | float) or abs(right) > 64):
            raise SecurityError("the template raises to a power above 64")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                most = MAX_CHARS if isinstance(text, str) else MAX_ITEMS
                if hasattr(text, "__len__") and isinstance(count, int) and len(text) * count > most:
                    raise SecurityError(f"the template makes something longer than {most}")
        return _capped(super().call_binop(context, operator, left, right))


def _refuse_string_method(owner: str, method: str, args: tuple[Any, ...]) -> None:
    """Refuse a method or filter of a string whose result would be enormous, before it is made."""
    size = 0
    if method in ("format", "format_map"):
        _check_format(owner)
    elif method == "translate":
        raise SecurityError("str.translate is not allowed in a template")
    elif method == "replace" and len(args) >= 2 and all(isinstance(a, str) for a in args[:2]):
        size = (owner.count(args[0]) if args[0] else len(owner) + 1) * len(args[1])
    elif method == "join" and args and hasattr(args[0], "__len__"):
        size = len(owner) * len(args[0])
    else:
        places = 1 + owner.count("\n") + owner.count("\t")
        size = places * max((abs(a) for a in args if isinstance(a, int)), default=0)
    if size > MAX_CHARS:
        raise SecurityError(f"the template makes a text of more than {MAX_CHARS} characters")


def _guard(name: str, function: Any) -> Any:
    """A filter with its arguments bounded before and its result after."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        _refuse_large(*given)
        texts = [a for a in given if isinstance(a, str)]
        if name == "join":
            lists = [a for a in given if isinstance(a, list | tuple)]
            _refuse_string_method(texts[-1] if texts else "", name, tuple(lists or texts[:1]))
        elif texts:
            at = given.index(texts[0])
            _refuse_string_method(texts[0], name, tuple(given[at + 1 :]))
        return _capped(function(*args, **kwargs))

    return guarded


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As templates written for `transformers` expect: no HTML escaping, non-ASCII characters kept."""
    if indent is not None and not 0 <= indent <= 64:
        raise SecurityError("tojson indents by 0 to 64 in a template")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Bounds(NodeTransformer):
    """Puts the counters and caps into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Count every turn."""
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted", node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Cap what `~` joins."""
        self.generic_visit(node)
        return _filtered(node, "_capped", node)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        """Cap what a block assigns; a filter of the template's own runs first."""
        self.generic_visit(node)
        node.filter = _filtered(node.filter, "_capped", node)
        return node


def _filtered(inner: Any, name: str, at: nodes.Node) -> nodes.Filter:
    return nodes.Filter(inner, name, [], [], None, None, lineno=at.lineno)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's words for training, renders its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body, in place of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
