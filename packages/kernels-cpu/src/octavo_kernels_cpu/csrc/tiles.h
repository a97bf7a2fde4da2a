// Products of int8 rows with panels on AMX tiles. Included by product.h where the machine has them.
//
// A tile multiplies 16 rows by the 16 outputs of a panel over the 32 inputs that share a scale; its integer sums are exact, and are scaled
// and added in the order of the vector kernels: the results are theirs to the last bit.
#pragma once
#include "weights.h"

namespace octavo {

constexpr int TILE_ROWS_AMX = 16;
// Rows from which on tiles pay.
constexpr int tiles_from(Format format) { return format == Format::Q4 ? 13 : 5; }
constexpr int GROUPS_AT_ONCE = 32;  // groups of a panel whose weights lie unpacked in the first-level cache

// The shapes of the eight tile registers, for one thread, as long as this lives: XLA's own kernels count on finding theirs again.
class TileShapes {
 public:
  // All of 16 rows of 64 bytes.
  TileShapes() {
    Config mine = {};
    for (int i = 0; i < 8; i++) mine.rows[i] = 16, mine.row_bytes[i] = 64;
    take(mine);
  }
  // For groups of int8. 0, 1: sums of 16 rows; 2: 16 rows; 3: weights; 4, 5 and 6: like 0, 1 and 2 for the `rest` rows of the last tile.
  explicit TileShapes(int rest) {
    Config mine = {};
    const int rows[] = {16, 16, 16, GROUP / 4, rest, rest, rest};
    for (int i = 0; i < 7; i++) {
      mine.rows[i] = uint8_t(rows[i] ? rows[i] : 1);
      mine.row_bytes[i] = i == 2 || i == 6 ? GROUP : 64;
    }
    take(mine);
  }
  ~TileShapes() {
    if (before_.palette)
      asm volatile("ldtilecfg %0" ::"m"(before_) : "memory");
    else
      asm volatile("tilerelease" ::: "memory");
  }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  void take(Config& mine) {
    asm volatile("sttilecfg %0" : "=m"(before_)::"memory");
    mine.palette = 1;
    asm volatile("ldtilecfg %0" ::"m"(mine) : "memory");
  }
  Config before_;
};

// sums[rows][16] = rows of x, `stride` bytes apart, times the weights of one group. Two sets of registers for the sums: while one is
// stored the other computes.
#define OCTAVO_TILE_PRODUCT(NAME, OPERATION, SUMS, ROWS)                                                            \
  OCTAVO_INLINE void NAME(const int8_t* x, size_t stride, const uint8_t* weights, int32_t* sums) {                   \
    asm volatile("tilezero %%tmm" SUMS "\n\ttileloadd (%0,%1,1), %%tmm" ROWS "\n\ttileloadd (%2,%3,1), %%tmm3\n\t"    \
                 OPERATION " %%tmm3, %%tmm" ROWS ", %%tmm" SUMS "\n\ttilestored %%tmm" SUMS ", (%4,%3,1)"             \
                 :                                                                                                  \
                 : "r"(x), "r"(stride), "r"(weights), "r"(size_t(64)), "r"(sums)                                    \
                 : "memory");                                                                                       \
  }
OCTAVO_TILE_PRODUCT(signed_even, "tdpbssd", "0", "2")
OCTAVO_TILE_PRODUCT(signed_odd, "tdpbssd", "1", "2")
OCTAVO_TILE_PRODUCT(signed_rest_even, "tdpbssd", "4", "6")
OCTAVO_TILE_PRODUCT(signed_rest_odd, "tdpbssd", "5", "6")
OCTAVO_TILE_PRODUCT(unsigned_even, "tdpbsud", "0", "2")
OCTAVO_TILE_PRODUCT(unsigned_odd, "tdpbsud", "1", "2")
OCTAVO_TILE_PRODUCT(unsigned_rest_even, "tdpbsud", "4", "6")
OCTAVO_TILE_PRODUCT(unsigned_rest_odd, "tdpbsud", "5", "6")
#undef OCTAVO_TILE_PRODUCT

template <Format FORMAT, bool IS_FULL, bool ODD>
OCTAVO_INLINE void tile_product(const int8_t* x, size_t stride, const uint8_t* weights, int32_t* sums) {
  if constexpr (FORMAT == Format::Q4) {
    if constexpr (IS_FULL)
      ODD ? unsigned_odd(x, stride, weights, sums) : unsigned_even(x, stride, weights, sums);
    else
      ODD ? unsigned_rest_odd(x, stride, weights, sums) : unsigned_rest_even(x, stride, weights, sums);
  } else {
    if constexpr (IS_FULL)
      ODD ? signed_odd(x, stride, weights, sums) : signed_even(x, stride, weights, sums);
    else
      ODD ? signed_rest_odd(x, stride, weights, sums) : signed_rest_even(x, stride, weights, sums);
  }
}

// Weights of groups [first, last) of a Q4 panel as bytes.
OCTAVO_INLINE void unpack(const uint8_t* panel, int first, int last, uint8_t* out) {
  for (int g = first; g < last; g++, out += 512)
    for (int i = 0; i < 4; i++) {
      const I both = load_bits(panel + size_t(g) * 256 + i * 64);
      store_bits(out + i * 64, low_nibbles(both));
      store_bits(out + 256 + i * 64, high_nibbles(both));
    }
}

// Groups [first, last) of one panel with R rows from `row` on, a multiple of 16: added to out[r][16], which is set where `first` is 0.
// `weights`: of these groups, as bytes; `scales`: of the panel's.
template <Format FORMAT, int R>
__attribute__((noinline)) void tile_groups(const uint8_t* weights, const uint16_t* scales, const Rows& x, int row, int first, int last, float* out) {
  constexpr bool IS_FULL = R == TILE_ROWS_AMX;
  constexpr int SCALES = FORMAT == Format::Q4 ? 2 * PANEL : PANEL;
  constexpr bool IS_WIDE = planes(FORMAT) == 2;
  alignas(64) int32_t sums[2][planes(FORMAT)][R * PANEL];
  F total[R];
  for (int r = 0; r < R; r++) total[r] = first ? load(out + r * PANEL) : splat(0.0f);
  const size_t stride = size_t(x.groups) * GROUP;
  const size_t from = size_t(row) * stride;
  auto add = [&](int g, const int32_t (*c)[R * PANEL]) {
    const float *in_scale = x.scale + x.at(row, g), *in_sum = x.sum + x.at(row, g);
    const F scale = load_f16(scales + g * SCALES);
    for (int r = 0; r < R; r++) {
      F dot = to_float(load_bits(c[0] + r * PANEL));
      if (IS_WIDE) dot = fma(dot, splat(float(PARTS)), to_float(load_bits(c[IS_WIDE] + r * PANEL)));
      total[r] = fma(mul(dot, splat(in_scale[r])), scale, total[r]);
    }
    if constexpr (FORMAT == Format::Q4) {
      const F minimum = load_f16(scales + g * SCALES + PANEL);
      for (int r = 0; r < R; r++) total[r] = fma(minimum, splat(in_sum[r]), total[r]);
    }
  };
  auto multiply = [&](int g, auto odd) {
    if (g >= last) return;
    const size_t at = from + size_t(g) * GROUP;
    tile_product<FORMAT, IS_FULL, decltype(odd)::value>(x.q + at, stride, weights + size_t(g - first) * 512, sums[odd][0]);
    if (IS_WIDE) tile_product<FORMAT, IS_FULL, decltype(odd)::value>(x.low + at, stride, weights + size_t(g - first) * 512, sums[odd][IS_WIDE]);
  };
  multiply(first, std::false_type());
  for (int g = first; g < last; g += 2) {
    multiply(g + 1, std::true_type());
    add(g, sums[0]);
    if (g + 1 == last) break;
    multiply(g + 2, std::false_type());
    add(g + 1, sums[1]);
  }
  for (int r = 0; r < R; r++) store(out + r * PANEL, total[r]);
}

template <Format FORMAT, int R = TILE_ROWS_AMX>
OCTAVO_INLINE void any_tile(int rows, const uint8_t* weights, const uint16_t* scales, const Rows& x, int row, int first, int last, float* out) {
  if (rows == R)
    tile_groups<FORMAT, R>(weights, scales, x, row, first, last, out);
  else if constexpr (R > 1)
    any_tile<FORMAT, R - 1>(rows, weights, scales, x, row, first, last, out);
}

// One panel with rows [row, end): out[r][16]. `row` is a multiple of 16; the shapes are set for these rows.
template <Format FORMAT>
OCTAVO_INLINE void tile_panel(const uint8_t* panel, const Rows& x, int row, int end, float* out) {
  alignas(64) uint8_t unpacked[GROUPS_AT_ONCE * 512];
  const uint16_t* scales = (const uint16_t*)(panel + size_t(x.groups) * (FORMAT == Format::Q4 ? 256 : 512));
  for (int g = 0; g < x.groups; g += GROUPS_AT_ONCE) {
    const int last = std::min(g + GROUPS_AT_ONCE, x.groups);
    if (FORMAT == Format::Q4) unpack(panel, g, last, unpacked);
    const uint8_t* weights = FORMAT == Format::Q4 ? unpacked : panel + size_t(g) * 512;
    for (int r = row; r < end; r += TILE_ROWS_AMX)
      any_tile<FORMAT>(std::min(end - r, TILE_ROWS_AMX), weights, scales, x, r, g, last, out + (r - row) * PANEL);
  }
}

}  // namespace octavo
