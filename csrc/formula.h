// The innermost loops: runs of one channel after another, rows of many channels, a line with a weight for each value.
// Everything around them is the same for every activation; they are chosen once per call, from a table.
//
// Values are worked on in the lanes of their type (see lanes.h). Sums in float lanes are added to one in double after
// kFlush additions at the most, long before they lose digits.
#pragma once

#include "functions.h"

namespace normkit {
namespace NK_NAMESPACE {

constexpr int64_t kFlush = 64;

template <class P> P* from(P* memory, int64_t i) { return memory ? memory + i : nullptr; }

// What a channel's values are multiplied by and what is added, as S or for several channels as a vector; d = x - mean:
//   xhat = d * unit + offset
//   y    = activation(d * scale + bias)
//   dx   = g * scale + d * unit * slope + level, where g is the gradient of what enters the activation; a product of unit
//          and slope may leave the range of a float
template <class S> struct Coefficients { S mean, unit, offset, scale, bias, slope, level; };

// In S, with what the mean loses to it added elsewhere.
template <class S> Coefficients<S> in(const Coefficients<double>& k) {
  const S mean = S(k.mean);
  const double rest = std::isfinite(mean) ? k.mean - double(mean) : 0, offset = -rest * k.unit;
  return {mean, S(k.unit), S(k.offset + offset), S(k.scale), S(k.bias - rest * k.scale),
          S(k.slope), S(k.level + offset * k.slope)};
}

// The same of every column, as arrays that vectors are loaded from.
template <class S> struct ColumnCoefficients {
  const S *mean, *unit, *offset, *scale, *bias, *slope, *level;
  ColumnCoefficients at(int64_t i) const {
    return {mean + i, unit + i, offset + i, scale + i, bias + i, slope + i, level + i};
  }
};

// Of a line, which has one mean and deviation for all of its values, and a weight and a bias for each.
template <class S> struct LineCoefficients { S mean = 0, unit = 0, offset = 0, slope = 0, level = 0; };
template <class P> struct LineParameters {  // null: ones and zeros
  const P *weight, *bias;
  LineParameters at(int64_t i) const { return {from(weight, i), from(bias, i)}; }
};

struct Sums {
  double first = 0, second = 0;
  void add(const Sums& other) { first += other.first; second += other.second; }
};

// Two sums in the making: vectors that are added up now and then.
template <class V> struct Pending {
  V first = V::all(0), second = V::all(0);
  Sums flushed;
  bool waiting = false;  // whether the vectors hold anything: to add up the lanes of one takes as long as many additions
  void keep(V a, V b) {
    first = a;
    second = b;
    waiting = true;
  }
  void flush() {
    if (!waiting) return;
    flushed.add({first.sum(), second.sum()});
    first = second = V::all(0);
    waiting = false;
  }
  Sums total() {
    flush();
    return flushed;
  }
};

// How many runs of n values may be added to a Pending before it must be flushed; what is longer than kLongRun vectors is
// flushed on the way.
constexpr int64_t kLongRun = 16;
template <class V> int64_t runs_before_flush(int64_t n) {
  return std::max<int64_t>(1, kFlush / std::min<int64_t>(kLongRun, (n + V::width - 1) / V::width));
}

// Memory of a backward: the gradient, the input (or, inverted, the output) and, with a residual, what its sum with the
// normalized value can be told from: the output, if the activation keeps its sign, else the residual.
template <class T> struct Backward {
  const T *dy, *x, *beside;
  Backward at(int64_t i) const { return {dy + i, x + i, from(beside, i)}; }
};

// A slope that takes an exponential is computed once: the loops that sum g keep it where dx will be, and those that
// write dx read it there, as if there were no activation. Half precision would round it on the way.
template <class T> bool keeps_gradient(const Job& job) {
  return std::is_same_v<T, float> && job.activation >= Activation::silu && !job.stored;
}

// Tables of pointers are passed by value: the compiler must not think that a store could have changed them.

template <class V> Coefficients<V> spread(const Coefficients<typename V::Scalar>& k) {
  return {V::all(k.mean), V::all(k.unit), V::all(k.offset), V::all(k.scale),
          V::all(k.bias), V::all(k.slope), V::all(k.level)};
}
template <class V> Coefficients<V> join(Part part, const Coefficients<V>& a, const Coefficients<V>& b) {
  return {join(part, a.mean, b.mean), join(part, a.unit, b.unit),   join(part, a.offset, b.offset),
          join(part, a.scale, b.scale), join(part, a.bias, b.bias), join(part, a.slope, b.slope),
          join(part, a.level, b.level)};
}
template <class V, class S, class How> Coefficients<V> load(const ColumnCoefficients<S>& k, int64_t i, How how) {
  return {V::load(k.mean + i, how), V::load(k.unit + i, how),  V::load(k.offset + i, how), V::load(k.scale + i, how),
          V::load(k.bias + i, how), V::load(k.slope + i, how), V::load(k.level + i, how)};
}
// So many values are read together, and those after them next, if they are not too many to be waited for.
template <class T> int64_t ahead_of(int64_t values) {
  constexpr int64_t most = 32 * 1024;
  const int64_t bytes = values * int64_t(sizeof(T));
  return bytes <= most ? std::max(bytes, kAhead) : kAhead;
}

// ---- sums of values ------------------------------------------------------------------------------------------------

// Runs of n values, one after another, about a shift of their own. M: only where the mask, the same for every run, is
// set; `odd` then becomes NaN if a value elsewhere is not finite.
template <bool M, class T, class V>
NK_FLAT void sum_runs(const T* x, const uint8_t* mask, int64_t runs, int64_t n, const typename V::Scalar* shifts,
                      Pending<V>* sums, V* odd) {
  constexpr int64_t w = V::width;
  V out = V::all(0);
  for (int64_t run = 0; run < runs; ++run, x += n) {
    const V about = V::all(shifts[run]);
    const auto add = [&](int64_t i, auto how, V& a, V& b) {
      V v = V::load(x + i, how, about);
      if constexpr (M) {
        const auto counted = V::counted(mask + i, how);
        out = out + where(counted, V::all(0), v - v);
        v = where(counted, v - about, V::all(0));
      } else {
        v = v - about;
      }
      a = a + v; b = fma(v, v, b);
    };
    int64_t i = 0;
    if (n >= kLongRun * w) {
      while (i + 4 * w <= n) {  // several accumulators: an addition takes longer than the next one waits
        V a0 = V::all(0), b0 = a0, a1 = a0, b1 = a0, a2 = a0, b2 = a0, a3 = a0, b3 = a0;
        const int64_t end = std::min(n - 4 * w, i + 4 * w * (kFlush - 1));
        for (; i <= end; i += 4 * w) {
          for (int64_t j = 0; j < 4 * w; j += 64 / int64_t(sizeof(T))) ask_ahead(x + i + j);
          add(i, Whole{}, a0, b0);
          add(i + w, Whole{}, a1, b1);
          add(i + 2 * w, Whole{}, a2, b2);
          add(i + 3 * w, Whole{}, a3, b3);
        }
        sums[run].flushed.add({((a0 + a1) + (a2 + a3)).sum(), ((b0 + b1) + (b2 + b3)).sum()});
      }
    }
    if (i == n) continue;
    V a = sums[run].first, b = sums[run].second;
    across<V>(n - i, [&](int64_t j, auto how) {
      ask_ahead(x + i + j);
      add(i + j, how, a, b);
    });
    sums[run].keep(a, b);
  }
  if constexpr (M) *odd = *odd + out;
}

// K rows, wherever they are.
template <int K, class T, class S>
NK_FLAT void sum_columns(const T* const* rows, int64_t n, const S* shift, S* first, S* second, int64_t ahead) {
  using V = typename Working<T>::V;
  const T* x[K];
  for (int row = 0; row < K; ++row) x[row] = rows[row];
  across<V>(n, [&](int64_t j, auto how) {
    const V about = V::load(shift + j, how);
    V a = V::load(first + j, how), b = V::load(second + j, how);
    for (int row = 0; row < K; ++row) {
      ask_ahead(x[row] + j, ahead);
      const V v = V::load(x[row] + j, how, about) - about;
      a = a + v; b = fma(v, v, b);
    }
    a.store(first + j, how);
    b.store(second + j, how);
  });
}

// ---- what depends on the activation --------------------------------------------------------------------------------

// What the loops are compiled for. The smooth ones are told apart inside, in most loops once per call (`knowing`).
enum class Form { none, relu, leaky_relu, smooth };

constexpr int kTogether = 4;  // rows of a block: what a column needs is loaded once for all of them

// R: a residual is added before the activation. I: x is the output, and everything before it is worked out from that.
template <class V, Form A, bool R, bool I> struct Formula {
  static constexpr bool keeps_sign = A == Form::relu || A == Form::leaky_relu;

  template <class T, class How>
  static V forward(const T* x, const T* residual, const Coefficients<V>& k, How how, Activation kind) {
    V z = fma(V::load(x, how) - k.mean, k.scale, k.bias);
    if constexpr (R) z = z + V::load(residual, how);
    if constexpr (A == Form::relu) z = larger(V::all(0), z);
    if constexpr (A == Form::leaky_relu) z = where(at_most(z, V::all(0)), z * V::all(kLeakySlope), z);
    if constexpr (A == Form::smooth) z = smooth(kind, z);
    return z;
  }

  struct Gradient { V d, g; };  // x about its mean; the gradient of what enters the activation
  template <class T, class How>
  static Gradient gradient(const Backward<T>& m, const Coefficients<V>& k, How how, Activation kind) {
    V v = V::load(m.x, how);
    if constexpr (A == Form::none) return {v - k.mean, V::load(m.dy, how)};
    if constexpr (I) {
      const auto closed = at_most(v, V::all(0));
      const V g = V::load(m.dy, how);
      v = where(closed, v * V::all(1.0 / kLeakySlope), v);
      return {v - k.mean, where(closed, g * V::all(kLeakySlope), g)};
    }
    v = v - k.mean;
    V z;
    if constexpr (R && keeps_sign) {
      z = V::load(m.beside, how);
    } else {
      z = fma(v, k.scale, k.bias);
      if constexpr (R) z = z + V::load(m.beside, how);
    }
    if constexpr (A == Form::relu) return {v, V::load_unless(at_most(z, V::all(0)), m.dy, how)};
    const V g = V::load(m.dy, how);
    if constexpr (A == Form::leaky_relu) return {v, where(at_most(z, V::all(0)), g * V::all(kLeakySlope), g)};
    if constexpr (A == Form::smooth) return {v, g * smooth_slope(kind, z)};
    return {v, g};
  }

  static V xhat(V d, const Coefficients<V>& k) { return fma(d, k.unit, k.offset); }

  // Without a gradient through the statistics nothing of x is left in it: zero times a NaN would still be one.
  static V dx(const Gradient& e, const Coefficients<V>& k, bool through) {
    return through ? fma(e.g, k.scale, fma(e.d * k.unit, k.slope, k.level)) : e.g * k.scale;
  }
  static V masked_dx(const Gradient& e, const Coefficients<V>& k, typename V::Mask through) {
    return fma(e.g, k.scale, where(through, fma(e.d * k.unit, k.slope, k.level), V::all(0)));
  }
};

// f(kind), known to the compiler: a switch for every vector takes as long as a third of a smooth activation.
template <Activation kind> using Known = std::integral_constant<Activation, kind>;
template <Form A, class Body> void knowing(Activation kind, Body f) {
  if constexpr (A == Form::smooth) {
    switch (kind) {
      case Activation::silu: return f(Known<Activation::silu>{});
      case Activation::gelu: return f(Known<Activation::gelu>{});
      case Activation::sigmoid: return f(Known<Activation::sigmoid>{});
      default: return f(Known<Activation::tanh>{});
    }
  }
  f(Known<Activation::none>{});
}

template <class T, Form A, bool R, bool I> struct RunLoops {
  using V = typename Working<T>::OfRun;
  using S = typename V::Scalar;
  using F = Formula<V, A, R, I>;
  using Gradient = typename F::Gradient;

  // Runs of n values, one after another, with coefficients of their own: body(first, how, stream, coefficients). A
  // vector that begins in one run ends in the next, so that `out` is written in whole vectors; several runs are at
  // least a vector each.
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
                                   Activation kind, bool stream) {
    knowing<A>(kind, [&](auto known) {
      across_runs(y, runs, n, k, stream, [&](int64_t i, auto how, bool streamed, const Coefficients<V>& c) {
        ask_ahead<Cache::first>(x + i);
        put(F::forward(x + i, r + (R ? i : 0), c, how, known), y + i, how, streamed);
      });
    });
  }

