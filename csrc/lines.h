// Populations of one example whose groups are contiguous lines, with a weight and a bias for (nearly) every value:
// layer and root mean square norms, and group norms of maps too small to make runs of.
#pragma once

#include "statistics.h"

namespace normkit {
namespace NK_NAMESPACE {

template <class T> struct Lines {
  using V = typename Working<T>::V;
  using S = typename V::Scalar;
  using P = typename Working<T>::Parameter;
  static constexpr int64_t kPiece = kFlush * V::width;  // values of a line that may be summed in its type's lanes
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
  Backward<T> read{dy, x, static_cast<const T*>(residual ? job.y : nullptr)};
  // Of the second half of a backward, after a first that has kept the gradient; elsewhere the same.
  bool kept = keeps_gradient<T>(job) && dx;
  Inner<T> spreading = kept ? Inner<T>::without_activation(job) : inner;
  Backward<T> summed{kept ? dx : dy, x, read.beside};
  int64_t length = job.channels * job.positions, groups = job.groups;
  int64_t width = groups * length;  // of an example: what weight and bias are spread over
  int64_t sharing = job.populations / job.sets;  // examples in a row that have the same weight and bias
  std::vector<P> spread_weight{}, spread_bias{};
  LineParameters<P> parameters{spread(job.weight, spread_weight), spread(job.bias, spread_bias)};
  bool affine_gradient = job.dweight || job.dbias;
  bool long_lines = affine_gradient && length > kLongLine && job.sets == 1;

  // One value per position, where a channel has several.
  const P* spread(const void* of_channels, std::vector<P>& room) const {
    const P* values = static_cast<const P*>(of_channels);
    if (!values || job.positions == 1) return values;
    room.resize(width);
    for (int64_t i = 0; i < width; ++i) room[i] = values[i / job.positions];
    return room.data();
  }
  LineParameters<P> parameters_of(int64_t p, int64_t column) const { return parameters.at(p / sharing * width + column); }

  // ---- how lines are gone over: those of a few examples at a time, of which those of one group share their parameters

  // Examples per task: many enough to share out, few enough that what tasks keep per column stays small.
  static constexpr int64_t kTaskValues = 64 * 1024, kMostTasks = 64;
  // Short lines share what a column needs; of long ones more than two would drive each other out of the cache.
  static constexpr int64_t kShortLine = 512;  // bytes
  bool is_short = length * int64_t(sizeof(T)) < kShortLine;
  // Past the cache, memory is written in whole lines of it, not in halves by turns.
  bool in_pairs = !is_large<V, T>(job) || V::width * int64_t(sizeof(T)) >= 64;
  // What follows from the sums of a line takes a while, which the lines after it need not wait for: each step sums a few
  // lines, that stay in the innermost cache, and then writes them. It divides kFlush.
  static constexpr int64_t kMostLines = 8, kStepBytes = 8 * 1024;
  int64_t step = lines_of_a_step();
  int64_t lines_of_a_step() const {
    int64_t found = kMostLines;
    while (found > 1 && found * width * int64_t(sizeof(T)) > kStepBytes) found /= 2;
    return is_short ? std::max<int64_t>(found, kTogether) : found;
  }
  int64_t ahead = ahead_of<T>(step * width);  // the lines of the next step
  int64_t height = std::min(
      sharing, std::max({int64_t(kTogether), kTaskValues / width, ceil_div(job.populations, kMostTasks)}));
  int64_t tasks_of_set = ceil_div(sharing, height), tasks = job.sets * tasks_of_set;
  int64_t first_of(int64_t task) const { return task / tasks_of_set * sharing + task % tasks_of_set * height; }
  int64_t last_of(int64_t task) const { return std::min(first_of(task) + height, (task / tasks_of_set + 1) * sharing); }
  // f(task, first example, last example, room for what is known of their lines)
  template <class F> void by_examples(ParallelFor parallel_for, F f) const {
    run(parallel_for, tasks, [&](int64_t t) {
      Known known(step * groups);
      const int64_t end = last_of(t);
      for (int64_t p = first_of(t); p < end; p += step) f(t, p, std::min<int64_t>(end, p + step), known);
    });
  }

  // Of every line: memory that a task takes once.
  struct Known {
    std::vector<LineCoefficients<S>> coefficients;
    std::vector<Pending<V>> sums;
    std::vector<S> shifts;
    std::vector<T> room{};  // for gradients that something is added to, before they are written
    explicit Known(int64_t lines) : coefficients(lines), sums(lines), shifts(lines) {}
  };

  bool stream(const T* out) const { return streams<V>(job, out, length); }
  int64_t at(int64_t p, int64_t g) const { return p * width + g * length; }

  // f<K>(first example, their coefficients) for examples [p0, p1), whose lines of group g have coefficients from k on.
  template <class F> void together(int64_t p0, int64_t p1, int64_t g, const LineCoefficients<S>* k, F f) const {
    LineCoefficients<S> own[kTogether];
    int64_t p = p0;
    const auto some = [&]<int K>() {
      for (; p + K <= p1; p += K) {
        for (int i = 0; i < K; ++i) own[i] = k[(p - p0 + i) * groups + g];
        f.template operator()<K>(p, own);
      }
    };
    if (is_short) some.template operator()<kTogether>();
    if (in_pairs) some.template operator()<2>();
    some.template operator()<1>();
  }

  LineCoefficients<S> coefficients(int64_t line, double slope, double level) const {
    const auto k = in<S>({job.mean[line], statistics.inverse_std(line), 0, 0, 0, slope, level});
    return {k.mean, k.unit, k.offset, k.slope, k.level};
  }
  void set_coefficients(int64_t p0, int64_t p1, Known& known) const {
    for (int64_t i = 0, l = p0 * groups; l < p1 * groups; ++i, ++l) known.coefficients[i] = coefficients(l, 0, 0);
  }

  // ---- forward

  // Where x is a sum: adds up that of examples [p0, p1). It is read next, and therefore written to the cache: to keep it
  // elsewhere, and write it past the cache in the end, takes longer.
  void add_up(int64_t p0, int64_t p1) const {
    if (!job.addends[0]) return;
    const int64_t first = p0 * width;
    const T *one = static_cast<const T*>(job.addends[0]) + first, *other = static_cast<const T*>(job.addends[1]) + first;
    T* to = const_cast<T*>(x) + first;
    across<V>((p1 - p0) * width, [=, this](int64_t i, auto how) {
      ask_ahead(one + i, ahead);
      ask_ahead(other + i, ahead);
      (V::load(one + i, how) + V::load(other + i, how)).store(to + i, how);
    });
  }

  void set_moments(int64_t p0, int64_t p1, Known& known) const {
    const int64_t lines = (p1 - p0) * groups;
    const T* own = x + p0 * width;
    const auto sum_up = [&](int64_t first, int64_t n) {
      std::fill_n(known.sums.begin() + first, n, Pending<V>());
      V odd;
      sum_runs<false>(own + first * length, nullptr, n, length, &known.shifts[first], &known.sums[first], &odd);
    };
    for (int64_t i = 0; i < lines; ++i) known.shifts[i] = S(shift_of(job, own + i * length, length));
    sum_up(0, lines);
    for (int64_t p = p0, i = 0; p < p1; ++p) {
      for (int64_t g = 0; g < groups; ++g, ++i) {
        const auto set = [&] { return statistics.set(p, g, known.shifts[i], known.sums[i].total()); };
        if (!set()) continue;
        known.shifts[i] = S(job.mean[p0 * groups + i]);  // of this line alone: what is beside it must not matter
        sum_up(i, 1);
        set();
      }
    }
    statistics.ready(p0 * groups, p1 * groups);
  }

  void apply(int64_t p0, int64_t p1, Known& known) const {
    set_coefficients(p0, p1, known);
    for (int64_t g = 0; g < groups; ++g) {
      together(p0, p1, g, known.coefficients.data(), [&]<int K>(int64_t p, const LineCoefficients<S>* k) {
        const int64_t i = at(p, g);
        inner.template of_lines<K>().forward(x + i, from(residual, i), y + i, width, length, k,
                                             parameters_of(p, g * length), job.activation, ahead, stream(y));
      });
    }
  }

  void moments(ParallelFor parallel_for) const {
    by_examples(parallel_for, [&](int64_t, int64_t p0, int64_t p1, Known& known) { set_moments(p0, p1, known); });
  }
  void forward(ParallelFor parallel_for) const {
    by_examples(parallel_for, [&](int64_t, int64_t p0, int64_t p1, Known& known) {
      add_up(p0, p1);
      set_moments(p0, p1, known);
      apply(p0, p1, known);
    });
  }
  void evaluate(ParallelFor parallel_for) const {
    by_examples(parallel_for, [&](int64_t, int64_t p0, int64_t p1, Known& known) { apply(p0, p1, known); });
  }

  // ---- backward

  // Sets the coefficients of the lines of examples [p0, p1), with the gradients through their statistics.
  void settle(int64_t p0, int64_t p1, Known& known) const {
    set_coefficients(p0, p1, known);
    if (job.stored) return;
    for (int64_t g = 0; g < groups; ++g) {
      together(p0, p1, g, known.coefficients.data(), [&]<int K>(int64_t p, const LineCoefficients<S>* own) {
        Pending<V> some[K];
        for (int64_t first = 0; first < length; first += kPiece) {
          for (auto& one : some) one.flush();
          const int64_t i = at(p, g) + first;
          inner.template of_lines<K>().sum(read.at(i), width, std::min(kPiece, length - first), own,
                                           parameters_of(p, g * length + first), job.activation, ahead, some,
                                           kept ? dx + i : nullptr);
        }
        for (int i = 0; i < K; ++i) known.sums[(p - p0 + i) * groups + g] = some[i];
      });
    }
    const double inverse_count = statistics.inverse_count(0);  // without a mask the same for all
    for (int64_t i = 0; i < (p1 - p0) * groups; ++i) {
      const Sums total = known.sums[i].total();
      const int64_t line = p0 * groups + i;
      const double inverse_std = statistics.inverse_std(line);
      const double slope = -total.second * inverse_count * inverse_std;
      known.coefficients[i] = coefficients(line, slope, job.centred ? -total.first * inverse_count * inverse_std : 0);
    }
  }

  // Writes dx of columns [c0, c1) of a group, and adds to the parameters' gradients, those of c0 first. What goes to x
  // beside the norm is added to lines in the room, from where they are written once.
  void apply_gradients(int64_t p0, int64_t p1, int64_t g, int64_t c0, int64_t c1, const LineCoefficients<S>* k,
                       S* dweight, S* dbias, std::vector<T>& room) const {
    const int64_t n = c1 - c0;
    const T* beside = static_cast<const T*>(job.dx_beside);
    const bool past = stream(dx) && c0 % V::width == 0;
    if (beside) room.resize(kTogether * n);
    together(p0, p1, g, k, [&]<int K>(int64_t p, const LineCoefficients<S>* own) {
      const int64_t i = at(p, g) + c0;
      T* to = beside ? room.data() : dx + i;
      spreading.template of_lines<K>().backward(summed.at(i), to, beside ? n : width, from(dr, i), width, n, own,
                                                parameters_of(p, g * length + c0), job.activation, ahead, !job.stored,
                                                dweight, dbias, !beside && past);
      for (int line = 0; beside && line < K; ++line) {
        const T *near = to + line * n, *other = beside + i + line * width;
        T* out = dx + i + line * width;
        across<V>(n, [=, this](int64_t j, auto how) {
          ask_ahead(other + j, ahead);
          put(V::load(near + j, how) + V::load(other + j, how), out + j, how, past);
        });
      }
    });
  }

  // Gradients of weights and biases in the making: of at most kFlush lines, and of all.
  struct ColumnSums {
    int64_t n;
    Arrays<double> all{2, n};
    Arrays<S> pending{2, n};
    explicit ColumnSums(int64_t columns) : n(columns) {}
    void flush() {
      for (int a = 0; a < 2; ++a) {
        for (int64_t i = 0; i < n; ++i) { all[a][i] += double(pending[a][i]); pending[a][i] = 0; }
      }
    }
  };

  void backward(ParallelFor parallel_for) const {
    if (long_lines) return backward_by_columns(parallel_for);
    std::vector<ColumnSums> sums;
    sums.reserve(tasks);
    for (int64_t t = 0; affine_gradient && t < tasks; ++t) sums.emplace_back(width);
    by_examples(parallel_for, [&](int64_t t, int64_t p0, int64_t p1, Known& known) {
      settle(p0, p1, known);
      S *dweight = affine_gradient ? sums[t].pending[0] : nullptr, *dbias = affine_gradient ? sums[t].pending[1] : nullptr;
      for (int64_t g = 0; g < groups; ++g) {
        apply_gradients(p0, p1, g, 0, length, known.coefficients.data(), from(dweight, g * length),
                        from(dbias, g * length), known.room);
      }
      if (affine_gradient && ((p1 - first_of(t)) % kFlush == 0 || p1 == last_of(t))) sums[t].flush();
    });
    for (int64_t set = 0; affine_gradient && set < job.sets; ++set) {
      const int64_t first = set * tasks_of_set;
      Arrays<double>& all = sums[first].all;
      for (int64_t t = first + 1; t < first + tasks_of_set; ++t) {
        for (int a = 0; a < 2; ++a) for (int64_t i = 0; i < width; ++i) all[a][i] += sums[t].all[a][i];
      }
      set_parameters(all[0], all[1], set * width, (set + 1) * width);
    }
  }

  // The statistics of all lines first; then columns of all lines, so that what is kept per column stays in cache.
  void backward_by_columns(ParallelFor parallel_for) const {
    std::vector<LineCoefficients<S>> k(job.populations * groups);
    run(parallel_for, job.populations, [&](int64_t p) {
      Known known(groups);
      settle(p, p + 1, known);
      std::copy(known.coefficients.begin(), known.coefficients.end(), k.begin() + p * groups);
    });
    // What would be added up in pending sums alone may be so where it is wanted.
    static_assert(std::is_same_v<S, P>);
    const bool are_few = job.populations <= kFlush && job.positions == 1;
    // Blocks must not divide a channel.
    const int64_t block = std::max<int64_t>(1, kColumns / job.positions) * job.positions, per = ceil_div(length, block);
    run(parallel_for, groups * per, [&](int64_t i) {
      const int64_t g = i / per, c0 = i % per * block, c1 = std::min(length, c0 + block), base = g * length + c0;
      std::vector<T> room;
      if (are_few) {
        std::vector<S> unwanted(job.dweight && job.dbias ? 0 : c1 - c0);
        const auto of_these = [&](void* all) { return all ? static_cast<S*>(all) + base : unwanted.data(); };
        S *dweight = of_these(job.dweight), *dbias = of_these(job.dbias);
        for (S* out : {dweight, dbias}) std::fill_n(out, c1 - c0, S(0));
        return apply_gradients(0, job.populations, g, c0, c1, k.data(), dweight, dbias, room);
      }
      ColumnSums sums(c1 - c0);
      for (int64_t p = 0; p < job.populations; p += kFlush) {
        apply_gradients(p, std::min(job.populations, p + kFlush), g, c0, c1, &k[p * groups], sums.pending[0],
                        sums.pending[1], room);
        sums.flush();
      }
      set_parameters(sums.all[0], sums.all[1], base, base + c1 - c0);
    });
  }

  // The columns [begin, end), which are whole channels, have these gradients.
  void set_parameters(const double* dweight, const double* dbias, int64_t begin, int64_t end) const {
    for (auto [out, sums] : {std::pair{job.dweight, dweight}, std::pair{job.dbias, dbias}}) {
      if (!out) continue;
      std::vector<double> channels((end - begin) / job.positions);
      for (int64_t i = 0; i < end - begin; ++i) channels[i / job.positions] += sums[i];
      statistics.set_parameters(out, channels.data(), begin / job.positions, int64_t(channels.size()));
    }
  }

  // A line shares its statistics with no other: a backward in two halves has nothing to exchange between them.
  void backward_sums(ParallelFor) const {}
  void backward_apply(ParallelFor) const {}
};

}  // namespace NK_NAMESPACE
}  // namespace normkit
