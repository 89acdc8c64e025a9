// A few numbers at a time: float lanes for float and half precision, double lanes for double.
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

// What every vector V can do:
//   V::load(p, how)         numbers of a type that V works on; lanes beyond a part are zero, ...
//   V::load(p, how, fill)   ... or those of `fill`
//   V::load_unless(m, p, how)  zero in the lanes of the mask m
//   V::counted(bytes, how)  the mask of bytes that are not zero
//   times_two_to(a, t)      a * 2^n, where n is what `kRound` was added to, in t
// Comparisons with a NaN are false, and the larger of a number and a NaN on the right is the NaN.

#if defined(NK_AVX512)

struct Words { alignas(64) uint16_t at[32]; };
constexpr Words kSpreadWords = [] { Words w{}; for (int i = 0; i < 32; ++i) w.at[i] = uint16_t(i / 2); return w; }();
constexpr Words kUpperWords = [] { Words w{}; for (int i = 0; i < 16; ++i) w.at[i] = uint16_t(2 * i + 1); return w; }();

struct Floats {
  static constexpr int width = 16;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the lowest bits
  using Scalar = float;
  using Mask = __mmask16;
  __m512 v;

  // A bfloat16 is the upper half of a float: one shuffle of words makes room for the lower half, another takes it away.
  static __m512 widened(__m256i halves, bf16) {
    const __m512i index = _mm512_load_si512(kSpreadWords.at);
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, index, _mm512_castsi256_si512(halves)));
  }
  static __m256i narrowed(__m512 values, bf16) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __mmask16 number = _mm512_cmp_ps_mask(values, values, _CMP_ORD_Q);
    const __m512i rounded = _mm512_mask_add_epi32(_mm512_set1_epi32(0x7fc00000), number, bits,
                                                  _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_castsi512_si256(_mm512_permutexvar_epi16(_mm512_load_si512(kUpperWords.at), rounded));
  }
  static __m512 widened(__m256i halves, f16) { return _mm512_cvtph_ps(halves); }
  static __m256i narrowed(__m512 values, f16) { return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT); }

  static Mask first(Part part) { return Mask((1u << part.lanes) - 1); }
  static Floats all(float a) { return {_mm512_set1_ps(a)}; }
  static Floats load(const float* p, Whole = {}) { return {_mm512_loadu_ps(p)}; }
  static Floats load(const float* p, Part part) { return {_mm512_maskz_loadu_ps(first(part), p)}; }
  template <class T> static Floats load(const T* p, Whole = {}) {
    return {widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T{})};
  }
  template <class T> static Floats load(const T* p, Part part) {
    return {widened(_mm256_maskz_loadu_epi16(first(part), p), T{})};
  }
  template <class T> static Floats load(const T* p, Whole, Floats) { return load(p); }
  template <class T> static Floats load(const T* p, Part part, Floats fill) {
    return where(first(part), load(p, part), fill);
  }
  template <class T, class How> static Floats load_unless(Mask off, const T* p, How how) {
    return {_mm512_maskz_mov_ps(Mask(~off), load(p, how).v)};
  }
  static Mask counted(const uint8_t* p, Whole = {}) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm_test_epi8_mask(bytes, bytes);
  }
  static Mask counted(const uint8_t* p, Part part) {
    const __m128i bytes = _mm_maskz_loadu_epi8(first(part), p);
    return _mm_test_epi8_mask(bytes, bytes);
  }
  void store(float* p, Whole = {}) const { _mm512_storeu_ps(p, v); }
  void store(float* p, Part part) const { _mm512_mask_storeu_ps(p, first(part), v); }
  void stream(float* p) const { _mm512_stream_ps(p, v); }
  template <class T> void store(T* p, Whole = {}) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed(v, T{}));
  }
  template <class T> void store(T* p, Part part) const { _mm256_mask_storeu_epi16(p, first(part), narrowed(v, T{})); }
  template <class T> void stream(T* p) const {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrowed(v, T{}));
  }
  double sum() const {
    const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
    return _mm512_reduce_add_pd(_mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(v)), _mm512_cvtps_pd(upper)));
  }
  friend Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
  friend Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  friend Floats larger(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
  friend Floats magnitude(Floats a) { return {_mm512_abs_ps(a.v)}; }
  friend Mask at_most(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ); }
  friend Mask below(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
  friend Mask is_nan(Floats a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }
  friend Floats where(Mask m, Floats a, Floats b) { return {_mm512_mask_blend_ps(m, b.v, a.v)}; }
  friend Floats join(Part part, Floats a, Floats b) { return where(first(part), a, b); }
  friend Floats times_two_to(Floats a, Floats t) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(t.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), n))};
  }
};

