// Memory (population, example, channel, position), with enough positions in a row: a channel's values come in runs.
#pragma once

#include "statistics.h"

namespace normkit {
namespace NK_NAMESPACE {

template <class T> struct Planes {
  static constexpr int64_t kLongRun = 4096;       // bytes: shorter runs would leave half-written lines at their ends
  static constexpr int64_t kAhead = 2048;         // bytes of the next run to ask for
  static constexpr int64_t kSegment = 64 * 1024;  // elements per task, where there are too few groups to share out
  static constexpr int64_t kFewGroups = 8;

  const Job& job;
  Statistics statistics{job};
  Inner inner = inner_of(job);
  int64_t s = job.positions, channels = job.all_channels(), example = job.example_size();
  const T* x = static_cast<const T*>(job.x);
  const T* residual = static_cast<const T*>(job.residual);
  T* y = static_cast<T*>(job.y);
  const T* dy = static_cast<const T*>(job.dy);
  T* dx = static_cast<T*>(job.dx);
  T* dr = static_cast<T*>(job.dresidual);
  bool stream = job.size() * int64_t(sizeof(T)) >= kStreamBytes && s * int64_t(sizeof(T)) >= kLongRun &&
                std::is_same_v<T, float>;
  int64_t arrays = residual ? 3 : 2;  // that a backward reads
  bool few = job.populations * job.groups < kFewGroups && job.size() > kSegment;

  int64_t at(int64_t p, int64_t e, int64_t c) const { return (p * job.examples + e) * example + c * s; }
  double shift(int64_t p, int64_t g) const { return shift_of(job, x[at(p, 0, g * job.channels)]); }
  int64_t group_of(int64_t c) const { return c / job.channels; }

  // The memory system follows a run by itself; where the next one begins, it must be told.
  void expect(const T* memory, int64_t n) const {
#if defined(__GNUC__)
    const char* p = reinterpret_cast<const char*>(memory);
    for (int64_t i = 0; i < std::min<int64_t>(n * int64_t(sizeof(T)), kAhead); i += 64) __builtin_prefetch(p + i);
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

  // Segments of runs, in a fixed order, for few and large groups: f(segment, population, example, channel, first, size).
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
    const int64_t run = job.channels * s;  // a group's channels lie side by side
    for (int64_t e = 0; e < job.examples; ++e) {
      for (int64_t g = g0; g < g1; ++g) {
        const T* values = x + at(p, e, g * job.channels);
        if (e + 1 < job.examples) expect(values + example, run);
        sum_values(values, run, shift(p, g), sums[g - g0]);
      }
    }
    for (int64_t g = g0; g < g1; ++g) statistics.set(statistics.index(p, g), shift(p, g), sums[g - g0].total());
  }

  void moments_of_few(ParallelFor parallel_for) const {
    std::vector<Sums> sums(job.populations * segments_per_population), all(job.populations * job.groups);
    segments(parallel_for, [&](int64_t i, int64_t p, int64_t e, int64_t c, int64_t first, int64_t size) {
      Pending pending;
      sum_values(x + at(p, e, c) + first, size, shift(p, group_of(c)), pending);
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
  }

  void forward(ParallelFor parallel_for) const {
    if (few) {
      moments_of_few(parallel_for);
      return evaluate(parallel_for);
    }
    blocks(parallel_for, 1, [&](int64_t p, int64_t g0, int64_t g1) {
      moments(p, g0, g1);
      const auto k = coefficients(p, g0, g1, &Statistics::forward);
      const int64_t c0 = g0 * job.channels, c1 = g1 * job.channels;
      // Back to front: what was read last is still in cache.
      for (int64_t e = job.examples - 1; e >= 0; --e) {
        for (int64_t c = c0; c < c1; ++c) apply(p, e, c, 0, s, k[c - c0]);
      }
    });
  }

  using Formula = Coefficients<double> (Statistics::*)(int64_t pg, int64_t c) const;
  std::vector<Coefficients<double>> coefficients(int64_t p, int64_t g0, int64_t g1, Formula formula) const {
    std::vector<Coefficients<double>> k((g1 - g0) * job.channels);
    const int64_t c0 = g0 * job.channels;
    for (int64_t c = c0; c < g1 * job.channels; ++c) {
      k[c - c0] = (statistics.*formula)(statistics.index(p, group_of(c)), c);
    }
    return k;
  }

  std::vector<Coefficients<double>> coefficients(Formula formula) const {
    std::vector<Coefficients<double>> k;
    for (int64_t p = 0; p < job.populations; ++p) {
      const auto some = coefficients(p, 0, job.groups, formula);
      k.insert(k.end(), some.begin(), some.end());
    }
    return k;
  }

  void apply(int64_t p, int64_t e, int64_t c, int64_t first, int64_t size, const Coefficients<double>& k) const {
    const int64_t base = at(p, e, c) + first;
    Reader<T> read_x, read_r;
    Writer<T> write;
    by_chunk<T>(size, kChunk, [&](int64_t j, int64_t n) {
      const int64_t i = base + j;
      const float* r = residual ? read_r(residual + i, n) : nullptr;
      inner.forward_run(read_x(x + i, n), r, write(y + i), n, k, stream);
      write.done(y + i, n);
    });
  }

  void evaluate(ParallelFor parallel_for) const {
    const auto k = coefficients(&Statistics::forward);
    if (s >= kSegment || job.populations * job.examples * channels < kEnoughTasks) {
      return segments(parallel_for, [&](int64_t, int64_t p, int64_t e, int64_t c, int64_t first, int64_t size) {
        apply(p, e, c, first, size, k[p * channels + c]);
      });
    }
    // In memory's order, some runs at a time.
    const int64_t runs = std::max<int64_t>(1, kSegment / s), all = job.populations * job.examples * channels;
    run(parallel_for, ceil_div(all, runs), [&](int64_t b) {
      for (int64_t i = b * runs; i < std::min(all, (b + 1) * runs); ++i) {
        const int64_t e = i / channels, p = e / job.examples, c = i % channels;
        apply(p, e % job.examples, c, 0, s, k[p * channels + c]);
      }
    });
  }

  // ---- backward

  void add_gradient(int64_t p, int64_t e, int64_t c, int64_t first, int64_t size, const Coefficients<double>& k,
                    Pending& sums) const {
    const int64_t base = at(p, e, c) + first;
    if (e + 1 < job.examples) {
      expect(x + base + example, size);
      expect(dy + base + example, size);
    }
    BackwardReader<T> read{dy, x, residual ? y : nullptr};
    by_chunk<T>(size, kChunk, [&](int64_t j, int64_t n) { inner.sum_run(read(base + j, n), n, k, sums); });
  }

  void apply_gradient(int64_t p, int64_t e, int64_t c, int64_t first, int64_t size,
                      const Coefficients<double>& k) const {
    const int64_t base = at(p, e, c) + first;
    BackwardReader<T> read{dy, x, residual ? y : nullptr};
    Writer<T> write_dx, write_dr;
    by_chunk<T>(size, kChunk, [&](int64_t j, int64_t n) {
      const int64_t i = base + j;
      inner.backward_run(read(i, n), write_dx(dx + i), dr ? write_dr(dr + i) : nullptr, n, k, !job.stored, stream);
      write_dx.done(dx + i, n);
      if (dr) write_dr.done(dr + i, n);
    });
  }

  void keep(int64_t p, int64_t c, Sums s) const {
    const int64_t i = p * channels + c;
    job.sum_g[i] = s.first;
    job.sum_gx[i] = s.second * statistics.normaliser(statistics.index(p, group_of(c)), c);
  }

  void sum_gradients(int64_t p, int64_t g0, int64_t g1, const std::vector<Coefficients<double>>& k) const {
    const int64_t c0 = g0 * job.channels, c1 = g1 * job.channels;
    std::vector<Pending> sums(c1 - c0);
    for (int64_t e = 0; e < job.examples; ++e) {
      for (int64_t c = c0; c < c1; ++c) add_gradient(p, e, c, 0, s, k[c - c0], sums[c - c0]);
    }
    for (int64_t c = c0; c < c1; ++c) keep(p, c, sums[c - c0].total());
  }

  void settle(int64_t p, int64_t g0, int64_t g1, Coefficients<double>* k) const {
    for (int64_t g = g0; g < g1; ++g) {
      const auto through = statistics.through(p, g);
      for (int64_t c = g * job.channels; c < (g + 1) * job.channels; ++c) {
        statistics.settle(k[c - g0 * job.channels], through, statistics.index(p, g), c);
      }
    }
  }

  void backward_sums(ParallelFor parallel_for) const {
    if (few) return sum_gradients_of_few(parallel_for, coefficients(&Statistics::gradient));
    blocks(parallel_for, arrays, [&](int64_t p, int64_t g0, int64_t g1) {
      sum_gradients(p, g0, g1, coefficients(p, g0, g1, &Statistics::gradient));
    });
  }

  void backward_apply(ParallelFor parallel_for) const {
    auto k = coefficients(&Statistics::gradient);
    for (int64_t p = 0; p < job.populations; ++p) settle(p, 0, job.groups, &k[p * channels]);
    segments(parallel_for, [&](int64_t, int64_t p, int64_t e, int64_t c, int64_t first, int64_t size) {
      apply_gradient(p, e, c, first, size, k[p * channels + c]);
    });
  }

  void backward(ParallelFor parallel_for) const {
    if (few) {
      backward_sums(parallel_for);
      backward_apply(parallel_for);
      return statistics.parameters();
    }
    blocks(parallel_for, arrays, [&](int64_t p, int64_t g0, int64_t g1) {
      auto k = coefficients(p, g0, g1, &Statistics::gradient);
      sum_gradients(p, g0, g1, k);
      settle(p, g0, g1, k.data());
      const int64_t c0 = g0 * job.channels, c1 = g1 * job.channels;
      for (int64_t e = job.examples - 1; e >= 0; --e) {
        for (int64_t c = c0; c < c1; ++c) apply_gradient(p, e, c, 0, s, k[c - c0]);
      }
    });
    statistics.parameters();
  }

  void sum_gradients_of_few(ParallelFor parallel_for, const std::vector<Coefficients<double>>& k) const {
    std::vector<Sums> sums(job.populations * segments_per_population), all(job.populations * channels);
    segments(parallel_for, [&](int64_t i, int64_t p, int64_t e, int64_t c, int64_t first, int64_t size) {
      Pending pending;
      add_gradient(p, e, c, first, size, k[p * channels + c], pending);
      sums[i] = pending.total();
    });
    each_segment(sums, [&](int64_t p, int64_t c, Sums add) {
      Sums& to = all[p * channels + c];
      to.first += add.first; to.second += add.second;
    });
    for (int64_t p = 0; p < job.populations; ++p) for (int64_t c = 0; c < channels; ++c) keep(p, c, all[p * channels + c]);
  }
};

}  // namespace NK_NAMESPACE
}  // namespace normkit
