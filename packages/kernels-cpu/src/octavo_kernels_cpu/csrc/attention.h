// Paged attention over blocks laid out for it, and writing into them.
//
// One layer's pools, for each block and KV head:
//   K  float32 [head_dim][block_size]         bfloat16 [head_dim / 2][block_size][2]
//   V  float32 [block_size][head_dim]         bfloat16 [block_size / 2][head_dim][2]
// K lies feature by feature, so the scores of W tokens come from one load and no sum across lanes.
//
// A row's answer is computed tile by tile of context in one fixed order, whether it decodes or is part of a prompt: it does not depend on
// its neighbours. Source: online softmax after Milakov and Gimelshein (2018).
#pragma once
#include <algorithm>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace octavo {

constexpr int TILE_KV = 32;      // tokens of context at once
constexpr int TILE_ROWS = 24;    // query rows (queries × heads of a KV head) at once
constexpr int MAX_HEAD_DIM = 256;
constexpr float MASKED = -1e30f;

#if OCTAVO_ISA == OCTAVO_AVX512
constexpr int ROWS_IN_REGISTERS = 6;
#else
constexpr int ROWS_IN_REGISTERS = 3;
#endif

struct Pools {
  void *k, *v;
  bool bf16;
  int num_blocks, kv_heads, head_dim, block_size;

  size_t head_elements() const { return size_t(head_dim) * block_size; }
  template <class T>
  T* k_of(int block, int head) const { return (T*)k + (size_t(block) * kv_heads + head) * head_elements(); }
  template <class T>
  T* v_of(int block, int head) const { return (T*)v + (size_t(block) * kv_heads + head) * head_elements(); }
};

struct Batch {
  const int *query_start, *context_len, *block_table;  // [rows + 1], [rows], [rows, max_blocks]
  int num_rows, max_blocks, tokens;
};

