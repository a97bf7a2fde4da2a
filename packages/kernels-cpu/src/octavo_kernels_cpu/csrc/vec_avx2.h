// AVX2, FMA and F16C. Included by vec.h inside its namespace.
constexpr int W = 8;
struct F { __m256 v; };
struct I { __m256i v; };

OCTAVO_INLINE F load(const float* p) { return {_mm256_loadu_ps(p)}; }
OCTAVO_INLINE void store(float* p, F a) { _mm256_storeu_ps(p, a.v); }
OCTAVO_INLINE F splat(float a) { return {_mm256_set1_ps(a)}; }
OCTAVO_INLINE F add(F a, F b) { return {_mm256_add_ps(a.v, b.v)}; }
OCTAVO_INLINE F sub(F a, F b) { return {_mm256_sub_ps(a.v, b.v)}; }
OCTAVO_INLINE F mul(F a, F b) { return {_mm256_mul_ps(a.v, b.v)}; }
OCTAVO_INLINE F div(F a, F b) { return {_mm256_div_ps(a.v, b.v)}; }
OCTAVO_INLINE F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
OCTAVO_INLINE F max(F a, F b) { return {_mm256_max_ps(a.v, b.v)}; }
OCTAVO_INLINE F min(F a, F b) { return {_mm256_min_ps(a.v, b.v)}; }
OCTAVO_INLINE F abs_(F a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
OCTAVO_INLINE F nearest(F a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
OCTAVO_INLINE I to_int(F a) { return {_mm256_cvtps_epi32(a.v)}; }
OCTAVO_INLINE F to_float(I a) { return {_mm256_cvtepi32_ps(a.v)}; }
OCTAVO_INLINE F times_power_of_two(F a, I n) {
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v), _mm256_slli_epi32(n.v, 23)))};
}
// Lanes below n from a, the others from b.
OCTAVO_INLINE F first_lanes(int n, F a, F b) {
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane)))};
}
OCTAVO_INLINE float first_lane(F a) { return _mm256_cvtss_f32(a.v); }
OCTAVO_INLINE float sum_lanes(F a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
OCTAVO_INLINE float max_lanes(F a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
OCTAVO_INLINE F load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }

// W pairs of 16-bit floats, the first of each pair in the low half.
OCTAVO_INLINE I load_bits(const void* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
OCTAVO_INLINE F low_bf16(I a) { return {_mm256_castsi256_ps(_mm256_slli_epi32(a.v, 16))}; }
OCTAVO_INLINE F high_bf16(I a) { return {_mm256_castsi256_ps(_mm256_and_si256(a.v, _mm256_set1_epi32(int(0xffff0000u))))}; }

// W lanes of four bytes.
OCTAVO_INLINE I splat4(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return {_mm256_set1_epi32(x)};
}
OCTAVO_INLINE I low_nibbles(I a) { return {_mm256_and_si256(a.v, _mm256_set1_epi8(15))}; }
OCTAVO_INLINE I high_nibbles(I a) { return {_mm256_and_si256(_mm256_srli_epi16(a.v, 4), _mm256_set1_epi8(15))}; }
// Stores W integers of -128..127 as bytes.
OCTAVO_INLINE void store_bytes(int8_t* p, I a) {
  __m256i x = _mm256_packs_epi32(a.v, a.v);
  x = _mm256_permute4x64_epi64(_mm256_packs_epi16(x, x), 0x08);
  x = _mm256_shuffle_epi32(x, 0x08);
  _mm_storel_epi64((__m128i*)p, _mm256_castsi256_si128(x));
}
// Byte `at` of each lane, with its sign.
OCTAVO_INLINE I signed_byte(I a, int at) { return {_mm256_srai_epi32(_mm256_slli_epi32(a.v, 24 - 8 * at), 24)}; }
OCTAVO_INLINE I zero_bits() { return {_mm256_setzero_si256()}; }
OCTAVO_INLINE I add_int(I a, I b) { return {_mm256_add_epi32(a.v, b.v)}; }
OCTAVO_INLINE int sum_int(I a) {
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}

// Sums of products of four neighbouring bytes: weights 0..15, activations -127..127, 32 of each at most: 16-bit sums hold that.
struct Dot4 { __m256i v; };
OCTAVO_INLINE Dot4 dot4_zero() { return {_mm256_setzero_si256()}; }
OCTAVO_INLINE Dot4 dot4(Dot4 acc, I w, I x) {
  __m256i sum = _mm256_add_epi16(acc.v, _mm256_maddubs_epi16(w.v, x.v));
  asm("" : "+x"(sum));  // otherwise the compiler adds in another order, which keeps every product alive and spills it
  return {sum};
}
OCTAVO_INLINE I dot4_sum(Dot4 acc) { return {_mm256_madd_epi16(acc.v, _mm256_set1_epi16(1))}; }

// The same with weights -128..127. `sum`: of the activations, for units that need it.
struct Dot8 { __m256i v; };
OCTAVO_INLINE Dot8 dot8_start(int) { return {_mm256_setzero_si256()}; }
OCTAVO_INLINE I dot8_weights(I w) { return w; }
OCTAVO_INLINE Dot8 dot8(Dot8 acc, I w, I x) {
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w.v), _mm256_sign_epi8(x.v, w.v));
  __m256i sum = _mm256_add_epi32(acc.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  asm("" : "+x"(sum));
  return {sum};
}
OCTAVO_INLINE I dot8_sum(Dot8 acc) { return {acc.v}; }

// Sums of products of bytes -128..127 with four numbers of 16 bits, which lie in the order 0, 2, 1, 3.
constexpr bool HAS_DOT16 = true;
OCTAVO_INLINE I dot16(I acc, I w, const int16_t* x) {
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(w.v, 8), 8), odd = _mm256_srai_epi16(w.v, 8);
  __m256i sum = _mm256_add_epi32(acc.v, _mm256_madd_epi16(even, splat4((const int8_t*)x).v));
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(odd, splat4((const int8_t*)(x + 2)).v));
  asm("" : "+x"(sum));
  return {sum};
}
