// Matrices turned over: maps whose positions lie side by side become rows of channels, and the other way round.
#pragma once

#include "statistics.h"

namespace normkit {
namespace NK_NAMESPACE {

constexpr int64_t kSide = 8;          // of a block that is turned in registers
constexpr int64_t kTurnColumns = 32;  // of a task: their rows stay in the innermost cache while they are filled
constexpr int64_t kLine = 16;         // floats of a line of memory

// to[j][i] = from[i][j], of a part of `rows` by `columns`.
inline void turn_part(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t columns) {
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t i = 0; i < rows; ++i) to[j * to_stride + i] = from[i * from_stride + j];
  }
}

// The same of a whole block.
inline void turn_block(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
#if defined(NK_AVX512) || defined(NK_AVX2)
  __m256 quads[kSide];  // of the lower half of columns beside the upper: element k of four rows in quads[k] and [4 + k]
  for (int half = 0; half < 2; ++half) {
    __m256 r[4];
    for (int i = 0; i < 4; ++i) r[i] = _mm256_loadu_ps(from + (4 * half + i) * from_stride);
    const __m256 a = _mm256_unpacklo_ps(r[0], r[1]), b = _mm256_unpackhi_ps(r[0], r[1]);
    const __m256 c = _mm256_unpacklo_ps(r[2], r[3]), d = _mm256_unpackhi_ps(r[2], r[3]);
    __m256* q = quads + 4 * half;
    q[0] = _mm256_shuffle_ps(a, c, 0x44);
    q[1] = _mm256_shuffle_ps(a, c, 0xee);
    q[2] = _mm256_shuffle_ps(b, d, 0x44);
    q[3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  for (int k = 0; k < 4; ++k) {
    _mm256_storeu_ps(to + k * to_stride, _mm256_permute2f128_ps(quads[k], quads[4 + k], 0x20));
    _mm256_storeu_ps(to + (4 + k) * to_stride, _mm256_permute2f128_ps(quads[k], quads[4 + k], 0x31));
  }
#else
  turn_part(from, from_stride, to, to_stride, kSide, kSide);
#endif
}

// From (matrices, rows, columns) to (matrices, columns, rows).
inline void turn_over(const float* from, float* to, int64_t matrices, int64_t rows, int64_t columns,
                      ParallelFor parallel_for) {
  const int64_t per = ceil_div(columns, kTurnColumns);
  run(parallel_for, matrices * per, [=](int64_t task) {
    const int64_t first = task / per * rows * columns, c0 = task % per * kTurnColumns;
    const int64_t c1 = std::min(columns, c0 + kTurnColumns);
    for (int64_t i = 0; i < rows; i += kSide) {
      const int64_t height = std::min(kSide, rows - i);
      for (int64_t j = c0; j < c1; j += kSide) {
        const int64_t width = std::min(kSide, c1 - j);
        const float* block = from + first + i * columns + j;
        float* out = to + first + j * rows + i;
        if ((j - c0) % kLine == 0) {
          for (int64_t r = 0; r < kSide; ++r) ask_ahead<Cache::first>(block + r * columns, kSide * columns * sizeof(float));
        }
        if (height == kSide && width == kSide) turn_block(block, columns, out, rows);
        else turn_part(block, columns, out, rows, height, width);
      }
    }
  });
}

}  // namespace NK_NAMESPACE
}  // namespace normkit
