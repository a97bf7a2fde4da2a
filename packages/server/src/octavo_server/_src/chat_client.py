"""A conversation with any OpenAI-compatible server, streamed. Knows HTTP; knows no terminal and no engine."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from octavo_core.errors import ConfigError, OctavoError, nearest_name

Setting = float | int | str | list[str]
_KINDS: Final[Mapping[str, type]] = {
    "model": str,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "stop": list,
}
SETTINGS: Final = tuple(_KINDS)
"""What of a request may be set; servers refuse what they do not know."""
_ROLES: Final = ("system", "user", "assistant")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


class ChatClientError(OctavoError):
    """The server could not be reached, refused, or broke off."""


def api_base(url: str) -> str:
    """Where the API is: an address without a path gets `/v1`, any other is taken as it is, as OpenAI's clients do.

    Raises:
        ConfigError: It is no HTTP address.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"wanted a server's address such as http://127.0.0.1:8000, got '{url}'")
    return url.rstrip("/") if parts.path.strip("/") else url.rstrip("/") + "/v1"


def parse_setting(name: str, text: str) -> Setting:
    """The value of a setting as a person wrote it; `stop` is one string, with `\\n` for a line's end.

    Raises:
        ConfigError: There is no such setting, or it is of another kind.
    """
    name = name.replace("-", "_")
    if name not in _KINDS:
        raise ConfigError(f"no setting is called '{name}'{nearest_name(name, SETTINGS)}; there are {', '.join(SETTINGS)}")
    kind = _KINDS[name]
    if kind is list:
        return [text.replace("\\n", "\n")]
    try:
        return kind(text)  # type: ignore[no-any-return]
    except ValueError:
        raise ConfigError(f"{name} is {'a whole number' if kind is int else 'a number'}, got '{text}'") from None


@contextlib.contextmanager
def _noted_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed since. Python raises KeyboardInterrupt wherever it is just then, and one raised in a finaliser is lost."""
    pressed = False
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


class Conversation:
    """The turns so far, and how to ask for the next one.

    Args:
        client: Its base address is the API's.
        settings: Some of `SETTINGS`; without a model the first one the server lists is asked.
        system: System message.

    Raises:
        ChatClientError: No model is named and the server lists none, or cannot be reached.
    """

    def __init__(self, client: httpx.Client, settings: Mapping[str, Setting] | None = None, system: str | None = None) -> None:
        self._client = client
        self.settings = dict(settings or {})
        self.messages: list[dict[str, str]] = []
        self.set_system(system)
        if "model" not in self.settings:
            self.settings["model"] = self._first_model()

    @property
    def system(self) -> str | None:
        """The system message."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else None

    def set_system(self, text: str | None) -> None:
        """Put a system message before the turns, in place of the one there; None takes it away."""
        turns = [message for message in self.messages if message["role"] != "system"]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *turns]

    def clear(self) -> None:
        """Forget all turns but the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def to_json(self) -> str:
        """Messages and settings."""
        return json.dumps({"settings": self.settings, "messages": self.messages}, indent=2, ensure_ascii=False)

    def from_json(self, text: str) -> None:
        """Take over what `to_json` gave; the model stays the one talked to.

        Raises:
            ConfigError: It is something else; nothing is changed.
        """
        try:
            saved = json.loads(text)
            messages = [{"role": m["role"], "content": m["content"]} for m in saved["messages"]]
            settings = {name: value for name, value in saved["settings"].items() if name in SETTINGS and name != "model"}
            if not all(m["role"] in _ROLES and isinstance(m["content"], str) for m in messages):
                raise ValueError("a message has another role, or no text")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"no saved conversation: wanted what /save wrote ({type(error).__name__}: {error})") from None
        self.messages = messages
        self.settings = {"model": self.settings["model"], **settings}

    def ask(self, question: str, show: Callable[[str], None]) -> str:
        """Ask, and show the answer piece by piece. A Ctrl-C ends the answer; what was said until then is kept.

        Raises:
            ChatClientError: The server refused, or failed in the middle; the question is forgotten.
        """
        self.messages.append({"role": "user", "content": question})
        said = ""
        try:
            with _noted_ctrl_c() as was_pressed:
                for piece in self._pieces():
                    said += piece
                    show(piece)
                    if was_pressed():
                        raise KeyboardInterrupt
        except KeyboardInterrupt:
            show(" …")
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": said})
        return said

    def _pieces(self) -> Iterator[str]:
        body = {**self.settings, "messages": self.messages, "stream": True}
        is_whole = False
        try:
            with self._client.stream("POST", "chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise ChatClientError(message_of(response.read(), response.status_code))
                for line in _lines(response.iter_bytes()):
                    event = _event(line)
                    if event is None:
                        continue
                    for piece, is_last in _pieces_of(event):
                        is_whole = is_whole or is_last
                        yield piece
        except httpx.HTTPError as error:
            raise ChatClientError(f"the server cannot be reached any more: {error or type(error).__name__}") from None
        if not is_whole:
            raise ChatClientError("the server ended the answer in the middle")

    def _first_model(self) -> str:
        try:
            response = self._client.get("models")
        except httpx.HTTPError as error:
            base = str(self._client.base_url).rstrip("/")
            raise ChatClientError(f"cannot talk to {base}: {error or type(error).__name__}; is a server running there?") from None
        try:
            data: Any = response.raise_for_status().json()
            return str(data["data"][0]["id"])
        except (httpx.HTTPStatusError, ValueError, KeyError, IndexError, TypeError):
            raise ChatClientError(message_of(response.content, response.status_code)) from None


def _lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Lines of server-sent events, which end as WHATWG's HTML says (section 9.2.6): a text may hold whatever else Python calls a line's end."""
    held = b""
    for chunk in chunks:
        *whole, held = _LINE_END.split(held + chunk)
        yield from (line.decode("utf-8", "replace") for line in whole)
    yield held.decode("utf-8", "replace")


def _event(line: str) -> dict[str, Any] | None:
    """The object of a server-sent event's line; None for other lines and the last.

    Raises:
        ChatClientError: It tells of an error, or is no JSON.
    """
    if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
        return None
    try:
        event = json.loads(data)
    except ValueError:
        raise ChatClientError(f"the server sent what is no JSON: {data[:80]}") from None
    if not isinstance(event, dict):
        raise ChatClientError(f"the server sent what is no event: {data[:80]}")
    if event.get("error"):
        error = event["error"]
        raise ChatClientError(str(error.get("message") if isinstance(error, dict) else error))
    return event


def _pieces_of(event: dict[str, Any]) -> list[tuple[str, bool]]:
    """Text of an event's choices, and whether each is then at its end.

    Raises:
        ChatClientError: It is of another shape than a chunk of a chat completion.
    """
    try:
        choices = [(choice, (choice.get("delta") or {}).get("content") or "") for choice in event.get("choices") or []]
        return [("" + text, choice.get("finish_reason") is not None) for choice, text in choices]
    except (AttributeError, TypeError):
        raise ChatClientError(f"the server sent what is no chunk of an answer: {json.dumps(event)[:80]}") from None


def message_of(body: bytes, status: int) -> str:
    """What a refusal says, in one line."""
    try:
        said = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = body[:200].decode("utf-8", "replace") or "nothing more"
    return f"the server answered HTTP {status}: {' '.join(str(said).split())}"