  NK_FLAT static void sum_runs(Backward<T> m, int64_t runs, int64_t n, const Coefficients<S>* k, Activation kind,
                               Pending<V>* sums, T* kept) {
    knowing<A>(kind, [&](auto known) { sum_runs_of(m, runs, n, k, known, sums, kept); });
  }
  template <class Kind>
  static void sum_runs_of(Backward<T> m, int64_t runs, int64_t n, const Coefficients<S>* k, Kind kind, Pending<V>* sums,
                          T* kept) {
    constexpr int64_t w = V::width;
    for (int64_t run = 0; run < runs; ++run, m = m.at(n), kept = from(kept, n)) {
      const auto c = spread<V>(k[run]);
      const auto add = [&](int64_t i, auto how, V& a, V& b) {
        const Gradient e = F::gradient(m.at(i), c, how, kind);
        if (A == Form::smooth && kept) e.g.store(kept + i, how);
        a = a + e.g; b = fma(e.g, F::xhat(e.d, c), b);
      };
      int64_t i = 0;
      if (n >= kLongRun * w) {
        while (i + 2 * w <= n) {
          V a0 = V::all(0), b0 = a0, a1 = a0, b1 = a0;
          const int64_t end = std::min(n - 2 * w, i + 2 * w * (kFlush - 1));
          for (; i <= end; i += 2 * w) {
            ask_ahead(m.dy + i);
            ask_ahead(m.x + i);
            add(i, Whole{}, a0, b0);
            add(i + w, Whole{}, a1, b1);
          }
          sums[run].flushed.add({(a0 + a1).sum(), (b0 + b1).sum()});
        }
      }
      if (i == n) continue;
      V a = sums[run].first, b = sums[run].second;
      across<V>(n - i, [&](int64_t j, auto how) {
        ask_ahead(m.dy + i + j);
        ask_ahead(m.x + i + j);
        add(i + j, how, a, b);
      });
      sums[run].keep(a, b);
    }
  }

