// Plain loops of 8 lanes with the meaning of the AVX2 header. Included by vec.h inside its namespace.
constexpr int W = 8;
struct F { float v[W]; };
struct I { int32_t v[W]; };

template <class Op>
OCTAVO_INLINE F each(Op op) {
  F out;
  for (int i = 0; i < W; i++) out.v[i] = op(i);
  return out;
}
template <class Op>
OCTAVO_INLINE I each_int(Op op) {
  I out;
  for (int i = 0; i < W; i++) out.v[i] = op(i);
  return out;
}
OCTAVO_INLINE uint32_t bits_of(float a) {
  uint32_t u;
  std::memcpy(&u, &a, 4);
  return u;
}
OCTAVO_INLINE float of_bits(uint32_t u) {
  float a;
  std::memcpy(&a, &u, 4);
  return a;
}

OCTAVO_INLINE F load(const float* p) { return each([&](int i) { return p[i]; }); }
OCTAVO_INLINE void store(float* p, F a) { std::memcpy(p, a.v, sizeof a.v); }
OCTAVO_INLINE F splat(float a) { return each([&](int) { return a; }); }
OCTAVO_INLINE F add(F a, F b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
OCTAVO_INLINE F sub(F a, F b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
OCTAVO_INLINE F mul(F a, F b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
OCTAVO_INLINE F div(F a, F b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
OCTAVO_INLINE F fma(F a, F b, F c) { return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); }); }
// As the instructions do: the second operand where either is NaN.
OCTAVO_INLINE F max(F a, F b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
OCTAVO_INLINE F min(F a, F b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
OCTAVO_INLINE F abs_(F a) { return each([&](int i) { return std::fabs(a.v[i]); }); }
OCTAVO_INLINE F nearest(F a) { return each([&](int i) { return std::nearbyint(a.v[i]); }); }
OCTAVO_INLINE I to_int(F a) {
  return each_int([&](int i) { return a.v[i] >= -2147483648.0f && a.v[i] < 2147483648.0f ? int32_t(std::nearbyint(a.v[i])) : INT32_MIN; });
}
OCTAVO_INLINE F to_float(I a) { return each([&](int i) { return float(a.v[i]); }); }
OCTAVO_INLINE F times_power_of_two(F a, I n) {
  return each([&](int i) { return of_bits(bits_of(a.v[i]) + (uint32_t(n.v[i]) << 23)); });
}
OCTAVO_INLINE F first_lanes(int n, F a, F b) { return each([&](int i) { return i < n ? a.v[i] : b.v[i]; }); }
OCTAVO_INLINE float first_lane(F a) { return a.v[0]; }
OCTAVO_INLINE float sum_lanes(F a) {
  const float x0 = a.v[0] + a.v[4], x1 = a.v[1] + a.v[5], x2 = a.v[2] + a.v[6], x3 = a.v[3] + a.v[7];
  return (x0 + x2) + (x1 + x3);
}
OCTAVO_INLINE float max_lanes(F a) {
  float top = a.v[0];
  for (int i = 1; i < W; i++) top = a.v[i] > top ? a.v[i] : top;
  return top;
}
OCTAVO_INLINE float f16_value(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
  if (exponent == 31) return of_bits(sign | 0x7f800000u | fraction << 13);
  if (exponent) return of_bits(sign | (exponent + 112) << 23 | fraction << 13);
  const float small = float(fraction) * 0x1p-24f;
  return sign ? -small : small;
}
OCTAVO_INLINE F load_f16(const uint16_t* p) { return each([&](int i) { return f16_value(p[i]); }); }

OCTAVO_INLINE I load_bits(const void* p) {
  I out;
  std::memcpy(out.v, p, sizeof out.v);
  return out;
}
OCTAVO_INLINE F low_bf16(I a) { return each([&](int i) { return of_bits(uint32_t(a.v[i]) << 16); }); }
OCTAVO_INLINE F high_bf16(I a) { return each([&](int i) { return of_bits(uint32_t(a.v[i]) & 0xffff0000u); }); }

OCTAVO_INLINE I splat4(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return each_int([&](int) { return x; });
}
OCTAVO_INLINE I low_nibbles(I a) { return each_int([&](int i) { return a.v[i] & 0x0f0f0f0f; }); }
OCTAVO_INLINE I high_nibbles(I a) { return each_int([&](int i) { return int32_t((uint32_t(a.v[i]) >> 4) & 0x0f0f0f0fu); }); }
OCTAVO_INLINE void store_bytes(int8_t* p, I a) {
  for (int i = 0; i < W; i++) p[i] = int8_t(a.v[i] < -128 ? -128 : a.v[i] > 127 ? 127 : a.v[i]);
}
OCTAVO_INLINE I signed_byte(I a, int at) { return each_int([&](int i) { return int32_t(int8_t(uint32_t(a.v[i]) >> 8 * at)); }); }
OCTAVO_INLINE I zero_bits() { return each_int([](int) { return 0; }); }
OCTAVO_INLINE I add_int(I a, I b) { return each_int([&](int i) { return a.v[i] + b.v[i]; }); }
OCTAVO_INLINE int sum_int(I a) {
  int total = 0;
  for (int i = 0; i < W; i++) total += a.v[i];
  return total;
}

template <class Weight>
OCTAVO_INLINE int32_t four(int32_t w, int32_t x) {
  int32_t total = 0;
  for (int j = 0; j < 4; j++) total += int32_t(Weight(uint32_t(w) >> 8 * j)) * int32_t(int8_t(uint32_t(x) >> 8 * j));
  return total;
}
struct Dot4 { I v; };
OCTAVO_INLINE Dot4 dot4_zero() { return {zero_bits()}; }
OCTAVO_INLINE Dot4 dot4(Dot4 acc, I w, I x) { return {each_int([&](int i) { return acc.v.v[i] + four<uint8_t>(w.v[i], x.v[i]); })}; }
OCTAVO_INLINE I dot4_sum(Dot4 acc) { return acc.v; }
struct Dot8 { I v; };
OCTAVO_INLINE Dot8 dot8_start(int) { return {zero_bits()}; }
OCTAVO_INLINE I dot8_weights(I w) { return w; }
OCTAVO_INLINE Dot8 dot8(Dot8 acc, I w, I x) { return {each_int([&](int i) { return acc.v.v[i] + four<int8_t>(w.v[i], x.v[i]); })}; }
OCTAVO_INLINE I dot8_sum(Dot8 acc) { return acc.v; }

constexpr bool HAS_DOT16 = true;
OCTAVO_INLINE I dot16(I acc, I w, const int16_t* x) {
  return each_int([&](int i) {
    int32_t total = acc.v[i];
    for (int j = 0; j < 4; j++) total += int32_t(int8_t(uint32_t(w.v[i]) >> 8 * j)) * x[j % 2 * 2 + j / 2];
    return total;
  });
}