struct Doubles {
  static constexpr int width = 8;
  using Scalar = double;
  using Mask = __mmask8;
  __m512d v;
  static Mask first(Part part) { return Mask((1u << part.lanes) - 1); }
  static Doubles all(double a) { return {_mm512_set1_pd(a)}; }
  static Doubles load(const double* p, Whole = {}) { return {_mm512_loadu_pd(p)}; }
  static Doubles load(const double* p, Part part) { return {_mm512_maskz_loadu_pd(first(part), p)}; }
  static Doubles load(const double* p, Whole, Doubles) { return load(p); }
  static Doubles load(const double* p, Part part, Doubles fill) {
    return {_mm512_mask_loadu_pd(fill.v, first(part), p)};
  }
  template <class How> static Doubles load_unless(Mask off, const double* p, How how) {
    return {_mm512_maskz_mov_pd(Mask(~off), load(p, how).v)};
  }
  static Mask counted(const uint8_t* p, Whole = {}) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return Mask(_mm_test_epi8_mask(bytes, bytes));
  }
  static Mask counted(const uint8_t* p, Part part) {
    const __m128i bytes = _mm_maskz_loadu_epi8(first(part), p);
    return Mask(_mm_test_epi8_mask(bytes, bytes));
  }
  void store(double* p, Whole = {}) const { _mm512_storeu_pd(p, v); }
  void store(double* p, Part part) const { _mm512_mask_storeu_pd(p, first(part), v); }
  void stream(double* p) const { _mm512_stream_pd(p, v); }
  double sum() const { return _mm512_reduce_add_pd(v); }
  friend Doubles operator+(Doubles a, Doubles b) { return {_mm512_add_pd(a.v, b.v)}; }
  friend Doubles operator-(Doubles a, Doubles b) { return {_mm512_sub_pd(a.v, b.v)}; }
  friend Doubles operator*(Doubles a, Doubles b) { return {_mm512_mul_pd(a.v, b.v)}; }
  friend Doubles fma(Doubles a, Doubles b, Doubles c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
  friend Doubles larger(Doubles a, Doubles b) { return {_mm512_max_pd(a.v, b.v)}; }
  friend Mask at_most(Doubles a, Doubles b) { return _mm512_cmp_pd_mask(a.v, b.v, _CMP_LE_OQ); }
  friend Mask below(Doubles a, Doubles b) { return _mm512_cmp_pd_mask(a.v, b.v, _CMP_LT_OQ); }
  friend Doubles where(Mask m, Doubles a, Doubles b) { return {_mm512_mask_blend_pd(m, b.v, a.v)}; }
  friend Doubles join(Part part, Doubles a, Doubles b) { return where(first(part), a, b); }
};

inline void stream_line(const char* from, char* to) {  // 64 bytes, past the cache
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}
inline void fence() { _mm_sfence(); }  // streamed stores must be seen before a thread says that it is done

#elif defined(NK_AVX2)

struct Floats {
  static constexpr int width = 8;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the lowest bits
  using Scalar = float;
  using Mask = __m256;
  __m256 v;

