// Memory (population, example, channel, position), with enough positions in a row: a channel's values come in runs.
#pragma once

#include "statistics.h"

namespace normkit {
namespace NK_NAMESPACE {

template <class T> struct Planes {
  using V = typename Working<T>::OfRun;
  using S = typename V::Scalar;
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
  Backward<T> read{dy, x, static_cast<const T*>(residual ? job.y : nullptr)};
  int64_t arrays = residual ? 3 : 2;  // that a backward reads
  // Of the second half of a backward, after a first that has kept the gradient; elsewhere the same.
  bool kept = keeps_gradient<T>(job) && job.sum_g && dx;
  Inner<T> spreading = kept ? Inner<T>::without_activation(job) : inner;
  Backward<T> summed{kept ? dx : dy, x, read.beside};
  bool few = job.populations * job.groups < kFewGroups && job.size() > kSegment;

  int64_t at(int64_t p, int64_t e, int64_t c) const { return (p * job.examples + e) * example + c * s; }
  double shift(int64_t p, int64_t g) const {
    const int64_t c = g * job.channels;
    if (!job.mask) return shift_of(job, x + at(p, 0, c), s);
    const uint8_t *mask = job.mask + p * job.examples * s, *end = mask + job.examples * s;
    const int64_t i = std::find_if(mask, end, [](uint8_t counted) { return counted != 0; }) - mask;
    return i == end - mask ? 0.0 : shift_of(job, x + at(p, i / s, c) + i % s, 1);
  }
  const uint8_t* mask_of(int64_t p, int64_t e) const { return from(job.mask, (p * job.examples + e) * s); }
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
    std::vector<S> shifts(g1 - g0);
    for (int64_t g = g0; g < g1; ++g) shifts[g - g0] = S(shift(p, g));
    if (add_up(p, g0, g1, shifts)) {
      for (int64_t g = g0; g < g1; ++g) shifts[g - g0] = S(job.mean[statistics.index(p, g)]);
      add_up(p, g0, g1, shifts);
    }
    statistics.ready(statistics.index(p, g0), statistics.index(p, g1));
  }

  // Sets the moments of groups [g0, g1), and returns whether they should be taken again, about other shifts.
  bool add_up(int64_t p, int64_t g0, int64_t g1, const std::vector<S>& shifts) const {
    std::vector<Pending<V>> sums(g1 - g0);
    const int64_t run = job.channels * s, flush = runs_before_flush<V>(job.mask ? s : run);
    V odd = V::all(0);
    for (int64_t e = 0; e < job.examples; ++e) {
      const T* values = x + at(p, e, g0 * job.channels);
      if (e + 1 < job.examples) expect(values + example, run * (g1 - g0));
      if (job.mask) add_masked(p, e, g0, g1, 0, s, shifts.data(), sums.data(), &odd);
      else sum_runs<false>(values, nullptr, g1 - g0, run, shifts.data(), sums.data(), &odd);  // channels side by side
      if ((e + 1) % flush == 0) for (auto& one : sums) one.flush();
    }
    note_odd(job, odd.sum());
    bool again = false;
    for (int64_t g = g0; g < g1; ++g) again |= statistics.set(p, g, shifts[g - g0], sums[g - g0].total());
    return again;
  }

  // The values [first, first + n) of every channel of groups [g0, g1): the mask is theirs, not the group's.
  void add_masked(int64_t p, int64_t e, int64_t g0, int64_t g1, int64_t first, int64_t n, const S* shifts,
                  Pending<V>* sums, V* odd) const {
    for (int64_t g = g0; g < g1; ++g) {
      for (int64_t c = g * job.channels; c < (g + 1) * job.channels; ++c) {
        sum_runs<true>(x + at(p, e, c) + first, mask_of(p, e) + first, 1, n, &shifts[g - g0], &sums[g - g0], odd);
        if (job.channels > 1) sums[g - g0].flush();
      }
    }
  }

