"""What a bench says: a line a measurement for people, a flat JSON list for tools, rewritten after every line so that a crash loses none."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path

import jax


class Report:
    """Measurements of one run.

    Args:
        path: Where to write them as JSON; None writes nothing.

    Attributes:
        failures: Reasons, by case.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._items: list[dict[str, object]] = []
        self.failures: dict[str, str] = {}
        for name, value in _machine().items():
            self.add(f"machine/{name}", value, "text", 1)

    def add(self, name: str, value: float | str, unit: str, n: int) -> None:
        """A measurement: the median of `n`."""
        self._items.append({"name": name, "value": value, "unit": unit, "n": n})
        print(
            f"{name:64} {value if isinstance(value, str) else format(value, '.6g'):>14} {unit if unit != 'text' else ''}",
            flush=True,
        )
        if self._path:
            self._path.write_text(json.dumps(self._items, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def fail(self, name: str, error: BaseException) -> None:
        """A case that could not be measured, or was wrong."""
        self.failures[name] = f"{type(error).__name__}: {error}"[:2000]
        self.add(name, f"FAILED {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300], "text", 1)


def _machine() -> dict[str, str]:
    device = jax.devices()[0]
    versions = {name: _version(name) for name in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "octavo-kernels")}
    return {
        "device": f"{device.device_kind} ({device.platform}), {len(jax.devices())} visible",
        "platform_version": " ".join(device.client.platform_version.split()),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "python": platform.python_version(),
        "cpu": f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
