// Products of rows with panels of weights.
//
// Each result is a sum in one fixed order, whatever the number of rows: a row's results do not depend on its neighbours.
#pragma once
#include <algorithm>

#include "weights.h"

namespace octavo {

#if OCTAVO_ISA == OCTAVO_AVX512
constexpr int TILE_F = 12, TILE_Q = 8;
#else
constexpr int TILE_F = 6, TILE_Q = 4;  // rows whose sums fit the registers
#endif

// With one row the time goes to fetching weights; the processor's own prefetching stops at every page.
constexpr int AHEAD = 2048;
OCTAVO_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p, 0, 3); }

// NP panels from `panel` on, `step` bytes apart, with R rows from `row` on. Results: out[p][r][16].
template <Format FORMAT, int R, int NP>
OCTAVO_INLINE void float_tile(const uint8_t* panel, size_t step, const Rows& x, int row, int inputs, float* out) {
  F acc[NP][R][NV];
  for (int p = 0; p < NP; p++)
    for (int r = 0; r < R; r++)
      for (int v = 0; v < NV; v++) acc[p][r][v] = splat(0.0f);
  const float* in = x.f + size_t(row) * x.stride;
  if constexpr (FORMAT == Format::F32) {
    for (int k = 0; k < inputs; k++) {
      F w[NP][NV];
      for (int p = 0; p < NP; p++)
        for (int v = 0; v < NV; v++) w[p][v] = load((const float*)(panel + p * step) + k * PANEL + v * W);
      for (int r = 0; r < R; r++) {
        const F a = splat(in[size_t(r) * x.stride + k]);
        for (int p = 0; p < NP; p++)
          for (int v = 0; v < NV; v++) acc[p][r][v] = fma(a, w[p][v], acc[p][r][v]);
      }
    }
  } else {
    for (int k = 0; k + 1 < inputs; k += 2) {
      F low[NP][NV], high[NP][NV];
      if (R == 1)
        for (int p = 0; p < NP; p++) prefetch(panel + p * step + size_t(k) * 32 + AHEAD);
      for (int p = 0; p < NP; p++)
        for (int v = 0; v < NV; v++) {
          const I bits = load_bits(panel + p * step + size_t(k) * 32 + v * W * 4);
          low[p][v] = low_bf16(bits), high[p][v] = high_bf16(bits);
        }
      for (int r = 0; r < R; r++) {
        const F a = splat(in[size_t(r) * x.stride + k]), b = splat(in[size_t(r) * x.stride + k + 1]);
        for (int p = 0; p < NP; p++)
          for (int v = 0; v < NV; v++) acc[p][r][v] = fma(b, high[p][v], fma(a, low[p][v], acc[p][r][v]));
      }
    }
    if (inputs % 2)
      for (int r = 0; r < R; r++) {
        const F a = splat(in[size_t(r) * x.stride + inputs - 1]);
        for (int p = 0; p < NP; p++)
          for (int v = 0; v < NV; v++)
            acc[p][r][v] = fma(a, low_bf16(load_bits(panel + p * step + size_t(inputs - 1) * 32 + v * W * 4)), acc[p][r][v]);
      }
  }
  for (int p = 0; p < NP; p++)
    for (int r = 0; r < R; r++)
      for (int v = 0; v < NV; v++) store(out + (p * R + r) * PANEL + v * W, acc[p][r][v]);
}

template <int R>
OCTAVO_INLINE void q4_tile(const uint8_t* panel, const Rows& x, int row, int groups, float* out) {
  const uint8_t* scales = panel + size_t(groups) * 256;
  const int8_t* in = x.q + size_t(row) * groups * GROUP;
  const float* in_scale = x.scale + size_t(row) * groups;
  const float* in_sum = x.sum + size_t(row) * groups;
  for (int v = 0; v < NV; v++) {
    F total[R];
    for (int r = 0; r < R; r++) total[r] = splat(0.0f);
    for (int g = 0; g < groups; g++) {
      Dot4 acc[R];
      for (int r = 0; r < R; r++) acc[r] = dot4_zero();
      for (int i = 0; i < 4; i++) {
        if (R == 1 && v == 0) prefetch(panel + size_t(g) * 256 + i * 64 + AHEAD);
        const I both = load_bits(panel + size_t(g) * 256 + i * 64 + v * W * 4);
        const I low = low_nibbles(both), high = high_nibbles(both);
        for (int r = 0; r < R; r++) {
          const int8_t* q = in + (size_t(r) * groups + g) * GROUP + 4 * i;
          acc[r] = dot4(dot4(acc[r], low, splat4(q)), high, splat4(q + 16));
        }
      }
      const F scale = load_f16((const uint16_t*)(scales + g * 64) + v * W);
      const F minimum = load_f16((const uint16_t*)(scales + g * 64) + PANEL + v * W);
      for (int r = 0; r < R; r++) {
        const F dot = mul(to_float(dot4_sum(acc[r])), splat(in_scale[r * groups + g]));
        total[r] = fma(minimum, splat(in_sum[r * groups + g]), fma(dot, scale, total[r]));
      }
    }
    for (int r = 0; r < R; r++) store(out + r * PANEL + v * W, total[r]);
  }
}

