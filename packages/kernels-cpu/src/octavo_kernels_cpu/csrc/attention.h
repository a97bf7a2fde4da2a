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
#include <memory>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace octavo {

constexpr int TILE_KV = 32;      // tokens of context whose scores come at once
constexpr int SPAN = 128;        // tokens of context whose scores become weights at once
constexpr int TILE_ROWS = 24;    // query rows (queries × heads of a KV head) at once
constexpr int WIDEN_ROWS = 6;    // rows from which on bfloat16 K and V are widened once, not for every few rows
constexpr int ROWS_A_THREAD = 4;  // rows from which on a task has all heads of one, for more to fetch ahead
constexpr int MAX_HEAD_DIM = 256;
constexpr float MASKED = -1e30f;

#if OCTAVO_ISA >= OCTAVO_AVX512
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

// Two vectors of a row of keys or values, the first or second of each pair; or of a row of floats.
template <bool PAIRS, int N>
OCTAVO_INLINE void two_or_one(const void* row, bool second, F* out) {
  for (int i = 0; i < N; i++) {
    if constexpr (PAIRS) {
      const I bits = load_bits((const uint32_t*)row + i * W);
      out[i] = second ? high_bf16(bits) : low_bf16(bits);
    } else {
      out[i] = load((const float*)row + i * W);
    }
  }
}

// Sums over even and odd terms apart: what one multiplies the next need not wait for, and all of them fit the registers.
template <int R, int N>
struct Sums {
  F even[R][N], odd[R][N];

  OCTAVO_INLINE void clear_odd() {
    for (int r = 0; r < R; r++)
      for (int i = 0; i < N; i++) odd[r][i] = splat(0.0f);
  }
  // Each row's factor, `stride` apart, with each vector.
  static OCTAVO_INLINE void onto(F (&sum)[R][N], const float* factor, int stride, const F* x) {
    for (int r = 0; r < R; r++) {
      const F a = splat(factor[r * stride]);
      for (int i = 0; i < N; i++) sum[r][i] = fma(a, x[i], sum[r][i]);
    }
  }
};

// Lines of memory a loop fetches while it computes, some in each step: a burst of them would leave the units idle until they are there.
// Rows of `in_row` lines each, `stride` words apart. Nothing where there is no address.
struct Ahead {
  const uint32_t* at = nullptr;
  int in_row = 0, stride = 0, done = 0;

  template <int LINES>
  OCTAVO_INLINE void fetch() {
    if (!at) return;
    for (int i = 0; i < LINES; i++) {
      __builtin_prefetch(at + size_t(done) * 16);
      if (++done == in_row) done = 0, at += stride;
    }
  }
};

// A tile has as many lines of K, and as many of V, as its scores (or sums) take steps of two vectors of eight.
template <int N>
constexpr int LINES = N * W / 16;

// Scores of R rows of q with N W tokens from k on, a row of features (or of pairs of them) `size` words long: s[R][SPAN].
template <bool PAIRS, int R, int N>
OCTAVO_INLINE void score_tile(int dim, int size, const void* k, const float* q, float* s, Ahead& ahead) {
  Sums<R, N> sums;
  sums.clear_odd();
  std::memcpy(&sums.even, &sums.odd, sizeof sums.odd);
  const uint32_t* row = (const uint32_t*)k;
  for (int d = 0; d < dim; d += 2, row += PAIRS ? size : 2 * size) {
    F key[N];
    if (PAIRS) ahead.fetch<LINES<N>>();
    two_or_one<PAIRS, N>(row, false, key);
    sums.onto(sums.even, q + d, dim, key);
    two_or_one<PAIRS, N>(PAIRS ? row : row + size, true, key);
    sums.onto(sums.odd, q + d + 1, dim, key);
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) store(s + r * SPAN + i * W, add(sums.even[r][i], sums.odd[r][i]));
}

// Values of a span's tokens: tiles that lie anywhere, of `tile` tokens each, the last one perhaps not full; and what to fetch beside each.
struct Values {
  const void* at[SPAN / 16];
  int tile, count;
  Ahead ahead[SPAN / 16] = {};
};

// acc[r][0 .. N W) = fade[r] acc + sum over the span's tokens of weight · V, from feature `d` on.
template <bool PAIRS, int R, int N>
OCTAVO_INLINE void weigh_span(int dim, Values& v, int d, const float* weight, const float* fade, float* acc) {
  Sums<R, N> sums;
  sums.clear_odd();
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) sums.even[r][i] = mul(load(acc + r * dim + i * W), splat(fade[r]));
  for (int begin = 0, i = 0; begin < v.count; begin += v.tile, i++) {
    const uint32_t* row = (const uint32_t*)v.at[i] + d;
    const int end = std::min(begin + v.tile, v.count);
    for (int t = begin; t < end; t += 2, row += PAIRS ? dim : 2 * dim) {
      F value[N];
      if (PAIRS) v.ahead[i].fetch<LINES<N>>();
      two_or_one<PAIRS, N>(row, false, value);
      sums.onto(sums.even, weight + t, SPAN, value);
      if (t + 1 == end) break;  // what lies beyond may be anything
      two_or_one<PAIRS, N>(PAIRS ? row : row + dim, true, value);
      sums.onto(sums.odd, weight + t + 1, SPAN, value);
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) store(acc + r * dim + i * W, add(sums.even[r][i], sums.odd[r][i]));
}

