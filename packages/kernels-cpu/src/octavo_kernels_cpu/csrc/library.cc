// What the library exports: XLA custom calls for the halves of a layer, the head and attention, and a C function that packs weights.
//
// Compiled once an instruction set; the caller has checked that the machine has it. Checks every size it is given: a wrong one is an
// error of the call, never a wild read.
#include <cstdlib>
#include <string>
#include <vector>

#include "attention.h"
#include "layer.h"
#include "pack.h"
#include "prepare.h"
#include "xla/ffi/api/ffi.h"

#define OCTAVO_EXPORT extern "C" __attribute__((visibility("default")))

namespace ffi = xla::ffi;

namespace octavo {
namespace {

std::atomic<int> wanted_threads{1};

// Lives as long as the process: its threads may be waiting when it exits.
Pool& pool() {
  static Pool* made = new Pool(wanted_threads.load());
  return *made;
}

using Any = ffi::AnyBuffer;

template <class T>
T* at(const Any& buffer) {
  return (T*)buffer.untyped_data();
}
int64_t size(const Any& buffer) { return int64_t(buffer.element_count()); }
int dim(const Any& buffer, size_t axis) { return axis < buffer.dimensions().size() ? int(buffer.dimensions()[axis]) : -1; }
const float* or_null(const Any& buffer) { return size(buffer) ? at<float>(buffer) : nullptr; }

ffi::Error refused(const char* what) { return ffi::Error::InvalidArgument(std::string("octavo kernels: ") + what); }

// Whether a packed matrix has the size that its shape asks for.
bool is_whole(const Any& data, int64_t format, int outputs, int inputs) {
  if (format < 0 || format > int64_t(Format::Q8F) || outputs <= 0 || inputs <= 0) return false;
  if (is_quantised(Format(format)) && inputs % GROUP) return false;
  return size(data) == int64_t(num_panels(outputs) * panel_bytes(Format(format), inputs));
}

Weights weights(const Any& data, const float* bias, int64_t format, int outputs, int inputs) {
  return {at<uint8_t>(data), Format(format), outputs, inputs, bias};
}

void clear_pads(const Any& buffer, int live, int tokens) {
  const size_t width = tokens ? size(buffer) / tokens : 0;
  std::memset(at<float>(buffer) + live * width, 0, (tokens - live) * width * 4);
}

// Live tokens of a step, and those of them before the first prompt.
struct Counts {
  int live, singles;
  Counts(const Any& counts, int tokens) : live(std::clamp(at<int32_t>(counts)[0], 0, tokens)), singles(std::clamp(at<int32_t>(counts)[1], 0, live)) {}
};

// Parts of one vector of floats, one behind the other; a part that is not there is null.
class Floats {
 public:
  explicit Floats(const Any& buffer) : at_(at<float>(buffer)), left_(size(buffer)) {}
  const float* take(bool is_there, int64_t count) {
    if (!is_there) return nullptr;
    const float* part = at_;
    at_ += count, left_ -= count;
    return part;
  }
  bool fits() const { return left_ == 0; }

