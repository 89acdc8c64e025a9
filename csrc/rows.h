// Memory whose channels lie side by side, position after position: sums are kept column by column.
// So are those of maps too small to make runs of; there a channel is several columns.
#pragma once

#include "statistics.h"

namespace normkit {
namespace NK_NAMESPACE {

template <class T> struct Rows {
  using S = typename Applied<T>::V::Scalar;
  static constexpr int64_t kNarrow = 128;  // columns: below, what a row costs beside its values is too much

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

  int64_t per_channel = job.channels_last ? 1 : job.positions;  // columns
  int64_t columns = job.all_channels() * per_channel;
  // Narrow rows are read several at a time, as one of whole vectors; the last such row may be shorter.
  int64_t whole = columns % Lanes::width ? Lanes::width : 1;
  int64_t repeat = columns < kNarrow ? ceil_div(ceil_div(kNarrow, columns), whole) * whole : 1;
  int64_t width = columns * repeat;
  int64_t population = job.group_size() * job.groups;
  int64_t rows = population / width, rest = population % width;
  int64_t height = std::max<int64_t>(16, kTaskBytes / 2 / (width * int64_t(sizeof(T))));  // rows per task
  int64_t tasks = std::max<int64_t>(1, ceil_div(rows, height));                           // per population

  bool stream(const T* out) const {
    return job.size() * int64_t(sizeof(T)) >= kStreamBytes && reinterpret_cast<uintptr_t>(out) % 64 == 0 &&
           width % Applied<T>::V::width == 0;
  }
  int64_t stride(int64_t n) const { return std::is_same_v<T, float> ? width : n; }  // of what a reader returns
  template <int K> const typename Inner<T>::Rows& rows_of() const { return K == 1 ? inner.row : inner.rows; }
  // f(i, group, channel) for n columns, of which the first begins a channel: counted, because divisions are slow.
  template <class F> void each_column(int64_t first, int64_t n, F f) const {
    int64_t c = first / per_channel, g = c / job.channels, next_group = (g + 1) * job.channels, left = per_channel;
    for (int64_t i = 0; i < n; ++i) {
      f(i, g, c);
      if (--left) continue;
      left = per_channel;
      if (++c < next_group) continue;
      if (c == job.all_channels()) c = g = next_group = 0; else ++g;  // of a narrow row's repetition
      next_group += job.channels;
    }
  }
  double shift(int64_t p, int64_t g) const {
    return shift_of(job, x[p * population + g * job.channels * per_channel]);
  }

  // A part of a population: some rows of some columns. Those at the end take the shorter row along.
  struct Block { int64_t p, r0, r1, c0, c1; };

  // f<K>(index of the first value, first column, columns): K rows at a time, of halves no more values than `most`.
  static constexpr int64_t kAll = INT64_MAX;
  template <class F> void sweep(const Block& b, int64_t most, F f) const {
    const int64_t n = b.c1 - b.c0;
    int64_t at = b.p * population + b.r0 * width + b.c0, r = b.r0;
    for (; r + kTogether <= b.r1; r += kTogether, at += kTogether * width) {
      by_chunk<T>(n, most / kTogether, [&](int64_t j, int64_t size) {
        f.template operator()<kTogether>(at + j, b.c0 + j, size);
      });
    }
    for (; r < b.r1 + (b.r1 == rows && rest > b.c0); ++r, at += width) {
      const int64_t here = r < rows ? n : std::min(n, rest - b.c0);
      by_chunk<T>(here, most, [&](int64_t j, int64_t size) { f.template operator()<1>(at + j, b.c0 + j, size); });
    }
  }

  // Whole populations, or columns of them, that a task reads twice while they are in cache; ...
  bool fused(int64_t arrays) const {
    return population * int64_t(sizeof(T)) * arrays <= 2 * kTaskBytes || job.populations >= kEnoughTasks / 2;
  }
  template <class F> void fused_blocks(ParallelFor parallel_for, F f) const {
    int64_t groups = job.groups;  // per task
    if (repeat == 1) {
      const int64_t wanted = ceil_div(kEnoughTasks, job.populations);
      const int64_t least = ceil_div(kNarrow, job.channels * per_channel);
      groups = std::min(groups, std::max(ceil_div(ceil_div(groups, wanted), least) * least, least));
    }
    const int64_t per = ceil_div(job.groups, groups);
    run(parallel_for, job.populations * per, [&](int64_t i) {
      const int64_t g0 = i % per * groups, g1 = std::min(job.groups, g0 + groups);
      const int64_t c0 = g0 * job.channels * per_channel;
      f(Block{i / per, 0, rows, c0, g1 == job.groups ? width : g1 * job.channels * per_channel}, g0, g1);
    });
  }
  // ... or rows of them, which are swept over a second time, from the end.
  template <class F> void row_blocks(ParallelFor parallel_for, F f) const {
    run(parallel_for, job.populations * tasks, [&](int64_t i) {
      const int64_t t = i % tasks;
      f(i, Block{i / tasks, t * height, std::min(rows, (t + 1) * height), 0, width});
    });
  }

  // Two sums of every column of a block, as arrays that vectors are loaded from.
  struct ColumnSums {
    int64_t n;
    Arrays<double> arrays{2, n};
    explicit ColumnSums(int64_t columns) : n(columns) {}
    double* first(int64_t i = 0) { return arrays[0] + i; }
    double* second(int64_t i = 0) { return arrays[1] + i; }
    Sums operator[](int64_t i) const { return {arrays[0][i], arrays[1][i]}; }
    void add(const ColumnSums& other) {
      for (int a = 0; a < 2; ++a) for (int64_t i = 0; i < n; ++i) arrays[a][i] += other.arrays[a][i];
    }
  };

  // The sums of each population, from those of its blocks of rows, in a fixed order.
  template <class F> std::vector<ColumnSums> sums_by_rows(ParallelFor parallel_for, F add_block) const {
    std::vector<ColumnSums> parts(job.populations * tasks, ColumnSums(0)), all(job.populations, ColumnSums(width));
    row_blocks(parallel_for, [&](int64_t i, const Block& b) {
      parts[i] = ColumnSums(width);
      add_block(b, parts[i]);
    });
    for (int64_t i = 0; i < job.populations * tasks; ++i) all[i / tasks].add(parts[i]);
    return all;
  }

  // ---- forward

  void add_values(const Block& b, ColumnSums& sums) const {
    Arrays<double> memory(1, b.c1 - b.c0);
    double* about = memory[0];
    each_column(b.c0, b.c1 - b.c0, [&](int64_t i, int64_t g, int64_t) { about[i] = shift(b.p, g); });
    Reader<T> reader;
    sweep(b, kChunk, [&]<int K>(int64_t at, int64_t column, int64_t n) {
      const int64_t c = column - b.c0;
      sum_columns<K>(reader(x + at, n, K, width), stride(n), n, &about[c], sums.first(c), sums.second(c));
    });
  }

  // The sums begin with column c0, the first of group g0.
  void set_moments(int64_t p, int64_t g0, int64_t g1, int64_t c0, const ColumnSums& sums) const {
    std::vector<Sums> all(g1 - g0);
    each_column(c0, sums.n, [&](int64_t i, int64_t g, int64_t) {
      Sums& to = all[g - g0];
      to.first += sums[i].first; to.second += sums[i].second;
    });
    for (int64_t g = g0; g < g1; ++g) statistics.set(statistics.index(p, g), shift(p, g), all[g - g0]);
    statistics.ready(statistics.index(p, g0), statistics.index(p, g1));
  }

  template <class F> void fused_moments(ParallelFor parallel_for, F then) const {
    fused_blocks(parallel_for, [&](const Block& b, int64_t g0, int64_t g1) {
      ColumnSums sums(b.c1 - b.c0);
      add_values(b, sums);
      set_moments(b.p, g0, g1, b.c0, sums);
      then(b);
    });
  }

  void moments_by_rows(ParallelFor parallel_for) const {
    const auto all = sums_by_rows(parallel_for, [&](const Block& b, ColumnSums& sums) { add_values(b, sums); });
    for (int64_t p = 0; p < job.populations; ++p) set_moments(p, 0, job.groups, 0, all[p]);
  }

  void moments(ParallelFor parallel_for) const {
    if (fused(1)) fused_moments(parallel_for, [](const Block&) {});
    else moments_by_rows(parallel_for);
  }

  void forward(ParallelFor parallel_for) const {
    if (fused(1)) {
      return fused_moments(parallel_for, [&](const Block& b) { apply(b, columns_of<S>(b)); });
    }
    moments_by_rows(parallel_for);
    evaluate(parallel_for);
  }

  // What the columns of a block are multiplied by and what is added, in the type that they are worked on in.
  template <class N> struct Columns {
    int64_t n;
    Arrays<N> arrays{7, n};
    void set(int64_t i, const Coefficients<double>& wide) {
      const Coefficients<N> k = in(wide, N{});
      const N all[] = {k.mean, k.unit, k.gain, k.bias, k.scale, k.slope, k.level};
      for (int a = 0; a < 7; ++a) arrays[a][i] = all[a];
    }
    ColumnCoefficients<N> at(int64_t i) const {
      return ColumnCoefficients<N>{arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], arrays[5], arrays[6]}.at(i);
    }
  };
  template <class N> Columns<N> columns_of(const Block& b) const {
    Columns<N> out{b.c1 - b.c0};
    each_column(b.c0, out.n, [&](int64_t i, int64_t g, int64_t c) {
      out.set(i, statistics.coefficients(statistics.index(b.p, g), c));
    });
    return out;
  }
  Block whole_population(int64_t p) const { return {p, 0, 0, 0, width}; }

