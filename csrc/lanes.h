// A few doubles at a time. All arithmetic is in double, so that only the store rounds; the loops wait for memory anyway.
// Compiled once per instruction set, in a namespace of its own.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(NK_AVX512) || defined(NK_AVX2)
#include <immintrin.h>
#endif

#include "job.h"

namespace normkit {
namespace NK_NAMESPACE {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

inline float from_bits(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline uint32_t to_bits(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }

inline double widen(float v) { return v; }
inline double widen(double v) { return v; }
inline double widen(bf16 v) { return from_bits(uint32_t(v.bits) << 16); }
inline double widen(f16 v) {
  const uint32_t sign = uint32_t(v.bits & 0x8000u) << 16, rest = v.bits & 0x7fffu;
  if (rest >= 0x7c00u) return from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);  // infinity, NaN
  if (rest < 0x0400u) return (sign ? -1.0 : 1.0) * double(rest) * 0x1p-24;            // subnormal
  return from_bits(sign | ((rest << 13) + 0x38000000u));
}

// Through float, as torch rounds a double to half precision.
inline void narrow(double v, float& out) { out = float(v); }
inline void narrow(double v, double& out) { out = v; }
inline void narrow(double v, bf16& out) {
  const uint32_t bits = to_bits(float(v));
  if ((bits & 0x7fffffffu) > 0x7f800000u) { out.bits = 0x7fc0; return; }  // rounding would carry a NaN to infinity
  out.bits = uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline void narrow(double v, f16& out) {
  const uint32_t bits = to_bits(float(v)), sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) { out.bits = uint16_t(sign | 0x7e00u); return; }
  if (magnitude >= 0x477ff000u) { out.bits = uint16_t(sign | 0x7c00u); return; }  // rounds to infinity
  if (magnitude < 0x38800000u) {  // subnormal: let float addition round at the right place
    const float shifted = from_bits(magnitude) + 0.5f;
    out.bits = uint16_t(sign | (to_bits(shifted) - to_bits(0.5f)));
    return;
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  out.bits = uint16_t(sign | ((rounded - 0x38000000u) >> 13));
}

// One lane: the tails of every loop, and all of it where there is no better.
struct One {
  static constexpr int width = 1;
  double v;
  static One all(double a) { return {a}; }
  template <class T> static One load(const T* p) { return {widen(*p)}; }
  template <class T> void store(T* p) const { narrow(v, *p); }
  template <class T> void stream(T* p) const { narrow(v, *p); }
  static void fence() {}  // nothing streams
  double sum() const { return v; }
  friend One operator+(One a, One b) { return {a.v + b.v}; }
  friend One operator-(One a, One b) { return {a.v - b.v}; }
  friend One operator*(One a, One b) { return {a.v * b.v}; }
#if defined(__FP_FAST_FMA)
  friend One fma(One a, One b, One c) { return {std::fma(a.v, b.v, c.v)}; }
#else
  friend One fma(One a, One b, One c) { return {a.v * b.v + c.v}; }  // the library's would be emulated
#endif
  // where gate is not positive, low; else high. A NaN is not "not positive".
  friend One unless_positive(One gate, One low, One high) { return {gate.v <= 0 ? low.v : high.v}; }
};

#if defined(NK_AVX512)

struct Lanes {
  static constexpr int width = 8;
  __m512d v;
  static Lanes all(double a) { return {_mm512_set1_pd(a)}; }
  static Lanes load(const double* p) { return {_mm512_loadu_pd(p)}; }
  static Lanes load(const float* p) { return {_mm512_cvtps_pd(_mm256_loadu_ps(p))}; }
  static Lanes load(const bf16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)))};
  }
  static Lanes load(const f16* p) {
    return {_mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
  }
  void store(double* p) const { _mm512_storeu_pd(p, v); }
  void store(float* p) const { _mm256_storeu_ps(p, _mm512_cvtpd_ps(v)); }
  void store(bf16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16()); }
  void store(f16* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(_mm512_cvtpd_ps(v), _MM_FROUND_TO_NEAREST_INT));
  }
  void stream(float* p) const { _mm256_stream_ps(p, _mm512_cvtpd_ps(v)); }
  template <class T> void stream(T* p) const { store(p); }
  static void fence() { _mm_sfence(); }  // streamed stores must be seen before a thread says that it is done
  double sum() const { return _mm512_reduce_add_pd(v); }
  friend Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_pd(a.v, b.v)}; }
  friend Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_pd(a.v, b.v)}; }
  friend Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_pd(a.v, b.v)}; }
  friend Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
  friend Lanes unless_positive(Lanes gate, Lanes low, Lanes high) {
    const __mmask8 m = _mm512_cmp_pd_mask(gate.v, _mm512_setzero_pd(), _CMP_LE_OQ);
    return {_mm512_mask_blend_pd(m, high.v, low.v)};
  }

 private:
  __m128i to_bf16() const {
    const __m256i bits = _mm256_castps_si256(_mm512_cvtpd_ps(v));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    return _mm256_cvtepi32_epi16(rounded);
  }
};

#elif defined(NK_AVX2)

struct Lanes {
  static constexpr int width = 4;
  __m256d v;
  static Lanes all(double a) { return {_mm256_set1_pd(a)}; }
  static Lanes load(const double* p) { return {_mm256_loadu_pd(p)}; }
  static Lanes load(const float* p) { return {_mm256_cvtps_pd(_mm_loadu_ps(p))}; }
  static Lanes load(const bf16* p) {
    const __m128i wide = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(wide, 16)))};
  }
  static Lanes load(const f16* p) {
    return {_mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
  }
  void store(double* p) const { _mm256_storeu_pd(p, v); }
  void store(float* p) const { _mm_storeu_ps(p, _mm256_cvtpd_ps(v)); }
  void store(bf16* p) const { _mm_storel_epi64(reinterpret_cast<__m128i*>(p), to_bf16()); }
  void store(f16* p) const {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_cvtps_ph(_mm256_cvtpd_ps(v), _MM_FROUND_TO_NEAREST_INT));
  }
  void stream(float* p) const { _mm_stream_ps(p, _mm256_cvtpd_ps(v)); }
  template <class T> void stream(T* p) const { store(p); }
  static void fence() { _mm_sfence(); }  // streamed stores must be seen before a thread says that it is done
  double sum() const {
    const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
  }
  friend Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_pd(a.v, b.v)}; }
  friend Lanes operator-(Lanes a, Lanes b) { return {_mm256_sub_pd(a.v, b.v)}; }
  friend Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_pd(a.v, b.v)}; }
  friend Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }
  friend Lanes unless_positive(Lanes gate, Lanes low, Lanes high) {
    return {_mm256_blendv_pd(high.v, low.v, _mm256_cmp_pd(gate.v, _mm256_setzero_pd(), _CMP_LE_OQ))};
  }

 private:
  __m128i to_bf16() const {
    const __m128i bits = _mm_castps_si128(_mm256_cvtpd_ps(v));
    const __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
    __m128i rounded = _mm_srli_epi32(_mm_add_epi32(bits, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff))), 16);
    const __m128i magnitude = _mm_and_si128(bits, _mm_set1_epi32(0x7fffffff));
    const __m128i nan = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x7f800000));
    rounded = _mm_blendv_epi8(rounded, _mm_set1_epi32(0x7fc0), nan);
    return _mm_packus_epi32(rounded, rounded);
  }
};

#else

using Lanes = One;

#endif

}  // namespace NK_NAMESPACE
}  // namespace normkit