  static __m256 widened(__m128i halves, bf16) {  // a bfloat16 is the upper half of a float
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  static __m256 widened(__m128i halves, f16) { return _mm256_cvtph_ps(halves); }
  static __m128i narrowed(__m256 values, bf16) {
    const __m256i bits = _mm256_castps_si256(values), nan = _mm256_set1_epi32(0x7fc00000);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nans = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, nan, nans), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
  }
  static __m128i narrowed(__m256 values, f16) { return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT); }

  static __m256i first(Part part) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(part.lanes), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Floats all(float a) { return {_mm256_set1_ps(a)}; }
  static Floats load(const float* p, Whole = {}) { return {_mm256_loadu_ps(p)}; }
  static Floats load(const float* p, Part part) { return {_mm256_maskload_ps(p, first(part))}; }
  template <class T> static Floats load(const T* p, Whole = {}) {
    return {widened(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), T{})};
  }
  template <class T> static Floats load(const T* p, Part part) {
    T whole[width] = {};
    std::memcpy(whole, p, size_t(part.lanes) * sizeof(T));
    return load(whole);
  }
  template <class T> static Floats load(const T* p, Whole, Floats) { return load(p); }
  template <class T> static Floats load(const T* p, Part part, Floats fill) { return join(part, load(p, part), fill); }
  template <class T, class How> static Floats load_unless(Mask off, const T* p, How how) {
    return {_mm256_andnot_ps(off, load(p, how).v)};
  }
  static Mask counted(const uint8_t* p, Whole = {}) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(wide, _mm256_setzero_si256()));
  }
  static Mask counted(const uint8_t* p, Part part) {
    uint8_t whole[16] = {};
    std::memcpy(whole, p, size_t(part.lanes));
    return counted(whole);
  }
  void store(float* p, Whole = {}) const { _mm256_storeu_ps(p, v); }
  void store(float* p, Part part) const { _mm256_maskstore_ps(p, first(part), v); }
  void stream(float* p) const { _mm256_stream_ps(p, v); }
  template <class T> void store(T* p, Whole = {}) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrowed(v, T{}));
  }
  template <class T> void store(T* p, Part part) const {
    T whole[width];
    store(whole);
    std::memcpy(p, whole, size_t(part.lanes) * sizeof(T));
  }
  template <class T> void stream(T* p) const { _mm_stream_si128(reinterpret_cast<__m128i*>(p), narrowed(v, T{})); }
  double sum() const {
    const __m256d all = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(v)),
                                      _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
    const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(all), _mm256_extractf128_pd(all, 1));
    return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
  }
  friend Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
  friend Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.v, b.v)}; }
  friend Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  friend Floats larger(Floats a, Floats b) { return {_mm256_max_ps(a.v, b.v)}; }
  friend Floats magnitude(Floats a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
  friend Mask at_most(Floats a, Floats b) { return _mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ); }
  friend Mask below(Floats a, Floats b) { return _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ); }
  friend Mask is_nan(Floats a) { return _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q); }
  friend Floats where(Mask m, Floats a, Floats b) { return {_mm256_blendv_ps(b.v, a.v, m)}; }
  friend Floats join(Part part, Floats a, Floats b) { return where(_mm256_castsi256_ps(first(part)), a, b); }
  friend Floats times_two_to(Floats a, Floats t) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(t.v), 23);
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v), n))};
  }
};

