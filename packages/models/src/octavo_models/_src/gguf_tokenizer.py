"""A tokenizer from GGUF metadata.

Knows the vocabularies `gpt2` (byte-level BPE, with its pre-tokenizers) and `llama` (SentencePiece BPE with scores). Decides nothing
about special tokens at encode time; `Tokenizer` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from octavo_core.errors import CheckpointError, UnsupportedModelError
from octavo_models._src.fields import Fields
from octavo_models._src.tokenizer import SpecialTokens, Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE_MARK: Final = "▁"
_ROLES: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "seperator"}

# What Llama 3 and Qwen 2 treat as one word before merging; the published patterns of their tokenizer.json files.
_LLAMA3_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS: Final = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2: Final = ("default", "gpt-2", "gpt2")
_DIGITS: Final = ("smollm", "starcoder")
_LLAMA3: Final = ("llama-bpe", "llama3", "llama-v3")


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, source: str) -> Tokenizer:
    """Build the tokenizer that a GGUF file's metadata describe; `source` names the file in errors.

    Raises:
        CheckpointError: When a key is missing or contradicts another.
        UnsupportedModelError: When the vocabulary or its pre-tokenizer is of a kind not built here.
    """
    fields = Fields(metadata, source)
    kind = fields.text("tokenizer.ggml.model")
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    if kind == "gpt2":
        backend = _byte_level(fields, tokens)
    elif kind == "llama":
        backend = _sentencepiece(fields, tokens)
    else:
        raise UnsupportedModelError(f"{source}: tokenizer '{kind}' is not served; this version serves 'gpt2' and 'llama'")
    _add_special(fields, backend, tokens)
    return Tokenizer(backend, _special(fields, tokens, sentencepiece=kind == "llama"))


def _strings(fields: Fields, key: str) -> list[str]:
    values = fields.values.get(key)
    if not isinstance(values, list) or not values or not all(isinstance(v, str) for v in values):
        raise CheckpointError(f"{fields.source}: '{key}' must be a list of strings")
    return values


def _vocabulary(fields: Fields, tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{fields.source}: 'tokenizer.ggml.tokens' names {len(tokens) - len(vocabulary)} tokens twice")
    return vocabulary


def _byte_level(fields: Fields, tokens: list[str]) -> Backend:
    vocabulary = _vocabulary(fields, tokens)
    merges = [_merge(fields.source, rule, vocabulary) for rule in _strings(fields, "tokenizer.ggml.merges")]
    rule = fields.text("tokenizer.ggml.pre", "default")
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=rule in _LLAMA3))
    backend.pre_tokenizer = _words(fields.source, rule)
    if rule == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _merge(source: str, rule: str, vocabulary: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = rule.partition(" ")
    if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
        raise CheckpointError(f"{source}: 'tokenizer.ggml.merges' holds '{rule}', whose parts or result are no tokens")
    return left, right


def _words(source: str, rule: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging."""
    if rule in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    if rule in _LLAMA3 or rule == "qwen2":
        pattern = Regex(_QWEN2_WORDS if rule == "qwen2" else _LLAMA3_WORDS)
        split = pre_tokenizers.Split(pattern, behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    served = ", ".join([*_GPT2, *_DIGITS, *_LLAMA3, "qwen2"])
    raise UnsupportedModelError(
        f"{source}: pre-tokenizer '{rule}' ('tokenizer.ggml.pre') is not served; this version serves {served}"
    )


def _sentencepiece(fields: Fields, tokens: list[str]) -> Backend:
    vocabulary = _vocabulary(fields, tokens)
    scores = fields.values.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{fields.source}: 'tokenizer.ggml.scores' must be a list as long as the tokens ({len(tokens)})")
    unknown = fields.integer("tokenizer.ggml.unknown_token_id", 0, least=0)
    if unknown >= len(tokens):
        raise CheckpointError(f"{fields.source}: 'tokenizer.ggml.unknown_token_id' {unknown} is outside the vocabulary")
    merges = merges_from_scores(vocabulary, scores)
    backend = Backend(models.BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    prefix = fields.boolean("tokenizer.ggml.add_space_prefix", True)
    mark = normalizers.Replace(" ", _SPACE_MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), mark]) if prefix else mark
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def merges_from_scores(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Merge rules equivalent to SentencePiece's: of all neighbouring pairs that form a token, the best-scored one merges first.

    Every cut of a token into two tokens is a rule; rules are ranked by the token's score, then by the parts' ids.
    """
    rules = []
    for token, token_id in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                rules.append((-scores[token_id], left, right, token[:cut], token[cut:]))
    return [(left, right) for _, _, _, left, right in sorted(rules)]


def _add_special(fields: Fields, backend: Backend, tokens: list[str]) -> None:
    """Tokens that are recognised in text before merging: control tokens and those the model's maker defined."""
    kinds = fields.values.get("tokenizer.ggml.token_type")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise CheckpointError(f"{fields.source}: 'tokenizer.ggml.token_type' must be a list as long as the tokens ({len(tokens)})")
    pairs = list(zip(tokens, kinds, strict=True))
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in pairs if k in (_UNKNOWN, _CONTROL)])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in pairs if k == _USER_DEFINED])


def _special(fields: Fields, tokens: list[str], *, sentencepiece: bool) -> SpecialTokens:
    ids = {role: fields.token_ids(f"tokenizer.ggml.{name}_token_id") for role, name in _ROLES.items()}
    for role, found in ids.items():
        if found and found[0] >= len(tokens):
            raise CheckpointError(f"{fields.source}: the id of '{role}', {found[0]}, is outside the vocabulary of {len(tokens)}")
    return SpecialTokens(
        bos_id=ids["bos_token"][0] if ids["bos_token"] else None,
        eos_id=ids["eos_token"][0] if ids["eos_token"] else None,
        add_bos=fields.boolean("tokenizer.ggml.add_bos_token", sentencepiece or fields.values.get("tokenizer.ggml.pre") in _LLAMA3),
        add_eos=fields.boolean("tokenizer.ggml.add_eos_token", False),
        strings={role: tokens[found[0]] for role, found in ids.items() if found},
    )
