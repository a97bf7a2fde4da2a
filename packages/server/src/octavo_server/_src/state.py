"""What every endpoint of one server shares: the model it serves, once there is one, and the requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from octavo_core.errors import RequestError, UnknownModelError, nearest_name
from octavo_core.wire import ModelCard
from octavo_server._src.body import BODIES_AT_ONCE, Bodies
from octavo_server._src.config import ServerConfig
from octavo_server._src.keys import Keys
from octavo_server._src.metrics import Metrics
from octavo_server._src.openai_errors import DrainingError, NotReadyError
from octavo_server._src.quotas import Quotas
from octavo_server._src.text import Text

if TYPE_CHECKING:
    from octavo_core.seams import Engine
else:  # octavo_core.seams imports jax, which a frontend must not
    Engine = Any

T = TypeVar("T")
_TOKENIZER_THREADS = 2
_LARGE = 64 * 1024


@dataclasses.dataclass(frozen=True)
class Served:
    """A loaded model. `text` is None where token ids go in and out."""

    engine: Engine
    card: ModelCard
    names: tuple[str, ...]
    text: Text | None
    created: int

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here; no name means this one."""
        if name is not None and name not in self.names:
            hint = nearest_name(name, self.names) or f"; served here: {', '.join(self.names)}"
            raise UnknownModelError(f"the model '{name[:200]}' does not exist{hint}", param="model")

    def require_text(self) -> Text:
        """The tokenizer and template.

        Raises:
            RequestError: The server runs without.
        """
        if self.text is None:
            raise RequestError(
                "this server was started with --skip-tokenizer-init: it takes prompts as token ids only", param="prompt"
            )
        return self.text


class ServerState:
    """The mutable centre of one server; touched on its event loop only."""

    def __init__(self, config: ServerConfig, quotas: Quotas | None = None) -> None:
        self.config = config
        self.served: Served | None = None
        self.live: set[str] = set()
        self.answering = 0
        """Generating HTTP requests that have not been answered to their end."""
        self.is_draining = False
        self.bodies = Bodies(BODIES_AT_ONCE * config.max_body_bytes)
        self.metrics = Metrics()
        self.keys = Keys.load(config.api_key, config.api_keys_file)
        self.quotas = quotas or Quotas(self.keys.entries)
        self._threads = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="octavo-tokenizer")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="octavo-large")
        self._turn = asyncio.Semaphore(1)

    def become_ready(self, engine: Engine, card: ModelCard, text: Text | None) -> None:
        """Begin to serve a loaded engine."""
        names = self.config.served_model_name or (card.name,)
        self.served = Served(engine, card, names, text, int(time.time()))
        self.metrics.follow(engine, names[0], self.live)

    async def off_loop(self, size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run CPU-bound work on text in a thread, so that other streams go on.

        Args:
            size: About how many bytes it looks at. What is large queues by itself: a short prompt does not wait for it.
        """
        loop = asyncio.get_running_loop()
        if size <= _LARGE:
            return await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))
        await self._turn.acquire()  # whoever is given up while it waits holds nothing any more; a thread would keep its text
        work = loop.run_in_executor(self._large, lambda: function(*args, **kwargs))
        work.add_done_callback(self._next_turn)
        return await asyncio.shield(work)  # it cannot be stopped: until it has ended it is its turn

    def _next_turn(self, work: asyncio.Future[Any]) -> None:
        self._turn.release()
        if not work.cancelled():
            work.exception()  # nobody may be there any more to hear of it

    def require_served(self) -> Served:
        """The model being served.

        Raises:
            DrainingError: Nothing is begun any more.
            NotReadyError: It is still loading.
        """
        if self.is_draining:
            raise DrainingError("this server is shutting down; send the request to another one, or again in a few seconds")
        if self.served is None:
            raise NotReadyError("the model is still loading; try again in a few seconds")
        return self.served

    @contextlib.contextmanager
    def answering_for(self, key: int | None) -> Iterator[None]:
        """A generating request is being answered, on account of a key.

        Raises:
            RateLimitedError: The key has used up what it may.
        """
        if key is not None:
            self.quotas.enter(key)
        self.answering += 1
        try:
            yield
        finally:
            self.answering -= 1
            if key is not None:
                self.quotas.leave(key)

    async def abort_all(self) -> None:
        """End every request in flight; each client is told."""
        if self.served is not None:
            for request_id in list(self.live):
                await self.served.engine.abort(request_id)
