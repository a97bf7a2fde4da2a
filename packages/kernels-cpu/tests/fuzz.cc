// Layers and attention of random shapes, each buffer exactly as long as it must be: for sanitizers. Arguments: rounds, seed.
// Also checks that a row's results are the same alone.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "attention.h"
#include "layer.h"
#include "pack.h"
#include "prepare.h"

using namespace octavo;

static std::mt19937 rng;
static int any(int low, int high) { return int(rng() % unsigned(high - low + 1)) + low; }

template <class T>
struct Buffer {
  size_t count;
  std::unique_ptr<T[]> data;
  explicit Buffer(size_t n) : count(n), data(new T[n]()) {}
  T* get() { return data.get(); }
};

static Buffer<float> numbers(size_t n) {
  Buffer<float> out(n);
  for (size_t i = 0; i < n; i++) out.data[i] = float(int(rng() % 2001) - 1000) / 1000;
  return out;
}

struct Packed {
  Buffer<uint8_t> data;
  Weights weights;
  Packed(Format format, int outputs, int inputs) : data(num_panels(outputs) * panel_bytes(format, inputs)) {
    const Source source = format == Format::Q4 ? (any(0, 1) ? Source::Q4_1 : Source::Q4_0) : Source::F32;
    Buffer<uint8_t> rows(source_row_bytes(source, inputs) * outputs);
    if (source == Source::F32) {
      auto values = numbers(size_t(outputs) * inputs);
      std::memcpy(rows.get(), values.get(), rows.count);
    } else {
      for (size_t i = 0; i < rows.count; i++) rows.data[i] = uint8_t(rng());
      const size_t block = source_row_bytes(source, GROUP);
      for (size_t i = 0; i < rows.count; i += block)
        for (int h = 0; h < (source == Source::Q4_1 ? 2 : 1); h++) {
          const uint16_t half = float_to_f16(0.01f * float(any(1, 9)));
          std::memcpy(rows.get() + i + 2 * h, &half, 2);
        }
    }
    Buffer<int32_t> order(size_t(num_panels(outputs)) * PANEL);
    for (size_t i = 0; i < order.count; i++) order.data[i] = int(i) < outputs ? int(i) : -1;
    Buffer<float> spare(inputs);
    for (int p = 0; p < num_panels(outputs); p++)
      pack_panel(format, source, rows.get(), order.get() + p * PANEL, inputs, data.get() + p * panel_bytes(format, inputs), spare.get());
    weights = {data.get(), format, outputs, inputs, nullptr};
  }
};

static void fail(const char* what, int round) {
  std::printf("round %d: %s\n", round, what);
  std::exit(1);
}

static void products(Pool& pool, int round) {
  const Format format = Format(any(0, 4));
  const int inputs = is_quantised(format) ? any(1, 20) * GROUP : any(1, 600), outputs = any(1, 130), rows = any(1, 110);
  Packed w(format, outputs, inputs);
  auto x = numbers(size_t(rows) * inputs);
  Buffer<float> y(size_t(rows) * outputs), one(outputs);
  Buffer<uint8_t> scratch(score_scratch(w.weights, rows));
  Team team(pool);
  score(team, w.weights, rows, x.get(), y.get(), Scratch(scratch.get(), scratch.count));
  const int row = any(0, rows - 1);
  score(team, w.weights, 1, x.get() + size_t(row) * inputs, one.get(), Scratch(scratch.get(), scratch.count));
  if (std::memcmp(one.get(), y.get() + size_t(row) * outputs, size_t(outputs) * 4)) fail("a row alone differs from the row in a batch", round);
}

static void layer(Pool& pool, int round) {
  const Format format = Format(any(0, 3));
  const int hidden = any(1, 6) * GROUP, ffn = any(1, 6) * GROUP, dim = any(1, 4) * 16, kv = any(1, 3), heads = kv * any(1, 4), tokens = any(1, 70);
  const int wide = (heads + 2 * kv) * dim, inner = heads * dim;
  if (is_quantised(format) && inner % GROUP) return;
  Packed qkv(format, wide, hidden), out(format, hidden, inner), gate_up(format, 2 * ffn, hidden), down(format, hidden, ffn);
  auto gain = numbers(hidden), head_gain = numbers(dim), x = numbers(size_t(tokens) * hidden), angle = numbers(size_t(tokens) * dim / 2);
  Buffer<float> q(size_t(tokens) * inner), k(size_t(tokens) * kv * dim), v(size_t(tokens) * kv * dim), y(size_t(tokens) * hidden);
  const bool more = any(0, 1);
  Projection p{heads, kv, dim, 1e-5f, gain.get(), more ? head_gain.get() : nullptr, more ? head_gain.get() : nullptr, qkv.weights};
  Rest r{Activation(any(0, 1)), 1e-5f, gain.get(), more ? gain.get() : nullptr, more ? gain.get() : nullptr, out.weights, gate_up.weights, down.weights};
  const int singles = any(0, tokens);
  Buffer<uint8_t> a(projection_scratch(p, tokens)), b(rest_scratch(r, tokens));
  Team team(pool);
  project(team, p, tokens, singles, x.get(), angle.get(), angle.get(), q.get(), k.get(), v.get(), Scratch(a.get(), a.count));
  finish(team, r, tokens, singles, x.get(), q.get(), y.get(), Scratch(b.get(), b.count));
  for (size_t i = 0; i < y.count; i++)
    if (!(y.data[i] - y.data[i] == 0)) fail("a layer's answer is not finite", round);
}

static void paged(Pool& pool, int round) {
  const bool bf16 = any(0, 1);
  const int size = any(1, 4) * 16, dim = any(1, 8) * 16, kv = any(1, 3), heads = kv * any(1, 8), rows = any(1, 6), blocks = any(2, 40);
  const size_t elements = size_t(blocks) * kv * size * dim;
  Buffer<uint8_t> k(elements * (bf16 ? 2 : 4)), v(elements * (bf16 ? 2 : 4));
  std::memset(k.get(), 0xff, k.count), std::memset(v.get(), 0xff, v.count);
  Pools pools{k.get(), v.get(), bf16, blocks, kv, dim, size};
  const int most = (blocks - 1) / rows;
  if (!most) return;
  std::vector<int> start{0}, length, table(size_t(rows) * most), slots;
  for (int r = 0, next = 1; r < rows; r++) {
    length.push_back(any(1, most * size));
    start.push_back(start.back() + any(1, std::min(length[r], 40)));
    for (int i = 0; i < most; i++) table[size_t(r) * most + i] = next++;
  }
  for (int r = 0; r < rows; r++)
    for (int t = 0; t < length[r]; t++) slots.push_back(table[size_t(r) * most + t / size] * size + t % size);
  auto keys = numbers(slots.size() * kv * dim), values = numbers(slots.size() * kv * dim), q = numbers(size_t(start.back()) * heads * dim);
  Buffer<float> out(size_t(start.back()) * heads * dim);
  Team team(pool);
  write(team, pools, int(slots.size()), slots.data(), keys.get(), values.get());
  Batch batch{start.data(), length.data(), table.data(), rows, most, start.back()};
  attend(team, pools, batch, heads, 0.1f, q.get(), out.get());
  for (size_t i = 0; i < out.count; i++)
    if (!(out.data[i] - out.data[i] == 0)) fail("attention read what nobody wrote", round);
}

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
  if (prepare()) return 75;
  rng.seed(argc > 2 ? unsigned(std::atoi(argv[2])) : 0);
  Pool pool(3);
  for (int round = 0; round < rounds; round++) products(pool, round), layer(pool, round), paged(pool, round);
  std::printf("%d rounds\n", rounds);
}
