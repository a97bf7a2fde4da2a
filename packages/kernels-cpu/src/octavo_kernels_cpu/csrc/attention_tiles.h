// Paged attention of prompts on AMX tiles, over bfloat16 KV. Included by attention.h where the machine has them.
//
// Blocks lie as tiles want them: 32 features of 16 keys, and 32 tokens of 16 features of values, are a tile each. Queries and weights are
// rounded to bfloat16, sums are float32. The context is walked in spans that begin at multiples of a span, so a token's answer does not
// depend on the chunk it comes in.
#pragma once
#include "tiles.h"

namespace octavo {

constexpr int PROMPT_QUERIES = 64;  // query rows at once: four tiles
constexpr int PROMPT_SPAN = 128;    // tokens of context whose scores become weights at once

inline bool has_attention_tiles(const Pools& p, int group) { return p.bf16 && p.head_dim % 32 == 0 && p.block_size % 32 == 0 && group <= PROMPT_QUERIES; }

// 2^x for x ≤ 0 with a relative error below 4e-6, far below bfloat16's. Source: the Taylor series of 2^f on |f| ≤ 1/2.
OCTAVO_INLINE F exp2_short(F x) {
  x = max(x, splat(-126.0f));
  const F n = nearest(x), f = sub(x, n);
  F p = splat(1.3333558e-3f);
  p = fma(p, f, splat(9.6181291e-3f));
  p = fma(p, f, splat(5.5504109e-2f));
  p = fma(p, f, splat(2.4022651e-1f));
  p = fma(p, f, splat(6.9314718e-1f));
  p = fma(p, f, splat(1.0f));
  return {_mm512_scalef_ps(p.v, n.v)};
}

OCTAVO_INLINE void round_to_bf16(F x, uint16_t* y) {
  const __m256bh bits = _mm512_cvtneps_pbh(x.v);
  std::memcpy(y, &bits, 32);
}

// One item's state: its queries in bfloat16, scores and weights of a span, sums, and what is known of each row.
struct PromptItem {
  alignas(64) uint16_t query[PROMPT_QUERIES * MAX_HEAD_DIM];
  alignas(64) uint16_t weight[PROMPT_QUERIES * PROMPT_SPAN];
  alignas(64) float score[PROMPT_QUERIES * PROMPT_SPAN];
  alignas(64) float sum[PROMPT_QUERIES * MAX_HEAD_DIM];
  alignas(64) uint32_t last[16 * MAX_HEAD_DIM];  // values of the context's last tokens, with zeros behind them
  float top[PROMPT_QUERIES], total[PROMPT_QUERIES];

  // Two tiles of keys with one of queries: 16 rows of scores of 32 tokens.
  void scores(const uint32_t* k, int dim, int size, const uint16_t* q, float* s) const {
    const size_t key_line = size_t(size) * 4, query_line = size_t(dim) * 2, score_line = PROMPT_SPAN * 4;
    asm volatile("tilezero %%tmm0\n\ttilezero %%tmm1" ::: "memory");
    for (int d = 0; d < dim; d += 32, k += size_t(16) * size)
      asm volatile("tileloadd (%0,%1,1), %%tmm4\n\ttileloadd (%2,%3,1), %%tmm5\n\ttileloadd 64(%2,%3,1), %%tmm6\n\t"
                   "tdpbf16ps %%tmm5, %%tmm4, %%tmm0\n\ttdpbf16ps %%tmm6, %%tmm4, %%tmm1"
                   :
                   : "r"(q + d), "r"(query_line), "r"(k), "r"(key_line)
                   : "memory");
    asm volatile("tilestored %%tmm0, (%0,%1,1)\n\ttilestored %%tmm1, 64(%0,%1,1)" ::"r"(s), "r"(score_line) : "memory");
  }

  // Adds a span's values, `tiles` times 32 tokens, to 16 features of 16 rows.
  void values(const uint32_t* const* v, int tiles, int dim, int d, const uint16_t* w, float* to) const {
    const size_t value_line = size_t(dim) * 4, weight_line = PROMPT_SPAN * 2;
    asm volatile("tileloadd (%0,%1,1), %%tmm0" ::"r"(to), "r"(value_line) : "memory");
    for (int i = 0; i < tiles; i++)
      asm volatile("tileloadd (%0,%1,1), %%tmm4\n\ttileloadd (%2,%3,1), %%tmm5\n\ttdpbf16ps %%tmm5, %%tmm4, %%tmm0"
                   :
                   : "r"(w + i * 32), "r"(weight_line), "r"(v[i] + d), "r"(value_line)
                   : "memory");
    asm volatile("tilestored %%tmm0, (%0,%1,1)" ::"r"(to), "r"(value_line) : "memory");
  }

