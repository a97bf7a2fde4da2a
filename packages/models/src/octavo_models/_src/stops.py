"""Stop strings found in a stream of text.

Knows characters only. Which tokens a match came from, and what a match means for a request, is the caller's affair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from octavo_core.errors import RequestError


class StopStrings:
    """Watches one stream for the first complete stop string and holds back exactly what could still become one.

    First is by where it ends: the stream stops at the earliest character that completes any of the strings, whatever their order
    in the list; where several end there, the longest counts. So the outcome does not depend on how the text was cut into pushes.

    Cost: O(characters) per push; never holds more than the longest stop string less one character.
    Source: Aho and Corasick, "Efficient string matching" (1975).

    Args:
        stops: At least one character each; an empty list never matches and never holds.
        include: Leave the matched string in the text.

    Raises:
        RequestError: For an empty stop string.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._include = include
        self._next, self._fail, self._match = _automaton(stops)
        self._depth = _depths(self._next)
        self._node = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take in text; what may be shown now, and the stop string if one is complete. Text after a match is ignored."""
        if self.matched is not None or len(self._next) == 1:
            return ("", self.matched) if self.matched is not None else (text, None)
        node = self._node
        for at, character in enumerate(text):
            while node and character not in self._next[node]:
                node = self._fail[node]
            node = self._next[node].get(character, 0)
            if self._match[node] is not None:
                return self._end(self._held + text[: at + 1], node)
        self._node = node
        shown = self._held + text
        cut = len(shown) - self._depth[node]
        self._held = shown[cut:]
        return shown[:cut], None

    def finish(self) -> str:
        """The stream has ended: what was held back, now that it can become no stop string."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _end(self, text: str, node: int) -> tuple[str, str | None]:
        self.matched = stop = self._match[node]
        self._held = ""
        return (text if self._include else text.removesuffix(stop or "")), stop


def _automaton(stops: Sequence[str]) -> tuple[list[dict[str, int]], list[int], list[str | None]]:
    """Children, failure link and longest stop string ending at each node; node 0 is the root."""
    children: list[dict[str, int]] = [{}]
    match: list[str | None] = [None]
    for stop in stops:
        if not stop:
            raise RequestError("a stop string has at least one character, got an empty one", param="stop")
        node = 0
        for character in stop:
            if character not in children[node]:
                children[node][character] = len(children)
                children.append({})
                match.append(None)
            node = children[node][character]
        match[node] = stop
    fail = [0] * len(children)
    queue = deque(children[0].values())
    while queue:
        node = queue.popleft()
        for character, child in children[node].items():
            back = fail[node]
            while back and character not in children[back]:
                back = fail[back]
            fail[child] = children[back].get(character, 0)
            match[child] = match[child] or match[fail[child]]
            queue.append(child)
    return children, fail, match


def _depths(children: list[dict[str, int]]) -> list[int]:
    """Characters from the root to each node; a child's number is always above its parent's."""
    depth = [0] * len(children)
    for node, edges in enumerate(children):
        for child in edges.values():
            depth[child] = depth[node] + 1
    return depth
