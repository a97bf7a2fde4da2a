"""`octavo chat`: a line-based client of any OpenAI-compatible server. Knows HTTP and a terminal; knows no engine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from octavo_core.errors import OctavoError

_HELP = "/exit ends, /clear forgets the conversation; Ctrl-C stops an answer"


class ChatClientError(OctavoError):
    """The server could not be reached, or refused."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Offer the client's options."""
    parser.add_argument("question", nargs="?", help="ask this, print the answer and exit; without it, talk line by line")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server's address (default: %(default)s)")
    parser.add_argument("--model", help="model to talk to (default: the first the server lists)")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--api-key", default=os.environ.get("OCTAVO_API_KEY"), help="bearer token (default: OCTAVO_API_KEY)")
    parser.add_argument("--max-tokens", type=int, help="longest answer")
    parser.add_argument("--temperature", type=float, help="0 is greedy")


def run(namespace: argparse.Namespace) -> int:
    """Ask, or talk; the exit status."""
    headers = {"Authorization": f"Bearer {namespace.api_key}"} if namespace.api_key else {}
    base = namespace.url.rstrip("/").removesuffix("/v1")
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(600, connect=10)) as client:
            chat = Conversation(client, namespace)
            if namespace.question is not None:
                chat.ask(namespace.question, _print_piece)
                print()
                return 0
            return _talk(chat)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ChatClientError(f"cannot talk to {base}: {error or type(error).__name__}; is a server running there?") from None


class Conversation:
    """The turns so far, and how to ask for the next one.

    Args:
        client: Points at the server.
        options: `model`, `system`, `max_tokens` and `temperature`, each None for the server's default.
    """

    def __init__(self, client: httpx.Client, options: argparse.Namespace) -> None:
        self._client = client
        self._model = options.model or _first_model(client)
        self._options = {name: value for name in ("max_tokens", "temperature") if (value := getattr(options, name)) is not None}
        self._start = [{"role": "system", "content": options.system}] if options.system else []
        self.messages: list[dict[str, str]] = list(self._start)

    def clear(self) -> None:
        """Forget all turns but the system message."""
        self.messages = list(self._start)

    def ask(self, question: str, show: Callable[[str], None]) -> str:
        """Ask, and show the answer piece by piece. A Ctrl-C ends the answer; what was said is kept.

        Raises:
            ChatClientError: The server refused, or failed in the middle.
        """
        self.messages.append({"role": "user", "content": question})
        said = ""
        try:
            for piece in self._pieces():
                said += piece
                show(piece)
        except KeyboardInterrupt:
            show(" …")
        except (ChatClientError, httpx.HTTPError):
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": said})
        return said

    def _pieces(self) -> Iterator[str]:
        body = {"model": self._model, "messages": self.messages, "stream": True, **self._options}
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise ChatClientError(_message_of(response.read(), response.status_code))
            for line in response.iter_lines():
                if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise ChatClientError(str(event["error"].get("message")))
                    for choice in event.get("choices", []):
                        yield (choice.get("delta") or {}).get("content") or ""


def _first_model(client: httpx.Client) -> str:
    response = client.get("/v1/models")
    try:
        data: Any = response.raise_for_status().json()
        return str(data["data"][0]["id"])
    except (httpx.HTTPStatusError, ValueError, KeyError, IndexError, TypeError):
        raise ChatClientError(_message_of(response.content, response.status_code)) from None


def _message_of(body: bytes, status: int) -> str:
    try:
        return f"the server answered HTTP {status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server answered HTTP {status}: {body[:200].decode('utf-8', 'replace')}"


def _print_piece(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _talk(chat: Conversation) -> int:
    if sys.stdin.isatty():
        print(_HELP)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if line in ("/exit", "/quit"):
            return 0
        if line == "/clear":
            chat.clear()
        elif line:
            try:
                chat.ask(line, _print_piece)
            except ChatClientError as error:
                print(f"octavo: {error}", file=sys.stderr)
            print()