  NK_FLAT static void backward_runs(Backward<T> m, T* to, T* dr, int64_t runs, int64_t n, const Coefficients<S>* k,
                                    Activation kind, bool through, bool stream) {
    knowing<A>(kind, [&](auto known) {
      across_runs(to, runs, n, k, stream, [&](int64_t i, auto how, bool streamed, const Coefficients<V>& c) {
        if (A == Form::none && !through) return put(V::load(m.dy + i, how) * c.scale, to + i, how, streamed);  // without x
        const auto e = F::gradient(m.at(i), c, how, known);
        put(F::dx(e, c, through), to + i, how, streamed);
        if (R && dr) e.g.store(dr + i, how);
      });
    });
  }

  // Of one run, whose statistics only some of the values enter.
  NK_FLAT static void backward_masked_run(Backward<T> m, const uint8_t* mask, T* to, T* dr, int64_t n,
                                          const Coefficients<S>& k, Activation kind, bool stream) {
    across_runs(to, 1, n, &k, stream, [&](int64_t i, auto how, bool streamed, const Coefficients<V>& c) {
      const auto e = F::gradient(m.at(i), c, how, kind);
      put(F::masked_dx(e, c, V::counted(mask + i, how)), to + i, how, streamed);
      if (R && dr) e.g.store(dr + i, how);
    });
  }
};

template <class T, Form A, bool R, bool I> struct Loops {
  using V = typename Working<T>::V;
  using S = typename V::Scalar;
  using P = typename Working<T>::Parameter;
  using F = Formula<V, A, R, I>;
  using Gradient = typename F::Gradient;

  // ---- rows of n columns; `ahead` bytes from a value lies what is read next

  NK_FLAT static void forward_rows(const T* x, const T* r, T* y, int64_t rows, int64_t stride, int64_t n,
                                   ColumnCoefficients<S> k, Activation kind, int64_t ahead, bool stream) {
    knowing<A>(kind, [&](auto known) {
      for (int64_t row = 0; row < rows; ++row, x += stride, r += R ? stride : 0, y += stride) {
        across<V>(n, [&](int64_t j, auto how) {
          ask_ahead<Cache::first>(x + j, ahead);
          put(F::forward(x + j, r + (R ? j : 0), load<V>(k, j, how), how, known), y + j, how, stream);
        });
      }
    });
  }

  template <int K>
  NK_FLAT static void sum_rows(Backward<T> m, int64_t stride, int64_t n, ColumnCoefficients<S> k, Activation kind,
                               S* first, S* second, T* kept) {
    const int64_t ahead = ahead_of<T>(K * stride);
    knowing<A>(kind, [&](auto known) {
      across<V>(n, [&](int64_t j, auto how) {
        const auto c = load<V>(k, j, how);
        V a = V::load(first + j, how), b = V::load(second + j, how);
        for (int row = 0; row < K; ++row) {
          ask_ahead(m.dy + row * stride + j, ahead);
          ask_ahead(m.x + row * stride + j, ahead);
          const Gradient e = F::gradient(m.at(row * stride + j), c, how, known);
          if (A == Form::smooth && kept) e.g.store(kept + row * stride + j, how);
          a = a + e.g; b = fma(e.g, F::xhat(e.d, c), b);
        }
        a.store(first + j, how);
        b.store(second + j, how);
      });
    });
  }

  NK_FLAT static void backward_rows(Backward<T> m, T* to, T* dr, int64_t rows, int64_t stride, int64_t n,
                                    ColumnCoefficients<S> k, Activation kind, bool through, int64_t ahead, bool stream) {
    knowing<A>(kind, [&](auto known) {
      for (int64_t row = 0; row < rows; ++row, m = m.at(stride), to += stride, dr = from(dr, stride)) {
        across<V>(n, [&](int64_t j, auto how) {
          ask_ahead(m.dy + j, ahead);
          ask_ahead(m.x + j, ahead);
          const auto c = load<V>(k, j, how);
          const auto e = F::gradient(m.at(j), c, how, known);
          put(F::dx(e, c, through), to + j, how, stream);
          if (R && dr) e.g.store(dr + j, how);
        });
      }
    });
  }

  // ---- lines: K of one group, each with its own statistics. What a column needs is loaded once for all of them. All are
  // read before any is written: lines may lie a page apart, and a load then waits for a store to what seems its place.
  // Each loop asks for a part of what the lines `ahead` bytes after these will need, so that memory is never idle.

  // Of K lines, as single numbers: of vectors in an array the compiler would make copies in memory, for every column.
  template <int K> struct LineStatistics {
    LineCoefficients<S> own[K];
    explicit LineStatistics(const LineCoefficients<S>* k) { std::copy(k, k + K, own); }
    Coefficients<V> of(int line, V weight, V bias) const {
      const LineCoefficients<S>& k = own[line];
      const V unit = V::all(k.unit), offset = V::all(k.offset);
      return {V::all(k.mean), unit, offset, unit * weight, fma(offset, weight, bias), V::all(k.slope), V::all(k.level)};
    }
  };
  template <class How> static V load_or(const P* values, int64_t j, How how, S other) {
    return values ? V::load(values + j, how) : V::all(other);
  }

  template <int K>
  NK_FLAT static void forward_lines(const T* x, const T* r, T* y, int64_t stride, int64_t n,
                                    const LineCoefficients<S>* k, LineParameters<P> p, Activation kind, int64_t ahead,
                                    bool stream) {
    const LineStatistics<K> statistics(k);
    across<V>(n, [&](int64_t j, auto how) {
      const V weight = load_or(p.weight, j, how, 1), bias = load_or(p.bias, j, how, 0);
      V out[K];
      for (int line = 0; line < K; ++line) {
        const int64_t i = line * stride + j;
        ask_ahead<Cache::first>(x + i, ahead);
        out[line] = F::forward(x + i, r + (R ? i : 0), statistics.of(line, weight, bias), how, kind);
      }
      for (int line = 0; line < K; ++line) put(out[line], y + line * stride + j, how, stream);
    });
  }

  // Sums of the gradient times the weight, and of that times the normalized value, of at most kFlush vectors.
  template <int K>
  NK_FLAT static void sum_lines(Backward<T> m, int64_t stride, int64_t n, const LineCoefficients<S>* k,
                                LineParameters<P> p, Activation kind, int64_t ahead, Pending<V>* sums, T* kept) {
    const LineStatistics<K> statistics(k);
    // Of sums: an addition takes longer than the next one waits. As many for one line as for two, so that it does not
    // matter to a long line whether another one is beside it.
    constexpr int chains = K > 2 ? 1 : 2;
    V a[chains][K], b[chains][K];
    for (int i = 0; i < chains * K; ++i) a[i / K][i % K] = b[i / K][i % K] = V::all(0);
    const auto add = [&](int64_t j, auto how, V* a, V* b) {
      const V weight = load_or(p.weight, j, how, 1), bias = load_or(p.bias, j, how, 0);
      for (int line = 0; line < K; ++line) {
        ask_ahead(m.dy + line * stride + j, ahead);
        const auto c = statistics.of(line, weight, bias);
        const Gradient e = F::gradient(m.at(line * stride + j), c, how, kind);
        if (A == Form::smooth && kept) e.g.store(kept + line * stride + j, how);
        const V g = e.g * weight;
        a[line] = a[line] + g; b[line] = fma(g, F::xhat(e.d, c), b[line]);
      }
    };
    int64_t i = 0;
    for (; i + chains * V::width <= n; i += chains * V::width) {
      for (int chain = 0; chain < chains; ++chain) add(i + chain * V::width, Whole{}, a[chain], b[chain]);
    }
    across<V>(n - i, [&](int64_t j, auto how) { add(i + j, how, a[0], b[0]); });
    for (int line = 0; line < K; ++line) {
      for (int chain = 1; chain < chains; ++chain) {
        a[0][line] = a[0][line] + a[chain][line];
        b[0][line] = b[0][line] + b[chain][line];
      }
      sums[line].keep(sums[line].first + a[0][line], sums[line].second + b[0][line]);
    }
  }

  // Adds to the parameters' gradients too, where they are wanted. Lines are `stride` apart, but `to_stride` where they are
  // written to.
  template <int K>
  NK_FLAT static void backward_lines(Backward<T> m, T* to, int64_t to_stride, T* dr, int64_t stride, int64_t n,
                                     const LineCoefficients<S>* k, LineParameters<P> p, Activation kind, int64_t ahead,
                                     bool through, S* dweight, S* dbias, bool stream) {
    const LineStatistics<K> statistics(k);
    across<V>(n, [&](int64_t j, auto how) {
      const V weight = load_or(p.weight, j, how, 1), bias = load_or(p.bias, j, how, 0);
      V sum_gx = dweight ? V::load(dweight + j, how) : V::all(0), sum_g = dweight ? V::load(dbias + j, how) : V::all(0);
      V out[K], g[K];
      for (int line = 0; line < K; ++line) {
        ask_ahead(m.x + line * stride + j, ahead);
        const auto c = statistics.of(line, weight, bias);
        const Gradient e = F::gradient(m.at(line * stride + j), c, how, kind);
        out[line] = F::dx(e, c, through);
        g[line] = e.g;
        sum_gx = fma(e.g, F::xhat(e.d, c), sum_gx);
        sum_g = sum_g + e.g;
      }
      for (int line = 0; line < K; ++line) {
        put(out[line], to + line * to_stride + j, how, stream);
        if (R && dr) g[line].store(dr + line * stride + j, how);
      }
      if (!dweight) return;
      sum_gx.store(dweight + j, how);
      sum_g.store(dbias + j, how);
    });
  }
};

// The loops of one activation; those of rows and lines for one of them, for two and for several together.
template <class T> struct Inner {
  using AnyRun = RunLoops<T, Form::none, false, false>;
  decltype(&AnyRun::forward_runs) forward_runs;
  decltype(&AnyRun::sum_runs) sum_runs;
  decltype(&AnyRun::backward_runs) backward_runs;
  decltype(&AnyRun::backward_masked_run) backward_masked_run;
  using Any = Loops<T, Form::none, false, false>;
  decltype(&Any::forward_rows) forward_rows;
  decltype(&Any::template sum_rows<1>) sum_row, sum_rows;
  decltype(&Any::backward_rows) backward_rows;
  struct Lines {
    decltype(&Any::template forward_lines<1>) forward;
    decltype(&Any::template sum_lines<1>) sum;
    decltype(&Any::template backward_lines<1>) backward;
  } line, pair, lines;
  template <int K> const Lines& of_lines() const { return K == 1 ? line : K == 2 ? pair : lines; }

  template <Form A, bool R, bool I = false> static Inner make() {
    using OfRun = RunLoops<T, A, R, I>;
    using L = Loops<T, A, R, I>;
    return {OfRun::forward_runs, OfRun::sum_runs, OfRun::backward_runs, OfRun::backward_masked_run,
            L::forward_rows, L::template sum_rows<1>, L::template sum_rows<kTogether>, L::backward_rows,
            {L::template forward_lines<1>, L::template sum_lines<1>, L::template backward_lines<1>},
            {L::template forward_lines<2>, L::template sum_lines<2>, L::template backward_lines<2>},
            {L::template forward_lines<kTogether>, L::template sum_lines<kTogether>,
             L::template backward_lines<kTogether>}};
  }
  template <Form A> static Inner make(bool residual) { return residual ? make<A, true>() : make<A, false>(); }

  // For loops that read the gradient of what enters the activation.
  static Inner without_activation(const Job& job) { return make<Form::none>(job.residual != nullptr); }

  static Inner of(const Job& job) {
    const bool r = job.residual != nullptr;
    switch (job.activation) {
      case Activation::none: break;  // an output without an activation is as good as its input
      case Activation::relu: return make<Form::relu>(r);
      case Activation::leaky_relu: return job.inverted ? make<Form::leaky_relu, false, true>() : make<Form::leaky_relu>(r);
      default:
        if constexpr (std::is_same_v<typename Working<T>::V, Floats>) return make<Form::smooth>(r);
    }
    return make<Form::none>(r);
  }
};

}  // namespace NK_NAMESPACE
}  // namespace normkit
