// Populations of one example whose groups are contiguous lines, with a weight and a bias for (nearly) every value:
// layer and root mean square norms, and group norms of maps too small to make runs of.
#pragma once

#include "statistics.h"

namespace normkit {
namespace NK_NAMESPACE {

template <class T> struct Lines {
  static constexpr int64_t kLongLine = 8192;  // elements: from here on, a second sweep goes by columns
  static constexpr int64_t kColumns = 2048;   // of that sweep

  const Job& job;
  Statistics statistics{job};
  Inner<T> inner = Inner<T>::of(job);
  const T* x = static_cast<const T*>(job.x);
  const T* residual = static_cast<const T*>(job.residual);
  T* y = static_cast<T*>(job.y);
  const T* dy = static_cast<const T*>(job.dy);
  T* dx = static_cast<T*>(job.dx);
  T* dr = static_cast<T*>(job.dresidual);
  Backward<T> read{dy, x, residual ? y : nullptr};
  int64_t length = job.channels * job.positions, groups = job.groups;
  int64_t width = groups * length;  // of an example: what weight and bias are spread over
  std::vector<float> spread_weight{}, spread_bias{};
  LineParameters parameters{spread(job.weight, spread_weight), spread(job.bias, spread_bias)};
  bool affine_gradient = job.dweight || job.dbias;
  bool long_lines = affine_gradient && length > kLongLine;

  // One value per position, where a channel has several.
  const float* spread(const float* values, std::vector<float>& room) const {
    if (!values || job.positions == 1) return values;
    room.resize(width);
    for (int64_t i = 0; i < width; ++i) room[i] = values[i / job.positions];
    return room.data();
  }

  // ---- how lines are gone over: those of a few examples at a time, of which those of one group share their parameters

  // Examples per task: many enough to share out, few enough that what tasks keep per column stays small.
  static constexpr int64_t kTaskValues = 64 * 1024, kMostTasks = 64;
  int64_t height = std::max({int64_t(kTogether), kTaskValues / width, ceil_div(job.populations, kMostTasks)});
  int64_t tasks = ceil_div(job.populations, height);
  template <class F> void by_examples(ParallelFor parallel_for, F f) const {  // f(task, first example, last example)
    run(parallel_for, tasks, [&](int64_t t) {
      const int64_t end = std::min(job.populations, (t + 1) * height);
      for (int64_t p = t * height; p < end; p += kTogether) f(t, p, std::min<int64_t>(end, p + kTogether));
    });
  }

  template <int K> const typename Inner<T>::Lines& lines_of() const { return K == 1 ? inner.line : inner.lines; }
  int64_t stride(int64_t n) const { return std::is_same_v<T, float> ? width : n; }  // of what a reader returns

  // Columns [c0, c1) of lines of a group: f<K>(index of the first value, first column, columns).
  template <int K, class F> void by_columns(int64_t p, int64_t g, int64_t c0, int64_t c1, F f) const {
    by_chunk<T>(c1 - c0, kChunk / K, [&](int64_t i, int64_t n) {
      const int64_t column = g * length + c0 + i;
      f(p * width + column, column, n);
    });
  }

  // f<K>(first example, their coefficients) for examples [p0, p1), whose lines of group g have coefficients from k on.
  template <class F> void together(int64_t p0, int64_t p1, int64_t g, const LineCoefficients* k, F f) const {
    LineCoefficients own[kTogether];
    int64_t p = p0;
    for (; p + kTogether <= p1; p += kTogether) {
      for (int i = 0; i < kTogether; ++i) own[i] = k[(p - p0 + i) * groups + g];
      f.template operator()<kTogether>(p, own);
    }
    for (; p < p1; ++p) f.template operator()<1>(p, &k[(p - p0) * groups + g]);
  }

  std::vector<LineCoefficients> coefficients(int64_t p0, int64_t p1) const {
    std::vector<LineCoefficients> k((p1 - p0) * groups);
    for (int64_t i = 0, l = p0 * groups; l < p1 * groups; ++i, ++l) k[i] = {job.mean[l], statistics.inverse_std(l)};
    return k;
  }

  // ---- forward

  void set_moments(int64_t p0, int64_t p1) const {
    std::vector<Pending> sums((p1 - p0) * groups);
    std::vector<double> shifts(sums.size());
    for (int64_t i = 0; i < int64_t(sums.size()); ++i) shifts[i] = shift_of(job, x[p0 * width + i * length]);
    sum_values(x + p0 * width, int64_t(sums.size()), length, shifts.data(), sums.data());
    for (int64_t i = 0; i < int64_t(sums.size()); ++i) statistics.set(p0 * groups + i, shifts[i], sums[i].total());
    statistics.ready(p0 * groups, p1 * groups);
  }

  void apply(int64_t p0, int64_t p1) const {
    const auto k = coefficients(p0, p1);
    Reader<T> read_x, read_r;
    Writer<T> write;
    for (int64_t g = 0; g < groups; ++g) {
      together(p0, p1, g, k.data(), [&]<int K>(int64_t p, const LineCoefficients* own) {
        by_columns<K>(p, g, 0, length, [&](int64_t at, int64_t column, int64_t n) {
          const float* added = residual ? read_r(residual + at, n, K, width) : nullptr;
          lines_of<K>().forward(read_x(x + at, n, K, width), added, write(y + at), stride(n), n, own,
                                parameters.at(column));
          write.done(y + at, n, K, width);
        });
      });
    }
  }

  void moments(ParallelFor parallel_for) const {
    by_examples(parallel_for, [&](int64_t, int64_t p0, int64_t p1) { set_moments(p0, p1); });
  }
  void forward(ParallelFor parallel_for) const {
    by_examples(parallel_for, [&](int64_t, int64_t p0, int64_t p1) {
      set_moments(p0, p1);
      apply(p0, p1);
    });
  }
  void evaluate(ParallelFor parallel_for) const {
    by_examples(parallel_for, [&](int64_t, int64_t p0, int64_t p1) { apply(p0, p1); });
  }

  // ---- backward

  // Coefficients of the lines of examples [p0, p1), with the gradients through their statistics.
  std::vector<LineCoefficients> settled(int64_t p0, int64_t p1) const {
    auto k = coefficients(p0, p1);
    if (job.stored) return k;
    std::vector<Pending> sums(k.size());
    BackwardReader<T> reader{read};
    for (int64_t g = 0; g < groups; ++g) {
      together(p0, p1, g, k.data(), [&]<int K>(int64_t p, const LineCoefficients* own) {
        Pending some[K];
        by_columns<K>(p, g, 0, length, [&](int64_t at, int64_t column, int64_t n) {
          lines_of<K>().sum(reader(at, n, K, width), stride(n), n, own, parameters.at(column), some);
        });
        for (int i = 0; i < K; ++i) sums[(p - p0 + i) * groups + g] = some[i];
      });
    }
    for (size_t i = 0; i < k.size(); ++i) {
      const Sums total = sums[i].total();
      const double s = k[i].inverse_std;
      k[i].slope = -total.second * statistics.inverse_count * s * s * s;
      k[i].level = job.centred ? -total.first * statistics.inverse_count * s : 0;
    }
    return k;
  }

  // Writes dx of columns [c0, c1) of a group, and adds to the parameters' gradients, those of c0 first.
  void apply_gradients(int64_t p0, int64_t p1, int64_t g, int64_t c0, int64_t c1, const LineCoefficients* k,
                       double* dweight, double* dbias) const {
    BackwardReader<T> reader{read};
    Writer<T> write_dx, write_dr;
    together(p0, p1, g, k, [&]<int K>(int64_t p, const LineCoefficients* own) {
      by_columns<K>(p, g, c0, c1, [&](int64_t at, int64_t column, int64_t n) {
        const int64_t i = column - g * length - c0;
        float* also = dr ? write_dr(dr + at) : nullptr;
        lines_of<K>().backward(reader(at, n, K, width), write_dx(dx + at), also, stride(n), n, own,
                               parameters.at(column), !job.stored, from(dweight, i), from(dbias, i));
        write_dx.done(dx + at, n, K, width);
        if (dr) write_dr.done(dr + at, n, K, width);
      });
    });
  }

  void backward(ParallelFor parallel_for) const {
    if (long_lines) return backward_by_columns(parallel_for);
    std::vector<Arrays<double>> sums(affine_gradient ? tasks : 0, Arrays<double>(2, width));
    by_examples(parallel_for, [&](int64_t t, int64_t p0, int64_t p1) {
      const auto k = settled(p0, p1);
      double *dweight = affine_gradient ? sums[t][0] : nullptr, *dbias = affine_gradient ? sums[t][1] : nullptr;
      for (int64_t g = 0; g < groups; ++g) {
        apply_gradients(p0, p1, g, 0, length, k.data(), from(dweight, g * length), from(dbias, g * length));
      }
    });
    if (!affine_gradient) return;
    for (int64_t t = 1; t < tasks; ++t) {
      for (int a = 0; a < 2; ++a) for (int64_t i = 0; i < width; ++i) sums[0][a][i] += sums[t][a][i];
    }
    set_parameters(sums[0][0], sums[0][1], 0, width);
  }

  // The statistics of all lines first; then columns of all lines, so that what is kept per column stays in cache.
  void backward_by_columns(ParallelFor parallel_for) const {
    std::vector<LineCoefficients> k(job.populations * groups);
    run(parallel_for, job.populations, [&](int64_t p) {
      const auto own = settled(p, p + 1);
      std::copy(own.begin(), own.end(), k.begin() + p * groups);
    });
    // Blocks must not divide a channel.
    const int64_t block = std::max<int64_t>(1, kColumns / job.positions) * job.positions, per = ceil_div(length, block);
    run(parallel_for, groups * per, [&](int64_t i) {
      const int64_t g = i / per, c0 = i % per * block, c1 = std::min(length, c0 + block), base = g * length + c0;
      Arrays<double> sums(2, c1 - c0);
      apply_gradients(0, job.populations, g, c0, c1, k.data(), sums[0], sums[1]);
      set_parameters(sums[0], sums[1], base, base + c1 - c0);
    });
  }

  // The columns [begin, end), which are whole channels, have these gradients.
  void set_parameters(const double* dweight, const double* dbias, int64_t begin, int64_t end) const {
    for (auto [out, sums] : {std::pair{job.dweight, dweight}, std::pair{job.dbias, dbias}}) {
      if (!out) continue;
      if (job.positions == 1) {
        std::copy(sums, sums + (end - begin), out + begin);
        continue;
      }
      for (int64_t c = begin / job.positions; c < end / job.positions; ++c) {
        double all = 0;
        for (int64_t i = 0; i < job.positions; ++i) all += sums[c * job.positions - begin + i];
        out[c] = float(all);
      }
    }
  }

  // Statistics of lines are nobody else's: there is nothing to share between two halves of a backward.
  void backward_sums(ParallelFor) const {}
  void backward_apply(ParallelFor) const {}
};

}  // namespace NK_NAMESPACE
}  // namespace normkit
