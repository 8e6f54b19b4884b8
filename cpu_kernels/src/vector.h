// Vectors of float32 in the width of one instruction set. Each instruction set has a source file of
// its own, which sets it for the code that it includes.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Of loops over arrays of vectors: completely, so that the vectors stay in registers.
#define UNROLL _Pragma("GCC unroll 32")

namespace jaxllm {
namespace {

#if defined(JAXLLM_AVX512)

constexpr int kWidth = 16;
typedef float Vector __attribute__((vector_size(64)));

inline Vector load(const float* p) { return (Vector)_mm512_loadu_ps(p); }
inline Vector load(const int8_t* p) {
  return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
// 32 entries of int4, two to a byte, the first in the low half.
inline void load_int4(const uint8_t* p, Vector* v) {
  const __m512 of = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  const __m512 even = _mm512_permutexvar_ps(bytes, of);  // which looks at 4 bits of an index
  const __m512 odd = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), of);
  v[0] = (Vector)_mm512_permutex2var_ps(even, first, odd);
  v[1] = (Vector)_mm512_permutex2var_ps(even, _mm512_add_epi32(first, _mm512_set1_epi32(8)), odd);
}
// Sums of the entries of four vectors.
inline __m128 sums(Vector a, Vector b, Vector c, Vector d) {
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  __m512 s = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
  return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}
inline void store_sums(float* p, Vector a, Vector b, Vector c, Vector d) { _mm_storeu_ps(p, sums(a, b, c, d)); }

#elif defined(JAXLLM_AVX2)

constexpr int kWidth = 8;
typedef float Vector __attribute__((vector_size(32)));

inline Vector load(const float* p) { return (Vector)_mm256_loadu_ps(p); }
inline Vector load(const int8_t* p) {
  return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline void load_int4(const uint8_t* p, Vector* v) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p), eight = _mm_set1_epi8(8);
  const auto of = [=](__m128i x) {  // the low four bits of each byte, with their sign
    return _mm_sub_epi8(_mm_xor_si128(_mm_and_si128(x, _mm_set1_epi8(15)), eight), eight);
  };
  const __m128i even = of(bytes), odd = of(_mm_srli_epi16(bytes, 4));
  const __m128i a = _mm_unpacklo_epi8(even, odd), b = _mm_unpackhi_epi8(even, odd);
  const __m128i eights[] = {a, _mm_srli_si128(a, 8), b, _mm_srli_si128(b, 8)};
  UNROLL for (int k = 0; k < 4; ++k) v[k] = (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eights[k]));
}
inline void store_sums(float* p, Vector a, Vector b, Vector c, Vector d) {
  __m256 s = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

#else

constexpr int kWidth = 4;
typedef float Vector __attribute__((vector_size(16)));

inline Vector load(const float* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Vector load(const int8_t* p) {
  return Vector{float(p[0]), float(p[1]), float(p[2]), float(p[3])};
}
inline void load_int4(const uint8_t* p, Vector* v) {
  for (int k = 0; k < 8; ++k, p += 2)
    v[k] = Vector{float(int8_t(p[0] << 4) >> 4), float(int8_t(p[0]) >> 4),
                  float(int8_t(p[1] << 4) >> 4), float(int8_t(p[1]) >> 4)};
}
inline void store_sums(float* p, Vector a, Vector b, Vector c, Vector d) {
  for (Vector v : {a, b, c, d}) *p++ = (v[0] + v[1]) + (v[2] + v[3]);
}

#endif

typedef int32_t Integers __attribute__((vector_size(4 * kWidth)));

inline void store(float* p, Vector v) { std::memcpy(p, &v, sizeof v); }
inline Vector zero() { return Vector{}; }

// The first `count` entries at p, and zeros.
template <class T>
Vector load_first(const T* p, long count) {
  T entries[kWidth] = {};
  std::memcpy(entries, p, count * sizeof(T));
  return load(entries);
}

inline float sum(Vector v) {
  float four[4];
  store_sums(four, v, zero(), zero(), zero());
  return four[0];
}

// e^x for x <= 0 within 2 ulp; 0 below -87 (Cephes' polynomial).
inline Vector exp(Vector x) {
  Vector clamped = x < -87.0f ? zero() - 87.0f : x;
  Vector scaled = clamped * 1.44269504088896341f - 0.5f;
  Integers n = __builtin_convertvector(scaled, Integers);  // towards zero: the nearest multiple
  Vector whole = __builtin_convertvector(n, Vector);
  Vector r = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vector p = zero() + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  Vector e = p * r * r + r + 1.0f;
  Integers bits = (n + 127) << 23;
  Vector power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -87.0f ? zero() : e * power;
}

}  // namespace
}  // namespace jaxllm
