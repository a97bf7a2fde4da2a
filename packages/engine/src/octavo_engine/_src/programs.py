"""Compiled programs of earlier starts: found again without being traced, or compiled and kept.

Touches one folder of the user's. JAX's own persistent cache saves XLA's part of a start and is keyed by the lowered program, so
tracing and lowering are paid each time; here a program is also known by everything it is made from. Whatever is in doubt (another
version, a changed source file, a component that is not Octavo's, a damaged file) is a miss, and the program is compiled.

Two kinds of file: a program, named by its lowered text, and a name, which says which program facts and shapes lead to. So programs
that an edit does not change are compiled once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import io
import logging
import os
import pickle
import platform
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import jax
import jaxlib.version
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from octavo_engine._src import host
from octavo_engine.config import EngineConfig

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_MAGIC: Final = b"octavo program 1\n"
_VARIABLES: Final = ("JAX_", "XLA_", "OCTAVO_", "LIBTPU_", "TF_", "OMP_")
_SECRETS: Final = ("OCTAVO_API_KEY", "OCTAVO_NODES_KEY")
"""No facts of a program."""
_TELLS: Final = (
    "jax_log",
    "jax_debug_log",
    "jax_explain",
    "jax_traceback",
    "jax_compilation_cache",
    "jax_enable_compilation_cache",
)
"""Settings of JAX that change what it tells and keeps, not what it compiles."""
_UNUSED_S: Final = 30 * 24 * 3600
_MOST_BYTES: Final = 1 << 30
"""In a larger folder, what was not used for so many seconds is removed."""

_PACKAGES: Final = tuple(
    f"octavo_{name}" for name in ("core", "kvcache", "scheduler", "kernels", "kernels_cpu", "models", "offload", "engine")
)


class Programs:
    """Programs kept in a folder, for one set of facts.

    Compiles one program at a time: XLA uses every core for one anyway, and JAX 0.10.2 has been seen to crash while one thread wrote
    a program to the persistent cache and another compiled.

    Args:
        folder: Where they are kept; None: nowhere.
        facts: Their `repr` tells apart what is compiled from anything else that bears the same name.
    """

    def __init__(self, folder: Path | None, *facts: object) -> None:
        self.folder, self._facts = folder, facts
        self._one_compiles = threading.Lock()
        self.counts: Counter[str] = Counter()
        """Programs that were `found` without being traced, those that were traced and then `known`, and those `compiled`."""

    def narrowed(self, *facts: object) -> Programs:
        """The same folder and counts, with more facts."""
        more = Programs(self.folder, *self._facts, *facts)
        more.counts = self.counts
        return more

    @property
    def told(self) -> tuple[str, str]:
        """How many were compiled, and where they are kept."""
        known = self.counts["found"] + self.counts["known"]
        where = "not kept" if self.folder is None else f"kept in {self.folder}"
        return f"{known} of an earlier start, {self.counts['compiled']} compiled", where

    def compile(
        self, name: str, jitted: Any, *args: Any, device: jax.Device, options: Mapping[str, str | bool] | None = None
    ) -> Any:
        """`jitted.lower(*args).compile(options)`, or what it gave before.

        Args:
            name: Of this program among those of these facts and of arguments of these shapes.
            jitted: A jitted function, without compiler options of its own.
            args: Arrays or their shapes.
            device: The one it runs on.
            options: Of XLA.
        """
        if self.folder is None:
            lowered = jitted.lower(*args)
            with self._one_compiles:
                self.counts["compiled"] += 1
                return lowered.compile(compiler_options=options)
        runs_on = device.platform, device.device_kind, device.id, sorted((options or {}).items())
        path = self._path("name", name, runs_on, _described(args))
        program = self._load(_read(path), device)
        if program is not None:
            self.counts["found"] += 1
            return program
        lowered = jitted.lower(*args)
        home = self._path("program", name, runs_on, _described(args), str(lowered.out_info), lowered.as_text()).name
        program = self._load(home, device)
        if program is None:
            with self._one_compiles, _without_jax_cache():
                self.counts["compiled"] += 1
                program = lowered.compile(compiler_options=options)
            if not _write(self.folder / home, lambda: serialize_executable.serialize(program)):
                return program
        else:
            self.counts["known"] += 1
        _write(path, lambda: home)
        return program

    def _load(self, home: Any, device: jax.Device) -> Any:
        """The program of that name, or None."""
        known = None if home is None or self.folder is None else _read(self.folder / str(home))
        if known is None:
            return None
        try:
            parts: tuple[bytes, Any, Any] = tuple(known)
            with self._one_compiles:
                return serialize_executable.deserialize_and_load(*parts, backend=device.client, execution_devices=[device])
        except Exception as error:  # whatever it is, compiling is the answer
            _LOG.debug("kept program %s cannot be loaded: %s", home, error)
            return None

    def recall(self, name: str, make: Callable[[], T]) -> T:
        """What `make` gave in an earlier start with these facts: shapes, or what was timed; never data."""
        if self.folder is None:
            return make()
        path = self._path("value", name)
        known: T | None = _read(path)
        if known is not None:
            return known
        made = make()
        _write(path, lambda: made)
        return made

    def _path(self, kind: str, *parts: object) -> Path:
        """Where something is kept. The text of a program stands for the facts it was made from, but for the environment."""
        facts = self._facts[:1] if kind == "program" else self._facts
        assert self.folder is not None
        return self.folder / f"{kind}-{hashlib.sha256(repr((parts, facts)).encode()).hexdigest()[:40]}"


@contextlib.contextmanager
def _without_jax_cache() -> Iterator[None]:
    """A CPU program that JAX read back from its own cache does not hold all of its code when it is written again (JAX 0.10.2), so what
    is kept here is compiled here."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def kept_programs(config: EngineConfig, checkpoint: Path, *facts: object) -> Programs:
    """Programs of earlier starts with the same software, settings, checkpoint and `facts`. A component from elsewhere may depend on
    anything: none then."""
    folder = host.compiled_programs_folder(config.compilation_cache_dir)
    named = (config.prefix_cache, config.scheduler, config.sampler, config.model_class, config.attention_backend)
    if folder is None or any(name is not None and re.search("[.:]", name) for name in named):
        return Programs(None)
    if not _is_private(folder / "programs"):
        return Programs(None)
    forget_unused(folder / "programs")
    asked = dataclasses.replace(config, step_log=None, request_log=None, compilation_cache_dir=None)
    paths = sorted(p for p in checkpoint.iterdir() if p.is_file()) if checkpoint.is_dir() else [checkpoint]
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return Programs(folder / "programs", *environment(), asked, files, *facts)


