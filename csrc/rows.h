// Memory whose channels lie side by side, position after position: sums are kept column by column.
// So are those of maps too small to make runs of; there a channel is several columns.
#pragma once

#include "statistics.h"

namespace normkit {
namespace NK_NAMESPACE {

template <class T> struct Rows {
  using V = typename Working<T>::V;
  using S = typename V::Scalar;
  static constexpr int64_t kStrip = 512;   // columns that are gone over from the first row to the last
  static constexpr int64_t kNarrow = 128;  // columns: shorter rows cost too much apart from their values, ...
  static constexpr int64_t kMany = 64;     // ... where there are more rows than this, and columns cost less
  static constexpr int64_t kShiftRows = 4;  // of whose values the mean is what a column is summed about at first

  const Job& job;
  Statistics statistics{job};
  Inner<T> inner = Inner<T>::of(job);
  const T* x = static_cast<const T*>(job.x);
  const T* residual = static_cast<const T*>(job.residual);
  T* y = static_cast<T*>(job.y);
  const T* dy = static_cast<const T*>(job.dy);
  T* dx = static_cast<T*>(job.dx);
  T* dr = static_cast<T*>(job.dresidual);
  Backward<T> read{dy, x, static_cast<const T*>(residual ? job.y : nullptr)};
  // Of the second half of a backward, after a first that has kept the gradient; elsewhere the same.
  bool kept = keeps_gradient<T>(job) && job.sum_g && dx;
  Inner<T> spreading = kept ? Inner<T>::without_activation(job) : inner;
  Backward<T> summed{kept ? dx : dy, x, read.beside};

  int64_t per_channel = job.channels_last ? 1 : job.positions;  // columns
  int64_t columns = job.all_channels() * per_channel;
  int64_t population = job.group_size() * job.groups;
  // Narrow rows are read several at a time, as one of whole vectors; the last such row may be shorter.
  bool narrow = columns < kNarrow && population >= kNarrow * kMany && !job.mask;
  int64_t whole = columns % V::width ? V::width : 1;
  int64_t repeat = narrow ? ceil_div(ceil_div(kNarrow, columns), whole) * whole : 1;
  int64_t width = columns * repeat;
  int64_t rows = population / width, rest = population % width;
  // A population in tiles, for tasks: a number of rows of a strip of columns.
  int64_t strips = ceil_div(width, kStrip);
  int64_t height = std::min(kTaskBytes / 2 / (std::min(width, kStrip) * int64_t(sizeof(T))),
                            std::max<int64_t>(64, ceil_div(rows * strips, kEnoughTasks)));
  int64_t tiles = std::max<int64_t>(1, ceil_div(rows, height)) * strips;

  bool stream(const T* out) const { return streams<V>(job, out, width); }
  // Whether every column is a group of its own: what is done for each of them is then done for several at once.
  bool alike = job.channels == 1 && per_channel == 1 && repeat == 1;
  // f(i, group, channel) for n columns, of which the first begins a channel: counted, because divisions are slow.
  template <class F> void each_column(int64_t first, int64_t n, F f) const {
    if (alike) {
      for (int64_t i = 0; i < n; ++i) f(i, first + i, first + i);
      return;
    }
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
  // What a group is summed about at first: the mean of the first values of its first column that enter the sums.
  double shift(int64_t p, int64_t g) const {
    T values[kShiftRows];
    int64_t found = 0;
    for (int64_t row = 0; row < population / columns && found < kShiftRows; ++row) {
      if (!counted(p, row)) continue;
      values[found++] = x[p * population + row * columns + g * job.channels * per_channel];
    }
    return found ? shift_of(job, values, found) : 0.0;
  }
  // The same of many columns.
  std::vector<double> mean_of_first_rows(int64_t p, int64_t first, std::vector<double> out) const {
    if (!job.centred) return out;
    const int64_t few = std::min<int64_t>(kShiftRows, rows), n = int64_t(out.size());
    double* sums = out.data();
    for (int64_t row = 0; row < few; ++row) {
      const T* values = x + at(p, row, first);
      for (int64_t i = 0; i < n; ++i) sums[i] += double(widen(values[i]));
    }
    for (int64_t i = 0; i < n; ++i) {
      const double mean = double(S(sums[i] / double(few)));
      sums[i] = std::isfinite(mean) ? mean : 0.0;
    }
    return out;
  }
  // Whether a row, which is one position of all channels where there is a mask, enters the statistics.
  bool counted(int64_t p, int64_t row) const { return !job.mask || job.mask[p * (population / columns) + row]; }

  // A part of a population: some rows of some columns. Those at the end take the shorter row along.
  struct Block { int64_t p, r0, r1, c0, c1; };

  // f(first row, last row, first column, columns) for a strip of a block's columns after another, so that what is kept
  // of them stays in the innermost cache while all rows go by. The last row may be the shorter one.
  template <class F> void by_strip(const Block& b, F f) const {
    for (int64_t c = b.c0; c < b.c1; c += kStrip) {
      const int64_t n = std::min(kStrip, b.c1 - c);
      f(b.r0, b.r1, c, n);
      if (b.r1 == rows && rest > c) f(rows, rows + 1, c, std::min(n, rest - c));
    }
  }
  int64_t at(int64_t p, int64_t row, int64_t column) const { return p * population + row * width + column; }

  // f(first row, last row, first column, columns) for the rows of a strip whose sums may stay in the lanes of a type.
  template <class F> void by_piece(const Block& b, F f) const {
    by_strip(b, [&](int64_t r, int64_t last, int64_t c, int64_t n) {
      for (; r < last; r += kFlush) f(r, std::min(last, r + kFlush), c, n);
    });
  }
  // Where what is read next is not what lies next in memory.
  int64_t ahead(int64_t n) const { return n < width ? width * int64_t(sizeof(T)) : kAhead; }

  // Of many populations a task takes one, or columns of one, and reads it twice while it is in cache; ...
  bool fused = job.populations >= kEnoughTasks / 2;
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
  // ... few are cut into tiles. A second sweep, over what the first one left in cache, begins at the end.
  Block tile(int64_t p, int64_t i) const {
    const int64_t r = i / strips * height, c = i % strips * kStrip;
    return {p, r, std::min(rows, r + height), c, std::min(width, c + kStrip)};
  }
  template <class F> void each_tile(ParallelFor parallel_for, F f) const {
    run(parallel_for, job.populations * tiles, [&](int64_t i) { f(i, tile(i / tiles, i % tiles)); });
  }
  template <class F> void each_tile_again(ParallelFor parallel_for, F f) const {
    run(parallel_for, job.populations * tiles, [&](int64_t i) { f(tile(i / tiles, tiles - 1 - i % tiles)); });
  }

  // Two sums of every column of a block, as arrays that vectors are loaded from; those in the making, of a strip.
  struct ColumnSums {
    int64_t n;
    Arrays<double> arrays{2, n};
    Arrays<S> pending{2, std::min(n, kStrip)};
    explicit ColumnSums(int64_t columns) : n(columns) {}
    S* first() { return pending[0]; }
    S* second() { return pending[1]; }
    void flush(int64_t column, int64_t columns) {
      for (int a = 0; a < 2; ++a) {
        double* to = arrays[a] + column;
        S* from = pending[a];
        for (int64_t i = 0; i < columns; ++i) { to[i] += double(from[i]); from[i] = 0; }
      }
    }
    Sums operator[](int64_t i) const { return {arrays[0][i], arrays[1][i]}; }
    void add(const ColumnSums& other, int64_t at) {
      for (int a = 0; a < 2; ++a) {
        double* to = arrays[a] + at;
        const double* from = other.arrays[a];
        for (int64_t i = 0; i < other.n; ++i) to[i] += from[i];
      }
    }
  };

  // The sums of each population, from those of its tiles, in a fixed order.
  template <class F> std::vector<ColumnSums> sums_by_tile(ParallelFor parallel_for, F add_tile) const {
    std::vector<ColumnSums> all(job.populations, ColumnSums(width));
    if (tiles == 1) {
      each_tile(parallel_for, [&](int64_t, const Block& b) { add_tile(b, all[b.p]); });
      return all;
    }
    std::vector<ColumnSums> parts(job.populations * tiles, ColumnSums(0));
    each_tile(parallel_for, [&](int64_t i, const Block& b) {
      parts[i] = ColumnSums(b.c1 - b.c0);
      add_tile(b, parts[i]);
    });
    for (int64_t i = 0; i < job.populations * tiles; ++i) all[i / tiles].add(parts[i], i % strips * kStrip);
    return all;
  }

  // ---- forward

  // What the columns from c0 on are summed about; `groups` has it for each group from g0 on.
  Arrays<S> spread_shifts(int64_t g0, int64_t c0, int64_t c1, const std::vector<double>& groups) const {
    Arrays<S> out(1, c1 - c0);
    S* about = out[0];
    each_column(c0, c1 - c0, [&](int64_t i, int64_t g, int64_t) { about[i] = S(groups[g - g0]); });
    return out;
  }
  std::vector<double> first_shifts(int64_t p, int64_t g0, int64_t g1) const {
    std::vector<double> out(g1 - g0);
    if (alike && !job.mask) return mean_of_first_rows(p, g0, std::move(out));
    for (int64_t g = g0; g < g1; ++g) out[g - g0] = shift(p, g);
    return out;
  }
  std::vector<double> better_shifts(int64_t p, int64_t g0, int64_t g1) const {
    std::vector<double> out(g1 - g0);
    for (int64_t g = g0; g < g1; ++g) out[g - g0] = double(S(job.mean[statistics.index(p, g)]));
    return out;
  }

  void add_values(const Block& b, const S* about, ColumnSums& sums) const {
    constexpr int K = 2 * kTogether;
    by_piece(b, [&](int64_t r, int64_t last, int64_t column, int64_t n) {
      const int64_t c = column - b.c0, ahead = ahead_of<T>(K * width);
      const T* rows[K];
      int waiting = 0;
      for (; r < last; ++r) {
        const T* row = x + at(b.p, r, column);
        if (!counted(b.p, r)) {
          note_odd(job, odd_in(row, n));
          continue;
        }
        rows[waiting++] = row;
        if (waiting < K) continue;
        sum_columns<K>(rows, n, about + c, sums.first(), sums.second(), ahead);
        waiting = 0;
      }
      for (int i = 0; i < waiting; ++i) sum_columns<1>(rows + i, n, about + c, sums.first(), sums.second(), ahead);
      sums.flush(c, n);
    });
  }
  static double odd_in(const T* values, int64_t n) {
    double odd = 0;
    for (int64_t i = 0; i < n; ++i) odd += double(widen(values[i]) - widen(values[i]));
    return odd;
  }

  // The sums begin with column c0, the first of group g0. Returns whether they should be taken again about other shifts.
  bool set_moments(int64_t p, int64_t g0, int64_t g1, int64_t c0, const std::vector<double>& shifts,
                   const ColumnSums& sums) const {
    std::vector<Sums> all(g1 - g0);
    each_column(c0, sums.n, [&](int64_t i, int64_t g, int64_t) { all[g - g0].add(sums[i]); });
    bool again = false;
    for (int64_t g = g0; g < g1; ++g) again |= statistics.set(p, g, shifts[g - g0], all[g - g0]);
    return again;
  }

  template <class F> void fused_moments(ParallelFor parallel_for, F then) const {
    fused_blocks(parallel_for, [&](const Block& b, int64_t g0, int64_t g1) {
      const auto add_up = [&](const std::vector<double>& shifts) {
        ColumnSums sums(b.c1 - b.c0);
        add_values(b, spread_shifts(g0, b.c0, b.c1, shifts)[0], sums);
        return set_moments(b.p, g0, g1, b.c0, shifts, sums);
      };
      if (add_up(first_shifts(b.p, g0, g1))) add_up(better_shifts(b.p, g0, g1));
      statistics.ready(statistics.index(b.p, g0), statistics.index(b.p, g1));
      then(b);
    });
  }

  void moments_by_tile(ParallelFor parallel_for) const {
    if (moments_by_tile(parallel_for, [&](int64_t p) { return first_shifts(p, 0, job.groups); })) {
      moments_by_tile(parallel_for, [&](int64_t p) { return better_shifts(p, 0, job.groups); });
    }
    statistics.ready();
  }
  template <class F> bool moments_by_tile(ParallelFor parallel_for, F shifts_of) const {
    std::vector<std::vector<double>> shifts;
    std::vector<Arrays<S>> about;
    for (int64_t p = 0; p < job.populations; ++p) {
      shifts.push_back(shifts_of(p));
      about.push_back(spread_shifts(0, 0, width, shifts[p]));
    }
    const auto all = sums_by_tile(parallel_for, [&](const Block& b, ColumnSums& sums) {
      add_values(b, about[b.p][0] + b.c0, sums);
    });
    bool again = false;
    for (int64_t p = 0; p < job.populations; ++p) again |= set_moments(p, 0, job.groups, 0, shifts[p], all[p]);
    return again;
  }

  void moments(ParallelFor parallel_for) const {
    if (fused) fused_moments(parallel_for, [](const Block&) {});
    else moments_by_tile(parallel_for);
  }

  void forward(ParallelFor parallel_for) const {
    if (fused) {
      return fused_moments(parallel_for, [&](const Block& b) { apply(b, columns_of(b)); });
    }
    moments_by_tile(parallel_for);
    evaluate(parallel_for);
  }

  // What the columns of a block are multiplied by and what is added.
  struct Columns {
    int64_t first, n;
    Arrays<S> arrays{7, n};
    void set(int64_t i, const Coefficients<double>& wide) {
      const Coefficients<S> k = in<S>(wide);
      const S all[] = {k.mean, k.unit, k.offset, k.scale, k.bias, k.slope, k.level};
      for (int a = 0; a < 7; ++a) arrays[a][i] = all[a];
    }
    ColumnCoefficients<S> at(int64_t column) const {
      return ColumnCoefficients<S>{arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], arrays[5],
                                   arrays[6]}.at(column - first);
    }
  };
  Columns columns_of(const Block& b) const {
    Columns out{b.c0, b.c1 - b.c0};
    each_column(b.c0, out.n, [&](int64_t i, int64_t g, int64_t c) {
      out.set(i, statistics.coefficients(statistics.index(b.p, g), c));
    });
    return out;
  }
  Block whole_population(int64_t p) const { return {p, 0, 0, 0, width}; }

  void apply(const Block& b, const Columns& columns) const {
    const bool streaming = stream(y) && b.c0 % V::width == 0;
    by_strip(b, [&](int64_t r, int64_t last, int64_t c, int64_t n) {
      const int64_t i = at(b.p, r, c);
      inner.forward_rows(x + i, from(residual, i), y + i, last - r, width, n, columns.at(c), job.activation, ahead(n),
                         streaming);
    });
  }

  void evaluate(ParallelFor parallel_for) const {
    std::vector<Columns> columns;
    for (int64_t p = 0; p < job.populations; ++p) {
      columns.push_back(columns_of(whole_population(p)));
    }
    each_tile_again(parallel_for, [&](const Block& b) { apply(b, columns[b.p]); });
  }

  // ---- backward

  void add_gradients(const Block& b, const Columns& columns, ColumnSums& sums) const {
    by_piece(b, [&](int64_t r, int64_t last, int64_t column, int64_t n) {
      const auto k = columns.at(column);
      const auto add = [&](auto sum, int64_t rows) {
        for (; r + rows <= last; r += rows) {
          const int64_t i = at(b.p, r, column);
          sum(read.at(i), width, n, k, job.activation, sums.first(), sums.second(), kept ? dx + i : nullptr);
        }
      };
      add(inner.sum_rows, kTogether);
      add(inner.sum_row, 1);
      sums.flush(column - b.c0, n);
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
  }

  // The columns of groups [g0, g1), once the sums of their gradients are known.
  Columns settled(const Block& b, int64_t g0, int64_t g1) const {
    std::vector<Statistics::Through> through;
    through.reserve(g1 - g0);
    for (int64_t g = g0; g < g1; ++g) through.push_back(statistics.through(b.p, g));
    Columns out{b.c0, b.c1 - b.c0};
    each_column(b.c0, out.n, [&](int64_t i, int64_t g, int64_t c) {
      auto k = statistics.coefficients(statistics.index(b.p, g), c);
      Statistics::settle(k, through[g - g0]);
      out.set(i, k);
    });
    return out;
  }

  void apply_gradients(const Block& b, const Columns& columns) const {
    const bool streaming = stream(dx) && b.c0 % V::width == 0;
    by_strip(b, [&](int64_t r, int64_t last, int64_t c, int64_t n) {
      while (r < last) {  // rows that enter the statistics, and rows that do not
        const bool through = !job.stored && counted(b.p, r);
        int64_t end = job.mask ? r + 1 : last;
        while (end < last && counted(b.p, end) == counted(b.p, r)) ++end;
        const int64_t i = at(b.p, r, c);
        spreading.backward_rows(summed.at(i), dx + i, from(dr, i), end - r, width, n, columns.at(c), job.activation, through,
                            ahead(n), streaming);
        r = end;
      }
    });
  }

  template <class F> void fused_sums(ParallelFor parallel_for, F then) const {
    fused_blocks(parallel_for, [&](const Block& b, int64_t g0, int64_t g1) {
      ColumnSums sums(b.c1 - b.c0);
      add_gradients(b, columns_of(b), sums);
      keep(b.p, g0, g1, b.c0, sums);
      then(b, g0, g1);
    });
  }

  void backward_sums(ParallelFor parallel_for) const {
    if (fused) return fused_sums(parallel_for, [](const Block&, int64_t, int64_t) {});
    std::vector<Columns> columns;
    for (int64_t p = 0; p < job.populations; ++p) {
      columns.push_back(columns_of(whole_population(p)));
    }
    const auto all = sums_by_tile(parallel_for, [&](const Block& b, ColumnSums& sums) {
      add_gradients(b, columns[b.p], sums);
    });
    for (int64_t p = 0; p < job.populations; ++p) keep(p, 0, job.groups, 0, all[p]);
  }

  void backward_apply(ParallelFor parallel_for) const {
    std::vector<Columns> columns;
    for (int64_t p = 0; p < job.populations; ++p) columns.push_back(settled(whole_population(p), 0, job.groups));
    each_tile_again(parallel_for, [&](const Block& b) { apply_gradients(b, columns[b.p]); });
  }

  void backward(ParallelFor parallel_for) const {
    if (statistics.needs_no_sums()) return backward_apply(parallel_for);
    if (fused) {
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