template <int R>
OCTAVO_INLINE void q8_tile(const uint8_t* panel, const Rows& x, int row, int groups, float* out) {
  const uint16_t* scales = (const uint16_t*)(panel + size_t(groups) * 512);
  const int8_t* in = x.q + size_t(row) * groups * GROUP;
  const float* in_scale = x.scale + size_t(row) * groups;
  for (int v = 0; v < NV; v++) {
    F total[R];
    for (int r = 0; r < R; r++) total[r] = splat(0.0f);
    for (int g = 0; g < groups; g++) {
      Dot8 acc[R];
      for (int r = 0; r < R; r++) acc[r] = dot8_zero();
      for (int i = 0; i < 8; i++) {
        if (R == 1 && v == 0) prefetch(panel + size_t(g) * 512 + i * 64 + AHEAD);
        const I w = load_bits(panel + size_t(g) * 512 + i * 64 + v * W * 4);
        for (int r = 0; r < R; r++) acc[r] = dot8(acc[r], w, splat4(in + (size_t(r) * groups + g) * GROUP + 4 * i));
      }
      const F scale = load_f16(scales + g * PANEL + v * W);
      for (int r = 0; r < R; r++)
        total[r] = fma(mul(to_float(dot8_sum(acc[r])), splat(in_scale[r * groups + g])), scale, total[r]);
    }
    for (int r = 0; r < R; r++) store(out + r * PANEL + v * W, total[r]);
  }
}

template <Format FORMAT>
constexpr int tile_rows = is_quantised(FORMAT) ? TILE_Q : TILE_F;

// One panel with R rows; out[r][16].
template <Format FORMAT, int R>
__attribute__((noinline)) void panel_tile(const Weights& w, int panel, const Rows& x, int row, float* out) {
  if constexpr (FORMAT == Format::Q4)
    q4_tile<R>(w.panel(panel), x, row, x.groups, out);
  else if constexpr (FORMAT == Format::Q8)
    q8_tile<R>(w.panel(panel), x, row, x.groups, out);
  else
    float_tile<FORMAT, R, 1>(w.panel(panel), 0, x, row, w.inputs, out);
}

// One row with two neighbouring panels: a sum waits for the one before it, so one panel alone leaves the units idle.
template <Format FORMAT>
__attribute__((noinline)) void two_panels(const Weights& w, int panel, const Rows& x, int row, float* out) {
  float_tile<FORMAT, 1, 2>(w.panel(panel), panel_bytes(FORMAT, w.inputs), x, row, w.inputs, out);
}

template <Format FORMAT, int R = tile_rows<FORMAT>>
OCTAVO_INLINE void any_rows(int rows, const Weights& w, int panel, const Rows& x, int row, float* out) {
  if (rows == R)
    panel_tile<FORMAT, R>(w, panel, x, row, out);
  else if constexpr (R > 1)
    any_rows<FORMAT, R - 1>(rows, w, panel, x, row, out);
}

// Panels [first, last) with rows [row, end): done(panel, row, rows, results[rows][16]), panels in order for each tile of rows.
template <Format FORMAT, class Done>
OCTAVO_INLINE void panels_with_rows(const Weights& w, int first, int last, const Rows& x, int row, int end, Done&& done) {
  alignas(64) float out[std::max(tile_rows<FORMAT>, 2) * PANEL];
  if constexpr (!is_quantised(FORMAT))
    if (end - row == 1) {
      int panel = first;
      for (; panel + 2 <= last; panel += 2) {
        two_panels<FORMAT>(w, panel, x, row, out);
        done(panel, row, 1, out);
        done(panel + 1, row, 1, out + PANEL);
      }
      if (panel < last) {
        panel_tile<FORMAT, 1>(w, panel, x, row, out);
        done(panel, row, 1, out);
      }
      return;
    }
  for (int panel = first; panel < last; panel++)
    for (int r = row; r < end; r += tile_rows<FORMAT>) {
      const int rows = std::min(tile_rows<FORMAT>, end - r);
      any_rows<FORMAT>(rows, w, panel, x, r, out);
      done(panel, r, rows, out);
    }
}

}  // namespace octavo
