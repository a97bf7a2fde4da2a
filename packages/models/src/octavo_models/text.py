"""Text and tokens without jax: tokenizer, incremental detokenizer, stop strings, chat templates.

`load_text` reads tokenizer and template of a checkpoint's folder or .gguf file.
"""

from octavo_models._src.chat import ChatTemplate
from octavo_models._src.detokenizer import Detokenizer
from octavo_models._src.gguf_tokenizer import tokenizer_from_gguf
from octavo_models._src.load_text import load_chat_template, load_text, load_tokenizer
from octavo_models._src.stops import StopStrings
from octavo_models._src.tokenizer import SpecialTokens, Tokenizer, check_text

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "SpecialTokens",
    "StopStrings",
    "Tokenizer",
    "check_text",
    "load_chat_template",
    "load_text",
    "load_tokenizer",
    "tokenizer_from_gguf",
]
