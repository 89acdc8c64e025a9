// A few doubles at a time: with arithmetic in double, only the store rounds.
// Compiled once per instruction set, in a namespace of its own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(NK_AVX512) || defined(NK_AVX2)
#include <immintrin.h>
#endif

#include "job.h"

namespace normkit {
namespace NK_NAMESPACE {

// How much of a vector there is: all of it, or the first few lanes, at the end of a row.
struct Whole {};
struct Part { int lanes; };

// One lane: all there is where there is no better.
struct One {
  static constexpr int width = 1;
  using Scalar = double;
  using Mask = bool;
  double v;
  static One all(double a) { return {a}; }
  static One load(const double* p, Whole = {}) { return {*p}; }
  static One load(const float* p, Whole = {}) { return {double(*p)}; }
  static One load_unless(Mask off, const float* p, Whole = {}) { return {off ? 0.0 : double(*p)}; }
  static One load(const float* p, Whole, One) { return load(p); }
  template <class P> static One load(const P*, Part, One fill = {0}) { return fill; }  // a whole is one lane:
  static One load_unless(Mask, const float*, Part) { return {0}; }                     // there are no parts
  void store(double* p, Whole = {}) const { *p = v; }
  void store(float* p, Whole = {}) const { *p = float(v); }
  template <class P> void store(P*, Part) const {}
  void stream(float* p) const { *p = float(v); }
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
  friend Mask not_positive(One a) { return a.v <= 0; }  // a NaN is not "not positive"
  friend One where(Mask m, One a, One b) { return m ? a : b; }
  friend One join(Part, One a, One) { return a; }
  friend One positive_part(One a) { return {a.v <= 0 ? 0.0 : a.v}; }  // of a NaN, itself
};

#if defined(NK_AVX512)

struct Lanes {
  static constexpr int width = 8;
  using Scalar = double;
  using Mask = __mmask8;
  __m512d v;
  static Mask first(Part part) { return Mask((1u << part.lanes) - 1); }
  static Lanes all(double a) { return {_mm512_set1_pd(a)}; }
  static Lanes load(const double* p, Whole = {}) { return {_mm512_loadu_pd(p)}; }
  static Lanes load(const float* p, Whole = {}) { return {_mm512_cvtps_pd(_mm256_loadu_ps(p))}; }
  static Lanes load(const double* p, Part part) { return {_mm512_maskz_loadu_pd(first(part), p)}; }
  static Lanes load(const float* p, Part part) {
    return {_mm512_cvtps_pd(_mm256_maskz_loadu_ps(first(part), p))};
  }
  static Lanes load(const float* p, Part part, Lanes fill) {
    return {_mm512_mask_cvtps_pd(fill.v, first(part), _mm256_maskz_loadu_ps(first(part), p))};
  }
  static Lanes load(const float* p, Whole, Lanes) { return load(p); }
  static Lanes load_unless(Mask off, const float* p, Whole = {}) {
    return {_mm512_maskz_cvtps_pd(Mask(~off), _mm256_loadu_ps(p))};
  }
  static Lanes load_unless(Mask off, const float* p, Part part) {
    return {_mm512_cvtps_pd(_mm256_maskz_loadu_ps(Mask(~off & first(part)), p))};
  }
  void store(double* p, Whole = {}) const { _mm512_storeu_pd(p, v); }
  void store(float* p, Whole = {}) const { _mm256_storeu_ps(p, _mm512_cvtpd_ps(v)); }
  void store(double* p, Part part) const { _mm512_mask_storeu_pd(p, first(part), v); }
  void store(float* p, Part part) const { _mm256_mask_storeu_ps(p, first(part), _mm512_cvtpd_ps(v)); }
  void stream(float* p) const { _mm256_stream_ps(p, _mm512_cvtpd_ps(v)); }
  static void fence() { _mm_sfence(); }  // streamed stores must be seen before a thread says that it is done
  double sum() const { return _mm512_reduce_add_pd(v); }
  friend Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_pd(a.v, b.v)}; }
  friend Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_pd(a.v, b.v)}; }
  friend Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_pd(a.v, b.v)}; }
  friend Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
  friend Mask not_positive(Lanes a) { return _mm512_cmp_pd_mask(a.v, _mm512_setzero_pd(), _CMP_LE_OQ); }
  friend Lanes where(Mask m, Lanes a, Lanes b) { return {_mm512_mask_blend_pd(m, b.v, a.v)}; }
  friend Lanes join(Part part, Lanes a, Lanes b) { return where(first(part), a, b); }  // the first lanes of a, then b's
  friend Lanes positive_part(Lanes a) { return {_mm512_max_pd(_mm512_setzero_pd(), a.v)}; }
};

inline void stream_line(const char* from, char* to) {  // 64 bytes, past the cache
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}

