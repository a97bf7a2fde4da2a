// From rows as a checkpoint has them to panels. Runs once, at load.
#pragma once
#include "weights.h"

namespace octavo {

// What a row of the source is made of. The last three are GGUF's blocks of 32: scale (and minimum) as float16, then the values.
enum class Source : int { F32 = 0, BF16 = 1, Q8_0 = 2, Q4_0 = 3, Q4_1 = 4 };

inline size_t source_row_bytes(Source source, int inputs) {
  switch (source) {
    case Source::F32: return size_t(inputs) * 4;
    case Source::BF16: return size_t(inputs) * 2;
    case Source::Q8_0: return size_t(inputs / GROUP) * 34;
    case Source::Q4_0: return size_t(inputs / GROUP) * 18;
    case Source::Q4_1: return size_t(inputs / GROUP) * 20;
  }
  return 0;
}

inline float f16_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
  uint32_t u = sign | (exponent + 112) << 23 | fraction << 13;
  if (exponent == 31) u = sign | 0x7f800000u | fraction << 13;
  if (!exponent) {
    const float small = float(fraction) * 0x1p-24f;
    return sign ? -small : small;
  }
  float out;
  std::memcpy(&out, &u, 4);
  return out;
}

// Rounds to nearest, ties to even; overflow becomes infinity.
inline uint16_t float_to_f16(float value) {
  uint32_t u;
  std::memcpy(&u, &value, 4);
  const uint16_t sign = uint16_t(u >> 16 & 0x8000);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return sign | 0x7e00;
  if (u >= 0x47800000u) return sign | 0x7c00;
  if (u < 0x38800000u) {  // subnormal: the addition rounds
    float x;
    std::memcpy(&x, &u, 4);
    x += 0.5f;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return uint16_t(sign | (bits - 0x3f000000u));
  }
  u += 0xc8000fffu + (u >> 13 & 1);
  return uint16_t(sign | u >> 13);
}

// A row of any source as float32.
inline void row_values(Source source, const uint8_t* row, int inputs, float* out) {
  if (source == Source::F32) {
    std::memcpy(out, row, size_t(inputs) * 4);
    return;
  }
  if (source == Source::BF16) {
    for (int k = 0; k < inputs; k++) {
      uint16_t bits;
      std::memcpy(&bits, row + 2 * k, 2);
      out[k] = bf16_value(bits);
    }
    return;
  }
  const size_t block = source_row_bytes(source, GROUP);
  for (int g = 0; g < inputs / GROUP; g++, row += block, out += GROUP) {
    uint16_t half[2];
    std::memcpy(half, row, 4);
    const float scale = f16_to_float(half[0]);
    if (source == Source::Q8_0) {
      for (int k = 0; k < GROUP; k++) out[k] = scale * float(int8_t(row[2 + k]));
      continue;
    }
    const float minimum = source == Source::Q4_1 ? f16_to_float(half[1]) : -8 * scale;
    const uint8_t* nibbles = row + (source == Source::Q4_1 ? 4 : 2);
    for (int k = 0; k < 16; k++) {
      out[k] = scale * float(nibbles[k] & 15) + minimum;
      out[16 + k] = scale * float(nibbles[k] >> 4) + minimum;
    }
  }
}

// A group as int8 and a float16 scale.
inline void to_q8(const float* x, int8_t* q, uint16_t* scale) {
  float largest = 0;
  for (int k = 0; k < GROUP; k++) largest = std::fmax(largest, std::fabs(x[k]));
  *scale = float_to_f16(largest / 127);
  const float step = f16_to_float(*scale);
  for (int k = 0; k < GROUP; k++) {
    const float whole = step > 0 ? std::nearbyint(x[k] / step) : 0;
    q[k] = int8_t(whole > 127 ? 127 : whole < -127 ? -127 : whole);
  }
}

// A source that can become this format: any as floats; GGUF's own blocks without loss; floats as int8 with loss.
inline bool can_pack(Source source, Format format) {
  switch (format) {
    case Format::F32: return true;
    case Format::BF16: return true;
    case Format::Q8:
    case Format::Q8F: return true;
    case Format::Q4: return source == Source::Q4_0 || source == Source::Q4_1;
  }
  return false;
}

// Row `order[16 p + j]` of the source becomes output j of panel p; −1 becomes zeros.
inline void pack_panel(Format format, Source source, const uint8_t* from, const int32_t* order, int inputs, uint8_t* to, float* spare) {
  const size_t row_bytes = source_row_bytes(source, inputs);
  const int groups = inputs / GROUP;
  std::memset(to, 0, panel_bytes(format, inputs));
  for (int j = 0; j < PANEL; j++) {
    if (order[j] < 0) continue;
    const uint8_t* row = from + size_t(order[j]) * row_bytes;
    if (format == Format::Q4) {
      const bool has_minimum = source == Source::Q4_1;
      for (int g = 0; g < groups; g++) {
        const uint8_t* block = row + g * source_row_bytes(source, GROUP);
        uint16_t half[2];
        std::memcpy(half, block, 4);
        uint16_t* scales = (uint16_t*)(to + size_t(groups) * 256 + g * 64);
        scales[j] = half[0];
        scales[PANEL + j] = has_minimum ? half[1] : float_to_f16(-8 * f16_to_float(half[0]));
        const uint8_t* nibbles = block + (has_minimum ? 4 : 2);
        for (int k = 0; k < 16; k++) to[size_t(g) * 256 + k / 4 * 64 + j * 4 + k % 4] = nibbles[k];
      }
      continue;
    }
    if (format == Format::Q8 || format == Format::Q8F) {
      uint16_t* scales = (uint16_t*)(to + size_t(groups) * 512);
      if (source != Source::Q8_0) row_values(source, row, inputs, spare);
      for (int g = 0; g < groups; g++) {
        int8_t q[GROUP];
        if (source == Source::Q8_0) {
          std::memcpy(scales + g * PANEL + j, row + g * 34, 2);
          std::memcpy(q, row + g * 34 + 2, GROUP);
        } else {
          to_q8(spare + g * GROUP, q, scales + g * PANEL + j);
        }
        for (int k = 0; k < GROUP; k++) to[size_t(g) * 512 + k / 4 * 64 + j * 4 + k % 4] = uint8_t(q[k]);
      }
      continue;
    }
    row_values(source, row, inputs, spare);
    for (int k = 0; k < inputs; k++) {
      if (format == Format::F32)
        ((float*)to)[size_t(k) * PANEL + j] = spare[k];
      else
        ((uint16_t*)to)[(size_t(k / 2) * PANEL + j) * 2 + k % 2] = bf16_bits(spare[k]);
    }
  }
}

}  // namespace octavo
