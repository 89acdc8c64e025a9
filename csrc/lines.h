// Populations of one example whose groups are contiguous lines, with a weight and a bias for (nearly) every value:
// layer and root mean square norms, and group norms of maps too small to make runs of.
#pragma once

#include "statistics.h"

namespace normkit {
namespace NK_NAMESPACE {

template <class T> struct Lines {
  static constexpr int64_t kBatch = 16;        // lines whose statistics are worked out side by side
  static constexpr int64_t kLongLine = 8192;   // elements: from here on, a second sweep goes by columns
  static constexpr int64_t kColumns = kChunk;  // of that sweep

  const Job& job;
  Statistics statistics{job};
  Inner<T> inner = Inner<T>::of(job);
  const T* x = static_cast<const T*>(job.x);
  const T* residual = static_cast<const T*>(job.residual);
  T* y = static_cast<T*>(job.y);
  const T* dy = static_cast<const T*>(job.dy);
  T* dx = static_cast<T*>(job.dx);
  T* dr = static_cast<T*>(job.dresidual);
  int64_t length = job.channels * job.positions, lines = job.populations * job.groups;
  int64_t width = job.groups * length;  // of an example: what weight and bias are spread over
  std::vector<float> spread_weight{}, spread_bias{};
  const float* weight = spread(job.weight, spread_weight);
  const float* bias = spread(job.bias, spread_bias);
  bool affine_gradient = job.dweight || job.dbias;
  bool long_lines = affine_gradient && length > kLongLine;

  // One value per position, where a channel has several.
  const float* spread(const float* values, std::vector<float>& room) const {
    if (!values || job.positions == 1) return values;
    room.resize(width);
    for (int64_t i = 0; i < width; ++i) room[i] = values[i / job.positions];
    return room.data();
  }

  // Examples per task: many enough to share out, few enough that what tasks keep per column stays small.
  int64_t height = std::max({int64_t(1), 64 * 1024 / std::max<int64_t>(1, width), ceil_div(job.populations, 64)});
  int64_t tasks = ceil_div(job.populations, height);
  template <class F> void by_lines(ParallelFor parallel_for, F f) const {  // f(task, first line, last line)
    run(parallel_for, tasks, [&](int64_t t) {
      const int64_t end = std::min(job.populations, (t + 1) * height) * job.groups;
      for (int64_t l = t * height * job.groups; l < end; l += kBatch) f(t, l, std::min(end, l + kBatch));
    });
  }

  double shift(int64_t line) const { return shift_of(job, x[line * length]); }

  // ---- forward

  void set_moments(int64_t l0, int64_t l1) const {
    Sums sums[kBatch];
    for (int64_t l = l0; l < l1; ++l) {
      Pending pending;
      const double about = shift(l);
      sum_values(x + l * length, 1, length, &about, &pending);
      sums[l - l0] = pending.total();
    }
    for (int64_t l = l0; l < l1; ++l) statistics.set(l, shift(l), sums[l - l0]);
    statistics.ready(l0, l1);
  }

  void prepare(int64_t l0, int64_t l1, LineCoefficients* out) const {
    for (int64_t l = l0; l < l1; ++l) {
      const int64_t column = l % job.groups * length;
      out[l - l0] = {job.mean[l], statistics.inverse_std(l), 0, 0, from(weight, column), from(bias, column)};
    }
  }

  // A line's coefficients, from a column of it on.
  static LineCoefficients beyond(LineCoefficients k, int64_t first) {
    k.weight = from(k.weight, first);
    k.bias = from(k.bias, first);
    return k;
  }

  void apply(int64_t line, const LineCoefficients& k) const {
    Reader<T> read_x, read_r;
    Writer<T> write;
    by_chunk<T>(length, kChunk, [&](int64_t first, int64_t n) {
      const int64_t i = line * length + first;
      const float* r = residual ? read_r(residual + i, n) : nullptr;
      inner.forward_line(read_x(x + i, n), r, write(y + i), n, beyond(k, first));
      write.done(y + i, n);
    });
  }

  void moments(ParallelFor parallel_for) const {
    by_lines(parallel_for, [&](int64_t, int64_t l0, int64_t l1) { set_moments(l0, l1); });
  }
  void forward(ParallelFor parallel_for) const {
    by_lines(parallel_for, [&](int64_t, int64_t l0, int64_t l1) {
      LineCoefficients k[kBatch];
      set_moments(l0, l1);
      prepare(l0, l1, k);
      for (int64_t l = l0; l < l1; ++l) apply(l, k[l - l0]);
    });
  }
  void evaluate(ParallelFor parallel_for) const {
    by_lines(parallel_for, [&](int64_t, int64_t l0, int64_t l1) {
      LineCoefficients k[kBatch];
      prepare(l0, l1, k);
      for (int64_t l = l0; l < l1; ++l) apply(l, k[l - l0]);
    });
  }

  // ---- backward

  void sum_gradients(int64_t line, LineCoefficients& k) const {
    if (job.stored) return;
    Pending sums;
    BackwardReader<T> read{{dy, x, residual ? y : nullptr}};
    by_chunk<T>(length, kChunk, [&](int64_t first, int64_t n) {
      inner.sum_line(read(line * length + first, n), n, beyond(k, first), sums);
    });
    const Sums total = sums.total();
    k.mean_g = job.centred ? total.first * statistics.inverse_count : 0;
    k.mean_gx = total.second * statistics.inverse_count * k.inverse_std;
  }

  // Writes dx of a line's columns [c0, c1), and adds to the parameters' gradients, those of c0 first.
  void apply_gradients(int64_t line, const LineCoefficients& k, int64_t c0, int64_t c1, double* dweight,
                       double* dbias) const {
    BackwardReader<T> read{{dy, x, residual ? y : nullptr}};
    Writer<T> write_dx, write_dr;
    by_chunk<T>(c1 - c0, kChunk, [&](int64_t first, int64_t n) {
      const int64_t i = line * length + c0 + first;
      float* also = dr ? write_dr(dr + i) : nullptr;
      inner.backward_line(read(i, n), write_dx(dx + i), also, n, beyond(k, c0 + first), !job.stored,
                          from(dweight, first), from(dbias, first));
      write_dx.done(dx + i, n);
      if (dr) write_dr.done(dr + i, n);
    });
  }

  void backward(ParallelFor parallel_for) const {
    if (long_lines) return backward_by_columns(parallel_for);
    std::vector<double> sums(affine_gradient ? tasks * 2 * width : 0);
    by_lines(parallel_for, [&](int64_t t, int64_t l0, int64_t l1) {
      double* dweight = affine_gradient ? &sums[t * 2 * width] : nullptr;
      LineCoefficients k[kBatch];
      prepare(l0, l1, k);
      for (int64_t l = l0; l < l1; ++l) sum_gradients(l, k[l - l0]);
      for (int64_t l = l0; l < l1; ++l) {
        double* here = from(dweight, l % job.groups * length);
        apply_gradients(l, k[l - l0], 0, length, here, from(here, width));
      }
    });
    if (!affine_gradient) return;
    for (int64_t t = 1; t < tasks; ++t) for (int64_t i = 0; i < 2 * width; ++i) sums[i] += sums[t * 2 * width + i];
    set_parameters(&sums[0], &sums[width], 0, width);
  }

  // The statistics of all lines first; then columns of all lines, so that what is kept per column stays in cache.
  void backward_by_columns(ParallelFor parallel_for) const {
    std::vector<LineCoefficients> k(lines);
    prepare(0, lines, k.data());
    run(parallel_for, lines, [&](int64_t l) { sum_gradients(l, k[l]); });
    // Blocks must not divide a channel.
    const int64_t block = std::max<int64_t>(1, kColumns / job.positions) * job.positions, per = ceil_div(length, block);
    run(parallel_for, job.groups * per, [&](int64_t i) {
      const int64_t g = i / per, c0 = i % per * block, c1 = std::min(length, c0 + block), base = g * length + c0;
      std::vector<double> sums(2 * (c1 - c0));
      double *dweight = &sums[0], *dbias = dweight + (c1 - c0);
      for (int64_t p = 0; p < job.populations; ++p) {
        const int64_t l = p * job.groups + g;
        apply_gradients(l, k[l], c0, c1, dweight, dbias);
      }
      set_parameters(dweight, dbias, base, base + c1 - c0);
    });
  }

  // The columns [begin, end), which are whole channels, have these gradients.
  void set_parameters(const double* dweight, const double* dbias, int64_t begin, int64_t end) const {
    for (auto [out, sums] : {std::pair{job.dweight, dweight}, std::pair{job.dbias, dbias}}) {
      if (!out) continue;
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
