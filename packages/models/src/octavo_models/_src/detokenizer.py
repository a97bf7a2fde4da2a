"""Token ids to text as they come, one object per sequence.

Works on bytes, so a character split over tokens appears once it is whole. Knows nothing of stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from octavo_models._src.tokenizer import Tokenizer


class Detokenizer:
    """Incremental `Tokenizer.decode`: everything pushed gives, joined, exactly what decoding all ids at once gives.

    One rule for streamed and plain use: a character that is unfinished when the sequence ends is dropped. U+FFFD appears only
    where the tokens' bytes can be no UTF-8 whatever follows.

    Args:
        skip_special_tokens: Leave special tokens out of the text.
        continues: The tokens go on after a prompt, so a leading space is text (only SentencePiece vocabularies differ).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._strip = tokenizer.strips_leading_space and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Take in the next tokens; the text that is complete with them, possibly empty."""
        data = b"".join(self._tokenizer.kept_bytes(token_ids, skip_special_tokens=self._skip))
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """End the sequence: forget an unfinished character. Always the empty string, so that callers treat both ends alike."""
        self._decoder.reset()
        return ""

    @property
    def num_held_bytes(self) -> int:
        """Bytes of an unfinished character, 0 to 3."""
        return len(self._decoder.getstate()[0])
