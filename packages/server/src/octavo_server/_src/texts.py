"""Tokenizer and chat template as the server's configuration wants them. Touches the disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from octavo_core.errors import ConfigError
from octavo_core.wire import ModelCard
from octavo_models.text import ChatTemplate, Tokenizer, load_text
from octavo_server._src.config import ServerConfig


def load_frontend(card: ModelCard, config: ServerConfig) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Tokenizer and template of a served checkpoint."""
    if config.skip_tokenizer_init:
        return None, None
    tokenizer, template = load_text(card.root)
    return tokenizer, chat_template_of(config, tokenizer.special.strings) or template


def chat_template_of(config: ServerConfig, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The template of `--chat-template`, if there is one.

    Raises:
        ConfigError: It cannot be read.
    """
    if not config.chat_template:
        return None
    source, name = _template_source(config.chat_template)
    return ChatTemplate(source, special_tokens=special_tokens, name=name)


def _template_source(value: str) -> tuple[str, str]:
    if "{{" in value or "{%" in value:
        return value, "--chat-template"
    try:
        return Path(value).read_text("utf-8"), value
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--chat-template is a readable Jinja file or a template, got '{value}': {error}") from None
