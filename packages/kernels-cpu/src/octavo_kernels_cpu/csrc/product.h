// Products of rows with panels of weights.
//
// Each result is a sum in one fixed order, whatever the number of rows: a row's results do not depend on its neighbours.
#pragma once
#include <algorithm>

#include "weights.h"
#if OCTAVO_ISA == OCTAVO_AMX
#include "tiles.h"
#endif

namespace octavo {

#if OCTAVO_ISA >= OCTAVO_AVX512
constexpr int TILE_F = 12, TILE_Q = 8;
#else
constexpr int TILE_F = 6, TILE_Q = 6;  // rows whose sums fit the registers
#endif

constexpr int ROW_BLOCK = 48;  // rows a task carries: a multiple of every tile, small enough for the second-level cache

// With one row the time goes to fetching weights; the processor's own prefetching stops at every page.
constexpr int AHEAD = 2048;
OCTAVO_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p, 0, 3); }

// NP panels from `panel` on, `step` bytes apart, with R rows from `row` on, over inputs [begin, end). Results: out[p][r][16], which hold
// what the inputs before `begin` gave.
template <Format FORMAT, int R, int NP>
OCTAVO_INLINE void float_tile(const uint8_t* panel, size_t step, const Rows& x, int row, int begin, int end, float* out) {
  F acc[NP][R][NV];
  for (int p = 0; p < NP; p++)
    for (int r = 0; r < R; r++)
      for (int v = 0; v < NV; v++) acc[p][r][v] = begin ? load(out + (p * R + r) * PANEL + v * W) : splat(0.0f);
  const float* in = x.f + size_t(row) * x.stride;
  if constexpr (FORMAT == Format::F32) {
    for (int k = begin; k < end; k++) {
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
    for (int k = begin; k + 1 < end; k += 2) {
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
    if ((end - begin) % 2)
      for (int r = 0; r < R; r++) {
        const F a = splat(in[size_t(r) * x.stride + end - 1]);
        for (int p = 0; p < NP; p++)
          for (int v = 0; v < NV; v++)
            acc[p][r][v] = fma(a, low_bf16(load_bits(panel + p * step + size_t(end - 1) * 32 + v * W * 4)), acc[p][r][v]);
      }
  }
  for (int p = 0; p < NP; p++)
    for (int r = 0; r < R; r++)
      for (int v = 0; v < NV; v++) store(out + (p * R + r) * PANEL + v * W, acc[p][r][v]);
}

// Lines of the next panel a tile fetches while it works, so many for each group of inputs. Beyond the last panel nothing is fetched: a
// prefetch of what is not there does nothing.
struct Next {
  const uint8_t* at = nullptr;
  int lines = 0;
  OCTAVO_INLINE void fetch() {
    for (int i = 0; i < lines; i++, at += 64) prefetch(at);
  }
};

template <int R>
OCTAVO_INLINE void q4_tile(const uint8_t* panel, const Rows& x, int row, int groups, Next next, float* out) {
  const uint8_t* scales = panel + size_t(groups) * 256;
  const int8_t* in = x.q + size_t(row) * groups * GROUP;
  for (int v = 0; v < NV; v++) {
    F total[R];
    for (int r = 0; r < R; r++) total[r] = splat(0.0f);
    for (int g = 0; g < groups; g++) {
      if (R > 1 && v == 0) next.fetch();
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
        const F dot = mul(to_float(dot4_sum(acc[r])), splat(x.scale[x.at(row + r, g)]));
        total[r] = fma(minimum, splat(x.sum[x.at(row + r, g)]), fma(dot, scale, total[r]));
      }
    }
    for (int r = 0; r < R; r++) store(out + r * PANEL + v * W, total[r]);
  }
}

template <Format FORMAT, int R>
OCTAVO_INLINE void q8_tile(const uint8_t* panel, const Rows& x, int row, int groups, Next next, float* out) {
  constexpr bool IS_WIDE = planes(FORMAT) == 2;
  const uint16_t* scales = (const uint16_t*)(panel + size_t(groups) * 512);
  const size_t from = size_t(row) * groups * GROUP;
  for (int v = 0; v < NV; v++) {
    F total[R];
    for (int r = 0; r < R; r++) total[r] = splat(0.0f);
    for (int g = 0; g < groups; g++) {
      if (R > 1 && v == 0) next.fetch();
      Dot8 acc[R], low[R];
      for (int r = 0; r < R; r++) acc[r] = dot8_start(x.whole_sum[x.at(row + r, g)]);
      if (IS_WIDE)
        for (int r = 0; r < R; r++) low[r] = dot8_start(x.low_sum[x.at(row + r, g)]);
      for (int i = 0; i < 8; i++) {
        if (R == 1 && v == 0) prefetch(panel + size_t(g) * 512 + i * 64 + AHEAD);
        const I w = dot8_weights(load_bits(panel + size_t(g) * 512 + i * 64 + v * W * 4));
        for (int r = 0; r < R; r++) {
          const size_t at = from + (size_t(r) * groups + g) * GROUP + 4 * i;
          acc[r] = dot8(acc[r], w, splat4(x.q + at));
          if (IS_WIDE) low[r] = dot8(low[r], w, splat4(x.low + at));
        }
      }
      const F scale = load_f16(scales + g * PANEL + v * W);
      for (int r = 0; r < R; r++) {
        F dot = to_float(dot8_sum(acc[r]));
        if (IS_WIDE) dot = fma(dot, splat(float(PARTS)), to_float(dot8_sum(low[r])));
        total[r] = fma(mul(dot, splat(x.scale[x.at(row + r, g)])), scale, total[r]);
      }
    }
    for (int r = 0; r < R; r++) store(out + r * PANEL + v * W, total[r]);
  }
}

// The same for activations of 16 bits in one piece.
template <int R>
OCTAVO_INLINE void wide_tile(const uint8_t* panel, const Rows& x, int row, int groups, Next next, float* out) {
  const uint16_t* scales = (const uint16_t*)(panel + size_t(groups) * 512);
  const int16_t* in = (const int16_t*)x.q + size_t(row) * groups * GROUP;
  for (int v = 0; v < NV; v++) {
    F total[R];
    for (int r = 0; r < R; r++) total[r] = splat(0.0f);
    for (int g = 0; g < groups; g++) {
      if (R > 1 && v == 0) next.fetch();
      I acc[R];
      for (int r = 0; r < R; r++) acc[r] = zero_bits();
      for (int i = 0; i < 8; i++) {
        if (R == 1 && v == 0) prefetch(panel + size_t(g) * 512 + i * 64 + AHEAD);
        const I w = load_bits(panel + size_t(g) * 512 + i * 64 + v * W * 4);
        for (int r = 0; r < R; r++) acc[r] = dot16(acc[r], w, in + (size_t(r) * groups + g) * GROUP + 4 * i);
      }
      const F scale = load_f16(scales + g * PANEL + v * W);
      for (int r = 0; r < R; r++) total[r] = fma(mul(to_float(acc[r]), splat(x.scale[x.at(row + r, g)])), scale, total[r]);
    }
    for (int r = 0; r < R; r++) store(out + r * PANEL + v * W, total[r]);
  }
}

template <Format FORMAT>
constexpr int tile_rows = !is_quantised(FORMAT) ? TILE_F : HAS_DOT16 ? TILE_Q : TILE_Q / planes(FORMAT);

// Inputs at once of a product in floats: a panel's part of them stays in the first-level cache while the rows pass.
constexpr int INPUTS_AT_ONCE = 256;

// One panel with R rows over inputs [begin, end), all of them in int8; out[r][16].
template <Format FORMAT, int R>
__attribute__((noinline)) void panel_tile(const uint8_t* panel, const Rows& x, int row, int begin, int end, Next next, float* out) {
  if constexpr (FORMAT == Format::Q4)
    q4_tile<R>(panel, x, row, x.groups, next, out);
  else if constexpr (planes(FORMAT) == 2 && HAS_DOT16)
    wide_tile<R>(panel, x, row, x.groups, next, out);
  else if constexpr (is_quantised(FORMAT))
    q8_tile<FORMAT, R>(panel, x, row, x.groups, next, out);
  else
    float_tile<FORMAT, R, 1>(panel, 0, x, row, begin, end, out);
}

// One row with two neighbouring panels: a sum waits for the one before it, so one panel alone leaves the units idle.
template <Format FORMAT>
__attribute__((noinline)) void two_panels(const Weights& w, int panel, const Rows& x, int row, float* out) {
  float_tile<FORMAT, 1, 2>(w.panel(panel), panel_bytes(FORMAT, w.inputs), x, row, 0, w.inputs, out);
}

template <Format FORMAT, int R = tile_rows<FORMAT>>
OCTAVO_INLINE void any_rows(int rows, const uint8_t* panel, const Rows& x, int row, int begin, int end, Next next, float* out) {
  if (rows == R)
    panel_tile<FORMAT, R>(panel, x, row, begin, end, next, out);
  else if constexpr (R > 1)
    any_rows<FORMAT, R - 1>(rows, panel, x, row, begin, end, next, out);
}

// fn(first row, how many) over rows [row, end) in tiles of nearly equal height: 8 rows are 4 and 4, not 6 and 2.
template <Format FORMAT, class Fn>
OCTAVO_INLINE void row_tiles(int row, int end, Fn&& fn) {
  constexpr int MOST = tile_rows<FORMAT>;
  for (int tiles = (end - row + MOST - 1) / MOST; tiles > 0; tiles--) {
    const int rows = (end - row + tiles - 1) / tiles;
    fn(row, rows);
    row += rows;
  }
}

// Rows from which on a bfloat16 panel is widened once, not for every tile of rows.
constexpr int WIDEN_FROM = 13;

// Inputs [begin, end) of a bfloat16 panel as a float32 one; `begin` is even.
OCTAVO_INLINE void widen(const uint8_t* panel, int begin, int end, float* out) {
  for (int k = begin; k < end; k += 2, out += 2 * PANEL)
    for (int v = 0; v < NV; v++) {
      const I bits = load_bits(panel + size_t(k) * 32 + v * W * 4);
      store(out + v * W, low_bf16(bits));
      if (k + 1 < end) store(out + PANEL + v * W, high_bf16(bits));
    }
}

// Panels [first, last) with rows [row, end), at most `ROW_BLOCK`: done(panel, row, rows, results[rows][16]), panels in order for each tile
// of rows.
template <Format FORMAT, class Done>
OCTAVO_INLINE void panels_with_rows(const Weights& w, int first, int last, const Rows& x, int row, int end, Done&& done) {
  alignas(64) float out[ROW_BLOCK * PANEL], wide[INPUTS_AT_ONCE * PANEL];
  int panel = first;
#if OCTAVO_ISA == OCTAVO_AMX
  if constexpr (is_quantised(FORMAT))
    if (end - row >= tiles_from(FORMAT)) {
      const TileShapes shapes((end - row) % TILE_ROWS_AMX);
      for (; panel < last; panel++) {
        tile_panel<FORMAT>(w.panel(panel), x, row, end, out);
        done(panel, row, end - row, out);
      }
      return;
    }
#endif
  if constexpr (FORMAT == Format::F32 || FORMAT == Format::BF16)
    if (end - row == 1)
      for (; panel + 2 <= last; panel += 2) {
        two_panels<FORMAT>(w, panel, x, row, out);
        done(panel, row, 1, out);
        done(panel + 1, row, 1, out + PANEL);
      }
  const int step = is_quantised(FORMAT) ? w.inputs : INPUTS_AT_ONCE;
  const int tiles = (end - row + tile_rows<FORMAT> - 1) / tile_rows<FORMAT>;
  const int groups = w.inputs / GROUP;
  const int parts = tiles * groups, panel_lines = int((panel_bytes(FORMAT, w.inputs) + 63) / 64);
  const int lines = is_quantised(FORMAT) && parts ? (panel_lines + parts - 1) / parts : 0;
  for (; panel < last; panel++)
    for (int k = 0; k < w.inputs; k += step) {
      const int stop = std::min(k + step, w.inputs);
      int tile = 0;
      row_tiles<FORMAT>(row, end, [&](int r, int rows) {
        float* part = out + (r - row) * PANEL;
        const Next next{lines ? w.panel(panel + 1) + size_t(tile++) * lines * groups * 64 : nullptr, lines};
        if (FORMAT == Format::BF16 && end - row >= WIDEN_FROM) {
          if (r == row) widen(w.panel(panel), k, stop, wide);
          any_rows<Format::F32>(rows, (const uint8_t*)(wide - size_t(k) * PANEL), x, r, k, stop, next, part);
        } else {
          any_rows<FORMAT>(rows, w.panel(panel), x, r, k, stop, next, part);
        }
        if (stop == w.inputs) done(panel, r, rows, part);
      });
    }
}

}  // namespace octavo