// Scores of R rows of q with tokens [offset, offset + NT W) of a block: s[R][TILE_KV].
template <bool BF16, int R, int NT>
OCTAVO_INLINE void score_tile(const Pools& p, const void* k, int offset, const float* q, float* s) {
  F acc[R][NT];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < NT; t++) acc[r][t] = splat(0.0f);
  const int dim = p.head_dim, size = p.block_size;
  if constexpr (BF16) {
    const uint32_t* pairs = (const uint32_t*)k + offset;
    for (int d = 0; d < dim; d += 2, pairs += size) {
      I bits[NT];
      for (int t = 0; t < NT; t++) bits[t] = load_bits(pairs + t * W);
      for (int r = 0; r < R; r++)
        for (int t = 0; t < NT; t++) acc[r][t] = fma(splat(q[r * dim + d]), low_bf16(bits[t]), acc[r][t]);
      for (int r = 0; r < R; r++)
        for (int t = 0; t < NT; t++) acc[r][t] = fma(splat(q[r * dim + d + 1]), high_bf16(bits[t]), acc[r][t]);
    }
  } else {
    const float* row = (const float*)k + offset;
    for (int d = 0; d < dim; d++, row += size) {
      F key[NT];
      for (int t = 0; t < NT; t++) key[t] = load(row + t * W);
      for (int r = 0; r < R; r++)
        for (int t = 0; t < NT; t++) acc[r][t] = fma(splat(q[r * dim + d]), key[t], acc[r][t]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < NT; t++) store(s + r * TILE_KV + t * W, acc[r][t]);
}

// acc[r][d0 .. d0 + ND W) = fade[r] acc + sum over the tile's first `count` tokens of weight · V.
template <bool BF16, int R, int ND>
OCTAVO_INLINE void weigh_tile(const Pools& p, const void* v, int offset, int count, const float* weight, const float* fade, int d0, float* acc) {
  const int dim = p.head_dim;
  F sum[R][ND];
  for (int r = 0; r < R; r++)
    for (int d = 0; d < ND; d++) sum[r][d] = mul(load(acc + r * dim + d0 + d * W), splat(fade[r]));
  if constexpr (BF16) {
    const uint32_t* pairs = (const uint32_t*)v + size_t(offset / 2) * dim + d0;
    for (int t = 0; t < count; t += 2, pairs += dim) {
      I bits[ND];
      for (int d = 0; d < ND; d++) bits[d] = load_bits(pairs + d * W);
      for (int r = 0; r < R; r++)
        for (int d = 0; d < ND; d++) sum[r][d] = fma(splat(weight[r * TILE_KV + t]), low_bf16(bits[d]), sum[r][d]);
      if (t + 1 == count) break;  // what lies beyond may be anything
      for (int r = 0; r < R; r++)
        for (int d = 0; d < ND; d++) sum[r][d] = fma(splat(weight[r * TILE_KV + t + 1]), high_bf16(bits[d]), sum[r][d]);
    }
  } else {
    const float* row = (const float*)v + size_t(offset) * dim + d0;
    for (int t = 0; t < count; t++, row += dim) {
      F value[ND];
      for (int d = 0; d < ND; d++) value[d] = load(row + d * W);
      for (int r = 0; r < R; r++)
        for (int d = 0; d < ND; d++) sum[r][d] = fma(splat(weight[r * TILE_KV + t]), value[d], sum[r][d]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int d = 0; d < ND; d++) store(acc + r * dim + d0 + d * W, sum[r][d]);
}

template <bool BF16, int NT, int R>
__attribute__((noinline)) void score_rows(const Pools& p, const void* k, int offset, const float* q, float* s) {
  score_tile<BF16, R, NT>(p, k, offset, q, s);
}

template <bool BF16, int R>
__attribute__((noinline)) void weigh_rows(const Pools& p, const void* v, int offset, int count, const float* weight, const float* fade,
                                          float* acc) {
  int d = 0;
  for (; d + 4 * W <= p.head_dim; d += 4 * W) weigh_tile<BF16, R, 4>(p, v, offset, count, weight, fade, d, acc);
  for (; d < p.head_dim; d += W) weigh_tile<BF16, R, 1>(p, v, offset, count, weight, fade, d, acc);
}

// fn(first row, integral constant: how many) over all rows, as many at once as the registers hold.
template <int R, class Fn>
OCTAVO_INLINE void in_registers(int first, int rows, Fn&& fn) {
  for (; first + R <= rows; first += R) fn(first, std::integral_constant<int, R>());
  if constexpr (R > 1) in_registers<R - 1>(first, rows, fn);
}

// Turns scores of `live` visible tokens into weights; answers by how much what was summed before fades. Keeps maximum and sum.
OCTAVO_INLINE float soften(float* s, int live, int tile, float& top, float& total) {
  F best = splat(MASKED);
  for (int t = 0; t < tile; t += W) {
    const F masked = first_lanes(live - t, load(s + t), splat(MASKED));
    store(s + t, masked);
    best = max(masked, best);
  }
  const float new_top = std::max(top, max_lanes(best));
  F sum = splat(0.0f);
  for (int t = 0; t < tile; t += W) {
    const F weight = first_lanes(live - t, exp_(sub(load(s + t), splat(new_top))), splat(0.0f));
    store(s + t, weight);
    sum = add(sum, weight);
  }
  const float fade = top == new_top ? 1.0f : first_lane(exp_(splat(top - new_top)));
  total = total * fade + sum_lanes(sum);
  top = new_top;
  return fade;
}

struct Item {
  int row, head, first;
};

// Queries [first, first + count) of a row with one KV head.
template <bool BF16, int TILE>
void attend_item(const Pools& p, const Batch& b, int heads, float scale, const float* q, float* out, Item item, int count) {
  const int group = heads / p.kv_heads, dim = p.head_dim, rows = count * group;
  alignas(64) float query[TILE_ROWS * MAX_HEAD_DIM], acc[TILE_ROWS * MAX_HEAD_DIM], s[TILE_ROWS * TILE_KV];
  float top[TILE_ROWS], total[TILE_ROWS], fade[TILE_ROWS];
  const int token = b.query_start[item.row] + item.first;
  const int* table = b.block_table + size_t(item.row) * b.max_blocks;
  const int capacity = b.max_blocks * p.block_size;
  // Context visible to the first query; each later one sees one token more.
  const int length = b.context_len[item.row] - (b.query_start[item.row + 1] - b.query_start[item.row]) + item.first + 1;
  const int end = std::min(length + count - 1, capacity);
  for (int i = 0; i < count; i++)
    for (int g = 0; g < group; g++) {
      const float* from = q + (size_t(token + i) * heads + item.head * group + g) * dim;
      for (int d = 0; d < dim; d += W) store(query + (i * group + g) * dim + d, mul(load(from + d), splat(scale)));
    }
  std::memset(acc, 0, size_t(rows) * dim * 4);
  std::fill(top, top + rows, MASKED);
  std::fill(total, total + rows, 0.0f);
  for (int t = 0; t < end; t += TILE) {
    const int id = table[t / p.block_size], block = id >= 0 && id < p.num_blocks ? id : 0, offset = t % p.block_size;
    const void *k = BF16 ? (const void*)p.k_of<uint16_t>(block, item.head) : p.k_of<float>(block, item.head);
    const void *v = BF16 ? (const void*)p.v_of<uint16_t>(block, item.head) : p.v_of<float>(block, item.head);
    in_registers<ROWS_IN_REGISTERS>(0, rows, [&](int r, auto some) {
      score_rows<BF16, TILE / W, decltype(some)::value>(p, k, offset, query + r * dim, s + r * TILE_KV);
    });
    for (int r = 0; r < rows; r++) fade[r] = soften(s + r * TILE_KV, std::min(length + r / group, end) - t, TILE, top[r], total[r]);
    in_registers<ROWS_IN_REGISTERS>(0, rows, [&](int r, auto some) {
      weigh_rows<BF16, decltype(some)::value>(p, v, offset, std::min(TILE, end - t), s + r * TILE_KV, fade + r, acc + r * dim);
    });
  }
  for (int i = 0; i < count; i++)
    for (int g = 0; g < group; g++) {
      const int r = i * group + g;
      float* to = out + (size_t(token + i) * heads + item.head * group + g) * dim;
      const F by = splat(total[r] > 0 ? total[r] : 1.0f);
      for (int d = 0; d < dim; d += W) store(to + d, div(load(acc + r * dim + d), by));
    }
}

// Attention of every live token; what lies beyond the last is left as it is.
inline void attend(Team& team, const Pools& p, const Batch& b, int heads, float scale, const float* q, float* out) {
  const int at_once = std::max(1, TILE_ROWS / (heads / p.kv_heads));
  std::vector<Item> items;
  for (int row = 0; row < b.num_rows; row++)
    for (int first = 0; first < b.query_start[row + 1] - b.query_start[row]; first += at_once)
      for (int head = 0; head < p.kv_heads; head++) items.push_back({row, head, first});
  team.run(int(items.size()), [&](int i) {
    const Item item = items[i];
    const int count = std::min(at_once, b.query_start[item.row + 1] - b.query_start[item.row] - item.first);
    auto run = [&](auto bf16, auto tile) {
      attend_item<decltype(bf16)::value, decltype(tile)::value>(p, b, heads, scale, q, out, item, count);
    };
    auto sized = [&](auto bf16) {
      p.block_size % 32 ? run(bf16, std::integral_constant<int, 16>()) : run(bf16, std::integral_constant<int, 32>());
    };
    p.bf16 ? sized(std::true_type()) : sized(std::false_type());
  });
}

template <class T>
OCTAVO_INLINE T stored(float x) {
  if constexpr (sizeof(T) == 2)
    return bf16_bits(x);
  else
    return x;
}

// Stores K or V of consecutive tokens [first, last), whose slots follow one another within a block.
template <class T, bool IS_K>
void write_run(const Pools& p, int head, int slot, int first, int last, const float* x) {
  constexpr int PAIR = sizeof(T) == 2 ? 2 : 1;
  const int dim = p.head_dim, size = p.block_size, offset = slot % size;
  T* to = IS_K ? p.k_of<T>(slot / size, head) : p.v_of<T>(slot / size, head);
  for (int t = first; t < last; t++) {
    const float* from = x + (size_t(t) * p.kv_heads + head) * dim;
    const int at = offset + t - first;
    for (int d = 0; d < dim; d++) {
      const size_t element = IS_K ? (size_t(d / PAIR) * size + at) * PAIR + d % PAIR : (size_t(at / PAIR) * dim + d) * PAIR + at % PAIR;
      to[element] = stored<T>(from[d]);
    }
  }
}

// Stores K and V of the first `tokens` tokens; slots outside the pool are skipped.
inline void write(Team& team, const Pools& p, int tokens, const int* slots, const float* k, const float* v) {
  const int num_slots = p.num_blocks * p.block_size;
  auto task = [&](int i) {
    const int head = i / 2;
    for (int t = 0; t < tokens;) {
      const int slot = slots[t];
      if (slot < 0 || slot >= num_slots) {
        t++;
        continue;
      }
      const int room = p.block_size - slot % p.block_size;
      int end = t + 1;
      while (end < tokens && end - t < room && slots[end] == slot + end - t) end++;
      if (p.bf16)
        i % 2 ? write_run<uint16_t, false>(p, head, slot, t, end, v) : write_run<uint16_t, true>(p, head, slot, t, end, k);
      else
        i % 2 ? write_run<float, false>(p, head, slot, t, end, v) : write_run<float, true>(p, head, slot, t, end, k);
      t = end;
    }
  };
  if (tokens <= 4)
    for (int i = 0; i < 2 * p.kv_heads; i++) task(i);
  else
    team.run(2 * p.kv_heads, task);
}

}  // namespace octavo
