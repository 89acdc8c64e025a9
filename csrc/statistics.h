// How work is shared out, and what a group's sums mean for all of its channels.
#pragma once

#include <vector>

#include "formula.h"

namespace normkit {
namespace NK_NAMESPACE {

constexpr int64_t kTaskBytes = 512 * 1024;         // what a task may touch and still find in cache the second time
constexpr int64_t kStreamBytes = 8 * 1024 * 1024;  // from this size on, an output is not worth a place in cache
constexpr int64_t kEnoughTasks = 16;               // to share out among threads, whatever their number

template <class F> void run(ParallelFor parallel_for, int64_t tasks, F f) {
  parallel_for(tasks, [](int64_t begin, int64_t end, void* context) {
    F& body = *static_cast<F*>(context);
    for (int64_t i = begin; i < end; ++i) body(i);
    Lanes::fence();
  }, &f);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T> bool is_large(const Job& job) { return job.size() * int64_t(sizeof(T)) >= kStreamBytes; }
// Whether an output is written past the cache whose rows of n values begin side by side.
template <class V, class T> bool streams(const Job& job, const T* out, int64_t n) {
  return is_large<T>(job) && reinterpret_cast<uintptr_t>(out) % 64 == 0 && n % V::width == 0;
}

// Numbers for every column, in several arrays that begin with a line of memory each, so that no vector of them spans
// two; and not a page apart: loads and stores whose addresses differ by a multiple of 4096 wait for one another.
template <class N> class Arrays {
  struct alignas(64) Line { N numbers[64 / sizeof(N)]; };
  static constexpr int64_t kGap = 3;
  int64_t lines;  // of an array
  std::vector<Line> memory;

 public:
  Arrays(int64_t arrays, int64_t size)
      : lines(ceil_div(size * int64_t(sizeof(N)), 64) + kGap), memory(arrays * lines) {}
  N* operator[](int64_t array) { return memory[array * lines].numbers; }
  const N* operator[](int64_t array) const { return memory[array * lines].numbers; }
};

struct Statistics {
  const Job& job;
  // Divisions and roots are slow: they are done once, many at a time.
  double inverse_count = 1.0 / job.count;
  mutable std::vector<double> inverse_stds = std::vector<double>(job.populations * job.groups);

  int64_t index(int64_t p, int64_t g) const { return p * job.groups + g; }
  double inverse_std(int64_t pg) const { return inverse_stds[pg]; }
  // The statistics [first, last) are known. Locals, so that the compiler sees vectors.
  void ready(int64_t first, int64_t last) const {
    const double *var = job.var, eps = job.eps;
    double* out = inverse_stds.data();
    for (int64_t i = first; i < last; ++i) out[i] = 1.0 / std::sqrt(var[i] + eps);
  }
  void ready() const { ready(0, int64_t(inverse_stds.size())); }
  double weight(int64_t c) const { return job.weight ? job.weight[c] : 1.0; }
  double bias(int64_t c) const { return job.bias ? job.bias[c] : 0.0; }

  // The sums are those of x - shift and of its square. `ready` comes next.
  void set(int64_t pg, double shift, Sums s) const {
    const double gap = s.first * inverse_count;
    job.mean[pg] = job.centred ? shift + gap : 0.0;
    const double var = s.second * inverse_count - (job.centred ? gap * gap : 0.0);
    job.var[pg] = var < 0 ? 0.0 : var;  // a NaN stays
  }

  // Without slope and level, which a backward has to settle. An inverted job centres its output about the bias.
  Coefficients<double> coefficients(int64_t pg, int64_t c) const {
    const double scale = weight(c) * inverse_std(pg), b = bias(c);
    return {job.inverted ? b : job.mean[pg], normalizer(pg, c), scale, b, scale, 0, 0};
  }

  // The normalized value is the centred one times this.
  double normalizer(int64_t pg, int64_t c) const { return job.inverted ? 1.0 / weight(c) : inverse_std(pg); }

  // What the gradient's sums over a group, weighted by its channels, take away from every value in it.
  struct Through { double inverse_std, mean_g, mean_gx; };
  Through through(int64_t p, int64_t g) const {
    const int64_t pg = index(p, g), first = g * job.channels;
    if (job.stored) return {inverse_std(pg), 0, 0};
    double sum_g = 0, sum_gx = 0;
    for (int64_t c = first; c < first + job.channels; ++c) {
      const int64_t i = p * job.all_channels() + c;
      sum_g += weight(c) * job.sum_g[i];
      sum_gx += weight(c) * job.sum_gx[i];
    }
    return {inverse_std(pg), job.centred ? sum_g * inverse_count : 0.0, sum_gx * inverse_count};
  }
  static void settle(Coefficients<double>& k, const Through& t) {
    k.slope = -t.inverse_std * t.mean_gx * k.unit;
    k.level = -t.inverse_std * t.mean_g;
  }

  // The parameters' gradients: the sums, added up over the populations.
  void parameters() const {
    const int64_t channels = job.all_channels();
    for (auto [out, sums] : {std::pair{job.dweight, job.sum_gx}, std::pair{job.dbias, job.sum_g}}) {
      if (!out) continue;
      std::vector<double> all(channels);
      for (int64_t p = 0; p < job.populations; ++p) {
        for (int64_t c = 0; c < channels; ++c) all[c] += sums[p * channels + c];
      }
      for (int64_t c = 0; c < channels; ++c) out[c] = float(all[c]);
    }
  }
};

// What a group's values are summed about: one of them.
template <class T> double shift_of(const Job& job, T first) {
  const double v = widen(first);
  return job.centred && std::isfinite(v) ? v : 0.0;
}

}  // namespace NK_NAMESPACE
}  // namespace normkit
