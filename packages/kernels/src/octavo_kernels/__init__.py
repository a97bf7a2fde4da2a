"""Paged attention and sampling, each behind a seam of `octavo_core.seams`.

Attention: `attention_backend` chooses among backends in order; `ReferenceAttention` is the float32 oracle.
Sampling: `RowSampler` draws tokens on the device, `score_tokens` scores given ones.
"""

from octavo_kernels._src.cpu import cpu_layers
from octavo_kernels._src.dispatch import BACKENDS, AttentionChoice, PassedOver, attend_rules, attention_backend
from octavo_kernels._src.reference_attention import ReferenceAttention
from octavo_kernels._src.sampler import RowSampler, SamplerParams, SamplerState
from octavo_kernels._src.scores import score_tokens

__version__ = "0.1.0"

__all__ = [
    "BACKENDS",
    "AttentionChoice",
    "PassedOver",
    "ReferenceAttention",
    "RowSampler",
    "SamplerParams",
    "SamplerState",
    "attend_rules",
    "attention_backend",
    "cpu_layers",
    "score_tokens",
]