template <bool PAIRS, int TILE, int R>
__attribute__((noinline)) void score_rows(int dim, int size, const void* k, const float* q, float* s, Ahead ahead) {
  constexpr int N = std::min(2, TILE / W);
  for (int t = 0; t < TILE; t += N * W) score_tile<PAIRS, R, N>(dim, size, (const uint32_t*)k + t, q, s + t, ahead);
}

template <bool PAIRS, int R>
__attribute__((noinline)) void weigh_rows(int dim, Values& v, const float* weight, const float* fade, float* acc) {
  int d = 0;
  for (; d + 2 * W <= dim; d += 2 * W) weigh_span<PAIRS, R, 2>(dim, v, d, weight, fade, acc + d);
  for (; d < dim; d += W) weigh_span<PAIRS, R, 1>(dim, v, d, weight, fade, acc + d);
}

// `rows` rows of `pairs` pairs of bfloat16, `stride` pairs apart, as two rows of floats each.
OCTAVO_INLINE void widen_pairs(const void* from, int rows, int pairs, int stride, float* to) {
  const uint32_t* in = (const uint32_t*)from;
  for (int r = 0; r < rows; r++, in += stride, to += 2 * pairs)
    for (int i = 0; i < pairs; i += W) {
      const I bits = load_bits(in + i);
      store(to + i, low_bf16(bits));
      store(to + pairs + i, high_bf16(bits));
    }
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
  int row, head, heads, first;
};

// Where a tile of context lies.
template <bool BF16, int TILE>
struct Tile {
  const uint32_t *k, *v;
  int dim, size;

  Tile(const Pools& p, const int* table, int head, int token) : dim(p.head_dim), size(p.block_size) {
    const int id = table[token / size], block = id >= 0 && id < p.num_blocks ? id : 0, offset = token % size;
    if constexpr (BF16) {
      k = (const uint32_t*)p.k_of<uint16_t>(block, head) + offset;
      v = (const uint32_t*)p.v_of<uint16_t>(block, head) + size_t(offset / 2) * dim;
    } else {
      k = (const uint32_t*)p.k_of<float>(block, head) + offset;
      v = (const uint32_t*)p.v_of<float>(block, head) + size_t(offset) * dim;
    }
  }

  // The processor's own prefetching stops at the end of a page, and blocks lie anywhere.
  Ahead ahead_k() const { return BF16 ? Ahead{k, TILE / 16, size} : Ahead{}; }
  Ahead ahead_v() const { return BF16 ? Ahead{v, dim * TILE / 32, 0} : Ahead{}; }
};

// Tokens whose scores become weights at once, so that their values in floats fit the first-level cache.
inline int span_of(int head_dim) { return head_dim <= 64 ? SPAN : head_dim <= 128 ? SPAN / 2 : SPAN / 4; }
constexpr int WIDE = SPAN * 64;

// Scores of all rows with one tile, and what a span weighs; `wide`: room for `WIDE` floats.
template <bool BF16, int TILE>
struct Products {
  int dim, size, rows;
  float* wide;

  bool widens() const { return BF16 && rows >= WIDEN_ROWS; }

  void score(const Tile<BF16, TILE>& tile, const float* q, float* s) const {
    if (widens()) {
      widen_pairs(tile.k, dim / 2, TILE, size, wide);
      score_all<false>(TILE, wide, q, s, {});
    } else {
      score_all<BF16>(size, tile.k, q, s, tile.ahead_v());
    }
  }
  void weigh(Values& v, const float* weight, const float* fade, float* acc) const {
    if (widens()) {
      for (int i = 0; i * TILE < v.count; i++) widen_pairs(v.at[i], TILE / 2, dim, dim, wide + i * TILE * dim);
      Values all{{wide}, v.count, v.count};
      weigh_all<false>(all, weight, fade, acc);
    } else {
      weigh_all<BF16>(v, weight, fade, acc);
    }
  }

 private:
  template <bool PAIRS>
  void score_all(int size, const void* k, const float* q, float* s, Ahead ahead) const {
    in_registers<ROWS_IN_REGISTERS>(0, rows, [&](int r, auto some) {
      score_rows<PAIRS, TILE, decltype(some)::value>(dim, size, k, q + r * dim, s + r * SPAN, r ? Ahead{} : ahead);
    });
  }
  template <bool PAIRS>
  void weigh_all(Values& v, const float* weight, const float* fade, float* acc) const {
    in_registers<ROWS_IN_REGISTERS>(0, rows, [&](int r, auto some) {
      weigh_rows<PAIRS, decltype(some)::value>(dim, v, weight + r * SPAN, fade + r, acc + r * dim);
    });
  }
};

