// How work is shared out, and what a group's sums mean for all of its channels.
#pragma once

#include <vector>

#include "formula.h"

namespace normkit {
namespace NK_NAMESPACE {

constexpr int64_t kTaskBytes = 512 * 1024;         // what a task may touch and still find in cache the second time
constexpr int64_t kEnoughTasks = 16;               // to share out among threads, whatever their number

template <class F> void run(ParallelFor parallel_for, int64_t tasks, F f) {
  parallel_for(tasks, [](int64_t begin, int64_t end, void* context) {
    F& body = *static_cast<F*>(context);
    for (int64_t i = begin; i < end; ++i) body(i);
    fence();
  }, &f);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Not in half precision, unless a vector of it is a line of memory: to write less than a line at once past the cache takes
// several times as long.
// Nor of medium size where a smooth activation leaves memory time enough, or where the output is found in the cache by what
// reads it next.
template <class V, class T> bool is_large(const Job& job) {
  const int64_t least = job.stays_near ? 4 * kStreamBytes
                        : job.activation >= Activation::silu ? 2 * kStreamBytes : kStreamBytes;
  const bool writes_lines = sizeof(T) >= sizeof(float) || V::width * sizeof(T) >= 64;
  return writes_lines && job.size() * int64_t(sizeof(T)) >= least;
}
// Whether an output is written past the cache whose rows of n values begin side by side.
template <class V, class T> bool streams(const Job& job, const T* out, int64_t n) {
  return is_large<V, T>(job) && reinterpret_cast<uintptr_t>(out) % 64 == 0 && n % V::width == 0;
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

// The sums of a group's values about a shift, and of their squares, one after the other in double: for values whose
// squares are too large for a float.
template <class T> Sums sums_in_double(const Job& job, int64_t p, int64_t g, double shift) {
  const T* x = static_cast<const T*>(job.x);
  const int64_t channels = job.all_channels(), s = job.positions;
  Sums sums;
  for (int64_t e = p * job.examples; e < (p + 1) * job.examples; ++e) {
    for (int64_t c = g * job.channels; c < (g + 1) * job.channels; ++c) {
      for (int64_t i = 0; i < s; ++i) {
        if (job.mask && !job.mask[e * s + i]) continue;
        const int64_t at = job.channels_last ? (e * s + i) * channels + c : (e * channels + c) * s + i;
        const double v = double(widen(x[at])) - shift;
        sums.add({v, v * v});
      }
    }
  }
  return sums;
}

struct Statistics {
  const Job& job;
  // Divisions and roots are slow: they are done once, many at a time.
  std::vector<double> inverse_counts = counts();  // one per population, or one for all
  mutable std::vector<double> inverse_stds = std::vector<double>(job.populations * job.groups);

  int64_t index(int64_t p, int64_t g) const { return p * job.groups + g; }
  double inverse_std(int64_t pg) const { return inverse_stds[pg]; }
  double inverse_count(int64_t p) const { return inverse_counts[inverse_counts.size() == 1 ? 0 : p]; }
  // The statistics [first, last) of x are known. Locals, so that the compiler sees vectors.
  void ready(int64_t first, int64_t last) const {
    if (job.merge.mean) merge(first, last);
    const double *var = job.var, eps = job.eps;
    double* out = inverse_stds.data();
    for (int64_t i = first; i < last; ++i) out[i] = 1.0 / std::sqrt(var[i] + eps);
    const Renorm& to = job.renorm;
    if (!to.running_std) return;
    for (int64_t i = first; i < last; ++i) {  // a NaN is not held within limits, as in torch
      to.r[i] = std::clamp(std::sqrt(var[i] + eps) / to.running_std[i], 1 / to.r_max, to.r_max);
      to.d[i] = std::clamp((job.mean[i] - to.running_mean[i]) / to.running_std[i], -to.d_max, to.d_max);
    }
  }
  void ready() const { ready(0, int64_t(inverse_stds.size())); }

  double weight(int64_t c) const { return parameter(job.weight, c, 1.0); }
  double bias(int64_t c) const { return parameter(job.bias, c, 0.0); }
  double r(int64_t pg) const { return job.renorm.r ? job.renorm.r[pg] : 1.0; }
  double d(int64_t pg) const { return job.renorm.d ? job.renorm.d[pg] : 0.0; }
  double parameter(const void* values, int64_t c, double other) const {
    if (!values) return other;
    return job.type == Type::f64 ? static_cast<const double*>(values)[c] : static_cast<const float*>(values)[c];
  }

  // The sums are those of x - shift and of its square. `ready` comes next. Returns whether the shift was so far from the
  // mean that the variance lost digits to it: about the mean that is now known, it would not.
  bool set(int64_t p, int64_t g, double shift, Sums s) const {
    constexpr double far = 16;  // variances
    const int64_t pg = index(p, g);
    if (!std::isfinite(s.second) && job.type != Type::f64) s = in_double(p, g, shift);
    const double gap = s.first * inverse_count(p), square = s.second * inverse_count(p);
    const double var = square - (job.centred ? gap * gap : 0.0);
    job.mean[pg] = job.centred ? shift + gap : 0.0;
    job.var[pg] = var < 0 ? 0.0 : var;  // a NaN stays
    return job.centred && gap * gap > far * var && std::isfinite(square);
  }

  // Without slope and level, which a backward has to settle. An inverted job centres its output about the bias.
  Coefficients<double> coefficients(int64_t pg, int64_t c) const {
    const double scale = weight(c) * r(pg) * inverse_std(pg), b = bias(c) + weight(c) * d(pg);
    if (job.inverted) return {b, 1.0 / weight(c), 0, scale, b, 0, 0};
    return {job.mean[pg], inverse_std(pg), 0, scale, b, 0, 0};
  }

  // What the gradient's sums over a group, weighted by its channels, take away from every value in it.
  struct Through { double inverse_std, mean_g, mean_gx; };
  Through through(int64_t p, int64_t g) const {
    const int64_t pg = index(p, g), first = g * job.channels;
    if (job.stored) return {inverse_std(pg), 0, 0};
    if (job.mean_g) return {inverse_std(pg), job.mean_g[pg], job.mean_gx[pg]};
    double sum_g = 0, sum_gx = 0;
    for (int64_t c = first; c < first + job.channels; ++c) {
      const int64_t i = p * job.all_channels() + c;
      sum_g += weight(c) * r(pg) * job.sum_g[i];
      sum_gx += weight(c) * r(pg) * job.sum_gx[i];
    }
    return {inverse_std(pg), job.centred ? sum_g * inverse_count(p) : 0.0, sum_gx * inverse_count(p)};
  }
  // Whether a gradient is that of each value alone.
  bool needs_no_sums() const { return job.stored && !job.dweight && !job.dbias; }
  static void settle(Coefficients<double>& k, const Through& t) {
    k.slope = -t.inverse_std * t.mean_gx;
    k.level = -t.inverse_std * t.mean_g;
  }

  // The parameters' gradients: the sums, added up over the populations.
  void parameters() const {
    const int64_t channels = job.all_channels();
    if (job.renorm.r) {  // of one population, in groups of one channel
      for (int64_t c = 0; c < channels; ++c) job.sum_gx[c] = r(c) * job.sum_gx[c] + d(c) * job.sum_g[c];
    }
    for (auto [out, sums] : {std::pair{job.dweight, job.sum_gx}, std::pair{job.dbias, job.sum_g}}) {
      if (!out) continue;
      std::vector<double> all(channels);
      for (int64_t p = 0; p < job.populations; ++p) {
        for (int64_t c = 0; c < channels; ++c) all[c] += sums[p * channels + c];
      }
      set_parameters(out, all.data(), 0, channels);
    }
  }
  // Those of channels from `first` on.
  void set_parameters(void* out, const double* gradients, int64_t first, int64_t n) const {
    if (job.type == Type::f64) std::copy(gradients, gradients + n, static_cast<double*>(out) + first);
    else for (int64_t i = 0; i < n; ++i) static_cast<float*>(out)[first + i] = float(gradients[i]);
  }

 private:
  void merge(int64_t first, int64_t last) const {
    const Merge& to = job.merge;
    const double n = double(job.group_size()), share = to.count / (n + to.count);
    for (int64_t i = first; i < last; ++i) {
      const double mean = job.mean[i], var = job.var[i], gap = to.mean[i] - mean;
      to.own_mean[i] = mean;
      to.own_var[i] = var;
      job.mean[i] = mean + gap * share;
      job.var[i] = var + (to.var[i] - var) * share + gap * gap * share * (1 - share);
    }
  }
  Sums in_double(int64_t p, int64_t g, double shift) const {
    switch (job.type) {
      case Type::bf16: return sums_in_double<bf16>(job, p, g, shift);
      case Type::f16: return sums_in_double<f16>(job, p, g, shift);
      default: return sums_in_double<float>(job, p, g, shift);
    }
  }
  std::vector<double> counts() const {
    std::vector<double> out;
    const int64_t different = job.mask ? job.populations : 1;
    for (int64_t p = 0; p < different; ++p) out.push_back(1.0 / std::max(1.0, job.counted(p) + job.others));
    return out;
  }
};

// What a group's values are summed about, to begin with: the mean of its first few, which lie side by side.
template <class T> double shift_of(const Job& job, const T* values, int64_t n) {
  using V = typename Working<T>::V;
  constexpr int64_t few = 16;
  if (!job.centred) return 0.0;
  n = std::min(n, few);
  V sums = V::all(0);
  across<V>(n, [&](int64_t i, auto how) { sums = sums + V::load(values + i, how); });
  const double mean = double(typename V::Scalar(sums.sum() / double(n)));
  return std::isfinite(mean) ? mean : 0.0;
}

// Notes, from any thread, that a value outside of the mask is not finite.
inline void note_odd(const Job& job, double odd) {
  if (odd != 0 && job.odd_padding) *job.odd_padding = 1;  // a NaN is not zero
}

}  // namespace NK_NAMESPACE
}  // namespace normkit