  void apply(const Block& b, const Columns<S>& columns) const {
    const bool streaming = stream(y) && b.c0 % Applied<T>::V::width == 0;
    sweep(b, kAll, [&]<int K>(int64_t at, int64_t column, int64_t n) {
      rows_of<K>().forward(x + at, from(residual, at), y + at, width, n, columns.at(column - b.c0), streaming);
    });
  }

  void evaluate(ParallelFor parallel_for) const {
    std::vector<Columns<S>> columns;
    for (int64_t p = 0; p < job.populations; ++p) {
      columns.push_back(columns_of<S>(whole_population(p)));
    }
    row_blocks(parallel_for, [&](int64_t i, const Block&) {
      const int64_t p = i / tasks, t = tasks - 1 - i % tasks;
      apply(Block{p, t * height, std::min(rows, (t + 1) * height), 0, width}, columns[p]);
    });
  }

  // ---- backward

  void add_gradients(const Block& b, const Columns<double>& columns, ColumnSums& sums) const {
    BackwardReader<T> reader{read};
    sweep(b, kChunk, [&]<int K>(int64_t at, int64_t column, int64_t n) {
      const int64_t c = column - b.c0;
      rows_of<K>().sum(reader(at, n, K, width), stride(n), n, columns.at(c), sums.first(c), sums.second(c));
    });
  }

