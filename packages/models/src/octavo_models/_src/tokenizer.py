"""Text to token ids and back, around `tokenizers.Tokenizer`.

Knows the bytes behind every token, which is what incremental decoding needs. Knows neither chat templates nor how a request spells
its options. Safe to use from several threads.
"""

from __future__ import annotations

import codecs
import copy
import dataclasses
import functools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import tokenizers

from octavo_core.errors import RequestError, UnsupportedModelError

Spelling = Literal["byte_level", "sentencepiece"]
_SPACE_MARK: Final = "▁"
_PART: Final = 16384


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Tokens with a role.

    Attributes:
        add_bos, add_eos: Put around encoded text; None: as the tokenizer's own post-processor does.
        strings: Their texts by name (`bos_token`, `eos_token`, …), for chat templates.
    """

    bos_id: int | None = None
    eos_id: int | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    strings: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Tokenizer:
    """A model's vocabulary with its rules.

    Args:
        backend: The compiled tokenizer. Not changed afterwards, by anybody.
        special: Tokens with a role.

    Raises:
        UnsupportedModelError: When the backend's decoder is neither byte-level nor SentencePiece's.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens | None = None) -> None:
        self.backend = backend
        self.special = special or SpecialTokens()
        self.spelling, self.strips_leading_space = _read_decoder(backend)
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The token ids of a text.

        Args:
            add_special_tokens: Put the begin (and end) token around it where the model wants that. False for a rendered chat
                template, which brings its own.
            parse_special: Read the spelling of a special token in the text as that token; False: as plain text.

        Raises:
            RequestError: When the text holds a lone surrogate, which no encoding can carry.
        """
        check_text(text)
        own = self.special.add_bos is not None or self.special.add_eos is not None
        backend = self.backend if parse_special else self._literal
        # A batch of one: `encode` would hold Python's lock, for seconds where the text is long.
        (encoded,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens and not own)
        ids: list[int] = encoded.ids
        if len(ids) > _PART:
            time.sleep(0)  # a turn for other threads: what follows, the end of `encoded`, takes the lock for about as long again
        if own and add_special_tokens:
            before = [self.special.bos_id] if self.special.add_bos and self.special.bos_id is not None else []
            after = [self.special.eos_id] if self.special.add_eos and self.special.eos_id is not None else []
            return [*before, *ids, *after]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, continues: bool = False) -> str:
        """The text of token ids: what a `Detokenizer` fed with them gives in all.

        Bytes that can be no UTF-8 become U+FFFD; a character cut short at the end is dropped.

        Args:
            continues: The tokens go on after others, so a leading space is text (SentencePiece drops it at a text's start).

        Raises:
            RequestError: For a negative id.
        """
        decoder, texts = codecs.getincrementaldecoder("utf-8")("replace"), []
        strips = self.strips_leading_space and not continues
        for at in range(0, len(token_ids), _PART):  # no call in C keeps Python's lock for long
            data = b"".join(self.kept_bytes(token_ids[at : at + _PART], skip_special_tokens=skip_special_tokens))
            texts.append(decoder.decode(data.removeprefix(b" ") if strips else data))
            strips = strips and not data
        return "".join(texts)

    def kept_bytes(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> list[bytes]:
        """Bytes of each token, without the special ones where they are skipped."""
        if skip_special_tokens:
            return [self.token_bytes(i) for i in token_ids if i not in self.special_ids]
        return [self.token_bytes(i) for i in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token, often not whole characters; empty for an id that names no token.

        Raises:
            RequestError: For a negative id.
        """
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def token_str(self, token_id: int) -> str:
        """One token as text, as log-probabilities show it; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def vocab_entry(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token (`Ġthe`); None for an id that names no token."""
        return self.backend.id_to_token(token_id) if token_id >= 0 else None

    def token_id(self, entry: str) -> int | None:
        """The inverse of `vocab_entry`."""
        return self.backend.token_to_id(entry)

    def _spell(self, token_id: int) -> bytes:
        if token_id < 0:
            raise RequestError(f"token ids are at least 0, got {token_id}")
        if token_id in self._added:
            return self._added[token_id].encode("utf-8")
        entry = self.backend.id_to_token(token_id)
        if entry is None:
            return b""
        if self.spelling == "byte_level":
            return _byte_level_bytes(entry)
        if len(entry) == 6 and entry.startswith("<0x") and entry.endswith(">"):
            return bytes([int(entry[3:5], 16)])
        return entry.replace(_SPACE_MARK, " ").encode("utf-8")

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A second backend that reads special tokens' spellings as plain text: the switch is per backend, not per call."""
        literal = copy.deepcopy(self.backend)
        literal.encode_special_tokens = True
        return literal


def check_text(text: str, *, param: str | None = None) -> None:
    """Refuse a text that UTF-8 cannot carry.

    Raises:
        RequestError: For a lone surrogate.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"text must be valid Unicode, but character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
        raise RequestError(message, param=param) from None


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies.

    Printable Latin-1 bytes stand for themselves; the others, in order, for U+0100 and on.
    Source: Radford et al., GPT-2 (2019).
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_ALPHABET: Final = byte_alphabet()


def _byte_level_bytes(entry: str) -> bytes:
    try:
        return bytes([_ALPHABET[c] for c in entry])
    except KeyError:
        return entry.encode("utf-8")


def _read_decoder(backend: tokenizers.Tokenizer) -> tuple[Spelling, bool]:
    """How the vocabulary spells bytes, and whether decoding drops one leading space."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps: list[dict[str, Any]] = state.get("decoders", [state])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return "byte_level", False
    if "Metaspace" in kinds:
        return "sentencepiece", any(
            step.get("prepend_scheme", "always") != "never" for step in steps if step["type"] == "Metaspace"
        )
    if "ByteFallback" in kinds:
        return "sentencepiece", any(step["type"] == "Strip" and step.get("start", 0) > 0 for step in steps)
    named = ", ".join(sorted(str(k) for k in kinds))
    raise UnsupportedModelError(f"tokenizer decoder {named} is not served; byte-level and SentencePiece decoders are")