struct Doubles {
  static constexpr int width = 4;
  using Scalar = double;
  using Mask = __m256d;
  __m256d v;
  static __m256i first(Part part) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(part.lanes), _mm256_setr_epi64x(0, 1, 2, 3));
  }
  static Doubles all(double a) { return {_mm256_set1_pd(a)}; }
  static Doubles load(const double* p, Whole = {}) { return {_mm256_loadu_pd(p)}; }
  static Doubles load(const double* p, Part part) { return {_mm256_maskload_pd(p, first(part))}; }
  static Doubles load(const double* p, Whole, Doubles) { return load(p); }
  static Doubles load(const double* p, Part part, Doubles fill) { return join(part, load(p, part), fill); }
  template <class How> static Doubles load_unless(Mask off, const double* p, How how) {
    return {_mm256_andnot_pd(off, load(p, how).v)};
  }
  static Mask counted(const uint8_t* p, Whole = {}) { return counted(p, Part{width}); }
  static Mask counted(const uint8_t* p, Part part) {
    uint8_t whole[16] = {};
    std::memcpy(whole, p, size_t(part.lanes));
    const __m256i wide = _mm256_cvtepu8_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(whole)));
    return _mm256_castsi256_pd(_mm256_cmpgt_epi64(wide, _mm256_setzero_si256()));
  }
  void store(double* p, Whole = {}) const { _mm256_storeu_pd(p, v); }
  void store(double* p, Part part) const { _mm256_maskstore_pd(p, first(part), v); }
  void stream(double* p) const { _mm256_stream_pd(p, v); }
  double sum() const {
    const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
  }
  friend Doubles operator+(Doubles a, Doubles b) { return {_mm256_add_pd(a.v, b.v)}; }
  friend Doubles operator-(Doubles a, Doubles b) { return {_mm256_sub_pd(a.v, b.v)}; }
  friend Doubles operator*(Doubles a, Doubles b) { return {_mm256_mul_pd(a.v, b.v)}; }
  friend Doubles fma(Doubles a, Doubles b, Doubles c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }
  friend Doubles larger(Doubles a, Doubles b) { return {_mm256_max_pd(a.v, b.v)}; }
  friend Mask at_most(Doubles a, Doubles b) { return _mm256_cmp_pd(a.v, b.v, _CMP_LE_OQ); }
  friend Mask below(Doubles a, Doubles b) { return _mm256_cmp_pd(a.v, b.v, _CMP_LT_OQ); }
  friend Doubles where(Mask m, Doubles a, Doubles b) { return {_mm256_blendv_pd(b.v, a.v, m)}; }
  friend Doubles join(Part part, Doubles a, Doubles b) { return where(_mm256_castsi256_pd(first(part)), a, b); }
};

inline void stream_line(const char* from, char* to) {
  for (int i = 0; i < 64; i += 32) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), half);
  }
}
inline void fence() { _mm_sfence(); }  // streamed stores must be seen before a thread says that it is done

#else

// One lane: all there is where there is no better. A whole is one lane, so that there are no parts.
template <class S> struct One {
  static constexpr int width = 1;
  static constexpr S kRound = 12582912.0f;
  using Scalar = S;
  using Mask = bool;
  S v;
  static One all(S a) { return {a}; }
  template <class T> static One load(const T* p, Whole = {}) { return {S(widen(*p))}; }
  template <class T> static One load(const T*, Part) { return {0}; }
  template <class T> static One load(const T* p, Whole, One) { return load(p); }
  template <class T> static One load(const T*, Part, One fill) { return fill; }
  template <class T, class How> static One load_unless(Mask off, const T* p, How how) {
    return off ? all(0) : load(p, how);
  }
  static Mask counted(const uint8_t* p, Whole = {}) { return *p != 0; }
  static Mask counted(const uint8_t*, Part) { return false; }
  template <class T> void store(T* p, Whole = {}) const { narrow(v, *p); }
  template <class T> void store(T*, Part) const {}
  template <class T> void stream(T* p) const { store(p); }
  double sum() const { return v; }
  friend One operator+(One a, One b) { return {a.v + b.v}; }
  friend One operator-(One a, One b) { return {a.v - b.v}; }
  friend One operator*(One a, One b) { return {a.v * b.v}; }
  friend One operator/(One a, One b) { return {a.v / b.v}; }
#if defined(__FP_FAST_FMA) && defined(__FP_FAST_FMAF)
  friend One fma(One a, One b, One c) { return {std::fma(a.v, b.v, c.v)}; }
#else
  friend One fma(One a, One b, One c) { return {a.v * b.v + c.v}; }  // the library's would be emulated
#endif
  friend One larger(One a, One b) { return {a.v > b.v ? a.v : b.v}; }
  friend One magnitude(One a) { return {std::fabs(a.v)}; }
  friend Mask at_most(One a, One b) { return a.v <= b.v; }
  friend Mask below(One a, One b) { return a.v < b.v; }
  friend Mask is_nan(One a) { return a.v != a.v; }
  friend One where(Mask m, One a, One b) { return m ? a : b; }
  friend One join(Part, One a, One) { return a; }
  friend One times_two_to(One a, One t) {
    return {from_bits(to_bits(float(a.v)) + (to_bits(float(t.v)) << 23))};
  }
};
using Floats = One<float>;
using Doubles = One<double>;
inline void stream_line(const char* from, char* to) { std::memcpy(to, from, 64); }
inline void fence() {}  // nothing streams

