// Products of prompt tokens on AMX tiles in bfloat16. Included by layer.h where the machine has them.
//
// Many tokens share a weight, so it pays to widen a panel once, to bfloat16, and to sum over all inputs within the tiles: no scale is
// looked at again. Each result is a sum in one order, whatever tokens come together. Knows rows and panels; knows no layer.
#pragma once
#include <algorithm>
#include <vector>

#include "tiles.h"

namespace octavo {

constexpr int PROMPT_ROWS = 128;    // tokens that a panel's weights meet while they are in the first-level cache
constexpr int PROMPT_BLOCK = 512;   // tokens for which a panel is widened once: their rows stay in the second-level cache
constexpr int K_TILE = 32;          // inputs of a tile
constexpr int TILE_BYTES = 1024;
constexpr int STEPS_AT_ONCE = 20;   // tiles of inputs of two panels that the first-level cache holds, nearly

// Whether prompts may go this way; float32 weights stay exact.
constexpr bool has_prompt_tiles(Format format, int inputs) { return HAS_TILES && format != Format::F32 && inputs % K_TILE == 0; }

inline size_t prompt_bytes(Format format, int rows, int inputs) {
  return has_prompt_tiles(format, inputs) ? size_t(padded_rows(rows)) * inputs * 2 : 0;
}

// Inputs [input, input + 16) of a row as bfloat16, in tiles of 16 rows and 32 inputs.
OCTAVO_INLINE void to_tile(F x, int row, int input, int inputs, uint16_t* tiles) {
  const __m256bh bits = _mm512_cvtneps_pbh(x.v);
  std::memcpy(tiles + (size_t(row / 16) * inputs + input / K_TILE * K_TILE) * 16 + row % 16 * K_TILE + input % K_TILE, &bits, 32);
}

// Two vectors of floats as W pairs of bfloat16, rounded to nearest.
OCTAVO_INLINE __m512i pairs_of(__m512 low, __m512 high) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i a = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(low), half), 16);
  const __m512i b = _mm512_add_epi32(_mm512_castps_si512(high), half);
  return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi32(int(0xffff0000u)), 0xf8);  // a | (b & mask)
}

// A nibble becomes 1 + nibble / 16 where its bits are moved to the top of a float's fraction.
template <int BIT>
OCTAVO_INLINE __m512 nibble(__m512i x) {
  const __m512i moved = BIT <= 19 ? _mm512_slli_epi32(x, BIT <= 19 ? 19 - BIT : 0) : _mm512_srli_epi32(x, BIT > 19 ? BIT - 19 : 0);
  const __m512i one = _mm512_set1_epi32(0x3f800000), mask = _mm512_set1_epi32(0x00780000);
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(one, moved, mask, 0xf8));
}

OCTAVO_INLINE void widen_q4(const uint8_t* panel, int groups, uint8_t* out) {
  const uint16_t* scales = (const uint16_t*)(panel + size_t(groups) * 256);
  for (int g = 0; g < groups; g++, out += 1024) {
    const __m512 scale = mul(load_f16(scales + g * 32), splat(16.0f)).v;
    const __m512 offset = _mm512_sub_ps(load_f16(scales + g * 32 + PANEL).v, scale);
    auto weight = [&](__m512 n) { return _mm512_fmadd_ps(n, scale, offset); };
    for (int i = 0; i < 4; i++) {
      prefetch(panel + size_t(g) * 256 + i * 64 + AHEAD);
      const __m512i x = load_bits(panel + size_t(g) * 256 + i * 64).v;
      _mm512_store_si512(out + (2 * i) * 64, pairs_of(weight(nibble<0>(x)), weight(nibble<8>(x))));
      _mm512_store_si512(out + (2 * i + 1) * 64, pairs_of(weight(nibble<16>(x)), weight(nibble<24>(x))));
      _mm512_store_si512(out + (8 + 2 * i) * 64, pairs_of(weight(nibble<4>(x)), weight(nibble<12>(x))));
      _mm512_store_si512(out + (8 + 2 * i + 1) * 64, pairs_of(weight(nibble<20>(x)), weight(nibble<28>(x))));
    }
  }
}

OCTAVO_INLINE void widen_q8(const uint8_t* panel, int groups, uint8_t* out) {
  const uint16_t* scales = (const uint16_t*)(panel + size_t(groups) * 512);
  for (int g = 0; g < groups; g++, out += 1024) {
    const F scale = load_f16(scales + g * PANEL);
    for (int i = 0; i < 8; i++) {
      prefetch(panel + size_t(g) * 512 + i * 64 + AHEAD);
      const I x = load_bits(panel + size_t(g) * 512 + i * 64);
      auto weight = [&](int j) { return mul(to_float(signed_byte(x, j)), scale).v; };
      _mm512_store_si512(out + (2 * i) * 64, pairs_of(weight(0), weight(1)));
      _mm512_store_si512(out + (2 * i + 1) * 64, pairs_of(weight(2), weight(3)));
    }
  }
}

// A panel's weights as tiles of bfloat16; those that are, stay where they are.
template <Format FORMAT>
OCTAVO_INLINE const uint8_t* widened(const uint8_t* panel, int inputs, uint8_t* room) {
  if constexpr (FORMAT == Format::BF16) return panel;
  if constexpr (FORMAT == Format::Q4) widen_q4(panel, inputs / GROUP, room);
  if constexpr (FORMAT == Format::Q8 || FORMAT == Format::Q8F) widen_q8(panel, inputs / GROUP, room);
  return room;
}

