// A few numbers of half precision at a time, in float lanes.
#pragma once

#include "lanes.h"

namespace normkit {
namespace NK_NAMESPACE {

// What a float loses is far below what a store to half precision rounds, so that values may be applied in float. Sums
// are another matter.
#if defined(NK_AVX512)

inline __m256i load_halves(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// A bfloat16 is the upper half of a float: one shuffle of words makes room for the lower half, another takes it away.
struct Words { alignas(64) uint16_t at[32]; };
constexpr Words kSpreadWords = [] { Words w{}; for (int i = 0; i < 32; ++i) w.at[i] = uint16_t(i / 2); return w; }();
constexpr Words kUpperWords = [] { Words w{}; for (int i = 0; i < 16; ++i) w.at[i] = uint16_t(2 * i + 1); return w; }();
inline __m512 widened(__m256i halves, bf16) {
  const __m512i index = _mm512_load_si512(kSpreadWords.at);
  return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, index, _mm512_castsi256_si512(halves)));
}
inline __m256i narrowed(__m512 values, bf16) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __mmask16 number = _mm512_cmp_ps_mask(values, values, _CMP_ORD_Q);
  const __m512i rounded = _mm512_mask_add_epi32(_mm512_set1_epi32(0x7fc00000), number, bits,
                                                _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_castsi512_si256(_mm512_permutexvar_epi16(_mm512_load_si512(kUpperWords.at), rounded));
}
inline __m512 widened(__m256i halves, f16) { return _mm512_cvtph_ps(halves); }
inline __m256i narrowed(__m512 values, f16) { return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT); }

