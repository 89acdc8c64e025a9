// Half precision, widened to float and narrowed again a chunk at a time, in the innermost cache: the loops see floats.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "lanes.h"

namespace normkit {
namespace NK_NAMESPACE {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

inline float from_bits(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline uint32_t to_bits(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }

inline float widen(float v) { return v; }
inline float widen(bf16 v) { return from_bits(uint32_t(v.bits) << 16); }
inline float widen(f16 v) {
  const uint32_t sign = uint32_t(v.bits & 0x8000u) << 16, rest = v.bits & 0x7fffu;
  if (rest >= 0x7c00u) return from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);  // infinity, NaN
  if (rest < 0x0400u) return (sign ? -1.0f : 1.0f) * float(rest) * 0x1p-24f;          // subnormal
  return from_bits(sign | ((rest << 13) + 0x38000000u));
}

inline void narrow(float v, bf16& out) {
  const uint32_t bits = to_bits(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) { out.bits = 0x7fc0; return; }  // rounding would carry a NaN to infinity
  out.bits = uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline void narrow(float v, f16& out) {
  const uint32_t bits = to_bits(v), sign = bits >> 16 & 0x8000u;
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

#if defined(NK_AVX512)

constexpr int kHalves = 16;
inline void widen_some(const bf16* p, float* out) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  _mm512_storeu_si512(out, _mm512_slli_epi32(wide, 16));
}
inline void widen_some(const f16* p, float* out) {
  _mm512_storeu_ps(out, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
// Read as they were written, eight floats at a time: what spans two stores that are still under way has to wait.
inline __m512 sixteen(const float* p) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(p)), _mm256_loadu_ps(p + 8), 1);
}
inline void narrow_some(const float* p, bf16* out) {
  const __m512 values = sixteen(p);
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __mmask16 number = _mm512_cmp_ps_mask(values, values, _CMP_ORD_Q);
  const __m512i rounded = _mm512_mask_add_epi32(_mm512_set1_epi32(0x7fc00000), number, bits,
                                                _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
inline void narrow_some(const float* p, f16* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtps_ph(sixteen(p), _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(NK_AVX2)

constexpr int kHalves = 8;
inline void widen_some(const bf16* p, float* out) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_slli_epi32(wide, 16));
}
inline void widen_some(const f16* p, float* out) {
  _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void narrow_some(const float* p, bf16* out) {
  const __m256 values = _mm256_loadu_ps(p);
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), packed);
}
inline void narrow_some(const float* p, f16* out) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(_mm256_loadu_ps(p), _MM_FROUND_TO_NEAREST_INT));
}

#else

constexpr int kHalves = 1;
template <class T> void widen_some(const T* p, float* out) { *out = widen(*p); }
template <class T> void narrow_some(const float* p, T* out) { narrow(*p, *out); }

#endif

// The last few, with nothing read or written beyond the end of T's memory; of floats there is room for a whole vector.
#if defined(NK_AVX512)

template <class T> void widen_rest(const T* p, float* out, int64_t n) {
  const __m256i some = _mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p);
  T whole[kHalves];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(whole), some);
  widen_some(whole, out);
}
template <class T> void narrow_rest(const float* p, T* out, int64_t n) {
  T whole[kHalves];
  narrow_some(p, whole);
  const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(whole));
  _mm256_mask_storeu_epi16(out, __mmask16((1u << n) - 1), some);
}

#else

template <class T> void widen_rest(const T* p, float* out, int64_t n) {
  T whole[kHalves] = {};
  std::memcpy(whole, p, size_t(n) * sizeof(T));
  widen_some(whole, out);
}
template <class T> void narrow_rest(const float* p, T* out, int64_t n) {
  T whole[kHalves];
  narrow_some(p, whole);
  std::memcpy(out, whole, size_t(n) * sizeof(T));
}

#endif

template <class T> void widen(const T* p, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + kHalves <= n; i += kHalves) {
#if defined(__GNUC__)
    __builtin_prefetch(reinterpret_cast<const char*>(p + i) + 1536);  // past the end of a page: see ask_ahead
#endif
    widen_some(p + i, out + i);
  }
  if (i < n) widen_rest(p + i, out + i, n - i);
}

template <class T> void narrow(const float* p, T* out, int64_t n) {
  int64_t i = 0;
  for (; i + kHalves <= n; i += kHalves) narrow_some(p + i, out + i);
  if (i < n) narrow_rest(p + i, out + i, n - i);
}

// No power of two: loads and stores whose addresses differ by a multiple of 4096 wait for one another.
constexpr int64_t kChunk = 768;

// Floats to read for values of type T: the values themselves, or a widened copy of a chunk (rows of it, side by side).
template <class T> struct Reader {
  alignas(64) float chunk[kChunk + kHalves];
  Reader() {}  // on purpose not zeroed: it would take as long as the work
  const float* operator()(const T* p, int64_t n) { widen(p, chunk, n); return chunk; }
  const float* operator()(const T* p, int64_t n, int64_t rows, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r) widen(p + r * stride, chunk + r * n, n);
    return chunk;
  }
};
template <> struct Reader<float> {
  const float* operator()(const float* p, int64_t) { return p; }
  const float* operator()(const float* p, int64_t, int64_t, int64_t) { return p; }
};

// Floats to write for values of type T; `done` narrows them into place.
template <class T> struct Writer {
  alignas(64) float chunk[kChunk + kHalves];
  Writer() {}
  float* operator()(T*) { return chunk; }
  void done(T* p, int64_t n) { narrow(chunk, p, n); }
  void done(T* p, int64_t n, int64_t rows, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r) narrow(chunk + r * n, p + r * stride, n);
  }
};
template <> struct Writer<float> {
  float* operator()(float* p) { return p; }
  void done(float*, int64_t) {}
  void done(float*, int64_t, int64_t, int64_t) {}
};

// f(first, size): chunks of at most `most`, or for floats, which need no copy, everything at once.
template <class T, class F> void by_chunk(int64_t n, int64_t most, F f) {
  if constexpr (std::is_same_v<T, float>) { f(int64_t(0), n); return; }
  for (int64_t i = 0; i < n; i += most) f(i, std::min(most, n - i));
}

}  // namespace NK_NAMESPACE
}  // namespace normkit
