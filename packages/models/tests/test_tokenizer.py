import itertools
import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, processors

from octavo_core.errors import CheckpointError, RequestError, UnsupportedModelError
from octavo_models._src import tokenizer as module
from octavo_models.text import SpecialTokens, Tokenizer, load_tokenizer, tokenizer_from_gguf

CORPUS = json.loads((Path(__file__).parent / "fixtures" / "smollm2_corpus.json").read_text())


def test_the_tokenizer_built_from_gguf_agrees_with_the_published_one(smollm2):
    tokenizer, _ = smollm2
    for entry in CORPUS:
        assert tokenizer.encode(entry["text"]) == entry["ids"], entry["text"]
        assert tokenizer.decode(entry["ids"], skip_special_tokens=False) == entry["decoded"], entry["text"]


def test_the_tokenizer_built_from_gguf_gives_the_reference_prompts(smollm2, reference_prompts):
    tokenizer, _ = smollm2
    for prompt in reference_prompts:
        assert tokenizer.encode(prompt["prompt"]) == prompt["prompt_ids"], prompt["name"]


def test_special_tokens_in_text_are_read_as_tokens_or_as_text(smollm2):
    tokenizer, _ = smollm2
    assert tokenizer.encode("<|im_start|>a")[0] == 1
    literal = tokenizer.encode("<|im_start|>a", parse_special=False)
    assert not tokenizer.special_ids & set(literal)
    assert tokenizer.decode(literal) == "<|im_start|>a"
    assert tokenizer.encode("<|im_start|>a")[0] == 1


def test_token_bytes_join_to_the_text(smollm2):
    tokenizer, _ = smollm2
    for entry in CORPUS:
        assert b"".join(map(tokenizer.token_bytes, entry["ids"])).decode("utf-8") == entry["decoded"]


def test_an_id_that_names_no_token_has_no_bytes(smollm2):
    tokenizer, _ = smollm2
    assert tokenizer.vocab_size == 49152
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.vocab_entry(10**6) is None


def test_a_negative_id_is_refused(smollm2):
    with pytest.raises(RequestError, match="-1"):
        smollm2[0].decode([-1])


def test_a_lone_surrogate_is_refused_by_name(smollm2):
    with pytest.raises(RequestError, match="U\\+D83D"):
        smollm2[0].encode("ab\ud83d")


@given(st.text(max_size=80), st.booleans())
def test_encoding_and_decoding_are_inverse(byte_backend, text, parse_special):
    tokenizer = Tokenizer(byte_backend)
    assert tokenizer.decode(tokenizer.encode(text, parse_special=parse_special), skip_special_tokens=False) == text


@given(st.lists(st.integers(2, 299), max_size=30))
def test_decoding_agrees_with_the_backend_up_to_an_unfinished_end(byte_backend, ids):
    ours, theirs = Tokenizer(byte_backend).decode(ids), byte_backend.decode(ids)
    assert theirs in (ours, ours + "\ufffd")


def test_begin_and_end_tokens_follow_the_flags(byte_backend):
    plain = Tokenizer(byte_backend).encode("the")
    both = Tokenizer(byte_backend, SpecialTokens(bos_id=0, eos_id=1, add_bos=True, add_eos=True))
    assert both.encode("the") == [0, *plain, 1]
    assert both.encode("the", add_special_tokens=False) == plain
    assert both.decode([0, *plain, 1]) == "the"


def test_without_flags_the_post_processor_decides(byte_backend):
    backend = tokenizers.Tokenizer.from_str(byte_backend.to_str())
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert Tokenizer(backend).encode("the")[0] == 0
    assert 0 not in Tokenizer(backend, SpecialTokens(bos_id=0, add_bos=False)).encode("the")


def test_a_decoder_of_another_kind_is_refused():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        Tokenizer(backend)


# SentencePiece vocabularies, as GGUF files of Llama 2 carry them.

PIECES = [
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "he",
    "ll",
    "hell",
    "hello",
    "▁hello",
    "▁w",
    "or",
    "▁wor",
    "ld",
    "▁world",
    "lo",
    "el",
    "ell",
    "ello",
]


def sentencepiece_metadata(**changes):
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *PIECES]
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES))]
    random.Random(3).shuffle(scores[259:])
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {**metadata, **changes}


