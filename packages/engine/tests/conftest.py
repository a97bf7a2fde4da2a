"""A tiny random checkpoint, and an engine around it that the whole session shares."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 96,
}


def write_checkpoint(folder, seed=0):
    """A Hugging Face folder with random weights large enough that greedy margins are clear."""
    rng = np.random.default_rng(seed)
    hidden, ffn, kv = 32, 64, 16
    shapes = {"model.embed_tokens.weight": (97, hidden), "model.norm.weight": (hidden,)}
    for i in range(2):
        block = f"model.layers.{i}."
        shapes |= {block + "input_layernorm.weight": (hidden,), block + "post_attention_layernorm.weight": (hidden,)}
        shapes |= {block + "self_attn.q_proj.weight": (hidden, hidden), block + "self_attn.o_proj.weight": (hidden, hidden)}
        shapes |= {block + "self_attn.k_proj.weight": (kv, hidden), block + "self_attn.v_proj.weight": (kv, hidden)}
        shapes |= {block + "mlp.gate_proj.weight": (ffn, hidden), block + "mlp.up_proj.weight": (ffn, hidden)}
        shapes |= {block + "mlp.down_proj.weight": (hidden, ffn)}
    weights = {
        n: (rng.standard_normal(s) * (0.3 if len(s) == 2 else 0.1) + (len(s) == 1)).astype(np.float32) for n, s in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 96, "temperature": 0.5}))
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def with_tokenizer(tmp_path_factory):
    """The same checkpoint with longer contexts, a byte-level vocabulary and a chat template."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    folder = write_checkpoint(tmp_path_factory.mktemp("with-tokenizer"))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 4096}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:96]
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('no such role') }}{% endif %}[{{ m.role }}]{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


OPTIONS = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 64,
    "block_size": 16,
    "compilation_cache_dir": None,
}


@pytest.fixture(scope="session")
def make_llm(checkpoint):
    from octavo_engine import LLM

    made = []

    def make(model=checkpoint, **options):
        llm = LLM(str(model), **{**OPTIONS, "num_gpu_blocks_override": 200, **options})
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(scope="session")
def llm(make_llm):
    """Roomy: 199 blocks of 16 tokens, steps of 64."""
    return make_llm()


@pytest.fixture(scope="session")
def tight(make_llm):
    """A pool of one longest sequence and a bit: 20 blocks of 16 tokens, so that batches preempt."""
    return make_llm(num_gpu_blocks_override=21)


@pytest.fixture
def prompts():
    rng = np.random.default_rng(1)
    return [rng.integers(0, 96, int(n)).tolist() for n in rng.integers(1, 120, 32)]


@pytest.fixture(scope="session")
def is_idle():
    """Every block is free or cached and the cache's books are in order."""
    from octavo_kvcache import audit

    def check(core):
        while core.has_work:
            core.turn()
        cache = core.planner.state[1]
        assert audit(cache, core.planner.spec) == []
        assert core.stats().kv_usage == 0.0
        assert core.stats().num_running == 0
        assert core.stats().num_waiting == 0

    return check


@pytest.fixture(scope="session")
def layout():
    """The module `follower.py` beside this file."""
    spec = importlib.util.spec_from_file_location("octavo_engine_follower", pathlib.Path(__file__).with_name("follower.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