  // Scores of row `r`, of which `live` are visible, become weights; what was summed before fades.
  OCTAVO_INLINE void soften(int r, int live, int count, int dim) {
    float* s = score + r * PROMPT_SPAN;
    F best = splat(MASKED);
    for (int t = 0; t < count; t += W) best = max(first_lanes(live - t, load(s + t), splat(MASKED)), best);
    const float new_top = std::max(top[r], max_lanes(best));
    F all = splat(0.0f);
    for (int t = 0; t < count; t += W) {
      const F weight_of = first_lanes(live - t, exp2_short(sub(load(s + t), splat(new_top))), splat(0.0f));
      round_to_bf16(weight_of, weight + r * PROMPT_SPAN + t);
      all = add(all, weight_of);
    }
    if (top[r] != new_top) {
      const F fade = exp2_short(splat(top[r] - new_top));
      for (int d = 0; d < dim; d += W) store(sum + r * dim + d, mul(load(sum + r * dim + d), fade));
      total[r] *= first_lane(fade);
      top[r] = new_top;
    }
    total[r] += sum_lanes(all);
  }
};

// Queries [first, first + count) of a row with one KV head.
inline void attend_prompt(const Pools& p, const Batch& b, int heads, float scale, const float* q, float* out, int row, int head, int first, int count) {
  static thread_local std::unique_ptr<PromptItem> kept;
  if (!kept) kept.reset(new PromptItem());
  PromptItem& item = *kept;
  const int group = heads / p.kv_heads, dim = p.head_dim, size = p.block_size, rows = count * group, tiles = (rows + 15) / 16;
  const int token = b.query_start[row] + first;
  const int* table = b.block_table + size_t(row) * b.max_blocks;
  const int length = b.context_len[row] - (b.query_start[row + 1] - b.query_start[row]) + first + 1;  // visible to the first query
  const int end = std::min(length + count - 1, b.max_blocks * size);
  const F by = splat(scale * 1.44269504f);
  for (int r = 0; r < rows; r++) {
    const float* from = q + (size_t(token + r / group) * heads + head * group + r % group) * dim;
    for (int d = 0; d < dim; d += W) round_to_bf16(mul(load(from + d), by), item.query + r * dim + d);
  }
  std::memset(item.query + rows * dim, 0, size_t(tiles * 16 - rows) * dim * 2);
  std::memset(item.sum, 0, size_t(tiles) * 16 * dim * 4);
  std::memset(item.weight, 0, sizeof item.weight);
  std::fill(item.top, item.top + rows, MASKED);
  std::fill(item.total, item.total + rows, 0.0f);
  const TileShapes shapes;
  for (int begin = 0; begin < end; begin += PROMPT_SPAN) {
    const int stop = std::min(begin + PROMPT_SPAN, end), parts = (stop - begin + 31) / 32;
    const uint32_t* v[PROMPT_SPAN / 32];
    for (int i = 0; i < parts; i++) {
      const Tile<true, 32> tile(p, table, head, begin + i * 32);
      v[i] = tile.v;
      for (int t = 0; t < tiles; t++) item.scores(tile.k, dim, size, item.query + t * 16 * dim, item.score + t * 16 * PROMPT_SPAN + i * 32);
    }
    if (const int some = (stop - begin) % 32) {  // what lies beyond the context may be anything
      const uint32_t* from = v[parts - 1];
      for (int pair = 0; pair < 16; pair++)
        for (int d = 0; d < dim; d += W) {
          const __m512i mask = _mm512_set1_epi32(2 * pair + 1 < some ? -1 : 2 * pair < some ? 0xffff : 0);
          store_bits(item.last + pair * dim + d, {_mm512_and_si512(load_bits(from + pair * dim + d).v, mask)});
        }
      v[parts - 1] = item.last;
    }
    for (int r = 0; r < rows; r++) item.soften(r, std::min(length + r / group, end) - begin, parts * 32, dim);
    for (int t = 0; t < tiles; t++)
      for (int d = 0; d < dim; d += 16) item.values(v, parts, dim, d, item.weight + t * 16 * PROMPT_SPAN, item.sum + t * 16 * dim + d);
  }
  for (int r = 0; r < rows; r++) {
    float* to = out + (size_t(token + r / group) * heads + head * group + r % group) * dim;
    const F total = splat(item.total[r] > 0 ? item.total[r] : 1.0f);
    for (int d = 0; d < dim; d += W) store(to + d, div(load(item.sum + r * dim + d), total));
  }
}

}  // namespace octavo