#elif defined(NK_AVX2)

struct Lanes {
  static constexpr int width = 4;
  using Scalar = double;
  using Mask = __m256d;
  __m256d v;
  static __m128i first(Part part) { return _mm_cmpgt_epi32(_mm_set1_epi32(part.lanes), _mm_setr_epi32(0, 1, 2, 3)); }
  static __m256i wide(Part part) { return _mm256_cvtepi32_epi64(first(part)); }
  static Lanes all(double a) { return {_mm256_set1_pd(a)}; }
  static Lanes load(const double* p, Whole = {}) { return {_mm256_loadu_pd(p)}; }
  static Lanes load(const float* p, Whole = {}) { return {_mm256_cvtps_pd(_mm_loadu_ps(p))}; }
  static Lanes load(const double* p, Part part) { return {_mm256_maskload_pd(p, wide(part))}; }
  static Lanes load(const float* p, Part part) { return {_mm256_cvtps_pd(_mm_maskload_ps(p, first(part)))}; }
  static Lanes load(const float* p, Part part, Lanes fill) {
    return {_mm256_blendv_pd(fill.v, load(p, part).v, _mm256_castsi256_pd(wide(part)))};
  }
  static Lanes load(const float* p, Whole, Lanes) { return load(p); }
  template <class How = Whole> static Lanes load_unless(Mask off, const float* p, How how = {}) {
    return {_mm256_andnot_pd(off, load(p, how).v)};
  }
  void store(double* p, Whole = {}) const { _mm256_storeu_pd(p, v); }
  void store(float* p, Whole = {}) const { _mm_storeu_ps(p, _mm256_cvtpd_ps(v)); }
  void store(double* p, Part part) const { _mm256_maskstore_pd(p, wide(part), v); }
  void store(float* p, Part part) const { _mm_maskstore_ps(p, first(part), _mm256_cvtpd_ps(v)); }
  void stream(float* p) const { _mm_stream_ps(p, _mm256_cvtpd_ps(v)); }
  static void fence() { _mm_sfence(); }  // streamed stores must be seen before a thread says that it is done
  double sum() const {
    const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
  }
  friend Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_pd(a.v, b.v)}; }
  friend Lanes operator-(Lanes a, Lanes b) { return {_mm256_sub_pd(a.v, b.v)}; }
  friend Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_pd(a.v, b.v)}; }
  friend Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }
  friend Mask not_positive(Lanes a) { return _mm256_cmp_pd(a.v, _mm256_setzero_pd(), _CMP_LE_OQ); }
  friend Lanes where(Mask m, Lanes a, Lanes b) { return {_mm256_blendv_pd(b.v, a.v, m)}; }
  friend Lanes join(Part part, Lanes a, Lanes b) { return where(_mm256_castsi256_pd(wide(part)), a, b); }
  friend Lanes positive_part(Lanes a) { return {_mm256_max_pd(_mm256_setzero_pd(), a.v)}; }
};

inline void stream_line(const char* from, char* to) {
  for (int i = 0; i < 64; i += 32) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), half);
  }
}

#else

using Lanes = One;
inline void stream_line(const char* from, char* to) { std::memcpy(to, from, 64); }

#endif

// Every call inside is inlined. Otherwise what a lambda captures stays in memory, where a vector's store may have
// changed it, and is loaded again for every vector.
#if defined(__GNUC__)
#define NK_FLAT __attribute__((flatten))
#else
#define NK_FLAT
#endif

// ---- a vector at a time --------------------------------------------------------------------------------------------

// f(first, how)
template <class V, class F> void across(int64_t n, F f) {
  int64_t i = 0;
  for (; i + V::width <= n; i += V::width) f(i, Whole{});
  if (V::width > 1 && i < n) f(i, Part{int(n - i)});
}

// How many values there are before memory is aligned for stores that go past the cache.
template <class V, class T> int64_t unaligned(const T* p) {
  constexpr int64_t line = V::width * int64_t(sizeof(T));
  return (line - int64_t(reinterpret_cast<uintptr_t>(p) % line)) % line / int64_t(sizeof(T));
}
template <class V, class T> void put(V v, T* p, Whole, bool stream) { if (stream) v.stream(p); else v.store(p); }
template <class V, class T> void put(V v, T* p, Part part, bool) { v.store(p, part); }

// The memory system stops at the end of a page; asked a little ahead, it does not.
constexpr int64_t kAhead = 1536;  // bytes
template <class T> void ask_ahead(const T* p, int64_t ahead = kAhead) {
#if defined(__GNUC__)
  __builtin_prefetch(reinterpret_cast<const char*>(p) + ahead);
#else
  (void)p, (void)ahead;
#endif
}

}  // namespace NK_NAMESPACE
}  // namespace normkit