def merged_by_score(text, metadata):
    """SentencePiece's rule, slowly: merge the best-scored neighbouring pair, the leftmost of equals, until none forms a token."""
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        at = min(pairs)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]


@given(st.text("helowrd ", min_size=1, max_size=24))
def test_sentencepiece_merges_by_score(text):
    metadata = sentencepiece_metadata()
    tokenizer = tokenizer_from_gguf(metadata, source="test")
    tokens = [tokenizer.vocab_entry(i) for i in tokenizer.encode(text, add_special_tokens=False)]
    assert tokens == merged_by_score(text, metadata)


def test_sentencepiece_adds_the_begin_token_and_drops_the_first_space():
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(), source="test")
    ids = tokenizer.encode("hello world")
    assert [tokenizer.vocab_entry(i) for i in ids] == ["<s>", "▁hello", "▁world"]
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.decode(ids[2:], continues=True) == " world"
    assert tokenizer.token_bytes(ids[2]) == b" world"


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("part", [1, 2, 3, 7])
def test_what_is_long_is_decoded_in_parts_that_cut_nothing(part, continues, monkeypatch):
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(), source="test")
    ids = tokenizer.encode("hello é日本🙂 world" * 5)
    whole = tokenizer.decode(ids, continues=continues)
    assert whole == (" " if continues else "") + "hello é日本🙂 world" * 5
    monkeypatch.setattr(module, "_PART", part)
    assert tokenizer.decode(ids, continues=continues) == whole


@given(st.text(max_size=40))
def test_sentencepiece_falls_back_to_bytes(text):
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(), source="test")
    text = text.replace("▁", " ").replace("<", "(")
    ids = tokenizer.encode(text)
    assert 0 not in ids
    assert tokenizer.decode(ids) == text


# Damage.


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModelError, "'bert'"),
        ({"tokenizer.ggml.model": None}, CheckpointError, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.tokens": ["a", 1]}, CheckpointError, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.scores": [0.0]}, CheckpointError, "tokenizer.ggml.scores"),
        ({"tokenizer.ggml.token_type": [1]}, CheckpointError, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, CheckpointError, "bos_token"),
        ({"tokenizer.ggml.unknown_token_id": 10**6}, CheckpointError, "unknown_token_id"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, CheckpointError, "add_bos_token"),
        ({"tokenizer.ggml.model": "gpt2"}, CheckpointError, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["h zz"]}, CheckpointError, "h zz"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["h e"], "tokenizer.ggml.pre": "x"},
            UnsupportedModelError,
            "'x'",
        ),
    ],
)
def test_metadata_that_cannot_make_a_tokenizer_is_refused_by_key(changes, error, words):
    with pytest.raises(error, match=words) as caught:
        tokenizer_from_gguf(sentencepiece_metadata(**changes), source="test")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "text", "pieces"),
    [
        ("gpt-2", "a12 b", ["a", "12", "Ġb"]),
        ("smollm", "a12 b", ["a", "1", "2", "Ġb"]),
        ("llama-bpe", "a1234 b\n\n", ["a", "123", "4", "Ġb", "ĊĊ"]),
        ("qwen2", "a12 b\n", ["a", "1", "2", "Ġb", "Ċ"]),
    ],
)
def test_each_pre_tokenizer_cuts_words_its_own_way(byte_backend, rule, text, pieces):
    vocabulary = byte_backend.get_vocab()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": sorted(vocabulary, key=vocabulary.get),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in json.loads(byte_backend.to_str())["model"]["merges"]],
    }
    tokenizer = tokenizer_from_gguf(metadata, source="test")
    assert [word for word, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)] == pieces
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_folder_gives_its_tokenizer(hf_folder):
    tokenizer = load_tokenizer(hf_folder)
    assert tokenizer.special.bos_id == 0
    assert tokenizer.special.eos_id == 1
    assert tokenizer.special.strings == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"model": {"type": "BPE"}}', b"\xff\xfe"])
def test_a_damaged_tokenizer_file_is_refused_by_name(hf_folder, content):
    (hf_folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
        load_tokenizer(hf_folder)
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_file_is_refused_by_name(hf_folder):
    (hf_folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(hf_folder)
    (hf_folder / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
        load_tokenizer(hf_folder)
