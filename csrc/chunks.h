// Half precision, widened to float and narrowed again a chunk at a time, in the innermost cache: loops that work in
// double see floats.
#pragma once

#include "halves.h"

namespace normkit {
namespace NK_NAMESPACE {

template <class T> NK_FLAT void widen(const T* p, float* out, int64_t n) {
  across<HalfLanes<T>>(n, [&](int64_t i, auto how) {
    ask_ahead(p + i);
    HalfLanes<T>::load(p + i, how).store(out + i);  // there is room for a whole vector
  });
}

template <class T> NK_FLAT void narrow(const float* p, T* out, int64_t n) {
  across<HalfLanes<T>>(n, [&](int64_t i, auto how) { HalfLanes<T>::load_written(p + i).store(out + i, how); });
}

// No power of two: loads and stores whose addresses differ by a multiple of 4096 wait for one another.
constexpr int64_t kChunk = 768;

// Floats to read for values of type T: the values themselves, or a widened copy of a chunk (rows of it, side by side).
template <class T> struct Reader {
  alignas(64) float chunk[kChunk + HalfLanes<T>::width];
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
  alignas(64) float chunk[kChunk + HalfLanes<T>::width];
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