  // As for moments: the sums begin with column c0, the first of group g0.
  void keep(int64_t p, int64_t g0, int64_t g1, int64_t c0, const ColumnSums& sums) const {
    const int64_t base = p * job.all_channels(), begin = g0 * job.channels, end = g1 * job.channels;
    for (int64_t c = begin; c < end; ++c) job.sum_g[base + c] = job.sum_gx[base + c] = 0;
    each_column(c0, sums.n, [&](int64_t i, int64_t, int64_t c) {
      job.sum_g[base + c] += sums[i].first;
      job.sum_gx[base + c] += sums[i].second;
    });
    for (int64_t g = g0, c = begin; g < g1; ++g) {
      for (; c < (g + 1) * job.channels; ++c) {
        job.sum_gx[base + c] *= statistics.normaliser(statistics.index(p, g), c);
      }
    }
  }

  // The columns of groups [g0, g1), once the sums of their gradients are known.
  Columns<S> settled(const Block& b, int64_t g0, int64_t g1) const {
    std::vector<Statistics::Through> through;
    through.reserve(g1 - g0);
    for (int64_t g = g0; g < g1; ++g) through.push_back(statistics.through(b.p, g));
    Columns<S> out{b.c1 - b.c0};
    each_column(b.c0, out.n, [&](int64_t i, int64_t g, int64_t c) {
      auto k = statistics.coefficients(statistics.index(b.p, g), c);
      Statistics::settle(k, through[g - g0]);
      out.set(i, k);
    });
    return out;
  }

  void apply_gradients(const Block& b, const Columns<S>& columns) const {
    const bool streaming = stream(dx) && b.c0 % Applied<T>::V::width == 0;
    sweep(b, kAll, [&]<int K>(int64_t at, int64_t column, int64_t n) {
      rows_of<K>().backward(read.at(at), dx + at, from(dr, at), width, n, columns.at(column - b.c0), !job.stored,
                            streaming);
    });
  }

  template <class F> void fused_sums(ParallelFor parallel_for, F then) const {
    fused_blocks(parallel_for, [&](const Block& b, int64_t g0, int64_t g1) {
      ColumnSums sums(b.c1 - b.c0);
      add_gradients(b, columns_of<double>(b), sums);
      keep(b.p, g0, g1, b.c0, sums);
      then(b, g0, g1);
    });
  }

  void backward_sums(ParallelFor parallel_for) const {
    if (fused(2)) return fused_sums(parallel_for, [](const Block&, int64_t, int64_t) {});
    std::vector<Columns<double>> columns;
    for (int64_t p = 0; p < job.populations; ++p) {
      columns.push_back(columns_of<double>(whole_population(p)));
    }
    const auto all = sums_by_rows(parallel_for, [&](const Block& b, ColumnSums& sums) {
      add_gradients(b, columns[b.p], sums);
    });
    for (int64_t p = 0; p < job.populations; ++p) keep(p, 0, job.groups, 0, all[p]);
  }

  void backward_apply(ParallelFor parallel_for) const {
    std::vector<Columns<S>> columns;
    for (int64_t p = 0; p < job.populations; ++p) columns.push_back(settled(whole_population(p), 0, job.groups));
    row_blocks(parallel_for, [&](int64_t i, const Block&) {
      const int64_t p = i / tasks, t = tasks - 1 - i % tasks;
      apply_gradients(Block{p, t * height, std::min(rows, (t + 1) * height), 0, width}, columns[p]);
    });
  }

  void backward(ParallelFor parallel_for) const {
    if (fused(2)) {
      fused_sums(parallel_for, [&](const Block& b, int64_t g0, int64_t g1) { apply_gradients(b, settled(b, g0, g1)); });
    } else {
      backward_sums(parallel_for);
      backward_apply(parallel_for);
    }
    statistics.parameters();
  }
};

}  // namespace NK_NAMESPACE
}  // namespace normkit