  void moments_of_few(ParallelFor parallel_for) const {
    std::vector<S> shifts(job.populations * job.groups);
    for (int64_t p = 0; p < job.populations; ++p) {
      for (int64_t g = 0; g < job.groups; ++g) shifts[statistics.index(p, g)] = S(shift(p, g));
    }
    if (add_up_few(parallel_for, shifts)) {
      std::copy(job.mean, job.mean + shifts.size(), shifts.begin());
      add_up_few(parallel_for, shifts);
    }
    statistics.ready();
  }

  bool add_up_few(ParallelFor parallel_for, const std::vector<S>& shifts) const {
    std::vector<Sums> sums(job.populations * segments_per_population), all(job.populations * job.groups);
    segments(parallel_for, [&](int64_t i, int64_t p, int64_t e, int64_t c, int64_t first, int64_t size) {
      Pending<V> pending;
      const S* about = &shifts[statistics.index(p, group_of(c))];
      const T* values = x + at(p, e, c) + first;
      V odd = V::all(0);
      if (job.mask) sum_runs<true>(values, mask_of(p, e) + first, 1, size, about, &pending, &odd);
      else sum_runs<false>(values, nullptr, 1, size, about, &pending, &odd);
      note_odd(job, odd.sum());
      sums[i] = pending.total();
    });
    each_segment(sums, [&](int64_t p, int64_t c, Sums add) { all[statistics.index(p, group_of(c))].add(add); });
    bool again = false;
    for (int64_t p = 0; p < job.populations; ++p) {
      for (int64_t g = 0; g < job.groups; ++g) {
        const int64_t pg = statistics.index(p, g);
        again |= statistics.set(p, g, shifts[pg], all[pg]);
      }
    }
    return again;
  }

