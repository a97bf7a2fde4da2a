// The two halves of a decoder layer around attention, and the head: norms, products, rotation and activation of a step's live tokens.
//
// Knows rows and weights; knows no KV, no batch, no XLA. All memory is the caller's: a `Scratch` is carved out of one buffer.
#pragma once
#include "pool.h"
#include "product.h"
#if OCTAVO_ISA == OCTAVO_AMX
#include "prompts.h"
#endif

namespace octavo {

#if OCTAVO_ISA != OCTAVO_AMX
constexpr bool has_prompt_tiles(Format, int) { return false; }
inline size_t prompt_bytes(Format, int, int) { return 0; }
OCTAVO_INLINE void to_tile(F, int, int, int, uint16_t*) {}
constexpr int PROMPT_BLOCK = ROW_BLOCK;
template <Format, class Done>
void prompt_panels(const Weights&, int, int, const uint16_t*, int, int, int, Done&&) {}
#endif

constexpr size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Bytes of `rows` rows of `inputs` values on their way into a product of this format.
inline size_t rows_bytes(Format format, int rows, int inputs) {
  const size_t prompt = aligned(prompt_bytes(format, rows, inputs));
  if (!is_quantised(format)) return prompt + aligned(size_t(rows) * inputs * 4);
  const size_t groups = inputs / GROUP, room = padded_rows(rows);
  return prompt + planes(format) * aligned(room * inputs) + (1 + planes(format)) * aligned(room * groups * 4);
}

class Scratch {
 public:
  Scratch(void* data, size_t bytes) : at_((uint8_t*)data), end_((uint8_t*)data + bytes) {}
  template <class T>
  T* take(size_t count) {
    T* part = (T*)at_;
    at_ += aligned(count * sizeof(T));
    return part;
  }
  bool fits() const { return at_ <= end_; }

 private:
  uint8_t *at_, *end_;
};

// Rows of a product that are still to be filled.
struct RowsOut {
  Format format;
  float* f = nullptr;
  int8_t *q = nullptr, *low = nullptr;
  float *scale = nullptr, *sum = nullptr;
  int32_t* low_sum = nullptr;
  uint16_t* prompt = nullptr;
  int inputs = 0, singles = 0;