// Queries [first, first + count) of a row with one KV head after another.
template <bool BF16, int TILE>
void attend_item(const Pools& p, const Batch& b, int heads, float scale, const float* q, float* out, Item item, int count) {
  const int group = heads / p.kv_heads, dim = p.head_dim, rows = count * group;
  alignas(64) float query[TILE_ROWS * MAX_HEAD_DIM], acc[TILE_ROWS * MAX_HEAD_DIM], s[TILE_ROWS * SPAN], wide[WIDE];
  float top[TILE_ROWS], total[TILE_ROWS], fade[TILE_ROWS];
  const int token = b.query_start[item.row] + item.first;
  const int* table = b.block_table + size_t(item.row) * b.max_blocks;
  const int capacity = b.max_blocks * p.block_size;
  // Context visible to the first query; each later one sees one token more.
  const int length = b.context_len[item.row] - (b.query_start[item.row + 1] - b.query_start[item.row]) + item.first + 1;
  const int end = std::min(length + count - 1, capacity);
  const Products<BF16, TILE> products{dim, p.block_size, rows, wide};
  const int span = span_of(dim);
  for (int head = item.head; head < item.head + item.heads; head++) {
    for (int i = 0; i < count; i++)
      for (int g = 0; g < group; g++) {
        const float* from = q + (size_t(token + i) * heads + head * group + g) * dim;
        for (int d = 0; d < dim; d += W) store(query + (i * group + g) * dim + d, mul(load(from + d), splat(scale)));
      }
    std::memset(acc, 0, size_t(rows) * dim * 4);
    std::fill(top, top + rows, MASKED);
    std::fill(total, total + rows, 0.0f);
    for (int begin = 0; begin < end; begin += span) {
      const int stop = std::min(begin + span, end);
      const bool is_last = stop == end;
      const int next = is_last ? 0 : stop, next_head = is_last ? head + 1 : head;
      Values values{{}, TILE, stop - begin};
      int tiles = 0;
      for (int t = begin; t < stop; t += TILE, tiles++) {
        const Tile<BF16, TILE> tile(p, table, head, t);
        products.score(tile, query, s + tiles * TILE);
        values.at[tiles] = tile.v;
        if (next_head < item.head + item.heads && next + t - begin < end)
          values.ahead[tiles] = Tile<BF16, TILE>(p, table, next_head, next + t - begin).ahead_k();
      }
      for (int r = 0; r < rows; r++)
        fade[r] = soften(s + r * SPAN, std::min(length + r / group, end) - begin, tiles * TILE, top[r], total[r]);
      products.weigh(values, s, fade, acc);
    }
    for (int i = 0; i < count; i++)
      for (int g = 0; g < group; g++) {
        const int r = i * group + g;
        float* to = out + (size_t(token + i) * heads + head * group + g) * dim;
        const F by = splat(total[r] > 0 ? total[r] : 1.0f);
        for (int d = 0; d < dim; d += W) store(to + d, div(load(acc + r * dim + d), by));
      }
  }
}

}  // namespace octavo

#if OCTAVO_ISA == OCTAVO_AMX
#include "attention_tiles.h"
#else
namespace octavo {
constexpr int PROMPT_QUERIES = TILE_ROWS;
inline bool has_attention_tiles(const Pools&, int) { return false; }
inline void attend_prompt(const Pools&, const Batch&, int, float, const float*, float*, int, int, int, int) {}
}  // namespace octavo
#endif

namespace octavo {

// Attention of every live token; what lies beyond the last is left as it is.
inline void attend(Team& team, const Pools& p, const Batch& b, int heads, float scale, const float* q, float* out) {
  const int group = heads / p.kv_heads;
  const bool tiles = has_attention_tiles(p, group);
  auto at_once = [&](int queries) { return std::max(1, (tiles && queries > 1 ? PROMPT_QUERIES : TILE_ROWS) / group); };
  std::vector<Item> items;
  const bool many = b.num_rows >= ROWS_A_THREAD * team.threads();
  for (int row = 0; row < b.num_rows; row++) {
    const int queries = b.query_start[row + 1] - b.query_start[row], together = many && queries == 1 ? p.kv_heads : 1;
    for (int first = 0; first < queries; first += at_once(queries))
      for (int head = 0; head < p.kv_heads; head += together) items.push_back({row, head, together, first});
  }
  team.run(int(items.size()), [&](int i) {
    const Item item = items[i];
    const int queries = b.query_start[item.row + 1] - b.query_start[item.row], count = std::min(at_once(queries), queries - item.first);
    if (tiles && queries > 1) return attend_prompt(p, b, heads, scale, q, out, item.row, item.head, item.first, count);
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
