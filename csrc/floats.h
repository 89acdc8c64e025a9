// The innermost loops, over floats: a run of one channel, rows of many channels, a line with a weight for each value.
// Everything around them is the same for every activation; they are chosen once per call, from a table.
#pragma once

#include "halves.h"

namespace normkit {
namespace NK_NAMESPACE {

template <class P> P* from(P* memory, int64_t i) { return memory ? memory + i : nullptr; }

// What a channel's values are multiplied by and what is added, for V = double, or of several channels side by side:
//   y  = activation((x - mean) * scale + bias)
//   dx = g * scale + (x - mean) * slope + level,  where g is dy behind the activation
template <class V> struct Coefficients { V mean, scale, bias, slope, level; };

// The same of every column, as arrays that vectors are loaded from.
struct ColumnCoefficients {
  const double *mean, *scale, *bias, *slope, *level;  // a forward has no slope and no level
  ColumnCoefficients at(int64_t i) const {
    return {mean + i, scale + i, bias + i, from(slope, i), from(level, i)};
  }
};

// The same of a line: one mean and deviation for all, a weight and a bias (null: one and zero) for each value.
struct LineCoefficients {
  double mean, inverse_std, mean_g, mean_gx;
  const float *weight, *bias;
};

struct Sums { double first = 0, second = 0; };

// Two sums in the making: vectors that are added up once, at the end.
struct Pending {
  Lanes first = Lanes::all(0), second = Lanes::all(0);
  Sums total() const { return {first.sum(), second.sum()}; }
};

// Memory of a backward: the gradient, the input (or, inverted, the output) and, with a residual, the output.
struct Backward {
  const float *dy, *x, *y;
  Backward at(int64_t i) const { return {dy + i, x + i, from(y, i)}; }
};

// ---- a vector at a time --------------------------------------------------------------------------------------------

// f(first, how)
template <class F> void across(int64_t n, F f) {
  int64_t i = 0;
  for (; i + Lanes::width <= n; i += Lanes::width) f(i, Whole{});
  if (Lanes::width > 1 && i < n) f(i, Part{int(n - i)});
}

// The same from the first aligned place on, where stores may go past the cache: f(first, how, aligned).
template <class F> void across_aligned(const float* out, int64_t n, F f) {
  constexpr int64_t line = Lanes::width * int64_t(sizeof(float));
  const int64_t ahead = (line - int64_t(reinterpret_cast<uintptr_t>(out) % line)) % line / int64_t(sizeof(float));
  int64_t i = std::min(n, ahead);
  if (Lanes::width > 1 && i > 0) f(int64_t(0), Part{int(i)}, false);
  for (; i + Lanes::width <= n; i += Lanes::width) f(i, Whole{}, true);
  if (Lanes::width > 1 && i < n) f(i, Part{int(n - i)}, false);
}
inline void put(Lanes v, float* p, Whole, bool stream) { if (stream) v.stream(p); else v.store(p); }
inline void put(Lanes v, float* p, Part part, bool) { v.store(p, part); }

inline Coefficients<Lanes> spread(const Coefficients<double>& k) {
  return {Lanes::all(k.mean), Lanes::all(k.scale), Lanes::all(k.bias), Lanes::all(k.slope), Lanes::all(k.level)};
}
template <class How> Coefficients<Lanes> load(const ColumnCoefficients& k, int64_t i, How how) {
  return {Lanes::load(k.mean + i, how), Lanes::load(k.scale + i, how), Lanes::load(k.bias + i, how), Lanes::all(0),
          Lanes::all(0)};
}
template <class How> Coefficients<Lanes> load_settled(const ColumnCoefficients& k, int64_t i, How how) {
  auto out = load(k, i, how);
  out.slope = Lanes::load(k.slope + i, how);
  out.level = Lanes::load(k.level + i, how);
  return out;
}
template <class How> Coefficients<Lanes> load(const LineCoefficients& k, int64_t i, How how) {
  const Lanes scale = Lanes::all(k.inverse_std), mean = Lanes::all(k.mean);
  return {mean, k.weight ? scale * Lanes::load(k.weight + i, how) : scale,
          k.bias ? Lanes::load(k.bias + i, how) : Lanes::all(0), mean, mean};
}

// The memory system stops at the end of a page; asked a little ahead, it does not.
constexpr int64_t kAhead = 384;  // floats
inline void ask_ahead(const float* p, int64_t ahead = kAhead) {
#if defined(__GNUC__)
  __builtin_prefetch(p + ahead);
#else
  (void)p, (void)ahead;
#endif
}
// Several rows are read together: of narrow ones, those after them are next.
template <int K> int64_t ahead_of_rows(int64_t stride) { return stride < kAhead ? K * stride : kAhead; }

// ---- sums of values ------------------------------------------------------------------------------------------------

// Several accumulators: an addition takes longer than the next one waits.
inline void sum_floats(const float* x, int64_t n, double shift, Pending& sums) {
  using V = Lanes;
  constexpr int64_t w = V::width;
  const V about = V::all(shift);
  V a0 = sums.first, b0 = sums.second, a1 = V::all(0), b1 = a1, a2 = a1, b2 = a1, a3 = a1, b3 = a1;
  const auto add = [&](V v, V& a, V& b) {
    v = v - about;
    a = a + v; b = fma(v, v, b);
  };
  int64_t i = 0;
  for (; i + 4 * w <= n; i += 4 * w) {
    for (int64_t j = 0; j < 4 * w; j += 16) ask_ahead(x + i + j);
    add(V::load(x + i), a0, b0);
    add(V::load(x + i + w), a1, b1);
    add(V::load(x + i + 2 * w), a2, b2);
    add(V::load(x + i + 3 * w), a3, b3);
  }
  across(n - i, [&](int64_t j, auto how) { add(V::load(x + i + j, how, about), a0, b0); });
  sums.first = (a0 + a1) + (a2 + a3);
  sums.second = (b0 + b1) + (b2 + b3);
}

template <int K>
void sum_columns(const float* x, int64_t stride, int64_t n, const double* shift, double* first, double* second) {
  const int64_t ahead = ahead_of_rows<K>(stride);
  across(n, [&](int64_t j, auto how) {
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

// Tables of pointers are passed by value: the compiler must not think that a store could have changed them.

// ---- what depends on the activation --------------------------------------------------------------------------------

constexpr int kTogether = 4;  // rows of a block: what a column needs is loaded once for all of them

// R: a residual is added before the activation. I: x is the output, and everything before it is worked out from that.
template <Activation A, bool R, bool I> struct Floats {
  using V = Lanes;

  template <class How> static V forward(const float* x, const float* residual, const Coefficients<V>& k, How how) {
    V z = fma(V::load(x, how) - k.mean, k.scale, k.bias);
    if constexpr (R) z = z + V::load(residual, how);
    if constexpr (A == Activation::relu) return positive_part(z);
    if constexpr (A == Activation::leaky_relu) return where(not_positive(z), z * V::all(kLeakySlope), z);
    return z;
  }

  struct Gradient { V centred, g; };  // x about its mean; the gradient behind the activation
  template <class How> static Gradient gradient(const Backward& m, const Coefficients<V>& k, How how) {
    V v = V::load(m.x, how);
    if constexpr (A == Activation::none) return {v - k.mean, V::load(m.dy, how)};
    typename V::Mask closed;
    if constexpr (I) {
      closed = not_positive(v);
      v = where(closed, v * V::all(1.0 / kLeakySlope), v) - k.mean;
    } else {
      v = v - k.mean;
      if constexpr (R) closed = not_positive(V::load(m.y, how));  // the output's sign is the sum's
      else closed = not_positive(fma(v, k.scale, k.bias));
    }
    if constexpr (A == Activation::relu) return {v, V::load_unless(closed, m.dy, how)};
    const V g = V::load(m.dy, how);
    return {v, where(closed, g * V::all(kLeakySlope), g)};
  }

  // Without a gradient through the statistics nothing of x is left in it: zero times a NaN would still be one.
  static V dx(const Gradient& e, V scale, V slope, V level, bool through) {
    return through ? fma(e.g, scale, fma(e.centred, slope, level)) : e.g * scale;
  }

  // ---- a run of one channel

  static void forward_run(const float* x, const float* r, float* y, int64_t n, const Coefficients<double>& k,
                          bool stream) {
    const auto c = spread(k);
    if (stream) {
      across_aligned(y, n, [&](int64_t i, auto how, bool aligned) {
        ask_ahead(x + i);
        put(forward(x + i, from(r, i), c, how), y + i, how, aligned);
      });
    } else {
      across(n, [&](int64_t i, auto how) {
        ask_ahead(x + i);
        forward(x + i, from(r, i), c, how).store(y + i, how);
      });
    }
  }

  static void sum_run(Backward m, int64_t n, const Coefficients<double>& k, Pending& sums) {
    constexpr int64_t w = V::width;
    const auto c = spread(k);
    V a0 = sums.first, b0 = sums.second, a1 = V::all(0), b1 = a1;
    const auto add = [&](int64_t i, auto how, V& a, V& b) {
      const Gradient e = gradient(m.at(i), c, how);
      a = a + e.g; b = fma(e.g, e.centred, b);
    };
    int64_t i = 0;
    for (; i + 2 * w <= n; i += 2 * w) {
      ask_ahead(m.dy + i);
      ask_ahead(m.x + i);
      add(i, Whole{}, a0, b0);
      add(i + w, Whole{}, a1, b1);
    }
    across(n - i, [&](int64_t j, auto how) { add(i + j, how, a0, b0); });
    sums.first = a0 + a1;
    sums.second = b0 + b1;
  }

  static void backward_run(Backward m, float* to, float* dr, int64_t n, const Coefficients<double>& k, bool through,
                           bool stream) {
    const auto c = spread(k);
    const auto one = [&](int64_t i, auto how, bool aligned) {
      const Gradient e = gradient(m.at(i), c, how);
      put(dx(e, c.scale, c.slope, c.level, through), to + i, how, aligned);
      if (R && dr) e.g.store(dr + i, how);
    };
    if (stream) across_aligned(to, n, one);
    else across(n, [&](int64_t i, auto how) { one(i, how, false); });
  }

  // ---- K rows of many channels

  // What is written goes nearly in memory's order, so that whole lines leave at once; and what a strip of columns needs
  // stays near while its rows are worked on.
  static constexpr int64_t kStrip = 256;

  template <int K>
  static void forward_rows(const float* x, const float* r, float* y, int64_t stride, int64_t n, ColumnCoefficients k,
                           bool stream) {
    for (int64_t first = 0; first < n; first += kStrip) {
      for (int row = 0; row < K; ++row) {
        const int64_t i = row * stride + first;
        const float* in = x + i;
        const float* added = R ? r + i : nullptr;
        float* out = y + i;
        const ColumnCoefficients here = k.at(first);
        across(std::min(kStrip, n - first), [&](int64_t j, auto how) {
          ask_ahead(in + j);
          put(forward(in + j, added + (R ? j : 0), load(here, j, how), how), out + j, how, stream);
        });
      }
    }
  }

  template <int K>
  static void sum_rows(Backward m, int64_t stride, int64_t n, ColumnCoefficients k, double* first,
                       double* second) {
    const int64_t ahead = ahead_of_rows<K>(stride);
    across(n, [&](int64_t j, auto how) {
      const auto c = load(k, j, how);
      V a = V::load(first + j, how), b = V::load(second + j, how);
      for (int row = 0; row < K; ++row) {
        ask_ahead(m.dy + row * stride + j, ahead);
        ask_ahead(m.x + row * stride + j, ahead);
        const Gradient e = gradient(m.at(row * stride + j), c, how);
        a = a + e.g; b = fma(e.g, e.centred, b);
      }
      a.store(first + j, how);
      b.store(second + j, how);
    });
  }

  template <int K>
  static void backward_rows(Backward m, float* to, float* dr, int64_t stride, int64_t n, ColumnCoefficients k,
                            bool through, bool stream) {
    for (int64_t first = 0; first < n; first += kStrip) {
      for (int row = 0; row < K; ++row) {
        const int64_t i = row * stride + first;
        const Backward in = m.at(i);
        float *out = to + i, *also = from(dr, i);
        const ColumnCoefficients here = k.at(first);
        across(std::min(kStrip, n - first), [&](int64_t j, auto how) {
          ask_ahead(in.dy + j);
          ask_ahead(in.x + j);
          const auto c = load_settled(here, j, how);
          const Gradient e = gradient(in.at(j), c, how);
          put(dx(e, c.scale, c.slope, c.level, through), out + j, how, stream);
          if (R && also) e.g.store(also + j, how);
        });
      }
    }
  }

  // ---- a line with a weight and a bias for each value

  static void forward_line(const float* x, const float* r, float* y, int64_t n, LineCoefficients k) {
    across(n, [&](int64_t i, auto how) { forward(x + i, from(r, i), load(k, i, how), how).store(y + i, how); });
  }

  // Sums of the gradient times the weight, and of that times the centred value.
  static void sum_line(Backward m, int64_t n, LineCoefficients k, Pending& sums) {
    V a = sums.first, b = sums.second;
    across(n, [&](int64_t i, auto how) {
      const Gradient e = gradient(m.at(i), load(k, i, how), how);
      const V g = k.weight ? e.g * V::load(k.weight + i, how) : e.g;
      a = a + g; b = fma(g, e.centred, b);
    });
    sums.first = a;
    sums.second = b;
  }

  // Adds to the parameters' gradients too, where they are wanted.
  static void backward_line(Backward m, float* to, float* dr, int64_t n, LineCoefficients k, bool through,
                            double* dweight, double* dbias) {
    const V inverse_std = V::all(k.inverse_std), level = V::all(-k.mean_g * k.inverse_std);
    const V slope = V::all(-k.mean_gx * k.inverse_std * k.inverse_std);
    across(n, [&](int64_t i, auto how) {
      const auto c = load(k, i, how);
      const Gradient e = gradient(m.at(i), c, how);
      dx(e, c.scale, slope, level, through).store(to + i, how);
      if (R && dr) e.g.store(dr + i, how);
      if (!dweight) return;
      fma(e.g, e.centred * inverse_std, V::load(dweight + i, how)).store(dweight + i, how);
      (e.g + V::load(dbias + i, how)).store(dbias + i, how);
    });
  }
};

// The loops of one activation; those of rows for one row, and for several together.
struct Inner {
  decltype(&Floats<Activation::none, false, false>::forward_run) forward_run;
  decltype(&Floats<Activation::none, false, false>::sum_run) sum_run;
  decltype(&Floats<Activation::none, false, false>::backward_run) backward_run;
  struct Rows {
    decltype(&Floats<Activation::none, false, false>::forward_rows<1>) forward;
    decltype(&Floats<Activation::none, false, false>::sum_rows<1>) sum;
    decltype(&Floats<Activation::none, false, false>::backward_rows<1>) backward;
  } row, rows;
  decltype(&Floats<Activation::none, false, false>::forward_line) forward_line;
  decltype(&Floats<Activation::none, false, false>::sum_line) sum_line;
  decltype(&Floats<Activation::none, false, false>::backward_line) backward_line;
};

template <Activation A, bool R, bool I> Inner inner() {
  using F = Floats<A, R, I>;
  return {F::forward_run, F::sum_run, F::backward_run,
          {F::template forward_rows<1>, F::template sum_rows<1>, F::template backward_rows<1>},
          {F::template forward_rows<kTogether>, F::template sum_rows<kTogether>, F::template backward_rows<kTogether>},
          F::forward_line, F::sum_line, F::backward_line};
}

inline Inner inner_of(const Job& job) {
  const bool r = job.residual != nullptr;
  switch (job.activation) {
    case Activation::relu: return r ? inner<Activation::relu, true, false>() : inner<Activation::relu, false, false>();
    case Activation::leaky_relu:
      if (job.inverted) return inner<Activation::leaky_relu, false, true>();
      return r ? inner<Activation::leaky_relu, true, false>() : inner<Activation::leaky_relu, false, false>();
    case Activation::none: break;  // an output without an activation is as good as its input
  }
  return r ? inner<Activation::none, true, false>() : inner<Activation::none, false, false>();
}

}  // namespace NK_NAMESPACE
}  // namespace normkit