  // The first `singles` rows are alone in their step; the others are prompts.
  RowsOut(Format format, int rows, int singles, int inputs, Scratch& scratch) : format(format), inputs(inputs), singles(rows) {
    if (singles < rows && has_prompt_tiles(format, inputs)) {
      this->singles = singles;
      prompt = scratch.take<uint16_t>(size_t(padded_rows(rows - singles)) * inputs);
    }
    if (!is_quantised(format)) {
      f = scratch.take<float>(size_t(rows) * inputs);
      return;
    }
    const size_t room = padded_rows(rows);
    q = scratch.take<int8_t>(planes(format) * room * inputs);
    scale = scratch.take<float>(room * (inputs / GROUP));
    sum = scratch.take<float>(room * (inputs / GROUP));
    if (planes(format) == 1) return;
    low = q + room * inputs;
    low_sum = scratch.take<int32_t>(room * (inputs / GROUP));
  }
  Rows rows() const { return {f, inputs, q, low, scale, sum, (const int32_t*)sum, low_sum, inputs / GROUP, prompt, singles}; }
  bool is_prompt(int row) const { return row >= singles; }
  // W inputs of a prompt's row from `input` on.
  OCTAVO_INLINE void fill_prompt(F x, int row, int input) const { to_tile(x, row - singles, input, inputs, prompt); }
  OCTAVO_INLINE void quantise(const float* x, int row, int group) const;
};

// One group as int8 with the scale, which is the answer, that brings its largest value to 127. `low`: what that leaves, in 254ths; or null.
OCTAVO_INLINE float quantise_group(const float* x, int8_t* q, int8_t* low, int& sum, int& low_sum) {
  F value[GROUP / W], top = splat(0.0f);
  for (int i = 0; i < GROUP / W; i++) {
    value[i] = load(x + i * W);
    top = max(abs_(value[i]), top);
  }
  const float largest = max_lanes(top);
  const float up = largest > 0 ? 127.0f / largest : 0.0f;
  I total = zero_bits(), low_total = zero_bits();
  for (int i = 0; i < GROUP / W; i++) {
    const F exact = mul(value[i], splat(up));
    const I whole = to_int(exact);
    total = add_int(total, whole);
    store_bytes(q + i * W, whole);
    if (!low) continue;
    const I rest = to_int(mul(sub(exact, to_float(whole)), splat(float(PARTS))));
    low_total = add_int(low_total, rest);
    store_bytes(low + i * W, rest);
  }
  sum = sum_int(total), low_sum = low ? sum_int(low_total) : 0;
  return largest / 127.0f;
}

OCTAVO_INLINE void RowsOut::quantise(const float* x, int row, int group) const {
  const int groups = inputs / GROUP;
  const size_t at = Rows::scale_at(row, group, groups), from = (size_t(row) * groups + group) * GROUP;
  int total, low_total;
  if (HAS_DOT16 && low) {
    int8_t first[GROUP], second[GROUP];
    int16_t* both = (int16_t*)q + from;
    scale[at] = quantise_group(x, first, second, total, low_total) * (1.0f / PARTS);
    for (int i = 0; i < GROUP; i++) both[i / 4 * 4 + i % 2 * 2 + i % 4 / 2] = int16_t(PARTS * first[i] + second[i]);
    return;
  }
  scale[at] = quantise_group(x, q + from, low ? low + from : nullptr, total, low_total);
  if (format == Format::Q4)
    sum[at] = scale[at] * float(total);
  else
    ((int32_t*)sum)[at] = total;
  if (low) scale[at] *= 1.0f / PARTS, low_sum[at] = low_total;
}

OCTAVO_INLINE void fill_row(const float* x, int row, const RowsOut& out) {
  if (out.is_prompt(row)) {
    for (int i = 0; i < out.inputs; i += W) out.fill_prompt(load(x + i), row, i);
    return;
  }
  if (out.f) {
    std::memcpy(out.f + size_t(row) * out.inputs, x, size_t(out.inputs) * 4);
    return;
  }
  for (int g = 0; g < out.inputs / GROUP; g++) out.quantise(x + g * GROUP, row, g);
}

// Root mean square norm with a gain (arXiv 1910.07467); y may be x.
OCTAVO_INLINE void rms_norm(const float* x, const float* gain, float eps, int size, float* y) {
  F squares = splat(0.0f);
  int i = 0;
  for (; i + W <= size; i += W) squares = fma(load(x + i), load(x + i), squares);
  float total = sum_lanes(squares);
  for (int j = i; j < size; j++) total += x[j] * x[j];
  const float by = 1.0f / std::sqrt(total / float(size) + eps);
  for (i = 0; i + W <= size; i += W) store(y + i, mul(mul(load(x + i), splat(by)), load(gain + i)));
  for (; i < size; i++) y[i] = x[i] * by * gain[i];
}

constexpr int ROWS_AT_ONCE = 8;

// f(row) for every row, several to a task.
template <class Fn>
void each_row(Team& team, int rows, Fn&& f) {
  team.run((rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, [&](int i) {
    for (int row = i * ROWS_AT_ONCE; row < std::min(rows, (i + 1) * ROWS_AT_ONCE); row++) f(row);
  });
}

// Normed rows on their way into a product; `spare` has room for all of them. Without a gain they enter as they are.
inline void enter(Team& team, const float* x, const float* gain, float eps, int rows, int size, float* spare, const RowsOut& out) {
  each_row(team, rows, [&](int row) {
    const float* from = x + size_t(row) * size;
    if (gain) {
      const bool stays = out.f && !out.is_prompt(row);
      float* to = stays ? out.f + size_t(row) * size : spare + size_t(row) * size;
      rms_norm(from, gain, eps, size, to);
      if (stays) return;
      from = to;
    }
    fill_row(from, row, out);
  });
}

// Calls task(first panel, last panel, row, end) over all panels and rows [begin, rows), in multiples of `unit` panels and of `block` rows.
template <class Fn>
void share_out(Team& team, int panels, int begin, int rows, int block, int unit, Fn&& task) {
  const int blocks = (rows - begin + block - 1) / block;
  if (blocks <= 0) return;
  const int units = (panels + unit - 1) / unit;
  const int wanted = std::max(1, team.threads() * 6 / std::max(1, blocks));
  const int each = std::max(1, (units + wanted - 1) / wanted) * unit;
  const int chunks = (panels + each - 1) / each;
  team.run(chunks * blocks, [&](int i) {
    const int chunk = i % chunks, row = begin + i / chunks * block;
    task(chunk * each, std::min(panels, (chunk + 1) * each), row, std::min(rows, row + block));
  });
}

template <class Fn>
void with_format(Format format, Fn&& f) {
  switch (format) {
    case Format::F32: return f(std::integral_constant<Format, Format::F32>());
    case Format::BF16: return f(std::integral_constant<Format, Format::BF16>());
    case Format::Q8: return f(std::integral_constant<Format, Format::Q8>());
    case Format::Q4: return f(std::integral_constant<Format, Format::Q4>());
    case Format::Q8F: return f(std::integral_constant<Format, Format::Q8F>());
  }
}

// out[row] = (base[row] +) W x[row] (+ bias); rows of `out` are w.outputs apart. `base` may be `out`.
inline void product(Team& team, const Weights& w, const Rows& x, int rows, const float* base, float* out) {
  auto done = [&](int panel, int r, int count, const float* y) {
    const int n = panel * PANEL, width = std::min(PANEL, w.outputs - n);
    for (int i = 0; i < count; i++, y += PANEL) {
      const size_t at = size_t(r + i) * w.outputs + n;
      if (width == PANEL) {
        for (int v = 0; v < NV; v++) {
          F value = load(y + v * W);
          if (w.bias) value = add(value, load(w.bias + n + v * W));
          if (base) value = add(load(base + at + v * W), value);
          store(out + at + v * W, value);
        }
      } else {
        for (int j = 0; j < width; j++) out[at + j] = (base ? base[at + j] : 0.0f) + (y[j] + (w.bias ? w.bias[n + j] : 0.0f));
      }
    }
  };
  const int panels = num_panels(w.outputs), singles = std::min(rows, x.singles);
  with_format(w.format, [&](auto format) {
    constexpr Format FORMAT = decltype(format)::value;
    share_out(team, panels, 0, singles, ROW_BLOCK, 1,
              [&](int first, int last, int row, int end) { panels_with_rows<FORMAT>(w, first, last, x, row, end, done); });
    share_out(team, panels, singles, rows, PROMPT_BLOCK, 2, [&](int first, int last, int row, int end) {
      prompt_panels<FORMAT>(w, first, last, x.prompt, singles, row, end, [&](int panel, int r, int count, const float* y, const float* next) {
        done(panel, r, count, y);
        if (next) done(panel + 1, r, count, next);
      });
    });
  });
}

enum class Activation : int { SILU = 0, GELU_TANH = 1 };

OCTAVO_INLINE F activate(Activation kind, F x) {
  if (kind == Activation::SILU) return mul(x, sigmoid(x));
  // x sigmoid(2 u) with u the argument of tanh in 0.5 x (1 + tanh u): the same function.
  const F u = mul(splat(0.7978845608f), fma(mul(splat(0.044715f), mul(x, x)), x, x));
  return mul(x, sigmoid(add(u, u)));
}

// Gate and up of a few rows from `row` on become act(gate) · up, as rows that enter the next product. Panels alternate gate, up.
struct Gated {
  static constexpr int UNIT = 2 * GROUP / PANEL;
  const Weights& w;
  Activation kind;
  const RowsOut& h;
  alignas(64) float gate[ROW_BLOCK * PANEL], both[ROW_BLOCK * GROUP];

  // W results of the product from lane `v * W` of a panel on.
  OCTAVO_INLINE F biased(int panel, int v, const float* y) const {
    const F value = load(y + v * W);
    return w.bias ? add(value, load(w.bias + panel * PANEL + v * W)) : value;
  }
  // Results of one panel.
  OCTAVO_INLINE void take(int panel, int unit, int local, int count, const float* y) {
    for (int i = 0; i < count; i++, local++)
      for (int v = 0; v < NV; v++) {
        const F value = biased(panel, v, y + i * PANEL);
        float* g = gate + local * PANEL + v * W;
        if (panel % 2 == 0)
          store(g, value);
        else
          store(both + local * GROUP + (panel - unit) / 2 * PANEL + v * W, mul(activate(kind, load(g)), value));
      }
  }
  // All panels [unit, stop) of rows [row, end) were taken.
  OCTAVO_INLINE void leave(int unit, int stop, int row, int end) const {
    const int n = unit / 2 * PANEL, width = (stop - unit) / 2 * PANEL;
    for (int r = row; r < end; r++) {
      const float* from = both + (r - row) * GROUP;
      if (h.f)
        std::memcpy(h.f + size_t(r) * h.inputs + n, from, size_t(width) * 4);
      else
        h.quantise(from, r, n / GROUP);
    }
  }
  // Both panels of rows of prompts.
  OCTAVO_INLINE void pass(int panel, int row, int count, const float* gates, const float* ups) const {
    for (int i = 0; i < count; i++, gates += PANEL, ups += PANEL)
      for (int v = 0; v < NV; v++)
        h.fill_prompt(mul(activate(kind, biased(panel, v, gates)), biased(panel + 1, v, ups)), row + i, panel / 2 * PANEL + v * W);
  }
};

// h = act(gate x) · (up x). Where x has prompts, h has them too.
inline void gated(Team& team, const Weights& w, Activation kind, const Rows& x, int rows, const RowsOut& h) {
  constexpr int UNIT = Gated::UNIT;
  const int panels = num_panels(w.outputs), singles = std::min(rows, x.singles);
  with_format(w.format, [&](auto format) {
    constexpr Format FORMAT = decltype(format)::value;
    share_out(team, panels, 0, singles, ROW_BLOCK, UNIT, [&](int first, int last, int row, int end) {
      Gated part{w, kind, h};
      for (int unit = first; unit < last; unit += UNIT) {
        const int stop = std::min(unit + UNIT, last);
        panels_with_rows<FORMAT>(w, unit, stop, x, row, end, [&](int panel, int r, int count, const float* y) { part.take(panel, unit, r - row, count, y); });
        part.leave(unit, stop, row, end);
      }
    });
    share_out(team, panels, singles, rows, PROMPT_BLOCK, 2, [&](int first, int last, int row, int end) {
      const Gated part{w, kind, h};
      prompt_panels<FORMAT>(w, first, last, x.prompt, singles, row, end,
                            [&](int panel, int r, int count, const float* y, const float* next) { part.pass(panel, r, count, y, next); });
    });
  });
}

struct Projection {
  int heads, kv_heads, head_dim;
  float eps;
  const float *gain, *q_gain, *k_gain;  // the last two of a head, or null
  Weights qkv;
};

inline size_t projection_scratch(const Projection& p, int tokens) {
  return 2 * aligned(size_t(tokens) * std::max(p.qkv.inputs, p.qkv.outputs) * 4) + rows_bytes(p.qkv.format, tokens, p.qkv.inputs);
}

// Rotates the halves of a head against each other: (a, b) -> (a cos - b sin, b cos + a sin).
OCTAVO_INLINE void rotate(const float* x, const float* cos, const float* sin, int half, float* y) {
  int i = 0;
  for (; i + W <= half; i += W) {
    const F a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(y + i, fma(a, c, sub(splat(0.0f), mul(b, s))));
    store(y + half + i, fma(b, c, mul(a, s)));
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i];
    y[i] = a * cos[i] - b * sin[i];
    y[half + i] = b * cos[i] + a * sin[i];
  }
}

// q, k, v of the first `tokens` rows of x, of which all from `singles` on are prompts: norm, product, norm of heads where there is one, rotation.
inline void project(Team& team, const Projection& p, int tokens, int singles, const float* x, const float* cos, const float* sin, float* q, float* k,
                    float* v, Scratch scratch) {
  const int hidden = p.qkv.inputs, wide = p.qkv.outputs, dim = p.head_dim;
  float* spare = scratch.take<float>(size_t(tokens) * std::max(hidden, wide));
  float* qkv = scratch.take<float>(size_t(tokens) * std::max(hidden, wide));
  RowsOut in(p.qkv.format, tokens, singles, hidden, scratch);
  enter(team, x, p.gain, p.eps, tokens, hidden, spare, in);
  product(team, p.qkv, in.rows(), tokens, nullptr, qkv);
  each_row(team, tokens, [&](int t) {
    float* from = qkv + size_t(t) * wide;
    for (int h = 0; h < p.heads + p.kv_heads; h++, from += dim) {
      const bool is_q = h < p.heads;
      const float* gain = is_q ? p.q_gain : p.k_gain;
      if (gain) rms_norm(from, gain, p.eps, dim, from);
      float* to = is_q ? q + (size_t(t) * p.heads + h) * dim : k + (size_t(t) * p.kv_heads + h - p.heads) * dim;
      rotate(from, cos + size_t(t) * (dim / 2), sin + size_t(t) * (dim / 2), dim / 2, to);
    }
    std::memcpy(v + size_t(t) * p.kv_heads * dim, from, size_t(p.kv_heads) * dim * 4);
  });
}

struct Rest {
  Activation activation;
  float eps;
  const float *gain, *after_attention, *after_mlp;  // the last two norm what is added to the stream; or null
  Weights out, gate_up, down;
};

inline size_t rest_scratch(const Rest& r, int tokens) {
  return 2 * aligned(size_t(tokens) * r.out.outputs * 4) + rows_bytes(r.out.format, tokens, r.out.inputs) +
         rows_bytes(r.gate_up.format, tokens, r.gate_up.inputs) + rows_bytes(r.down.format, tokens, r.down.inputs);
}

// x + out(attended), then + down(act(gate(norm)) · up(norm)) of the first `tokens` rows. `y` may be `x`.
inline void finish(Team& team, const Rest& r, int tokens, int singles, const float* x, const float* attended, float* y, Scratch scratch) {
  const int hidden = r.out.outputs;
  float* spare = scratch.take<float>(size_t(tokens) * hidden);
  float* update = scratch.take<float>(size_t(tokens) * hidden);
  RowsOut a(r.out.format, tokens, singles, r.out.inputs, scratch);
  RowsOut b(r.gate_up.format, tokens, singles, hidden, scratch);
  RowsOut c(r.down.format, tokens, singles, r.down.inputs, scratch);
  auto onto = [&](const Weights& w, const Rows& in, const float* base, const float* gain) {
    if (!gain) return product(team, w, in, tokens, base, y);
    product(team, w, in, tokens, nullptr, update);
    each_row(team, tokens, [&](int t) {
      float* u = update + size_t(t) * hidden;
      rms_norm(u, gain, r.eps, hidden, u);
      for (int i = 0; i < hidden; i++) y[size_t(t) * hidden + i] = base[size_t(t) * hidden + i] + u[i];
    });
  };
  enter(team, attended, nullptr, 0, tokens, r.out.inputs, spare, a);
  onto(r.out, a.rows(), x, r.after_attention);
  enter(team, y, r.gain, r.eps, tokens, hidden, spare, b);
  gated(team, r.gate_up, r.activation, b.rows(), tokens, c);
  onto(r.down, c.rows(), y, r.after_mlp);
}

inline size_t score_scratch(const Weights& w, int rows) { return rows_bytes(w.format, rows, w.inputs); }

// Rows without those of zeros at the end: pads, whose products are known.
inline int without_zeros(const float* x, int rows, int size) {
  const auto is_zero = [](float value) { return value == 0; };
  while (rows && std::all_of(x + size_t(rows - 1) * size, x + size_t(rows) * size, is_zero)) rows--;
  return rows;
}

// Products of `rows` rows with one matrix: the head.
inline void score(Team& team, const Weights& w, int rows, const float* x, float* y, Scratch scratch) {
  const int live = without_zeros(x, rows, w.inputs);
  RowsOut in(w.format, rows, rows, w.inputs, scratch);
  enter(team, x, nullptr, 0, live, w.inputs, nullptr, in);
  product(team, w, in.rows(), live, nullptr, y);
  each_row(team, rows - live, [&](int row) {
    float* to = y + size_t(live + row) * w.outputs;
    w.bias ? (void)std::copy(w.bias, w.bias + w.outputs, to) : std::fill(to, to + w.outputs, 0.0f);
  });
}

}  // namespace octavo