def _is_private(folder: Path) -> bool:
    """Nobody else can write what is loaded from there. Makes the folder where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        stat = folder.stat()
    except OSError as error:
        _LOG.warning("compiled programs are not kept: %s", error)
        return False
    if hasattr(os, "geteuid") and (stat.st_uid != os.geteuid() or stat.st_mode & 0o022):
        _LOG.warning("compiled programs are not kept: %s can be written by other users; chmod 700 it", folder)
        return False
    return True


def environment() -> tuple[object, ...]:
    """Facts of the software and the machine that any program depends on. The first: what XLA compiles with; the second: what is traced.

    Each is one of the facts of `Programs`, in this order.
    """
    names = [name for name in os.environ if name.startswith(_VARIABLES) and name not in _SECRETS]
    set_outside = {name: os.environ[name] for name in names}
    versions = jax.__version__, jaxlib.version.__version__, sys.version, platform.machine()
    devices = [(d.platform, d.device_kind, d.id) for d in jax.devices()]
    compiler = (
        versions,
        [jax.devices()[0].client.platform_version, *devices],
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        _cpu(),
        sorted(set_outside.items()),
        sorted((name, repr(value)) for name, value in jax.config.values.items() if not name.startswith(_TELLS)),
        _digest(".so", ".dylib", ".pyd"),
    )
    return compiler, _digest(".py")


def _cpu() -> str:
    """What the CPU calls itself and can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return repr([next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags", "Features")])


def _digest(*suffixes: str) -> str:
    """Of every file with one of these suffixes that Octavo's packages consist of."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        found = importlib.util.find_spec(package)
        for folder in sorted((found.submodule_search_locations or []) if found else []):
            for path in sorted(p for p in Path(folder).rglob("*") if p.suffix in suffixes):
                digest.update(f"{package} {path.relative_to(folder)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _described(args: Any) -> str:
    """Structure, shapes, dtypes of arguments, and what else their types decide."""
    leaves, tree = jax.tree.flatten(args)
    avals = [(x.shape, str(x.dtype), bool(getattr(x, "weak_type", False)), str(getattr(x, "sharding", ""))) for x in leaves]
    return repr((str(tree), avals))


def _read(path: Path) -> Any:
    """What was written, or None when nothing was, not all of it, or not that."""
    try:
        data = path.read_bytes()
        os.utime(path)
        head = len(_MAGIC) + 32
        if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(data[head:]).digest() != data[len(_MAGIC) : head]:
            return None
        return pickle.loads(data[head:])  # of the user's own folder, as the machine code in JAX's cache is
    except OSError:
        return None
    except Exception as error:
        _LOG.debug("%s cannot be read: %s", path, error)
        return None


def _write(path: Path, make: Callable[[], Any]) -> bool:
    """Keep something, whole or not at all, and say whether; a folder that cannot be written is no fault."""
    try:
        buffer = io.BytesIO()
        pickle.dump(make(), buffer)
        payload = buffer.getvalue()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
            file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
        os.replace(file.name, path)
        return True
    except Exception as error:  # a program that cannot be kept is compiled again
        _LOG.debug("%s is not kept: %s", path, error)
        return False


def forget_unused(folder: Path) -> None:
    """Remove what no start has used for long, once the folder is large."""
    try:
        files = [(path.stat(), path) for path in folder.iterdir() if path.is_file()]
        if sum(stat.st_size for stat, _ in files) > _MOST_BYTES:
            for stat, path in files:
                if time.time() - stat.st_mtime > _UNUSED_S:
                    path.unlink(missing_ok=True)
    except OSError as error:
        _LOG.debug("%s is not tidied: %s", folder, error)
