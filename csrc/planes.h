// Memory (population, example, channel, position), with enough positions in a row: a channel's values come in runs.
#pragma once

#include "statistics.h"

namespace normkit {
namespace NK_NAMESPACE {

template <class T> struct Planes {
  using S = typename Applied<T>::V::Scalar;
  static constexpr int64_t kLongPiece = 2048;     // bytes: shorter ones leave too many lines half written
  static constexpr int64_t kNextRun = 2048;       // bytes of the next run to prefetch
  static constexpr int64_t kSegment = 64 * 1024;  // elements per task, where there are too few groups to share out
  static constexpr int64_t kFewGroups = 8;

  const Job& job;
  Statistics statistics{job};
  Inner<T> inner = Inner<T>::of(job);
  int64_t s = job.positions, channels = job.all_channels(), example = job.example_size();
  const T* x = static_cast<const T*>(job.x);
  const T* residual = static_cast<const T*>(job.residual);
  T* y = static_cast<T*>(job.y);
  const T* dy = static_cast<const T*>(job.dy);
  T* dx = static_cast<T*>(job.dx);
  T* dr = static_cast<T*>(job.dresidual);
  Backward<T> read{dy, x, residual ? y : nullptr};
  int64_t arrays = residual ? 3 : 2;  // that a backward reads
  bool few = job.populations * job.groups < kFewGroups && job.size() > kSegment;

  int64_t at(int64_t p, int64_t e, int64_t c) const { return (p * job.examples + e) * example + c * s; }
  double shift(int64_t p, int64_t g) const { return shift_of(job, x[at(p, 0, g * job.channels)]); }
  int64_t group_of(int64_t c) const { return c / job.channels; }

  // Hardware prefetching follows a run, but does not know where the next one begins.
  void expect(const T* memory, int64_t n) const {
#if defined(__GNUC__)
    const char* p = reinterpret_cast<const char*>(memory);
    for (int64_t i = 0; i < std::min<int64_t>(n * int64_t(sizeof(T)), kNextRun); i += 64) __builtin_prefetch(p + i);
#endif
  }

  // Blocks of groups that fit the cache with `arrays` arrays of input: f(population, first group, last group).
  template <class F> void blocks(ParallelFor parallel_for, int64_t arrays, F f) const {
    const int64_t bytes = job.group_size() * int64_t(sizeof(T)) * arrays;
    const int64_t even = ceil_div(job.groups * job.populations, kEnoughTasks);
    const int64_t size = std::max<int64_t>(1, std::min({kTaskBytes / std::max<int64_t>(bytes, 1), even, job.groups}));
    const int64_t per = ceil_div(job.groups, size);
    run(parallel_for, job.populations * per, [&](int64_t i) {
      const int64_t first = i % per * size;
      f(i / per, first, std::min(job.groups, first + size));
    });
  }

  // Segments of runs, in a fixed order, for few large groups: f(segment, population, example, channel, first, size).
  int64_t parts = ceil_div(s, kSegment), segments_per_population = job.examples * channels * parts;
  template <class F> void segments(ParallelFor parallel_for, F f) const {
    run(parallel_for, job.populations * segments_per_population, [&](int64_t i) {
      const int64_t part = i % parts, c = i / parts % channels, e = i / parts / channels;
      f(i, e / job.examples, e % job.examples, c, part * kSegment, std::min(kSegment, s - part * kSegment));
    });
  }
  // The sums of a population's segments, added up in order: f(population, channel, sums).
  template <class F> void each_segment(const std::vector<Sums>& sums, F f) const {
    for (int64_t i = 0; i < int64_t(sums.size()); ++i) f(i / segments_per_population, i / parts % channels, sums[i]);
  }

  // ---- forward

  void moments(ParallelFor parallel_for) const {
    if (few) return moments_of_few(parallel_for);
    blocks(parallel_for, 1, [&](int64_t p, int64_t g0, int64_t g1) { moments(p, g0, g1); });
  }

  void moments(int64_t p, int64_t g0, int64_t g1) const {
    std::vector<Pending> sums(g1 - g0);
    std::vector<double> shifts(g1 - g0);
    for (int64_t g = g0; g < g1; ++g) shifts[g - g0] = shift(p, g);
    const int64_t run = job.channels * s;  // a group's channels lie side by side
    for (int64_t e = 0; e < job.examples; ++e) {
      const T* values = x + at(p, e, g0 * job.channels);
      if (e + 1 < job.examples) expect(values + example, run * (g1 - g0));
      sum_runs(values, g1 - g0, run, shifts.data(), sums.data());
    }
    for (int64_t g = g0; g < g1; ++g) statistics.set(statistics.index(p, g), shifts[g - g0], sums[g - g0].total());
    statistics.ready(statistics.index(p, g0), statistics.index(p, g1));
  }

  void moments_of_few(ParallelFor parallel_for) const {
    std::vector<Sums> sums(job.populations * segments_per_population), all(job.populations * job.groups);
    segments(parallel_for, [&](int64_t i, int64_t p, int64_t e, int64_t c, int64_t first, int64_t size) {
      Pending pending;
      const double about = shift(p, group_of(c));
      sum_runs(x + at(p, e, c) + first, 1, size, &about, &pending);
      sums[i] = pending.total();
    });
    each_segment(sums, [&](int64_t p, int64_t c, Sums add) {
      Sums& to = all[statistics.index(p, group_of(c))];
      to.first += add.first; to.second += add.second;
    });
    for (int64_t p = 0; p < job.populations; ++p) {
      for (int64_t g = 0; g < job.groups; ++g) {
        statistics.set(statistics.index(p, g), shift(p, g), all[statistics.index(p, g)]);
      }
    }
    statistics.ready();
  }

  void forward(ParallelFor parallel_for) const {
    if (few) {
      moments_of_few(parallel_for);
      return evaluate(parallel_for);
    }
    blocks(parallel_for, 1, [&](int64_t p, int64_t g0, int64_t g1) {
      moments(p, g0, g1);
      const auto k = applied(coefficients(p, g0, g1));
      // Back to front: what was read last is still in cache.
      for (int64_t e = job.examples - 1; e >= 0; --e) {
        apply(at(p, e, g0 * job.channels), int64_t(k.size()), s, k.data());
      }
    });
  }

  std::vector<Coefficients<double>> coefficients(int64_t p, int64_t g0, int64_t g1) const {
    std::vector<Coefficients<double>> k;
    k.reserve((g1 - g0) * job.channels);
    for (int64_t g = g0; g < g1; ++g) {
      for (int64_t c = g * job.channels; c < (g + 1) * job.channels; ++c) {
        k.push_back(statistics.coefficients(statistics.index(p, g), c));
      }
    }
    return k;
  }

  std::vector<Coefficients<double>> coefficients() const {
    std::vector<Coefficients<double>> k;
    for (int64_t p = 0; p < job.populations; ++p) {
      const auto some = coefficients(p, 0, job.groups);
      k.insert(k.end(), some.begin(), some.end());
    }
    return k;
  }

  // In the type that values are applied in.
  static std::vector<Coefficients<S>> applied(const std::vector<Coefficients<double>>& k) {
    std::vector<Coefficients<S>> out;
    out.reserve(k.size());
    for (const auto& one : k) out.push_back(in(one, S{}));
    return out;
  }

  // Whether this many values in a row are written past the cache.
  bool streams(int64_t values) const {
    return is_large<T>(job) && values * int64_t(sizeof(T)) >= kLongPiece;
  }

  // Runs of n values from index `first` on.
  void apply(int64_t first, int64_t runs, int64_t n, const Coefficients<S>* k) const {
    inner.forward_runs(x + first, from(residual, first), y + first, runs, n, k, streams(runs * n));
  }

  void evaluate(ParallelFor parallel_for) const {
    const auto k = applied(coefficients());
    if (s >= kSegment || job.populations * job.examples * channels < kEnoughTasks) {
      return segments(parallel_for, [&](int64_t, int64_t p, int64_t e, int64_t c, int64_t first, int64_t size) {
        apply(at(p, e, c) + first, 1, size, &k[p * channels + c]);
      });
    }
    by_runs_in_order(parallel_for, [&](int64_t p, int64_t e, int64_t c, int64_t runs) {
      apply(at(p, e, c), runs, s, &k[p * channels + c]);
    });
  }

  // In memory's order, some runs of an example at a time: f(population, example, first channel, runs).
  template <class F> void by_runs_in_order(ParallelFor parallel_for, F f) const {
    const int64_t most = std::max<int64_t>(1, kSegment / s), per = ceil_div(channels, most);
    run(parallel_for, job.populations * job.examples * per, [&](int64_t i) {
      const int64_t e = i / per, c = i % per * most;
      f(e / job.examples, e % job.examples, c, std::min(most, channels - c));
    });
  }

  // ---- backward

  // Adds up runs of n values from index `first` on.
  void add_gradients(int64_t first, int64_t runs, int64_t n, const Coefficients<double>* k, Pending* sums) const {
    inner.sum_runs(read.at(first), runs, n, k, sums);
  }

  void apply_gradients(int64_t first, int64_t runs, int64_t n, const Coefficients<S>* k) const {
    inner.backward_runs(read.at(first), dx + first, from(dr, first), runs, n, k, !job.stored, streams(runs * n));
  }

  void keep(int64_t p, int64_t c, Sums s) const {
    const int64_t i = p * channels + c;
    job.sum_g[i] = s.first;
    job.sum_gx[i] = s.second * statistics.normalizer(statistics.index(p, group_of(c)), c);
  }

  void sum_gradients(int64_t p, int64_t g0, int64_t g1, const std::vector<Coefficients<double>>& k) const {
    const int64_t c0 = g0 * job.channels, c1 = g1 * job.channels;
    std::vector<Pending> sums(c1 - c0);
    for (int64_t e = 0; e < job.examples; ++e) {
      const int64_t first = at(p, e, c0);
      if (e + 1 < job.examples) {
        expect(x + first + example, (c1 - c0) * s);
        expect(dy + first + example, (c1 - c0) * s);
      }
      add_gradients(first, c1 - c0, s, k.data(), sums.data());
    }
    for (int64_t c = c0; c < c1; ++c) keep(p, c, sums[c - c0].total());
  }

  void settle(int64_t p, int64_t g0, int64_t g1, Coefficients<double>* k) const {
    for (int64_t g = g0; g < g1; ++g) {
      const auto through = statistics.through(p, g);
      for (int64_t c = 0; c < job.channels; ++c) Statistics::settle(*k++, through);
    }
  }

  void backward_sums(ParallelFor parallel_for) const {
    if (few) return sum_gradients_of_few(parallel_for, coefficients());
    blocks(parallel_for, arrays, [&](int64_t p, int64_t g0, int64_t g1) {
      sum_gradients(p, g0, g1, coefficients(p, g0, g1));
    });
  }

  void backward_apply(ParallelFor parallel_for) const {
    auto k = coefficients();
    for (int64_t p = 0; p < job.populations; ++p) settle(p, 0, job.groups, &k[p * channels]);
    const auto own = applied(k);
    segments(parallel_for, [&](int64_t, int64_t p, int64_t e, int64_t c, int64_t first, int64_t size) {
      apply_gradients(at(p, e, c) + first, 1, size, &own[p * channels + c]);
    });
  }

  void backward(ParallelFor parallel_for) const {
    if (few) {
      backward_sums(parallel_for);
      backward_apply(parallel_for);
      return statistics.parameters();
    }
    blocks(parallel_for, arrays, [&](int64_t p, int64_t g0, int64_t g1) {
      auto k = coefficients(p, g0, g1);
      sum_gradients(p, g0, g1, k);
      settle(p, g0, g1, k.data());
      const auto own = applied(k);
      for (int64_t e = job.examples - 1; e >= 0; --e) {
        apply_gradients(at(p, e, g0 * job.channels), int64_t(own.size()), s, own.data());
      }
    });
    statistics.parameters();
  }

  void sum_gradients_of_few(ParallelFor parallel_for, const std::vector<Coefficients<double>>& k) const {
    std::vector<Sums> sums(job.populations * segments_per_population), all(job.populations * channels);
    segments(parallel_for, [&](int64_t i, int64_t p, int64_t e, int64_t c, int64_t first, int64_t size) {
      Pending pending;
      add_gradients(at(p, e, c) + first, 1, size, &k[p * channels + c], &pending);
      sums[i] = pending.total();
    });
    each_segment(sums, [&](int64_t p, int64_t c, Sums add) {
      Sums& to = all[p * channels + c];
      to.first += add.first; to.second += add.second;
    });
    for (int64_t p = 0; p < job.populations; ++p) {
      for (int64_t c = 0; c < channels; ++c) keep(p, c, all[p * channels + c]);
    }
  }
};

}  // namespace NK_NAMESPACE
}  // namespace normkit
