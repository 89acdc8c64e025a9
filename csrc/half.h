// Half precision, a number at a time; and other numbers, for code that takes any.
#pragma once

#include <cstdint>
#include <cstring>

namespace normkit {
namespace NK_NAMESPACE {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

inline float from_bits(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline uint32_t to_bits(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }

inline double widen(double v) { return v; }
inline float widen(float v) { return v; }
inline float widen(bf16 v) { return from_bits(uint32_t(v.bits) << 16); }
inline float widen(f16 v) {
  const uint32_t sign = uint32_t(v.bits & 0x8000u) << 16, rest = v.bits & 0x7fffu;
  if (rest >= 0x7c00u) return from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);  // infinity, NaN
  if (rest < 0x0400u) return (sign ? -1.0f : 1.0f) * float(rest) * 0x1p-24f;          // subnormal
  return from_bits(sign | ((rest << 13) + 0x38000000u));
}

inline void narrow(double v, double& out) { out = v; }
inline void narrow(float v, float& out) { out = v; }
inline void narrow(double v, float& out) { out = float(v); }
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
// As torch does it: by way of a float.
inline void narrow(double v, bf16& out) { narrow(float(v), out); }
inline void narrow(double v, f16& out) { narrow(float(v), out); }

}  // namespace NK_NAMESPACE
}  // namespace normkit
