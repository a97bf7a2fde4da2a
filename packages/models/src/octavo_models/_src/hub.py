"""What the hub client's cache holds, and a hub model's description without its weights.

Touches disk and network through `huggingface_hub`. Imports no jax.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from octavo_core.errors import CheckpointError, OctavoError
from octavo_models._src.checkpoint import check_hub_id, download_failed, open_checkpoint
from octavo_models._src.progress import note
from octavo_models._src.stored import StoredType, element_bits, summed


class Cached(NamedTuple):
    """A model in the cache.

    Attributes:
        revision: Branch or tag that led to it, or the commit's first letters.
        problem: Why it cannot be served; None: it can.
    """

    name: str
    revision: str
    path: Path
    num_bytes: int
    architecture: str
    problem: str | None


def cached_models(download_dir: str | None = None) -> tuple[Cached, ...]:
    """Every snapshot of every model in the hub client's cache, by name.

    Args:
        download_dir: Another cache than the client's own.

    Raises:
        CheckpointError: The cache cannot be read.
    """
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        found = huggingface_hub.scan_cache_dir(download_dir)
    except CacheNotFound:
        return ()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the hub's cache cannot be read: {error}") from None
    repos = sorted((repo for repo in found.repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id)
    return tuple(
        _cached(repo.repo_id, sorted(revision.refs), revision.commit_hash, revision.snapshot_path, revision.size_on_disk)
        for repo in repos
        for revision in sorted(repo.revisions, key=lambda r: r.commit_hash)
    )


def _cached(name: str, refs: list[str], commit: str, path: Path, num_bytes: int) -> Cached:
    revision = refs[0] if refs else commit[:12]
    try:
        return Cached(name, revision, path, num_bytes, open_checkpoint(path).config.architecture, None)
    except OctavoError as error:
        return Cached(name, revision, path, num_bytes, "", str(error))


def describe(repo: str, *, revision: str | None = None, download_dir: str | None = None) -> tuple[Path, tuple[StoredType, ...]]:
    """A hub model's small files, and the element types of its weights from the headers of its files. Its weights stay there.

    Raises:
        CheckpointError: The network is away, or the model is not there.
    """
    import huggingface_hub

    check_hub_id(repo)
    note(f"asking the hub about {repo}")
    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, cache_dir=download_dir, allow_patterns=["*.json", "*.jinja"], ignore_patterns=["*/*"]
        )
        metadata = huggingface_hub.get_safetensors_metadata(repo, revision=revision)
    except Exception as error:  # the client raises whatever its HTTP library does
        raise download_failed(repo, revision, error) from None
    tensors = (info for file in metadata.files_metadata.values() for info in file.tensors.values())
    entries = ((t.dtype, t.parameter_count, t.parameter_count * element_bits(t.dtype) // 8) for t in tensors)
    return Path(folder), summed(entries)
