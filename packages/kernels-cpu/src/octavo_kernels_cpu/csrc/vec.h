// Vectors of W lanes behind one set of names: AVX2, AVX-512, or plain loops of 8 lanes that mean the same to the last bit.
//
// A kernel written over these names is compiled once an instruction set. The plain loops are for machines without the units (tests run
// one source under all of them) and never for speed. No object here has a constructor that runs at load time.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define OCTAVO_SCALAR 0
#define OCTAVO_AVX2 1
#define OCTAVO_AVX512 2
#define OCTAVO_AMX 3
#ifndef OCTAVO_ISA
#error "define OCTAVO_ISA: 0 plain loops, 1 AVX2, 2 AVX-512, 3 AVX-512 and AMX tiles"
#endif

#if OCTAVO_ISA != OCTAVO_SCALAR
#include <immintrin.h>
#endif

#define OCTAVO_INLINE inline __attribute__((always_inline))

namespace octavo {

constexpr int PANEL = 16;  // outputs of a weight panel

#if OCTAVO_ISA == OCTAVO_AVX2
#include "vec_avx2.h"
#elif OCTAVO_ISA >= OCTAVO_AVX512
#include "vec_avx512.h"
#else
#include "vec_scalar.h"
#endif

constexpr int NV = PANEL / W;  // vectors of a panel
constexpr bool HAS_TILES = OCTAVO_ISA == OCTAVO_AMX;

// e^x with a relative error below 2e-7. Source: Cody and Waite's reduction, the Taylor series of e^r on |r| <= ln(2)/2.
OCTAVO_INLINE F exp_(F x) {
  x = max(min(x, splat(88.0f)), splat(-87.0f));
  F n = nearest(mul(x, splat(1.44269504f)));
  F r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F p = splat(1.0f / 5040);
  p = fma(p, r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return times_power_of_two(p, to_int(n));
}

OCTAVO_INLINE F sigmoid(F x) { return div(splat(1.0f), add(splat(1.0f), exp_(sub(splat(0.0f), x)))); }

OCTAVO_INLINE float bf16_value(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Rounds to nearest, ties to even; NaN stays NaN.
OCTAVO_INLINE uint16_t bf16_bits(float value) {
  uint32_t u;
  std::memcpy(&u, &value, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

}  // namespace octavo