  void forward(ParallelFor parallel_for) const {
    if (few) {
      moments_of_few(parallel_for);
      return evaluate(parallel_for);
    }
    blocks(parallel_for, 1, [&](int64_t p, int64_t g0, int64_t g1) {
      moments(p, g0, g1);
      const auto k = worked(coefficients(p, g0, g1));
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

  // In the type that values are worked on in.
  static std::vector<Coefficients<S>> worked(const std::vector<Coefficients<double>>& k) {
    std::vector<Coefficients<S>> out;
    out.reserve(k.size());
    for (const auto& one : k) out.push_back(in<S>(one));
    return out;
  }

  // Whether this many values in a row are written past the cache.
  bool streams(int64_t values) const {
    return is_large<V, T>(job) && values * int64_t(sizeof(T)) >= kLongPiece;
  }

  // Runs of n values from index `first` on.
  void apply(int64_t first, int64_t runs, int64_t n, const Coefficients<S>* k) const {
    const int64_t together = n < V::width ? 1 : runs;
    for (int64_t run = 0; run < runs; run += together, first += together * n, k += together) {
      inner.forward_runs(x + first, from(residual, first), y + first, together, n, k, job.activation,
                         streams(together * n));
    }
  }

  void evaluate(ParallelFor parallel_for) const {
    const auto k = worked(coefficients());
    in_order(parallel_for, [&](int64_t p, int64_t e, int64_t c, int64_t first, int64_t runs, int64_t n) {
      apply(at(p, e, c) + first, runs, n, &k[p * channels + c]);
    });
  }

  // In memory's order, some runs of an example at a time, or parts of one that is long:
  // f(population, example, first channel, first value, runs, values of each).
  template <class F> void in_order(ParallelFor parallel_for, F f) const {
    if (s >= kSegment || job.populations * job.examples * channels < kEnoughTasks) {
      return segments(parallel_for, [&](int64_t, int64_t p, int64_t e, int64_t c, int64_t first, int64_t size) {
        f(p, e, c, first, 1, size);
      });
    }
    const int64_t most = std::max<int64_t>(1, kSegment / s), per = ceil_div(channels, most);
    run(parallel_for, job.populations * job.examples * per, [&](int64_t i) {
      const int64_t e = i / per, c = i % per * most;
      f(e / job.examples, e % job.examples, c, 0, std::min(most, channels - c), s);
    });
  }

  // ---- backward

  // Adds up runs of n values from index `first` on.
  void add_gradients(int64_t first, int64_t runs, int64_t n, const Coefficients<S>* k, Pending<V>* sums) const {
    inner.sum_runs(read.at(first), runs, n, k, job.activation, sums, kept ? dx + first : nullptr);
  }

  // Runs of n values from `first` on of the channels from c on.
  void apply_gradients(int64_t p, int64_t e, int64_t c, int64_t first, int64_t runs, int64_t n,
                       const Coefficients<S>* k) const {
    const bool masked = job.mask && !job.stored;
    const int64_t together = masked || n < V::width ? 1 : runs;
    int64_t i = at(p, e, c) + first;
    for (int64_t run = 0; run < runs; run += together, i += together * n, k += together) {
      const bool stream = streams(together * n);
      if (masked) {
        spreading.backward_masked_run(summed.at(i), mask_of(p, e) + first, dx + i, from(dr, i), n, *k, job.activation, stream);
      } else {
        spreading.backward_runs(summed.at(i), dx + i, from(dr, i), together, n, k, job.activation, !job.stored, stream);
      }
    }
  }

  void keep(int64_t p, int64_t c, Sums s) const {
    const int64_t i = p * channels + c;
    job.sum_g[i] = s.first;
    job.sum_gx[i] = s.second;
  }

  void sum_gradients(int64_t p, int64_t g0, int64_t g1, const std::vector<Coefficients<S>>& k) const {
    const int64_t c0 = g0 * job.channels, c1 = g1 * job.channels, flush = runs_before_flush<V>(s);
    std::vector<Pending<V>> sums(c1 - c0);
    for (int64_t e = 0; e < job.examples; ++e) {
      const int64_t first = at(p, e, c0);
      if (e + 1 < job.examples) {
        expect(x + first + example, (c1 - c0) * s);
        expect(dy + first + example, (c1 - c0) * s);
      }
      add_gradients(first, c1 - c0, s, k.data(), sums.data());
      if ((e + 1) % flush == 0) for (auto& one : sums) one.flush();
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
    if (few) return sum_gradients_of_few(parallel_for, worked(coefficients()));
    blocks(parallel_for, arrays, [&](int64_t p, int64_t g0, int64_t g1) {
      sum_gradients(p, g0, g1, worked(coefficients(p, g0, g1)));
    });
  }

  void backward_apply(ParallelFor parallel_for) const {
    auto k = coefficients();
    for (int64_t p = 0; p < job.populations; ++p) settle(p, 0, job.groups, &k[p * channels]);
    const auto own = worked(k);
    in_order(parallel_for, [&](int64_t p, int64_t e, int64_t c, int64_t first, int64_t runs, int64_t n) {
      apply_gradients(p, e, c, first, runs, n, &own[p * channels + c]);
    });
  }

  void backward(ParallelFor parallel_for) const {
    if (statistics.needs_no_sums()) return backward_apply(parallel_for);
    if (few) {
      backward_sums(parallel_for);
      backward_apply(parallel_for);
      return statistics.parameters();
    }
    blocks(parallel_for, arrays, [&](int64_t p, int64_t g0, int64_t g1) {
      auto k = coefficients(p, g0, g1);
      sum_gradients(p, g0, g1, worked(k));
      settle(p, g0, g1, k.data());
      const auto own = worked(k);
      for (int64_t e = job.examples - 1; e >= 0; --e) {
        apply_gradients(p, e, g0 * job.channels, 0, int64_t(own.size()), s, own.data());
      }
    });
    statistics.parameters();
  }

  void sum_gradients_of_few(ParallelFor parallel_for, const std::vector<Coefficients<S>>& k) const {
    std::vector<Sums> sums(job.populations * segments_per_population), all(job.populations * channels);
    segments(parallel_for, [&](int64_t i, int64_t p, int64_t e, int64_t c, int64_t first, int64_t size) {
      Pending<V> pending;
      add_gradients(at(p, e, c) + first, 1, size, &k[p * channels + c], &pending);
      sums[i] = pending.total();
    });
    each_segment(sums, [&](int64_t p, int64_t c, Sums add) {
      all[p * channels + c].add(add);
    });
    for (int64_t p = 0; p < job.populations; ++p) {
      for (int64_t c = 0; c < channels; ++c) keep(p, c, all[p * channels + c]);
    }
  }
};

}  // namespace NK_NAMESPACE
}  // namespace normkit