// Products of TILES tiles of rows with PANELS panels over `steps` tiles of inputs, added to sums[PANELS][PROMPT_ROWS][16], which are set
// where `is_first`. Both come in tiles of 1,024 bytes, those of the next row or panel so many bytes on.
template <int TILES, int PANELS>
__attribute__((noinline)) void prompt_tiles(const uint8_t* weights, size_t next_panel, const uint8_t* rows, size_t next_rows, int steps, bool is_first, float* sums) {
  const size_t line = 64;
  float* other = sums + PROMPT_ROWS * PANEL;
#define OCTAVO_LOAD(N, AT) asm volatile("tileloadd (%0,%1,1), %%tmm" N ::"r"(AT), "r"(line) : "memory")
#define OCTAVO_STORE(N, AT) asm volatile("tilestored %%tmm" N ", (%0,%1,1)" ::"r"(AT), "r"(line) : "memory")
#define OCTAVO_MULTIPLY(SUM, ROW, WEIGHT) asm volatile("tdpbf16ps %%tmm" WEIGHT ", %%tmm" ROW ", %%tmm" SUM ::: "memory")
  if (is_first) {
    asm volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" ::: "memory");
  } else {
    OCTAVO_LOAD("0", sums);
    if constexpr (PANELS > 1) OCTAVO_LOAD("1", other);
    if constexpr (TILES > 1) OCTAVO_LOAD("2", sums + 16 * PANEL);
    if constexpr (TILES > 1 && PANELS > 1) OCTAVO_LOAD("3", other + 16 * PANEL);
  }
  for (int k = 0; k < steps; k++, weights += TILE_BYTES, rows += TILE_BYTES) {
    OCTAVO_LOAD("4", rows);
    OCTAVO_LOAD("6", weights);
    OCTAVO_MULTIPLY("0", "4", "6");
    if constexpr (PANELS > 1) {
      OCTAVO_LOAD("7", weights + next_panel);
      OCTAVO_MULTIPLY("1", "4", "7");
    }
    if constexpr (TILES > 1) {
      OCTAVO_LOAD("5", rows + next_rows);
      OCTAVO_MULTIPLY("2", "5", "6");
    }
    if constexpr (TILES > 1 && PANELS > 1) OCTAVO_MULTIPLY("3", "5", "7");
  }
  OCTAVO_STORE("0", sums);
  if constexpr (PANELS > 1) OCTAVO_STORE("1", other);
  if constexpr (TILES > 1) OCTAVO_STORE("2", sums + 16 * PANEL);
  if constexpr (TILES > 1 && PANELS > 1) OCTAVO_STORE("3", other + 16 * PANEL);
#undef OCTAVO_LOAD
#undef OCTAVO_STORE
#undef OCTAVO_MULTIPLY
}

// Panels [first, last) with prompt rows [row, end) of `x`, whose first row is `base`: done(panel, row, rows, results[rows][16], next[rows][16])
// for two panels at a time, `next` of the second or null where there is none. `row` lies a multiple of 16 beyond `base`.
template <Format FORMAT, class Done>
void prompt_panels(const Weights& w, int first, int last, const uint16_t* x, int base, int row, int end, Done&& done) {
  static thread_local std::vector<uint8_t> room;
  const size_t bytes = size_t(w.inputs) * 32;  // of a panel, and of a tile of rows
  if (room.size() < 2 * bytes + 64) room.resize(2 * bytes + 64);
  uint8_t* aligned_room = room.data() + (-(uintptr_t)room.data() & 63);
  alignas(64) float sums[2][PROMPT_ROWS * PANEL];
  const TileShapes shapes;
  const int steps = w.inputs / K_TILE;
  const int parts = (steps + STEPS_AT_ONCE - 1) / STEPS_AT_ONCE, most = (steps + parts - 1) / parts;
  for (int p = first; p < last; p += 2) {
    const bool is_pair = p + 1 < last;
    const uint8_t* here = widened<FORMAT>(w.panel(p), w.inputs, aligned_room);
    const size_t next_panel = is_pair ? widened<FORMAT>(w.panel(p + 1), w.inputs, aligned_room + bytes) - here : 0;
    for (int r = row; r < end; r += PROMPT_ROWS) {
      const int rows = std::min(PROMPT_ROWS, end - r), tiles = (rows + 15) / 16;
      const uint8_t* in = (const uint8_t*)x + size_t(r - base) / 16 * bytes;
      for (int k = 0; k < steps; k += most) {
        const int some = std::min(most, steps - k);
        for (int t = 0; t < tiles; t += 2) {
          auto run = [&](auto two_tiles, auto two_panels) {
            prompt_tiles<1 + decltype(two_tiles)::value, 1 + decltype(two_panels)::value>(
                here + size_t(k) * TILE_BYTES, next_panel, in + t * bytes + size_t(k) * TILE_BYTES, bytes, some, k == 0, sums[0] + t * 16 * PANEL);
          };
          if (t + 1 < tiles)
            is_pair ? run(std::true_type(), std::true_type()) : run(std::true_type(), std::false_type());
          else
            is_pair ? run(std::false_type(), std::true_type()) : run(std::false_type(), std::false_type());
        }
      }
      done(p, r, rows, sums[0], is_pair ? sums[1] : nullptr);
    }
  }
}

}  // namespace octavo
