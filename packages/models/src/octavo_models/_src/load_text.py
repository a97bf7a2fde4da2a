"""The tokenizer and the chat template of a checkpoint, from a folder or a .gguf file.

Knows file names; the formats are the other modules'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from octavo_core.errors import CheckpointError
from octavo_models._src.chat import ChatTemplate
from octavo_models._src.fields import Fields, read_json
from octavo_models._src.gguf_meta import read_gguf
from octavo_models._src.gguf_tokenizer import tokenizer_from_gguf
from octavo_models._src.tokenizer import SpecialTokens, Tokenizer

_ROLES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_text(path: str | Path) -> tuple[Tokenizer, ChatTemplate]:
    """Tokenizer and chat template of a folder or .gguf file, reading it once.

    A model without a template gets one whose `render` says so.

    Raises:
        CheckpointError: When a file is missing or damaged.
        UnsupportedModelError: When the tokenizer is of a kind this version does not serve.
    """
    path = Path(path)
    if path.is_dir() and not (path / "tokenizer.json").exists() and len(ggufs := list(path.glob("*.gguf"))) == 1:
        path = ggufs[0]
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a folder or .gguf file. Raises as `load_text` does."""
    return load_text(path)[0]


def load_chat_template(path: str | Path) -> ChatTemplate:
    """The chat template of a folder or .gguf file. Raises as `load_text` does."""
    return load_text(path)[1]


def _from_gguf(path: Path) -> tuple[Tokenizer, ChatTemplate]:
    header = read_gguf(path)
    tokenizer = tokenizer_from_gguf(header.metadata, source=str(path))
    source = Fields(header.metadata, str(path)).text("tokenizer.chat_template", "") or None
    return tokenizer, ChatTemplate(source, special_tokens=tokenizer.special.strings, name=str(path))


def _from_folder(folder: Path) -> tuple[Tokenizer, ChatTemplate]:
    backend = _backend(folder / "tokenizer.json")
    path = folder / "tokenizer_config.json"
    fields = Fields(read_json(path) if path.exists() else {}, str(path))
    tokenizer = Tokenizer(backend, _special(folder, fields, backend))
    own = folder / "chat_template.jinja"
    source = own.read_text("utf-8", "replace") if own.exists() else _template_of(fields)
    return tokenizer, ChatTemplate(source, special_tokens=tokenizer.special.strings, name=str(own if own.exists() else path))


def _backend(path: Path) -> Backend:
    if not path.exists():
        hint = " (a SentencePiece 'tokenizer.model' alone is not read)" if (path.parent / "tokenizer.model").exists() else ""
        raise CheckpointError(f"{path}: wanted this file, found none{hint}")
    read_json(path)
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception for whatever its parser meets
        raise CheckpointError(f"{path}: wanted a tokenizer, but: {' '.join(str(error).split())[:200]}") from None


def _special(folder: Path, fields: Fields, backend: Backend) -> SpecialTokens:
    path = folder / "special_tokens_map.json"
    elsewhere = read_json(path) if path.exists() else {}
    strings = {}
    for role in _ROLES:
        text = _content(fields.values.get(role) or elsewhere.get(role))
        if text is not None:
            strings[role] = text
    ids = {role: backend.token_to_id(text) for role, text in strings.items()}
    return SpecialTokens(
        bos_id=ids.get("bos_token"),
        eos_id=ids.get("eos_token"),
        add_bos=fields.boolean("add_bos_token") if fields.has("add_bos_token") else None,
        add_eos=fields.boolean("add_eos_token") if fields.has("add_eos_token") else None,
        strings=strings,
    )


def _content(token: Any) -> str | None:
    """A special token is written as a string or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _template_of(fields: Fields) -> str | None:
    """One template, or the one called `default` of a list."""
    value = fields.values.get("chat_template")
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise fields.fail("chat_template", "a string or a list of named templates")
    return value
