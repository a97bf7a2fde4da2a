"""Settings of the HTTP server, in vLLM's names where vLLM has one. Knows nothing of the engine's settings."""

from __future__ import annotations

import dataclasses

from octavo_core.config import option
from octavo_core.errors import ConfigError

_HTTP = "HTTP server"
_API = "API"
_TLS = "TLS"
_PROCESSES = "processes"


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """What `octavo serve` needs to know beside the engine's configuration."""

    host: str = option("0.0.0.0", "Address to listen on", group=_HTTP)
    port: int = option(8000, "Port to listen on; 0 lets the system choose", group=_HTTP)
    root_path: str = option("", "Path under which a proxy serves this server", group=_HTTP)
    max_body_bytes: int = option(32 * 2**20, "Largest request body", group=_HTTP)
    max_connections: int = option(
        8192, "Connections at once of one frontend, at most half of the files it may open; further ones get 503", group=_HTTP
    )
    header_timeout: float = option(20.0, "Seconds for the head of a request", group=_HTTP)
    body_timeout: float = option(60.0, "Seconds for the body of a request", group=_HTTP)
    write_timeout: float = option(60.0, "Seconds a client may read nothing while something waits for it", group=_HTTP)
    shutdown_timeout: float = option(10.0, "Seconds that running requests may take to finish after SIGTERM", group=_HTTP)
    in_process: bool = option(False, "Run the engine core in the server's own process", group=_PROCESSES)
    api_server_count: int = option(1, "Frontend processes that share the port", group=_PROCESSES)
    stuck_after: float = option(
        30.0, "Seconds within one step after which liveness fails where no watchdog replaces the core (--in-process)", group=_HTTP
    )
    http2: bool = option(True, "Speak HTTP/2 with clients that do, with TLS (ALPN) or without (prior knowledge)", group=_HTTP)
    ssl_certfile: str = option("", "Certificate chain (PEM); with it the server speaks TLS only", group=_TLS, metavar="FILE")
    ssl_keyfile: str = option("", "Its private key (PEM), if not in the same file", group=_TLS, metavar="FILE")
    ssl_ca_certs: str = option(
        "", "Authorities (PEM) that sign clients' certificates; clients must have one", group=_TLS, metavar="FILE"
    )
    ssl_cert_reqs: int = option(-1, "Client certificates: 0 none, 1 optional, 2 required; -1: 2 with --ssl-ca-certs", group=_TLS)
    uvicorn_log_level: str = option(
        "info", "Level of the HTTP server's log", group=_HTTP, choices=("critical", "error", "warning", "info", "debug", "trace")
    )
    disable_uvicorn_access_log: bool = option(False, "Do not log each request", group=_HTTP, aliases=("--disable-access-log",))
    api_key: tuple[str, ...] = option(
        (), "Key that clients must send as a bearer token; repeat for several (also from OCTAVO_API_KEY)", group=_API, metavar="KEY"
    )
    api_keys_file: str = option(
        "", "JSON file of hashed keys with tenants, priorities and limits (octavo key makes an entry)", group=_API, metavar="FILE"
    )
    served_model_name: tuple[str, ...] = option(
        (), "Name clients use for the model; repeat for several, the first is answered", group=_API, metavar="NAME"
    )
    chat_template: str = option("", "Jinja file, or the template itself, instead of the checkpoint's", group=_API)
    skip_tokenizer_init: bool = option(False, "Serve token ids in and out, without a tokenizer", group=_API)
    ignore_unknown_fields: bool = option(False, "Ignore request fields this server does not understand", group=_API)
    return_tokens_as_token_ids: bool = option(False, 'Write tokens in logprobs as "token_id:N"', group=_API)
    enable_prompt_tokens_details: bool = option(True, "Accepted for compatibility: cached tokens are always reported", group=_API)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is between 0 and 65535, got {self.port}")
        if self.max_body_bytes < 1024:
            raise ConfigError(f"--max-body-bytes is at least 1024, got {self.max_body_bytes}")
        for name in ("header_timeout", "body_timeout", "write_timeout"):
            if not 0.1 <= getattr(self, name) <= 86400:
                raise ConfigError(f"--{name.replace('_', '-')} is between 0.1 and 86400 seconds, got {getattr(self, name)}")
        if self.max_connections < 1:
            raise ConfigError(f"--max-connections is at least 1, got {self.max_connections}")
        if not 0 <= self.shutdown_timeout <= 86400:
            raise ConfigError(f"--shutdown-timeout is between 0 and 86400 seconds, got {self.shutdown_timeout}")
        if (self.ssl_keyfile or self.ssl_ca_certs) and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        if not -1 <= self.ssl_cert_reqs <= 2 or (self.ssl_cert_reqs > 0 and not self.ssl_ca_certs):
            raise ConfigError(f"--ssl-cert-reqs is 0, 1 or 2, and above 0 needs --ssl-ca-certs; got {self.ssl_cert_reqs}")
        if not 1 <= self.api_server_count <= 64:
            raise ConfigError(f"--api-server-count is between 1 and 64, got {self.api_server_count}")
        if self.in_process and self.api_server_count > 1:
            raise ConfigError("--in-process keeps everything in one process: leave out --api-server-count")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path begins with '/' and does not end with it, got '{self.root_path}'")
        for key in self.api_key:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("an --api-key is one or more printable ASCII characters without spaces")

    @property
    def wanted_client_certificates(self) -> int:
        """0 none, 1 optional, 2 required."""
        return (2 if self.ssl_ca_certs else 0) if self.ssl_cert_reqs < 0 else self.ssl_cert_reqs

    @property
    def scheme(self) -> str:
        """What its addresses begin with."""
        return "https" if self.ssl_certfile else "http"
