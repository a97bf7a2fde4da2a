// AVX-512 F, BW, DQ, VL and VNNI. Included by vec.h inside its namespace.
constexpr int W = 16;
struct F { __m512 v; };
struct I { __m512i v; };

OCTAVO_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
OCTAVO_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
OCTAVO_INLINE F splat(float a) { return {_mm512_set1_ps(a)}; }
OCTAVO_INLINE F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
OCTAVO_INLINE F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
OCTAVO_INLINE F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
OCTAVO_INLINE F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
OCTAVO_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
OCTAVO_INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
OCTAVO_INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
OCTAVO_INLINE F abs_(F a) { return {_mm512_abs_ps(a.v)}; }
OCTAVO_INLINE F nearest(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
OCTAVO_INLINE I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }
OCTAVO_INLINE F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
OCTAVO_INLINE F times_power_of_two(F a, I n) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(n.v, 23)))};
}
// Lanes below n from a, the others from b.
OCTAVO_INLINE F first_lanes(int n, F a, F b) {
  __mmask16 mask = n <= 0 ? 0 : n >= 16 ? 0xffff : (1u << n) - 1;
  return {_mm512_mask_mov_ps(b.v, mask, a.v)};
}
OCTAVO_INLINE float first_lane(F a) { return _mm512_cvtss_f32(a.v); }
OCTAVO_INLINE float sum_lanes(F a) { return _mm512_reduce_add_ps(a.v); }
OCTAVO_INLINE float max_lanes(F a) { return _mm512_reduce_max_ps(a.v); }
OCTAVO_INLINE F load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }

// W pairs of 16-bit floats, the first of each pair in the low half.
OCTAVO_INLINE I load_bits(const void* p) { return {_mm512_loadu_si512(p)}; }
OCTAVO_INLINE void store_bits(void* p, I a) { _mm512_storeu_si512(p, a.v); }
OCTAVO_INLINE F low_bf16(I a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
OCTAVO_INLINE F high_bf16(I a) { return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(int(0xffff0000u))))}; }

// W lanes of four bytes.
OCTAVO_INLINE I splat4(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return {_mm512_set1_epi32(x)};
}
OCTAVO_INLINE I low_nibbles(I a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
OCTAVO_INLINE I high_nibbles(I a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
// Stores W integers of -128..127 as bytes.
OCTAVO_INLINE void store_bytes(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }
// Byte `at` of each lane, with its sign.
OCTAVO_INLINE I signed_byte(I a, int at) { return {_mm512_srai_epi32(_mm512_slli_epi32(a.v, 24 - 8 * at), 24)}; }
OCTAVO_INLINE I zero_bits() { return {_mm512_setzero_si512()}; }
OCTAVO_INLINE I add_int(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
OCTAVO_INLINE int sum_int(I a) { return _mm512_reduce_add_epi32(a.v); }

// Sums of products of four neighbouring bytes: weights 0..15, activations -127..127.
struct Dot4 { __m512i v; };
OCTAVO_INLINE Dot4 dot4_zero() { return {_mm512_setzero_si512()}; }
OCTAVO_INLINE Dot4 dot4(Dot4 acc, I w, I x) { return {_mm512_dpbusd_epi32(acc.v, w.v, x.v)}; }
OCTAVO_INLINE I dot4_sum(Dot4 acc) { return {acc.v}; }

// The same with weights -128..127: moved up by 128 they are unsigned, and 128 times the activations' sum is taken off beforehand.
struct Dot8 { __m512i v; };
OCTAVO_INLINE Dot8 dot8_start(int sum) { return {_mm512_set1_epi32(-128 * sum)}; }
OCTAVO_INLINE I dot8_weights(I w) { return {_mm512_xor_si512(w.v, _mm512_set1_epi8(-128))}; }
OCTAVO_INLINE Dot8 dot8(Dot8 acc, I w, I x) { return {_mm512_dpbusd_epi32(acc.v, w.v, x.v)}; }
OCTAVO_INLINE I dot8_sum(Dot8 acc) { return {acc.v}; }

constexpr bool HAS_DOT16 = false;
OCTAVO_INLINE I dot16(I acc, I, const int16_t*) { return acc; }