#endif

#if defined(NK_AVX512) || defined(NK_AVX2)

// Two vectors of floats for one of bfloat16: those at even places, which a shift widens, and those at odd ones, which are
// upper halves already. Nothing is shuffled on the way in or out, and AVX-512 writes a whole line of memory at once.
// For loops that do the same to every lane: it makes no difference to them which value is in which.
struct Pairs {
  static constexpr int width = 2 * Floats::width;
  static constexpr float kRound = Floats::kRound;
  using Scalar = float;
  struct Mask { Floats::Mask even, odd; };
  Floats even, odd;

  static Part evens(Part part) { return {(part.lanes + 1) / 2}; }
  static Part odds(Part part) { return {part.lanes / 2}; }
  static Pairs all(float a) { return {Floats::all(a), Floats::all(a)}; }
  static Pairs load(const bf16* p, Whole, Pairs) { return load(p); }
  static Pairs load(const bf16* p, Part part, Pairs fill) { return join(part, load(p, part), fill); }
  template <class How> static Pairs load_unless(Mask off, const bf16* p, How how) {
    return where(off, all(0), load(p, how));
  }

#if defined(NK_AVX512)
  static Pairs widened(__m512i both) {
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000u))))}};
  }
  // In the upper halves; below them is what rounding has left.
  static __m512i rounded(Floats values) {
    const __m512i bits = _mm512_castps_si512(values.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __mmask16 number = _mm512_cmp_ps_mask(values.v, values.v, _CMP_ORD_Q);
    return _mm512_mask_add_epi32(_mm512_set1_epi32(0x7fc00000), number, bits,
                                 _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  }
  __m512i narrowed() const {
    constexpr int upper_of_second = 0xca;  // where the mask is set the second, elsewhere the third
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32(int(0xffff0000u)), rounded(odd),
                                     _mm512_srli_epi32(rounded(even), 16), upper_of_second);
  }
  static __mmask32 first(Part part) { return __mmask32((uint64_t(1) << part.lanes) - 1); }
  static Pairs load(const bf16* p, Whole = {}) { return widened(_mm512_loadu_si512(p)); }
  static Pairs load(const bf16* p, Part part) { return widened(_mm512_maskz_loadu_epi16(first(part), p)); }
  void store(bf16* p, Whole = {}) const { _mm512_storeu_si512(p, narrowed()); }
  void store(bf16* p, Part part) const { _mm512_mask_storeu_epi16(p, first(part), narrowed()); }
  void stream(bf16* p) const { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), narrowed()); }
  static Mask counted(__m256i bytes) {
    return {_mm256_test_epi16_mask(bytes, _mm256_set1_epi16(0x00ff)),
            _mm256_test_epi16_mask(bytes, _mm256_set1_epi16(int16_t(0xff00)))};
  }
  static Mask counted(const uint8_t* p, Whole = {}) {
    return counted(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Mask counted(const uint8_t* p, Part part) { return counted(_mm256_maskz_loadu_epi8(first(part), p)); }
#else
  static Pairs widened(__m256i both) {
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(both, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000u))))}};
  }
  static __m256i rounded(Floats values) {
    const __m256i bits = _mm256_castps_si256(values.v), nan = _mm256_set1_epi32(0x7fc00000);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(is_nan(values)));
  }
  __m256i narrowed() const {
    return _mm256_blend_epi16(_mm256_srli_epi32(rounded(even), 16), rounded(odd), 0xaa);
  }
  static Pairs load(const bf16* p, Whole = {}) {
    return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Pairs load(const bf16* p, Part part) {
    bf16 whole[width] = {};
    std::memcpy(whole, p, size_t(part.lanes) * sizeof(bf16));
    return load(whole);
  }
  void store(bf16* p, Whole = {}) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed()); }
  void store(bf16* p, Part part) const {
    bf16 whole[width];
    store(whole);
    std::memcpy(p, whole, size_t(part.lanes) * sizeof(bf16));
  }
  void stream(bf16* p) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrowed()); }
  static Mask counted(const uint8_t* p, Whole = {}) {
    const __m256i both = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i zero = _mm256_setzero_si256(), lower = _mm256_and_si256(both, _mm256_set1_epi32(0xff));
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(lower, zero)),
            _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_srli_epi32(both, 8), zero))};
  }
  static Mask counted(const uint8_t* p, Part part) {
    uint8_t whole[width] = {};
    std::memcpy(whole, p, size_t(part.lanes));
    return counted(whole);
  }
