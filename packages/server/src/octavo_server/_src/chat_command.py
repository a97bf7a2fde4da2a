"""`octavo chat`: the terminal's client of any OpenAI-compatible server, or of an engine of its own. Knows options; imports no engine."""

from __future__ import annotations

import argparse
import contextlib
import os
from urllib.parse import urlsplit

import httpx

from octavo_server._src.chat_client import SETTINGS, ChatClientError, Conversation, Setting, api_base
from octavo_server._src.chat_embedded import embedded_server
from octavo_server._src.chat_lines import Talk, print_piece

__all__ = ["ChatClientError", "Conversation", "add_arguments", "run"]

_DEFAULT_URL = "http://127.0.0.1:8000"
_OPENAI = "api.openai.com"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Offer the client's options."""
    parser.add_argument("question", nargs="?", help="ask this, print the answer and exit; without it, talk line by line")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url", default=_DEFAULT_URL, help="server's address, with its path where it has one (default: %(default)s)"
    )
    where.add_argument("--embedded", action="store_true", help="start an engine for this conversation; --model names its model")
    parser.add_argument("--model", help="model to talk to (default: the first the server lists)")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--api-key", help=f"bearer token (default: OCTAVO_API_KEY; for {_OPENAI} OPENAI_API_KEY)")
    parser.add_argument("--max-tokens", type=int, help="longest answer")
    parser.add_argument("--temperature", type=float, help="0 is greedy")
    parser.add_argument("--top-p", type=float, help="smallest set of tokens with this much probability")
    parser.add_argument("--seed", type=int, help="of the sampling")


def run(namespace: argparse.Namespace) -> int:
    """Ask, or talk; the exit status."""
    with contextlib.ExitStack() as stack:
        settings = {name: value for name in SETTINGS if (value := getattr(namespace, name, None)) is not None}
        url = namespace.url
        if namespace.embedded:
            model = settings.pop("model", None)
            url = stack.enter_context(embedded_server([str(model)] if model else []))
        return _converse(api_base(url), namespace, settings)


def _converse(base: str, namespace: argparse.Namespace, settings: dict[str, Setting]) -> int:
    key = namespace.api_key or _key_for(base, is_own=namespace.embedded)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(600, connect=10)) as client:
            chat = Conversation(client, settings, namespace.system)
            if namespace.question is None:
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401 - `input` edits lines and remembers them once it is there
                return Talk(chat).run()
            chat.ask(namespace.question, print_piece)
            print()
            return 0
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise ChatClientError(f"cannot talk to {base}: {error}") from None


def _key_for(base: str, *, is_own: bool) -> str | None:
    """The environment's key. OpenAI's is told to nobody else; an engine of one's own takes what its server was started with."""
    name = "OPENAI_API_KEY" if not is_own and urlsplit(base).hostname == _OPENAI else "OCTAVO_API_KEY"
    return os.environ.get(name) or None
