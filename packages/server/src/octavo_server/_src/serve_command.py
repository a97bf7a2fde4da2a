"""`octavo serve`: composes the server with an engine it knows by dotted name only. Imports no jax; the engine does, when it loads."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pkgutil
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from octavo_core.config import add_arguments as add_options
from octavo_core.config import from_namespace
from octavo_core.errors import ConfigError
from octavo_models.text import ChatTemplate, Tokenizer, load_text
from octavo_server._src.config import ServerConfig
from octavo_server._src.serving import Loaded, StartedEngine, serve

_ENGINE = "octavo_engine:AsyncEngine"
_ENGINE_CONFIG = "octavo_engine.config:EngineConfig"
_KEY_VARIABLE = "OCTAVO_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of server and engine under their headings; where both have one, it is one option."""
    config = resolve(_ENGINE_CONFIG)
    parser.add_argument("model_or_path", nargs="?", metavar="MODEL", help="folder, .gguf file or hub id; the same as --model")
    parser.add_argument(
        "--engine", default=_ENGINE, metavar="MODULE:NAME", help="another engine, by dotted name (default: %(default)s)"
    )
    add_options(parser, config)
    add_options(parser, ServerConfig, skip=[field.name for field in dataclasses.fields(config)])


def run(namespace: argparse.Namespace) -> int:
    """Serve until told to stop; the exit status."""
    given = namespace.model_or_path
    if given is not None:
        if getattr(namespace, "model", given) != given:
            raise ConfigError(f"the model is given twice: '{given}' and --model '{namespace.model}'; leave one out")
        namespace.model = given
    engine_config = from_namespace(resolve(_ENGINE_CONFIG), namespace)
    server_config = _with_environment(from_namespace(ServerConfig, namespace))

    def load() -> Loaded:
        engine = resolve(namespace.engine).start(engine_config)
        return (engine, *load_frontend(engine, server_config))

    serve(server_config, load, announce=lambda url, engine: announce(url, engine, server_config))
    return 0


def resolve(name: str) -> Any:
    """The object of a dotted name.

    Raises:
        ConfigError: There is none.
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"'{name}' cannot be loaded: {error}") from error


def load_frontend(engine: Any, config: ServerConfig) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Tokenizer and template of a started engine's checkpoint, as the configuration wants them."""
    if config.skip_tokenizer_init:
        return None, None
    tokenizer, template = load_text(engine.card.root)
    if not config.chat_template:
        return tokenizer, template
    source, name = _template_source(config.chat_template)
    return tokenizer, ChatTemplate(source, special_tokens=tokenizer.special.strings, name=name)


def _template_source(value: str) -> tuple[str, str]:
    if "{{" in value or "{%" in value:
        return value, "--chat-template"
    try:
        return Path(value).read_text("utf-8"), value
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--chat-template is a readable Jinja file or a template, got '{value}': {error}") from None


def _with_environment(config: ServerConfig) -> ServerConfig:
    key = os.environ.get(_KEY_VARIABLE, "")
    return dataclasses.replace(config, api_key=(*config.api_key, key)) if key and key not in config.api_key else config


def announce(url: str, engine: StartedEngine, config: ServerConfig) -> None:
    """Print what was chosen and why, then the line people and scripts wait for."""
    table = Table(title="Octavo", title_justify="left", show_lines=False)
    for heading in ("setting", "value", "why"):
        table.add_column(heading, overflow="fold")
    for row in [*engine.startup_table(), *server_rows(engine, config)]:
        table.add_row(*(str(cell) for cell in row))
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(table)
    console.print(f"Octavo is ready on {url}", soft_wrap=True)
    console.file.flush()


def server_rows(engine: StartedEngine, config: ServerConfig) -> list[tuple[str, str, str]]:
    """The server's part of the start-up table."""
    names = config.served_model_name or (engine.card.name,)
    keys = len(config.api_key)
    return [
        ("served as", ", ".join(names), "--served-model-name" if config.served_model_name else "the model's own name"),
        ("listens on", f"{config.host}:{config.port}", "port 0: the system chooses" if config.port == 0 else "--host, --port"),
        ("API keys", str(keys) if keys else "none: open to all", f"--api-key or {_KEY_VARIABLE}"),
        ("tokenizer", "no: token ids only" if config.skip_tokenizer_init else "yes", "--skip-tokenizer-init"),
        ("chat template", "given" if config.chat_template else "the checkpoint's", "--chat-template"),
    ]
