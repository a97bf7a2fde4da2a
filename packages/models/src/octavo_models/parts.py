"""What layers are made of, for those who write another: each computes, and says by `weight_parts` which tensors it is made of."""

from octavo_models._src.attention import Attention
from octavo_models._src.latent_attention import LatentAttention
from octavo_models._src.layers import Embedding, Linear, RMSNorm
from octavo_models._src.mlp import GatedMLP
from octavo_models._src.moe import MoE
from octavo_models._src.rope import inverse_frequencies, rotate, rotation

__all__ = [
    "Attention",
    "Embedding",
    "GatedMLP",
    "LatentAttention",
    "Linear",
    "MoE",
    "RMSNorm",
    "inverse_frequencies",
    "rotate",
    "rotation",
]
