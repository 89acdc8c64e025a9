// The innermost loops: runs of one channel after another, rows of many channels, a line with a weight for each value.
// Everything around them is the same for every activation; they are chosen once per call, from a table.
//
// Sums are in double, whatever is summed. Values are applied in double, too, but for runs and rows of half precision:
// see half_lanes.h.
#pragma once

#include "half_lanes.h"

namespace normkit {
namespace NK_NAMESPACE {

template <class P> P* from(P* memory, int64_t i) { return memory ? memory + i : nullptr; }

// What a channel's values are multiplied by and what is added, for S = double or float, or of several channels:
//   c  = x - mean; in float, whose range is small, times `unit`
//   y  = activation(c * gain + bias)
//   dx = g * scale + c * slope + level,  where g is the gradient of what enters the activation
template <class S> struct Coefficients { S mean, unit, gain, bias, scale, slope, level; };

inline Coefficients<double> in(const Coefficients<double>& k, double) { return k; }
// In float, what the mean loses goes to what is added.
inline Coefficients<float> in(const Coefficients<double>& k, float) {
  const float mean = float(k.mean);
  const double rest = std::isfinite(mean) ? k.mean - mean : 0, unit = k.unit == 0 ? 1 : k.unit;
  return {mean, float(unit), float(k.gain / unit), float(k.bias - rest * k.gain),
          float(k.scale), float(k.slope / unit), float(k.level - rest * k.slope)};
}

// The same of every column, as arrays that vectors are loaded from.
template <class S> struct ColumnCoefficients {
  const S *mean, *unit, *gain, *bias, *scale, *slope, *level;
  ColumnCoefficients at(int64_t i) const {
    return {mean + i, unit + i, gain + i, bias + i, scale + i, slope + i, level + i};
  }
};

// Of a line, which has one mean and deviation for all of its values, and a weight and a bias for each.
struct LineCoefficients { double mean = 0, inverse_std = 0, slope = 0, level = 0; };
struct LineParameters {  // null: ones and zeros
  const float *weight, *bias;
  LineParameters at(int64_t i) const { return {from(weight, i), from(bias, i)}; }
};

struct Sums { double first = 0, second = 0; };

// Two sums in the making: vectors that are added up once, at the end.
struct Pending {
  Lanes first = Lanes::all(0), second = Lanes::all(0);
  Sums total() const { return {first.sum(), second.sum()}; }
};

// Memory of a backward: the gradient, the input (or, inverted, the output) and, with a residual, the output.
template <class T> struct Backward {
  const T *dy, *x, *y;
  Backward at(int64_t i) const { return {dy + i, x + i, from(y, i)}; }
};

// Tables of pointers are passed by value: the compiler must not think that a store could have changed them.

template <class V, class S> Coefficients<V> spread(const Coefficients<S>& k) {
  return {V::all(k.mean), V::all(k.unit), V::all(k.gain), V::all(k.bias), V::all(k.scale), V::all(k.slope),
          V::all(k.level)};
}
template <class V> Coefficients<V> join(Part part, const Coefficients<V>& a, const Coefficients<V>& b) {
  return {join(part, a.mean, b.mean),   join(part, a.unit, b.unit),   join(part, a.gain, b.gain),
          join(part, a.bias, b.bias),   join(part, a.scale, b.scale), join(part, a.slope, b.slope),
          join(part, a.level, b.level)};
}
template <class V, class S, class How> Coefficients<V> load(const ColumnCoefficients<S>& k, int64_t i, How how) {
  return {V::load(k.mean + i, how), V::load(k.unit + i, how), V::load(k.gain + i, how), V::load(k.bias + i, how),
          V::load(k.scale + i, how), V::load(k.slope + i, how), V::load(k.level + i, how)};
}
// K rows or lines are read together, and those after them next, if they are not too long to be waited for.
template <int K, class T> int64_t ahead_of(int64_t stride) {
  constexpr int64_t most = 32 * 1024;
  const int64_t bytes = K * stride * int64_t(sizeof(T));
  return bytes <= most ? std::max(bytes, kAhead) : kAhead;
}

// ---- sums of values ------------------------------------------------------------------------------------------------

// Runs of n values, one after another, about a shift of their own.
template <class T>
NK_FLAT void sum_runs(const T* x, int64_t runs, int64_t n, const double* shifts, Pending* sums) {
  using V = Lanes;
  constexpr int64_t w = V::width;
  for (int64_t run = 0; run < runs; ++run, x += n) {
    const V about = V::all(shifts[run]);
    V a0 = sums[run].first, b0 = sums[run].second;
    const auto add = [&](V v, V& a, V& b) {
      v = v - about;
      a = a + v; b = fma(v, v, b);
    };
    int64_t i = 0;
    if (n >= 16 * w) {  // several accumulators: an addition takes longer than the next one waits
      V a1 = V::all(0), b1 = a1, a2 = a1, b2 = a1, a3 = a1, b3 = a1;
      for (; i + 4 * w <= n; i += 4 * w) {
        for (int64_t j = 0; j < 4 * w; j += 16) ask_ahead(x + i + j);
        add(V::load(x + i), a0, b0);
        add(V::load(x + i + w), a1, b1);
        add(V::load(x + i + 2 * w), a2, b2);
        add(V::load(x + i + 3 * w), a3, b3);
      }
      a0 = (a0 + a1) + (a2 + a3);
      b0 = (b0 + b1) + (b2 + b3);
    }
    across<V>(n - i, [&](int64_t j, auto how) {
      ask_ahead(x + i + j);
      add(V::load(x + i + j, how, about), a0, b0);
    });
    sums[run].first = a0;
    sums[run].second = b0;
  }
}

template <int K, class T>
NK_FLAT void sum_columns(const T* x, int64_t stride, int64_t n, const double* shift, double* first,
                         double* second) {
  const int64_t ahead = ahead_of<K, T>(stride);
  across<Lanes>(n, [&](int64_t j, auto how) {
    const Lanes about = Lanes::load(shift + j, how);
    Lanes a = Lanes::load(first + j, how), b = Lanes::load(second + j, how);
    for (int row = 0; row < K; ++row) {
      ask_ahead(x + row * stride + j, ahead);
      const Lanes v = Lanes::load(x + row * stride + j, how, about) - about;
      a = a + v; b = fma(v, v, b);
    }
    a.store(first + j, how);
    b.store(second + j, how);
  });
}

// ---- what depends on the activation --------------------------------------------------------------------------------

constexpr int kTogether = 4;  // rows of a block: what a column needs is loaded once for all of them

// R: a residual is added before the activation. I: x is the output, and everything before it is worked out from that.
template <class V, Activation A, bool R, bool I> struct Formula {
  static V centre(V v, const Coefficients<V>& k) {
    if constexpr (std::is_same_v<typename V::Scalar, float>) return (v - k.mean) * k.unit;
    return v - k.mean;
  }

  template <class T, class How> static V forward(const T* x, const T* residual, const Coefficients<V>& k, How how) {
    V z = fma(centre(V::load(x, how), k), k.gain, k.bias);
    if constexpr (R) z = z + V::load(residual, how);
    if constexpr (A == Activation::relu) return positive_part(z);
    if constexpr (A == Activation::leaky_relu) return where(not_positive(z), z * V::all(kLeakySlope), z);
    return z;
  }

  struct Gradient { V centred, g; };  // x about its mean; the gradient of what enters the activation
  template <class T, class How> static Gradient gradient(const Backward<T>& m, const Coefficients<V>& k, How how) {
    V v = V::load(m.x, how);
    if constexpr (A == Activation::none) return {centre(v, k), V::load(m.dy, how)};
    typename V::Mask closed;
    if constexpr (I) {
      closed = not_positive(v);
      v = centre(where(closed, v * V::all(1.0 / kLeakySlope), v), k);
    } else {
      v = centre(v, k);
      if constexpr (R) closed = not_positive(V::load(m.y, how));  // the output's sign is the sum's
      else closed = not_positive(fma(v, k.gain, k.bias));
    }
    if constexpr (A == Activation::relu) return {v, V::load_unless(closed, m.dy, how)};
    const V g = V::load(m.dy, how);
    return {v, where(closed, g * V::all(kLeakySlope), g)};
  }

  // Without a gradient through the statistics nothing of x is left in it: zero times a NaN would still be one.
  static V dx(const Gradient& e, const Coefficients<V>& k, bool through) {
    return through ? fma(e.g, k.scale, fma(e.centred, k.slope, k.level)) : e.g * k.scale;
  }
};

// Runs and rows, written as they are read.
template <class T, Activation A, bool R, bool I> struct Apply {
  using V = typename Applied<T>::V;
  using S = typename V::Scalar;
  using F = Formula<V, A, R, I>;

  // Runs of n values, one after another, with coefficients of their own: body(first, how, stream, coefficients). A
  // vector that begins in one run ends in the next, so that `out` is written in whole vectors; a run is at least one.
  template <class Body>
  static void across_runs(const T* out, int64_t runs, int64_t n, const Coefficients<S>* k, bool stream, Body body) {
    constexpr int64_t w = V::width;
    auto here = spread<V>(k[0]);
    int64_t i = stream ? std::min(n, unaligned<V>(out)) : 0, end = n;
    if (i > 0) body(int64_t(0), Part{int(i)}, false, here);
    for (int64_t run = 1;; ++run, end += n) {
      for (; i + w <= end; i += w) body(i, Whole{}, stream, here);
      const Part rest{int(end - i)};
      if (run == runs) {
        if (rest.lanes) body(i, rest, false, here);
        return;
      }
      const auto next = spread<V>(k[run]);
      if (rest.lanes) {
        body(i, Whole{}, stream, join(rest, here, next));
        i += w;
      }
      here = next;
    }
  }

  NK_FLAT static void forward_runs(const T* x, const T* r, T* y, int64_t runs, int64_t n, const Coefficients<S>* k,
                                   bool stream) {
    across_runs(y, runs, n, k, stream, [&](int64_t i, auto how, bool streamed, const Coefficients<V>& c) {
      ask_ahead(x + i);
      put(F::forward(x + i, r + (R ? i : 0), c, how), y + i, how, streamed);
    });
  }

  NK_FLAT static void backward_runs(Backward<T> m, T* to, T* dr, int64_t runs, int64_t n, const Coefficients<S>* k,
                                    bool through, bool stream) {
    across_runs(to, runs, n, k, stream, [&](int64_t i, auto how, bool streamed, const Coefficients<V>& c) {
      const auto e = F::gradient(m.at(i), c, how);
      put(F::dx(e, c, through), to + i, how, streamed);
      if (R && dr) e.g.store(dr + i, how);
    });
  }

  // Rows of n columns; `ahead` bytes from a value lies what is read next.
  NK_FLAT static void forward_rows(const T* x, const T* r, T* y, int64_t rows, int64_t stride, int64_t n,
                                   ColumnCoefficients<S> k, int64_t ahead, bool stream) {
    for (int64_t row = 0; row < rows; ++row, x += stride, r += R ? stride : 0, y += stride) {
      across<V>(n, [&](int64_t j, auto how) {
        ask_ahead(x + j, ahead);
        put(F::forward(x + j, r + (R ? j : 0), load<V>(k, j, how), how), y + j, how, stream);
      });
    }
  }

  NK_FLAT static void backward_rows(Backward<T> m, T* to, T* dr, int64_t rows, int64_t stride, int64_t n,
                                    ColumnCoefficients<S> k, bool through, int64_t ahead, bool stream) {
    for (int64_t row = 0; row < rows; ++row, m = m.at(stride), to += stride, dr = from(dr, stride)) {
      across<V>(n, [&](int64_t j, auto how) {
        ask_ahead(m.dy + j, ahead);
        ask_ahead(m.x + j, ahead);
        const auto c = load<V>(k, j, how);
        const auto e = F::gradient(m.at(j), c, how);
        put(F::dx(e, c, through), to + j, how, stream);
        if (R && dr) e.g.store(dr + j, how);
      });
    }
  }
};

// Sums of gradients, and of their products with the centred value; and lines.
template <class T, Activation A, bool R, bool I> struct Wide {
  using V = Lanes;
  using F = Formula<V, A, R, I>;
  using Gradient = typename F::Gradient;

  NK_FLAT static void sum_runs(Backward<T> m, int64_t runs, int64_t n, const Coefficients<double>* k,
                               Pending* sums) {
    constexpr int64_t w = V::width;
    for (int64_t run = 0; run < runs; ++run, m = m.at(n)) {
      const auto c = spread<V>(k[run]);
      V a0 = sums[run].first, b0 = sums[run].second;
      const auto add = [&](int64_t i, auto how, V& a, V& b) {
        const Gradient e = F::gradient(m.at(i), c, how);
        a = a + e.g; b = fma(e.g, e.centred, b);
      };
      int64_t i = 0;
      if (n >= 16 * w) {
        V a1 = V::all(0), b1 = a1;
        for (; i + 2 * w <= n; i += 2 * w) {
          ask_ahead(m.dy + i);
          ask_ahead(m.x + i);
          add(i, Whole{}, a0, b0);
          add(i + w, Whole{}, a1, b1);
        }
        a0 = a0 + a1;
        b0 = b0 + b1;
      }
      across<V>(n - i, [&](int64_t j, auto how) {
        ask_ahead(m.dy + i + j);
        ask_ahead(m.x + i + j);
        add(i + j, how, a0, b0);
      });
      sums[run].first = a0;
      sums[run].second = b0;
    }
  }

  template <int K>
  NK_FLAT static void sum_rows(Backward<T> m, int64_t stride, int64_t n, ColumnCoefficients<double> k,
                               double* first, double* second) {
    const int64_t ahead = ahead_of<K, T>(stride);
    across<V>(n, [&](int64_t j, auto how) {
      const auto c = load<V>(k, j, how);
      V a = V::load(first + j, how), b = V::load(second + j, how);
      for (int row = 0; row < K; ++row) {
        ask_ahead(m.dy + row * stride + j, ahead);
        ask_ahead(m.x + row * stride + j, ahead);
        const Gradient e = F::gradient(m.at(row * stride + j), c, how);
        a = a + e.g; b = fma(e.g, e.centred, b);
      }
      a.store(first + j, how);
      b.store(second + j, how);
    });
  }

  // K lines of one group, each with its own statistics: what a column needs is loaded once for all of them. All are
  // read before any is written: lines may lie a page apart, and a load then waits for a store to what seems its place.
  template <int K> struct LineStatistics {
    V mean[K], unit[K], slope[K], level[K];
    explicit LineStatistics(const LineCoefficients* k) {
      for (int line = 0; line < K; ++line) {
        mean[line] = V::all(k[line].mean); unit[line] = V::all(k[line].inverse_std);
        slope[line] = V::all(k[line].slope); level[line] = V::all(k[line].level);
      }
    }
    // The gradient is multiplied by the unit before it meets the scale: so are its products with centred values.
    Coefficients<V> of(int line, V weight, V bias) const {
      return {mean[line], unit[line], unit[line] * weight, bias, weight, slope[line], level[line]};
    }
  };
  template <class How> static V load_or(const float* values, int64_t j, How how, double other) {
    return values ? V::load(values + j, how) : V::all(other);
  }

  template <int K>
  NK_FLAT static void forward_lines(const T* x, const T* r, T* y, int64_t stride, int64_t n,
                                    const LineCoefficients* k, LineParameters p, bool stream) {
    const LineStatistics<K> statistics(k);
    across<V>(n, [&](int64_t j, auto how) {
      const V weight = load_or(p.weight, j, how, 1), bias = load_or(p.bias, j, how, 0);
      V out[K];
      for (int line = 0; line < K; ++line) {
        const int64_t i = line * stride + j;
        out[line] = F::forward(x + i, r + (R ? i : 0), statistics.of(line, weight, bias), how);
      }
      for (int line = 0; line < K; ++line) put(out[line], y + line * stride + j, how, stream);
    });
  }

  // Sums of the gradient times the weight, and of that times the centred value.
  template <int K>
  NK_FLAT static void sum_lines(Backward<T> m, int64_t stride, int64_t n, const LineCoefficients* k,
                                LineParameters p, Pending* sums) {
    const LineStatistics<K> statistics(k);
    const int64_t ahead = ahead_of<K, T>(stride);
    V a[K], b[K];
    for (int line = 0; line < K; ++line) { a[line] = sums[line].first; b[line] = sums[line].second; }
    across<V>(n, [&](int64_t j, auto how) {
      const V weight = load_or(p.weight, j, how, 1), bias = load_or(p.bias, j, how, 0);
      for (int line = 0; line < K; ++line) {
        ask_ahead(m.dy + line * stride + j, ahead);
        ask_ahead(m.x + line * stride + j, ahead);
        const Gradient e = F::gradient(m.at(line * stride + j), statistics.of(line, weight, bias), how);
        const V g = e.g * weight;
        a[line] = a[line] + g; b[line] = fma(g, e.centred, b[line]);
      }
    });
    for (int line = 0; line < K; ++line) { sums[line].first = a[line]; sums[line].second = b[line]; }
  }

  // Adds to the parameters' gradients too, where they are wanted.
  template <int K>
  NK_FLAT static void backward_lines(Backward<T> m, T* to, T* dr, int64_t stride, int64_t n,
                                     const LineCoefficients* k, LineParameters p, bool through, double* dweight,
                                     double* dbias, bool stream) {
    const LineStatistics<K> statistics(k);
    across<V>(n, [&](int64_t j, auto how) {
      const V weight = load_or(p.weight, j, how, 1), bias = load_or(p.bias, j, how, 0);
      V sum_gx = dweight ? V::load(dweight + j, how) : V::all(0), sum_g = dweight ? V::load(dbias + j, how) : V::all(0);
      V out[K], g[K];
      for (int line = 0; line < K; ++line) {
        const auto c = statistics.of(line, weight, bias);
        const Gradient e = F::gradient(m.at(line * stride + j), c, how);
        const V scaled = e.g * c.unit;
        out[line] = F::dx({e.centred, scaled}, c, through);
        g[line] = e.g;
        sum_gx = fma(scaled, e.centred, sum_gx);
        sum_g = sum_g + e.g;
      }
      for (int line = 0; line < K; ++line) {
        put(out[line], to + line * stride + j, how, stream);
        if (R && dr) g[line].store(dr + line * stride + j, how);
      }
      if (!dweight) return;
      sum_gx.store(dweight + j, how);
      sum_g.store(dbias + j, how);
    });
  }
};

// The loops of one activation; those of rows and lines for one of them, and for several together.
template <class T> struct Inner {
  template <Activation A, bool R, bool I> struct Of {
    using Apply = NK_NAMESPACE::Apply<T, A, R, I>;
    using Wide = NK_NAMESPACE::Wide<T, A, R, I>;
  };
  using Any = Of<Activation::none, false, false>;
  decltype(&Any::Apply::forward_runs) forward_runs;
  decltype(&Any::Apply::backward_runs) backward_runs;
  decltype(&Any::Wide::sum_runs) sum_runs;
  decltype(&Any::Apply::forward_rows) forward_rows;
  decltype(&Any::Apply::backward_rows) backward_rows;
  decltype(&Any::Wide::template sum_rows<1>) sum_row, sum_rows;
  struct Lines {
    decltype(&Any::Wide::template forward_lines<1>) forward;
    decltype(&Any::Wide::template sum_lines<1>) sum;
    decltype(&Any::Wide::template backward_lines<1>) backward;
  } line, lines;

  template <Activation A, bool R, bool I> static Inner make() {
    using P = typename Of<A, R, I>::Apply;
    using W = typename Of<A, R, I>::Wide;
    return {P::forward_runs, P::backward_runs, W::sum_runs,
            P::forward_rows, P::backward_rows, W::template sum_rows<1>, W::template sum_rows<kTogether>,
            {W::template forward_lines<1>, W::template sum_lines<1>, W::template backward_lines<1>},
            {W::template forward_lines<kTogether>, W::template sum_lines<kTogether>,
             W::template backward_lines<kTogether>}};
  }

  static Inner of(const Job& job) {
    const bool r = job.residual != nullptr;
    switch (job.activation) {
      case Activation::relu: return r ? make<Activation::relu, true, false>() : make<Activation::relu, false, false>();
      case Activation::leaky_relu:
        if (job.inverted) return make<Activation::leaky_relu, false, true>();
        return r ? make<Activation::leaky_relu, true, false>() : make<Activation::leaky_relu, false, false>();
      case Activation::none: break;  // an output without an activation is as good as its input
    }
    return r ? make<Activation::none, true, false>() : make<Activation::none, false, false>();
  }
};

}  // namespace NK_NAMESPACE
}  // namespace normkit
