"""A conversation at a terminal, or over a pipe: lines, commands that begin with a slash, text of several lines.

Knows what a person types. Knows no HTTP.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from octavo_core.errors import ConfigError, OctavoError, nearest_name
from octavo_server._src.chat_client import SETTINGS, Conversation, parse_setting

QUOTES: Final = '"""'
HELP: Final = f"""\
/help                   these commands
/reset                  forget the conversation (also /clear)
/system [TEXT]          show the system message, or give another; /system none takes it away
/set [NAME [VALUE]]     show settings, or change one: {", ".join(SETTINGS)}; /set NAME none takes it back
/history                what was said so far
/save FILE, /load FILE  write the conversation to a file; go on with one
/quit                   end (also /exit, Ctrl-D)
A line that ends with \\ goes on in the next; text of several lines stands between {QUOTES} and {QUOTES}. Ctrl-C stops an answer."""
_QUIT: Final = ("/quit", "/exit")


class Talk:
    """Reads lines, answers them.

    Args:
        chat: Is asked.
        read: The next line after showing a prompt; raises EOFError at the end.
    """

    def __init__(self, chat: Conversation, read: Callable[[str], str] = input) -> None:
        self._chat, self._read = chat, read
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda rest: print(HELP),
            "/reset": lambda rest: chat.clear(),
            "/clear": lambda rest: chat.clear(),
            "/system": self._system,
            "/set": self._set,
            "/history": lambda rest: print("\n".join(f"{m['role']}: {m['content']}" for m in chat.messages) or "nothing yet"),
            "/save": self._save,
            "/load": self._load,
        }

    def run(self) -> int:
        """Until the end; the exit status."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            print(f"{self._chat.settings['model']}: /help shows what can be done, Ctrl-D ends")
        for text in self._texts(is_terminal):
            if text in _QUIT:
                return 0
            try:
                self._one(text)
            except OctavoError as error:
                print(f"octavo: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 0

    def _one(self, text: str) -> None:
        """A command or a question. A first line that begins with a slash is a command: two slashes ask what begins with one."""
        if text.startswith("/") and not text.startswith("//"):
            name, _, rest = text.partition(" ")
            if name not in self._commands:
                known = [*self._commands, *_QUIT]
                raise ConfigError(f"unknown command '{name}'{nearest_name(name, known)}; /help shows them")
            self._commands[name](rest.strip())
            return
        try:
            self._chat.ask(text.removeprefix("/") if text.startswith("//") else text, print_piece)
        finally:
            print()

    def _texts(self, is_terminal: bool) -> Iterator[str]:
        """What was typed, put together where it has several lines. A Ctrl-C drops what was begun."""
        while True:
            try:
                text = self._text(*(("> ", ". ") if is_terminal else ("", "")))
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                print(end="\n" if is_terminal else "")
                return
            if text:
                yield text

    def _text(self, prompt: str, more: str) -> str:
        text = self._read(prompt).strip()
        if text.startswith(QUOTES):
            text = text.removeprefix(QUOTES)
            while not text.endswith(QUOTES):
                text += "\n" + self._read(more)
            return text.removesuffix(QUOTES).strip("\n")
        while text.endswith("\\"):
            text = text.removesuffix("\\") + "\n" + self._read(more).rstrip()
        return text

    def _system(self, rest: str) -> None:
        if rest:
            self._chat.set_system(None if rest == "none" else rest)
        else:
            print(self._chat.system or "no system message")

    def _set(self, rest: str) -> None:
        name, _, value = rest.replace("=", " ", 1).partition(" ")
        name, value = name.replace("-", "_"), value.strip()
        settings = self._chat.settings
        if not name:
            print("\n".join(f"{known} {found}" for known, found in sorted(settings.items())))
        elif value == "none" and name in SETTINGS and name != "model":
            settings.pop(name, None)
        elif value:
            settings[name] = parse_setting(name, value)
        else:
            print(f"{name} {settings.get(name, 'is the server' + chr(39) + 's choice')}")

    def _save(self, rest: str) -> None:
        path = _path("save", rest)
        try:
            path.write_text(self._chat.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
        print(f"{len(self._chat.messages)} messages in {path}")

    def _load(self, rest: str) -> None:
        path = _path("load", rest)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        self._chat.from_json(text)
        print(f"{len(self._chat.messages)} messages from {path}")


def _path(command: str, rest: str) -> Path:
    if not rest:
        raise ConfigError(f"/{command} takes the name of a file")
    return Path(rest).expanduser()


def print_piece(piece: str) -> None:
    """Part of an answer, shown at once; what the terminal's encoding lacks as question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(piece.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