template <class T> struct HalfLanes {
  static constexpr int width = 16;
  using Scalar = float;
  using Mask = __mmask16;
  __m512 v;
  static Mask first(Part part) { return Mask((1u << part.lanes) - 1); }
  static HalfLanes all(float a) { return {_mm512_set1_ps(a)}; }
  static HalfLanes load(const float* p, Whole = {}) { return {_mm512_loadu_ps(p)}; }
  static HalfLanes load(const float* p, Part part) { return {_mm512_maskz_loadu_ps(first(part), p)}; }
  static HalfLanes load(const T* p, Whole = {}) { return {widened(load_halves(p), T{})}; }
  static HalfLanes load(const T* p, Part part) { return {widened(_mm256_maskz_loadu_epi16(first(part), p), T{})}; }
  template <class How> static HalfLanes load_unless(Mask off, const T* p, How how) {
    return {_mm512_maskz_mov_ps(Mask(~off), load(p, how).v)};
  }
  void store(T* p, Whole = {}) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed(v, T{})); }
  void store(T* p, Part part) const { _mm256_mask_storeu_epi16(p, first(part), narrowed(v, T{})); }
  void stream(T* p) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrowed(v, T{})); }
  friend HalfLanes operator+(HalfLanes a, HalfLanes b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend HalfLanes operator-(HalfLanes a, HalfLanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend HalfLanes operator*(HalfLanes a, HalfLanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend HalfLanes fma(HalfLanes a, HalfLanes b, HalfLanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  friend Mask not_positive(HalfLanes a) { return _mm512_cmp_ps_mask(a.v, _mm512_setzero_ps(), _CMP_LE_OQ); }
  friend HalfLanes where(Mask m, HalfLanes a, HalfLanes b) { return {_mm512_mask_blend_ps(m, b.v, a.v)}; }
  friend HalfLanes join(Part part, HalfLanes a, HalfLanes b) { return where(first(part), a, b); }
  friend HalfLanes positive_part(HalfLanes a) { return {_mm512_max_ps(_mm512_setzero_ps(), a.v)}; }
};

#elif defined(NK_AVX2)

inline __m128i load_halves(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }


template <class T> struct HalfLanes {
  static constexpr int width = 8;
  using Scalar = float;
  using Mask = __m256;
  __m256 v;
  static __m256i first(Part part) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(part.lanes), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static HalfLanes all(float a) { return {_mm256_set1_ps(a)}; }
  static HalfLanes load(const float* p, Whole = {}) { return {_mm256_loadu_ps(p)}; }
  static HalfLanes load(const float* p, Part part) { return {_mm256_maskload_ps(p, first(part))}; }
  static HalfLanes load(const T* p, Whole = {}) { return {widened(load_halves(p), T{})}; }
  static HalfLanes load(const T* p, Part part) {
    T whole[width] = {};
    std::memcpy(whole, p, size_t(part.lanes) * sizeof(T));
    return load(whole);
  }
  template <class How> static HalfLanes load_unless(Mask off, const T* p, How how) {
    return {_mm256_andnot_ps(off, load(p, how).v)};
  }
  void store(T* p, Whole = {}) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrowed(v, T{})); }
  void store(T* p, Part part) const {
    T whole[width];
    store(whole);
    std::memcpy(p, whole, size_t(part.lanes) * sizeof(T));
  }
  void stream(T* p) const { _mm_stream_si128(reinterpret_cast<__m128i*>(p), narrowed(v, T{})); }
  friend HalfLanes operator+(HalfLanes a, HalfLanes b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend HalfLanes operator-(HalfLanes a, HalfLanes b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend HalfLanes operator*(HalfLanes a, HalfLanes b) { return {_mm256_mul_ps(a.v, b.v)}; }
  friend HalfLanes fma(HalfLanes a, HalfLanes b, HalfLanes c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  friend Mask not_positive(HalfLanes a) { return _mm256_cmp_ps(a.v, _mm256_setzero_ps(), _CMP_LE_OQ); }
  friend HalfLanes where(Mask m, HalfLanes a, HalfLanes b) { return {_mm256_blendv_ps(b.v, a.v, m)}; }
  friend HalfLanes join(Part part, HalfLanes a, HalfLanes b) { return where(_mm256_castsi256_ps(first(part)), a, b); }
  friend HalfLanes positive_part(HalfLanes a) { return {_mm256_max_ps(_mm256_setzero_ps(), a.v)}; }
};

#else

template <class T> struct HalfLanes {
  static constexpr int width = 1;
  using Scalar = float;
  using Mask = bool;
  float v;
  static HalfLanes all(float a) { return {a}; }
  static HalfLanes load(const float* p, Whole = {}) { return {*p}; }
  static HalfLanes load(const T* p, Whole = {}) { return {widen(*p)}; }
  template <class P> static HalfLanes load(const P*, Part) { return {0}; }  // a whole is one lane: there are no parts
  template <class How> static HalfLanes load_unless(Mask off, const T* p, How how) {
    return off ? all(0) : load(p, how);
  }
  void store(T* p, Whole = {}) const { narrow(v, *p); }
  void store(T*, Part) const {}
  void stream(T* p) const { store(p); }
  friend HalfLanes operator+(HalfLanes a, HalfLanes b) { return {a.v + b.v}; }
  friend HalfLanes operator-(HalfLanes a, HalfLanes b) { return {a.v - b.v}; }
  friend HalfLanes operator*(HalfLanes a, HalfLanes b) { return {a.v * b.v}; }
  friend HalfLanes fma(HalfLanes a, HalfLanes b, HalfLanes c) { return {a.v * b.v + c.v}; }
  friend Mask not_positive(HalfLanes a) { return a.v <= 0; }
  friend HalfLanes where(Mask m, HalfLanes a, HalfLanes b) { return m ? a : b; }
  friend HalfLanes join(Part, HalfLanes a, HalfLanes) { return a; }
  friend HalfLanes positive_part(HalfLanes a) { return {a.v <= 0 ? 0.0f : a.v}; }
};

#endif

// What values of a type are applied in.
template <class T> struct Applied { using V = HalfLanes<T>; };
template <> struct Applied<float> { using V = Lanes; };

}  // namespace NK_NAMESPACE
}  // namespace normkit
