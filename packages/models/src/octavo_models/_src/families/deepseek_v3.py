"""DeepSeek-V3 and R1: latent attention; after the first dense layers, grouped sigmoid routing and shared experts.

The multi-token-prediction layer of a checkpoint is not used.
"""

from __future__ import annotations

from octavo_models._src.families.family import Family
from octavo_models._src.fields import Fields
from octavo_models._src.hf_config import base_config, rope_fields, yarn_mscale
from octavo_models._src.model_config import LatentConfig, ModelConfig, MoEConfig


def _read(fields: Fields, architecture: str) -> ModelConfig:
    latent = LatentConfig(
        q_rank=_q_rank(fields),
        kv_rank=fields.integer("kv_lora_rank", 512),
        nope_dim=fields.integer("qk_nope_head_dim", 128),
        rope_dim=fields.integer("qk_rope_head_dim", 64),
        v_dim=fields.integer("v_head_dim", 128),
        interleaved=_flag(fields, "rope_interleave"),
    )
    if latent.rope_dim % 2:
        raise fields.fail("qk_rope_head_dim", "even for rotary embedding")
    layers, dense = fields.integer("num_hidden_layers"), fields.integer("first_k_dense_replace", 3, least=0)
    # The head size of a file is the rotated part's, and nothing is derived from it: heads have `LatentConfig`'s sizes.
    own = Fields({**fields.values, "head_dim": latent.rope_dim}, fields.source)
    return base_config(
        own,
        architecture,
        width=18432,
        max_len=4096,
        attention_bias=fields.boolean("attention_bias", False),
        attention_scale=_attention_scale(fields, latent),
        latent=latent,
        moe=_moe(fields),
        moe_layers=tuple(layer >= dense for layer in range(layers)),
    )


def _flag(fields: Fields, key: str) -> bool:
    """True where the file does not mention it; null means false."""
    return fields.boolean(key, key not in fields.values)


def _q_rank(fields: Fields) -> int | None:
    """Null: the query projection is not factored; absent: DeepSeek-V3's."""
    return None if fields.values.get("q_lora_rank", 0) is None else fields.integer("q_lora_rank", 1536)


def _attention_scale(fields: Fields, latent: LatentConfig) -> float:
    """YaRN's sharpening acts on all of Q and K here, twice."""
    scale, rope = float(latent.nope_dim + latent.rope_dim) ** -0.5, rope_fields(fields)
    if rope.text("rope_type", rope.text("type", "default")) == "default" or not rope.has("mscale_all_dim"):
        return scale
    factor = rope.number("factor", 1.0)
    return scale * yarn_mscale(factor, rope.number("mscale_all_dim", closed=True)) ** 2


def _moe(fields: Fields) -> MoEConfig:
    experts, width = fields.integer("n_routed_experts", 256), fields.integer("moe_intermediate_size", 2048)
    groups, best = fields.integer("n_group", 8), fields.integer("topk_group", 4)
    if experts % groups or best > groups:
        raise fields.fail("n_group", f"a divisor of 'n_routed_experts' ({experts}) and at least 'topk_group' ({best})")
    return MoEConfig(
        num_experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=width,
        scoring="sigmoid",
        normalise=_flag(fields, "norm_topk_prob"),
        scale=fields.number("routed_scaling_factor", 2.5),
        num_groups=groups,
        groups_per_token=best,
        shared_size=width * fields.integer("n_shared_experts", 1, least=0),
    )


FAMILY = Family(("DeepseekV3ForCausalLM",), ("deepseek_v3",), _read)
