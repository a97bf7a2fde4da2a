"""TLS as the configuration wants it: certificate, HTTP/2 by ALPN, certificates of clients. Touches the disk."""

from __future__ import annotations

import ssl

from octavo_core.errors import ConfigError
from octavo_server._src.config import ServerConfig


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The context of a server's sockets; None: no TLS.

    Raises:
        ConfigError: A file cannot be read or does not hold what it should.
    """
    if not config.ssl_certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2", "http/1.1"] if config.http2 else ["http/1.1"])
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile} and --ssl-keyfile are no certificate and its key: {error}"
        ) from None
    if config.ssl_ca_certs:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs} holds no certificates: {error}") from None
        context.verify_mode = ssl.VerifyMode(config.wanted_client_certificates)
    return context