#endif

  double sum() const { return (even + odd).sum(); }
  friend Pairs operator+(Pairs a, Pairs b) { return {a.even + b.even, a.odd + b.odd}; }
  friend Pairs operator-(Pairs a, Pairs b) { return {a.even - b.even, a.odd - b.odd}; }
  friend Pairs operator*(Pairs a, Pairs b) { return {a.even * b.even, a.odd * b.odd}; }
  friend Pairs operator/(Pairs a, Pairs b) { return {a.even / b.even, a.odd / b.odd}; }
  friend Pairs fma(Pairs a, Pairs b, Pairs c) { return {fma(a.even, b.even, c.even), fma(a.odd, b.odd, c.odd)}; }
  friend Pairs larger(Pairs a, Pairs b) { return {larger(a.even, b.even), larger(a.odd, b.odd)}; }
  friend Pairs magnitude(Pairs a) { return {magnitude(a.even), magnitude(a.odd)}; }
  friend Mask at_most(Pairs a, Pairs b) { return {at_most(a.even, b.even), at_most(a.odd, b.odd)}; }
  friend Mask below(Pairs a, Pairs b) { return {below(a.even, b.even), below(a.odd, b.odd)}; }
  friend Mask is_nan(Pairs a) { return {is_nan(a.even), is_nan(a.odd)}; }
  friend Pairs where(Mask m, Pairs a, Pairs b) { return {where(m.even, a.even, b.even), where(m.odd, a.odd, b.odd)}; }
  friend Pairs join(Part part, Pairs a, Pairs b) {
    return {join(evens(part), a.even, b.even), join(odds(part), a.odd, b.odd)};
  }
  friend Pairs times_two_to(Pairs a, Pairs t) { return {times_two_to(a.even, t.even), times_two_to(a.odd, t.odd)}; }
};

#endif

// What values of a type are worked on in, also those of one run, and the type of their parameters.
template <class T> struct Working { using V = Floats; using OfRun = Floats; using Parameter = float; };
template <> struct Working<double> { using V = Doubles; using OfRun = Doubles; using Parameter = double; };
#if defined(NK_AVX512) || defined(NK_AVX2)
template <> struct Working<bf16> { using V = Floats; using OfRun = Pairs; using Parameter = float; };
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

// Hardware prefetching stops at the end of a page, unless it is asked for memory a little ahead. A loop that reads one
// tensor and writes another asks for the first cache; one that reads two, or what will be read again, for the second: what
// it is working on fills the first.
constexpr int64_t kAhead = 1536;  // bytes
enum class Cache { first, second };
template <Cache C = Cache::second, class T> void ask_ahead(const T* p, int64_t ahead = kAhead) {
#if defined(__GNUC__)
  __builtin_prefetch(reinterpret_cast<const char*>(p) + ahead, 0, C == Cache::first ? 3 : 2);
#else
  (void)p, (void)ahead;
#endif
}

}  // namespace NK_NAMESPACE
}  // namespace normkit
