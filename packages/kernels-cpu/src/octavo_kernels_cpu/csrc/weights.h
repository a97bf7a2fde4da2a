// Weight matrices [outputs, inputs] as panels of 16 outputs, and activations beside them.
//
// A panel holds, for all inputs, its 16 outputs side by side, four bytes of each together: what a vector unit loads, what VNNI
// and an AMX tile want. Rows beyond the last output are zeros.
//   F32   [inputs][16] float
//   BF16  [inputs / 2][16][2] bfloat16
//   Q8    [inputs / 32][8][16][4] int8, then [inputs / 32][16] float16 scales
//   Q4    [inputs / 32][4][16][4] bytes, then [inputs / 32][2][16] float16: scales, minima
// In Q4 a byte's low nibble belongs to input 4 i + j of the group, its high nibble to input 16 + 4 i + j: weight = scale · nibble + minimum.
#pragma once
#include <cstddef>

#include "vec.h"

namespace octavo {

// Q8F is Q8 for activations of 16 bits, as two int8: twice the work of one, a 254th of its rounding.
enum class Format : int { F32 = 0, BF16 = 1, Q8 = 2, Q4 = 3, Q8F = 4 };

constexpr int GROUP = 32;  // inputs that share a scale

// Rows there is room for, where activations enter as int8.
constexpr int padded_rows(int rows) { return (rows + PANEL - 1) / PANEL * PANEL; }

// Activations enter as int8; inputs come in groups that share a scale.
constexpr bool is_quantised(Format format) { return format == Format::Q8 || format == Format::Q4 || format == Format::Q8F; }

constexpr int PARTS = 254;  // an activation of Q8F is (first + second / PARTS) · scale

// int8 values a row has for each input.
constexpr int planes(Format format) { return format == Format::Q8F ? 2 : 1; }

constexpr int padded_inputs(Format format, int inputs) {
  return format == Format::F32 ? inputs : format == Format::BF16 ? (inputs + 1) / 2 * 2 : (inputs + GROUP - 1) / GROUP * GROUP;
}

constexpr size_t panel_bytes(Format format, int inputs) {
  const size_t k = padded_inputs(format, inputs);
  switch (format) {
    case Format::F32: return k * 64;
    case Format::BF16: return k * 32;
    case Format::Q8:
    case Format::Q8F: return k * 16 + k / GROUP * 32;
    case Format::Q4: return k * 8 + k / GROUP * 64;
  }
  return 0;
}

constexpr int num_panels(int outputs) { return (outputs + PANEL - 1) / PANEL; }

struct Weights {
  const uint8_t* data;
  Format format;
  int outputs, inputs;
  const float* bias;  // of every output, or null

  const uint8_t* panel(int i) const { return data + size_t(i) * panel_bytes(format, inputs); }
};

// Rows that enter a product: as float32, or as int8 with a scale for each group and its sum: scaled for Q4, otherwise whole numbers.
// `low` are the second values of Q8F, `low_sum` their sums. With units for 16 bits both values are one number, from `q` on, four in the
// order 0, 2, 1, 3.
struct Rows {
  const float* f;
  int stride;
  const int8_t *q, *low;
  const float* scale;
  const float* sum;
  const int32_t *whole_sum, *low_sum;
  int groups;
  const uint16_t* prompt;  // of the rows from `singles` on, in bfloat16; then they are nowhere else
  int singles;

  // Where a row's scale and sum of a group are: for tiles, 16 rows side by side.
  size_t at(int row, int group) const { return scale_at(row, group, groups); }
  static size_t scale_at(int row, int group, int groups) {
    return HAS_TILES ? (size_t(row / PANEL) * groups + group) * PANEL + row % PANEL : size_t(row) * groups + group;
  }
};

}  // namespace octavo
