// Normalizations that end in a function of their own, run by run: EvoNorm (Liu et al. 2020), and filter response
// normalization with its threshold (Singh & Krishnan 2020).
#pragma once

#include "statistics.h"

namespace normkit {
namespace NK_NAMESPACE {

// Every kind has its output, what of dx comes from each value alone, and sums for the rest: see kGateSums.
template <class T> struct Gate {
  using V = typename Working<T>::V;
  static constexpr int64_t kTaskValues = 16 * 1024;

  const GateJob& job;
  const T* x = static_cast<const T*>(job.x);
  const T* dy = static_cast<const T*>(job.dy);

  // A value's share in the gradients of its group's moments. About their mean: far from zero, the two parts would cancel.
  struct Rest {
    V level, slope, mean;
    explicit Rest(const double* k)
        : level(V::all(float(k[5]))), slope(V::all(float(k[6]))), mean(V::all(float(k[7]))) {}
    V of(V x) const { return fma(x - mean, slope, level); }
  };

  // y = x * logistic(v * x) * weight / deviation + bias
  struct Sigmoid {
    V v, scale, bias;
    Rest rest;
    explicit Sigmoid(const double* k)
        : v(V::all(float(k[0]))), scale(V::all(float(k[1] / k[3]))), bias(V::all(float(k[2]))), rest(k) {}
    V forward(V x) const { return fma(x * Logistic<V>(v * x).of, scale, bias); }
    V backward(V x, V dy) const {
      const Logistic<V> s(v * x);
      return fma(dy * scale, s.of * fma(v * x, s.of_minus, V::all(1)), rest.of(x));
    }
    void add(V x, V dy, V* sums) const {
      const Logistic<V> s(v * x);
      const V gated = dy * x * s.of;
      sums[0] = sums[0] + dy;
      sums[1] = sums[1] + gated;
      sums[2] = fma(gated, x * s.of_minus, sums[2]);
    }
  };

  // y = x / max(deviation of the batch, v * x + deviation of the instance) * weight + bias
  struct Largest {
    V v, weight, bias, batch, instance;
    Rest rest;
    explicit Largest(const double* k)
        : v(V::all(float(k[0]))), weight(V::all(float(k[1]))), bias(V::all(float(k[2]))), batch(V::all(float(k[3]))),
          instance(V::all(float(k[4]))), rest(k) {}
    V inverse(V bent) const { return V::all(1) / where(is_nan(batch), batch, larger(batch, bent)); }
    V forward(V x) const { return fma(x * inverse(fma(v, x, instance)), weight, bias); }
    V backward(V x, V dy) const {
      const V bent = fma(v, x, instance), q = inverse(bent);
      return fma(dy * weight, where(below(batch, bent), instance * q * q, q), rest.of(x));
    }
    void add(V x, V dy, V* sums) const {
      const V bent = fma(v, x, instance), q = inverse(bent), u = dy * x * q, by = u * q;
      const auto is_bent = below(batch, bent);
      sums[0] = sums[0] + dy;
      sums[1] = sums[1] + u;
      sums[2] = sums[2] + where(is_bent, V::all(0), by);
      sums[3] = sums[3] + where(is_bent, by, V::all(0));
      sums[4] = fma(where(is_bent, by, V::all(0)), x, sums[4]);
    }
  };

  // y = max(x * weight / deviation + bias, floor)
  struct CutOff {
    V floor, scale, bias;
    Rest rest;
    explicit CutOff(const double* k)
        : floor(V::all(float(k[0]))), scale(V::all(float(k[1] / k[3]))), bias(V::all(float(k[2]))), rest(k) {}
    V forward(V x) const { return where(is_nan(floor), floor, larger(floor, fma(x, scale, bias))); }
    V passed(V x, V dy) const {  // where value and floor are the same, they share the gradient
      const V z = fma(x, scale, bias), shared = where(at_most(floor, z), dy * V::all(0.5f), V::all(0));
      return where(at_most(z, floor), shared, dy);
    }
    V backward(V x, V dy) const { return fma(passed(x, dy), scale, rest.of(x)); }
    void add(V x, V dy, V* sums) const {
      const V dz = passed(x, dy);
      sums[0] = sums[0] + dz;
      sums[1] = fma(dz, x, sums[1]);
      sums[2] = sums[2] + (dy - dz);
    }
  };

  // f(run), some runs to a task.
  template <class F> void each_run(ParallelFor parallel_for, F f) const {
    const int64_t size = std::max<int64_t>(1, kTaskValues / job.length);
    run(parallel_for, ceil_div(job.runs, size), [&](int64_t task) {
      for (int64_t r = task * size; r < std::min(job.runs, (task + 1) * size); ++r) f(r);
    });
  }
  const double* coefficients(int64_t r) const { return job.coefficients + r * kGateCoefficients; }

  template <class Kind> NK_FLAT static void forward_run(const T* x, T* y, int64_t n, const double* k) {
    const Kind kind(k);
    across<V>(n, [&](int64_t i, auto how) { kind.forward(V::load(x + i, how)).store(y + i, how); });
  }
  template <class Kind> NK_FLAT static void backward_run(const T* x, const T* dy, T* dx, int64_t n, const double* k) {
    const Kind kind(k);
    across<V>(n, [&](int64_t i, auto how) {
      kind.backward(V::load(x + i, how), V::load(dy + i, how)).store(dx + i, how);
    });
  }
  template <class Kind> NK_FLAT static void sum_run(const T* x, const T* dy, int64_t n, const double* k, double* out) {
    const Kind kind(k);
    for (int s = 0; s < kGateSums; ++s) out[s] = 0;
    for (int64_t first = 0; first < n; first += kFlush * V::width) {
      V sums[kGateSums];
      for (V& sum : sums) sum = V::all(0);
      across<V>(std::min(n - first, kFlush * V::width), [&](int64_t i, auto how) {
        kind.add(V::load(x + first + i, how), V::load(dy + first + i, how), sums);
      });
      for (int s = 0; s < kGateSums; ++s) out[s] += sums[s].sum();
    }
  }

  template <class Kind> void run_kind(ParallelFor parallel_for) const {
    const int64_t n = job.length;
    each_run(parallel_for, [&](int64_t r) {
      const double* k = coefficients(r);
      if (job.sums) sum_run<Kind>(x + r * n, dy + r * n, n, k, job.sums + r * kGateSums);
      else if (job.dy) backward_run<Kind>(x + r * n, dy + r * n, static_cast<T*>(job.out) + r * n, n, k);
      else forward_run<Kind>(x + r * n, static_cast<T*>(job.out) + r * n, n, k);
    });
  }
  void operator()(ParallelFor parallel_for) const {
    switch (job.kind) {
      case GateKind::sigmoid: return run_kind<Sigmoid>(parallel_for);
      case GateKind::largest: return run_kind<Largest>(parallel_for);
      case GateKind::cut_off: return run_kind<CutOff>(parallel_for);
    }
  }
};

}  // namespace NK_NAMESPACE
}  // namespace normkit
