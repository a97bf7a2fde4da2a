"""`octavo serve`: composes the server with an engine it knows by dotted name only. Imports no jax; the engine does, when it loads."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pkgutil
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from octavo_core.config import add_arguments as add_options
from octavo_core.config import from_namespace
from octavo_core.errors import ConfigError, OctavoError
from octavo_engine.process import DEFAULT_CORE, ProcessConfig, Supervisor
from octavo_server._src.config import ServerConfig
from octavo_server._src.keys import Keys
from octavo_server._src.processes import serve_processes
from octavo_server._src.started import StartedEngine
from octavo_server._src.tls import tls_context

_ENGINE = "octavo_engine:AsyncEngine"
_ENGINE_CONFIG = "octavo_engine.config:EngineConfig"
_FOLLOW = "octavo_engine:follow"
_KEY_VARIABLE = "OCTAVO_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of server and engine under their headings; where both have one, it is one option."""
    config = resolve(_ENGINE_CONFIG)
    parser.add_argument("model_or_path", nargs="?", metavar="MODEL", help="folder, .gguf file or hub id; the same as --model")
    parser.add_argument(
        "--engine",
        default=_ENGINE,
        metavar="MODULE:NAME",
        help="another engine, by dotted name, in the server's process (default: %(default)s)",
    )
    parser.add_argument(
        "--core", default=DEFAULT_CORE, metavar="MODULE:NAME", help="another engine core, by dotted name of what builds it"
    )
    add_options(parser, config)
    add_options(parser, ProcessConfig)
    add_options(parser, ServerConfig, skip=[field.name for field in dataclasses.fields(config)])


def run(namespace: argparse.Namespace) -> int:
    """Serve until told to stop; the exit status."""
    given = namespace.model_or_path
    if given is not None:
        if getattr(namespace, "model", given) != given:
            raise ConfigError(f"the model is given twice: '{given}' and --model '{namespace.model}'; leave one out")
        namespace.model = given
    engine_config = from_namespace(resolve(_ENGINE_CONFIG), namespace)
    if engine_config.node_rank:
        return _follow(engine_config)
    server_config = _with_environment(from_namespace(ServerConfig, namespace))
    tls_context(server_config)
    Keys.load(server_config.api_key, server_config.api_keys_file)

    process_config = from_namespace(ProcessConfig, namespace)
    if not server_config.in_process and namespace.engine == _ENGINE:
        if server_config.chat_template:
            from octavo_server._src.texts import chat_template_of

            chat_template_of(server_config, {})
        supervisor = Supervisor(engine_config, process_config, core=namespace.core)
        serve_processes(server_config, supervisor, announce=lambda url, engine: announce(url, engine, server_config))
        return 0

    from octavo_server._src.serving import Loaded, serve
    from octavo_server._src.texts import load_frontend

    def load() -> Loaded:
        engine = resolve(namespace.engine).start(engine_config)
        return (engine, *load_frontend(engine.card, server_config))

    serve(server_config, load, announce=lambda url, engine: announce(url, engine, server_config))
    return 0


def _follow(engine_config: Any) -> int:
    """Be one of several nodes and take no requests, until node 0 ends."""
    print(f"Octavo follows node 0 at {engine_config.master_addr}:{engine_config.master_port}", flush=True)
    try:
        resolve(_FOLLOW)(engine_config)
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # a farewell to nodes that are gone would abort
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
    keys = len(Keys.load(config.api_key, config.api_keys_file).entries)
    return [
        ("served as", ", ".join(names), "--served-model-name" if config.served_model_name else "the model's own name"),
        ("listens on", f"{config.host}:{config.port}", "port 0: the system chooses" if config.port == 0 else "--host, --port"),
        ("transport", _transport(config), "--ssl-certfile, --ssl-ca-certs, --http2"),
        ("API keys", str(keys) if keys else "none: open to all", f"--api-key, --api-keys-file or {_KEY_VARIABLE}"),
        ("tokenizer", "no: token ids only" if config.skip_tokenizer_init else "yes", "--skip-tokenizer-init"),
        ("chat template", "given" if config.chat_template else "the checkpoint's", "--chat-template"),
    ]


def _transport(config: ServerConfig) -> str:
    versions = "HTTP/1.1 and HTTP/2" if config.http2 else "HTTP/1.1"
    if not config.ssl_certfile:
        return f"{versions} without TLS"
    clients = {0: "", 1: ", client certificates optional", 2: ", client certificates required"}
    return f"{versions} over TLS{clients[config.wanted_client_certificates]}"
