"""Runs `octavo_server.serve` over the toy engine: what the process tests start. Arguments: port, checkpoint folder, JSON of settings."""

import json
import sys
import time

from octavo_core.errors import CheckpointError
from octavo_core.testing.engine import ToyEngine
from octavo_core.testing.patience import PATIENCE_S
from octavo_core.wire import ModelCard
from octavo_models.text import load_text
from octavo_server import ServerConfig, serve


def main() -> None:
    port, root, settings = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    card = ModelCard(name="org/toy", root=root, max_model_len=4096, vocab_size=512, eos_token_ids=(0,))

    def load():
        time.sleep(settings.get("load_s", 0))
        if settings.get("fails"):
            raise CheckpointError("the checkpoint is damaged")
        return (ToyEngine(card, delay_s=settings.get("delay_s", 0.005)), *load_text(root))

    config = ServerConfig(host="127.0.0.1", port=port, shutdown_timeout=settings.get("shutdown_timeout", PATIENCE_S))
    serve(config, load, announce=lambda url, engine: print("ready", url, flush=True))
    print("stopped", "jax" in sys.modules, flush=True)


if __name__ == "__main__":
    main()
