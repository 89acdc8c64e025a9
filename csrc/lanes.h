// A few doubles at a time: with arithmetic in double, only the store rounds.
// Compiled once per instruction set, in a namespace of its own.
#pragma once

#include <algorithm>
#include <cmath>

#if defined(NK_AVX512) || defined(NK_AVX2)
#include <immintrin.h>
#endif

#include "job.h"
#include "half.h"

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
  template <class T> static One load(const T* p, Whole = {}) { return {double(widen(*p))}; }
  template <class T> static One load(const T* p, Whole, One) { return load(p); }
  template <class T> static One load_unless(Mask off, const T* p, Whole = {}) { return off ? all(0) : load(p); }
  template <class T> static One load(const T*, Part, One fill = {0}) { return fill; }  // a whole is one lane:
  template <class T> static One load_unless(Mask, const T*, Part) { return {0}; }      // there are no parts
  void store(double* p, Whole = {}) const { *p = v; }
  void store(float* p, Whole = {}) const { *p = float(v); }
  template <class T> void store(T* p, Whole = {}) const { narrow(float(v), *p); }
  template <class T> void store(T*, Part) const {}
  template <class T> void stream(T* p) const { store(p); }
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

#if defined(NK_AVX512) || defined(NK_AVX2)

inline __m256 widened(__m128i halves, bf16) {  // a bfloat16 is the upper half of a float
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline __m256 widened(__m128i halves, f16) { return _mm256_cvtph_ps(halves); }
inline __m128i narrowed(__m256 values, bf16) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)), nan = _mm256_set1_epi32(0x7fc00000);
#if defined(NK_AVX512)
  const __mmask8 number = _mm256_cmp_ps_mask(values, values, _CMP_ORD_Q);
  return _mm256_cvtepi32_epi16(_mm256_srli_epi32(_mm256_mask_add_epi32(nan, number, bits, up), 16));
#else
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(_mm256_add_epi32(bits, up), nan, is_nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
#endif
}
inline __m128i narrowed(__m256 values, f16) { return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT); }

#endif
#if defined(NK_AVX512)

struct Lanes {
  static constexpr int width = 8;
  using Scalar = double;
  using Mask = __mmask8;
  __m512d v;
  static Mask first(Part part) { return Mask((1u << part.lanes) - 1); }
  static Lanes all(double a) { return {_mm512_set1_pd(a)}; }
  static Lanes load(const double* p, Whole = {}) { return {_mm512_loadu_pd(p)}; }
  static Lanes load(const double* p, Part part) { return {_mm512_maskz_loadu_pd(first(part), p)}; }
  // Numbers of any type, as floats; the others are zero.
  static __m256 floats(const float* p) { return _mm256_loadu_ps(p); }
  static __m256 floats(Mask which, const float* p) { return _mm256_maskz_loadu_ps(which, p); }
  template <class T> static __m256 floats(const T* p) {
    return widened(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), T{});
  }
  template <class T> static __m256 floats(Mask which, const T* p) {
    return widened(_mm_maskz_loadu_epi16(which, p), T{});
  }
  template <class T> static Lanes load(const T* p, Whole = {}) { return {_mm512_cvtps_pd(floats(p))}; }
  template <class T> static Lanes load(const T* p, Part part) { return {_mm512_cvtps_pd(floats(first(part), p))}; }
  template <class T> static Lanes load(const T* p, Whole, Lanes) { return load(p); }
  template <class T> static Lanes load(const T* p, Part part, Lanes fill) {
    return {_mm512_mask_cvtps_pd(fill.v, first(part), floats(first(part), p))};
  }
  template <class T> static Lanes load_unless(Mask off, const T* p, Whole = {}) {
    return {_mm512_maskz_cvtps_pd(Mask(~off), floats(p))};
  }
  template <class T> static Lanes load_unless(Mask off, const T* p, Part part) {
    return {_mm512_cvtps_pd(floats(Mask(~off & first(part)), p))};
  }
  void store(double* p, Whole = {}) const { _mm512_storeu_pd(p, v); }
  void store(float* p, Whole = {}) const { _mm256_storeu_ps(p, _mm512_cvtpd_ps(v)); }
  void store(double* p, Part part) const { _mm512_mask_storeu_pd(p, first(part), v); }
  void store(float* p, Part part) const { _mm256_mask_storeu_ps(p, first(part), _mm512_cvtpd_ps(v)); }
  void stream(float* p) const { _mm256_stream_ps(p, _mm512_cvtpd_ps(v)); }
  template <class T> __m128i halves() const { return narrowed(_mm512_cvtpd_ps(v), T{}); }
  template <class T> void store(T* p, Whole = {}) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves<T>());
  }
  template <class T> void store(T* p, Part part) const { _mm_mask_storeu_epi16(p, first(part), halves<T>()); }
  template <class T> void stream(T* p) const { _mm_stream_si128(reinterpret_cast<__m128i*>(p), halves<T>()); }
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
  static Lanes load(const double* p, Part part) { return {_mm256_maskload_pd(p, wide(part))}; }
  static __m128 floats(const float* p, Whole) { return _mm_loadu_ps(p); }
  static __m128 floats(const float* p, Part part) { return _mm_maskload_ps(p, first(part)); }
  template <class T> static __m128 floats(const T* p, Whole) {
    return _mm256_castps256_ps128(widened(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), T{}));
  }
  template <class T> static __m128 floats(const T* p, Part part) {
    T whole[width] = {};
    std::memcpy(whole, p, size_t(part.lanes) * sizeof(T));
    return floats(whole, Whole{});
  }
  template <class T, class How = Whole> static Lanes load(const T* p, How how = {}) {
    return {_mm256_cvtps_pd(floats(p, how))};
  }
  template <class T> static Lanes load(const T* p, Part part, Lanes fill) {
    return {_mm256_blendv_pd(fill.v, load(p, part).v, _mm256_castsi256_pd(wide(part)))};
  }
  template <class T> static Lanes load(const T* p, Whole, Lanes) { return load(p); }
  template <class T, class How = Whole> static Lanes load_unless(Mask off, const T* p, How how = {}) {
    return {_mm256_andnot_pd(off, load(p, how).v)};
  }
  void store(double* p, Whole = {}) const { _mm256_storeu_pd(p, v); }
  void store(float* p, Whole = {}) const { _mm_storeu_ps(p, _mm256_cvtpd_ps(v)); }
  void store(double* p, Part part) const { _mm256_maskstore_pd(p, wide(part), v); }
  void store(float* p, Part part) const { _mm_maskstore_ps(p, first(part), _mm256_cvtpd_ps(v)); }
  void stream(float* p) const { _mm_stream_ps(p, _mm256_cvtpd_ps(v)); }
  template <class T> void store(T* p, Whole = {}) const { store(p, Part{width}); }
  template <class T> void store(T* p, Part part) const {
    const __m128i halves = narrowed(_mm256_castps128_ps256(_mm256_cvtpd_ps(v)), T{});
    std::memcpy(p, &halves, size_t(part.lanes) * sizeof(T));
  }
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

// Hardware prefetching stops at the end of a page, unless it is asked for memory a little ahead.
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