 private:
  const float* at_;
  int64_t left_;
};

int64_t padded(int outputs) { return num_panels(outputs) * int64_t(PANEL); }

// Bits of `parts`: which of the optional vectors of floats there are, in the order of the operands.
ffi::Error Project(Any counts, Any x, Any cos, Any sin, Any floats, Any w, ffi::Result<Any> q, ffi::Result<Any> k, ffi::Result<Any> v,
                   ffi::Result<Any> scratch, int64_t format, int64_t parts, float eps) {
  const int tokens = dim(x, 0), hidden = dim(x, 1), heads = dim(*q, 1), kv_heads = dim(*k, 1), head_dim = dim(*q, 2);
  const int wide = (heads + 2 * kv_heads) * head_dim;
  if (!is_whole(w, format, wide, hidden)) return refused("projection: the packed weight is not [q and k and v, hidden]");
  if (size(cos) != int64_t(tokens) * (head_dim / 2) || size(sin) != size(cos)) return refused("projection: the rotation has another size");
  Floats rest(floats);
  const float* gain = rest.take(true, hidden);
  const float* q_gain = rest.take(parts & 1, head_dim);
  const float* k_gain = rest.take(parts & 2, head_dim);
  const float* bias = rest.take(parts & 4, padded(wide));
  if (!rest.fits()) return refused("projection: norms or biases have another size");
  const Projection p{heads, kv_heads, head_dim, eps, gain, q_gain, k_gain, weights(w, bias, format, wide, hidden)};
  if (size(*scratch) < int64_t(projection_scratch(p, tokens))) return refused("projection: too little scratch memory");
  if (size(counts) != 2) return refused("projection: counts are two numbers");
  const Counts step(counts, tokens);
  clear_pads(*q, step.live, tokens), clear_pads(*k, step.live, tokens), clear_pads(*v, step.live, tokens);
  Team team(pool());
  project(team, p, step.live, step.singles, at<float>(x), at<float>(cos), at<float>(sin), at<float>(*q), at<float>(*k), at<float>(*v),
          Scratch(at<uint8_t>(*scratch), size(*scratch)));
  return ffi::Error::Success();
}

ffi::Error Finish(Any counts, Any x, Any attended, Any floats, Any w_out, Any w_gate_up, Any w_down, ffi::Result<Any> y,
                  ffi::Result<Any> scratch, int64_t f_out, int64_t f_gate_up, int64_t f_down, int64_t ffn, int64_t activation, int64_t parts,
                  float eps) {
  const int tokens = dim(x, 0), hidden = dim(x, 1), wide = int(size(attended) / std::max(tokens, 1));
  if (!is_whole(w_out, f_out, hidden, wide)) return refused("layer: the packed output weight is not [hidden, heads]");
  if (ffn % PANEL || (is_quantised(Format(f_down)) && ffn % GROUP)) return refused("layer: the width of the MLP is not a multiple of a panel");
  if (!is_whole(w_gate_up, f_gate_up, int(2 * ffn), hidden)) return refused("layer: the packed gate and up weight is not [2 ffn, hidden]");
  if (!is_whole(w_down, f_down, hidden, int(ffn))) return refused("layer: the packed down weight is not [hidden, ffn]");
  if (activation < 0 || activation > 1 || size(*y) != size(x)) return refused("layer: unknown activation or another result");
  Floats rest(floats);
  const float* gain = rest.take(true, hidden);
  const float* after_attention = rest.take(parts & 1, hidden);
  const float* after_mlp = rest.take(parts & 2, hidden);
  const float* b_out = rest.take(parts & 4, padded(hidden));
  const float* b_gate_up = rest.take(parts & 8, padded(int(2 * ffn)));
  const float* b_down = rest.take(parts & 16, padded(hidden));
  if (!rest.fits()) return refused("layer: norms or biases have another size");
  const Rest r{Activation(activation), eps, gain, after_attention, after_mlp, weights(w_out, b_out, f_out, hidden, wide),
               weights(w_gate_up, b_gate_up, f_gate_up, int(2 * ffn), hidden), weights(w_down, b_down, f_down, hidden, int(ffn))};
  if (size(*scratch) < int64_t(rest_scratch(r, tokens))) return refused("layer: too little scratch memory");
  if (y->untyped_data() != x.untyped_data()) std::memcpy(at<float>(*y), at<float>(x), size(x) * 4);
  if (size(counts) != 2) return refused("layer: counts are two numbers");
  const Counts step(counts, tokens);
  Team team(pool());
  finish(team, r, step.live, step.singles, at<float>(*y), at<float>(attended), at<float>(*y), Scratch(at<uint8_t>(*scratch), size(*scratch)));
  return ffi::Error::Success();
}

ffi::Error Score(Any x, Any w, Any bias, ffi::Result<Any> y, ffi::Result<Any> scratch, int64_t format) {
  const int rows = dim(x, 0), inputs = dim(x, 1), outputs = dim(*y, 1);
  if (!is_whole(w, format, outputs, inputs) || (size(bias) && size(bias) != padded(outputs))) return refused("head: the packed weight is not [outputs, inputs]");
  const Weights matrix = weights(w, or_null(bias), format, outputs, inputs);
  if (dim(*y, 0) != rows || size(*scratch) < int64_t(score_scratch(matrix, rows))) return refused("head: too little scratch memory");
  Team team(pool());
  score(team, matrix, rows, at<float>(x), at<float>(*y), Scratch(at<uint8_t>(*scratch), size(*scratch)));
  return ffi::Error::Success();
}

bool pools(const Any& k, const Any& v, int64_t bf16, int64_t block_size, int64_t head_dim, Pools& out) {
  const int blocks = dim(k, 0), heads = dim(k, 1);
  const bool fits = blocks > 0 && heads > 0 && block_size > 0 && block_size % 16 == 0 && head_dim > 0 && head_dim % 16 == 0 && head_dim <= MAX_HEAD_DIM;
  if (!fits || size(k) != blocks * heads * block_size * head_dim || size(v) != size(k)) return false;
  out = {k.untyped_data(), v.untyped_data(), bf16 != 0, blocks, heads, int(head_dim), int(block_size)};
  return true;
}

ffi::Error Write(Any k, Any v, Any slots, Any k_pool, Any v_pool, ffi::Result<Any> k_out, ffi::Result<Any> v_out, int64_t bf16,
                 int64_t block_size, int64_t head_dim) {
  if (k_out->untyped_data() != k_pool.untyped_data() || v_out->untyped_data() != v_pool.untyped_data()) return refused("write: the pool was copied instead of written in place");
  Pools p;
  if (!pools(k_pool, v_pool, bf16, block_size, head_dim, p)) return refused("write: the pool has another shape");
  const int tokens = int(size(slots));
  if (size(k) != int64_t(tokens) * p.kv_heads * p.head_dim || size(v) != size(k)) return refused("write: keys or values have another shape");
  Team team(pool());
  write(team, p, tokens, at<int32_t>(slots), at<float>(k), at<float>(v));
  return ffi::Error::Success();
}

ffi::Error Attend(Any q, Any k_pool, Any v_pool, Any query_start, Any context_len, Any table, Any num_rows, ffi::Result<Any> out,
                  int64_t bf16, int64_t block_size, float scale) {
  const int tokens = dim(q, 0), heads = dim(q, 1), rows = int(size(context_len));
  Pools p;
  if (!pools(k_pool, v_pool, bf16, block_size, dim(q, 2), p)) return refused("attention: the pool has another shape");
  if (heads % p.kv_heads || heads / p.kv_heads > TILE_ROWS) return refused("attention: too many query heads to a KV head");
  if (size(query_start) != rows + 1 || dim(table, 0) != rows || size(*out) != size(q)) return refused("attention: the batch's arrays disagree");
  const Batch b{at<int32_t>(query_start), at<int32_t>(context_len), at<int32_t>(table), std::clamp(*at<int32_t>(num_rows), 0, rows), dim(table, 1), tokens};
  for (int r = 0; r < b.num_rows; r++)
    if (b.query_start[r] < 0 || b.query_start[r] > b.query_start[r + 1] || b.query_start[r + 1] > tokens) return refused("attention: rows start out of order");
  const int live = b.num_rows ? b.query_start[b.num_rows] : 0;
  clear_pads(*out, live, tokens);
  Team team(pool());
  attend(team, p, b, heads, scale, at<float>(q), at<float>(*out));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace octavo

#define ARG .Arg<octavo::Any>()
#define RET .Ret<octavo::Any>()
#define INT(name) .Attr<int64_t>(name)
#define FLOAT(name) .Attr<float>(name)

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(octavo_cpu_project, octavo::Project,
                              ffi::Ffi::Bind() ARG ARG ARG ARG ARG ARG RET RET RET RET INT("format") INT("parts") FLOAT("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(octavo_cpu_finish, octavo::Finish,
                              ffi::Ffi::Bind() ARG ARG ARG ARG ARG ARG ARG RET RET INT("f_out") INT("f_gate_up") INT("f_down") INT("ffn")
                                  INT("activation") INT("parts") FLOAT("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(octavo_cpu_score, octavo::Score, ffi::Ffi::Bind() ARG ARG ARG RET RET INT("format"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(octavo_cpu_write, octavo::Write,
                              ffi::Ffi::Bind() ARG ARG ARG ARG ARG RET RET INT("bf16") INT("block_size") INT("head_dim"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(octavo_cpu_attend, octavo::Attend,
                              ffi::Ffi::Bind() ARG ARG ARG ARG ARG ARG ARG RET INT("bf16") INT("block_size") FLOAT("scale"));
#pragma GCC visibility pop

// Asks the operating system for what this process needs to run these kernels; 0, or the error's number. Once, before any other call.
OCTAVO_EXPORT int octavo_cpu_prepare() { return octavo::prepare(); }

// Threads of the pool, the caller's included; counts until the first call that uses it.
OCTAVO_EXPORT void octavo_cpu_set_threads(int threads) { octavo::wanted_threads = std::max(1, threads); }

OCTAVO_EXPORT int octavo_cpu_threads() { return octavo::pool().threads(); }

// Bytes of a packed matrix, or −1 for a shape or pair of formats that cannot be packed.
OCTAVO_EXPORT int64_t octavo_cpu_packed_bytes(int format, int source, int outputs, int inputs) {
  using namespace octavo;
  if (format < 0 || format > 4 || source < 0 || source > 4 || outputs <= 0 || inputs <= 0) return -1;
  if (!can_pack(Source(source), Format(format))) return -1;
  if ((is_quantised(Format(format)) || source >= 2) && inputs % GROUP) return -1;
  return int64_t(num_panels(outputs) * panel_bytes(Format(format), inputs));
}

OCTAVO_EXPORT void octavo_cpu_pack(int format, int source, int panels, int inputs, const uint8_t* from, const int32_t* order, uint8_t* to) {
  using namespace octavo;
  Team team(pool());
  constexpr int EACH = 8;
  team.run((panels + EACH - 1) / EACH, [&](int i) {
    std::vector<float> spare(inputs);
    for (int p = i * EACH; p < std::min(panels, (i + 1) * EACH); p++)
      pack_panel(Format(format), Source(source), from, order + p * PANEL, inputs, to + p * panel_bytes(Format(format), inputs), spare.data());
  });
}

// Reads `bytes` from `from` with every thread; the answer keeps the compiler from leaving the reads out.
OCTAVO_EXPORT uint64_t octavo_cpu_stream(const uint64_t* from, int64_t bytes) {
  using namespace octavo;
  Team team(pool());
  constexpr int64_t EACH = 1 << 17;  // words
  const int64_t words = bytes / 8;
  std::atomic<uint64_t> total{0};
  team.run(int((words + EACH - 1) / EACH), [&](int i) {
    uint64_t sum = 0;
    for (int64_t w = i * EACH; w < std::min(words, (i + 1) * EACH); w++) sum += from[w];
    total += sum;
  });
  return total;
}
