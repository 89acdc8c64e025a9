// The loops, compiled once per instruction set. Nothing is checked here.
//
// A channel's values are summed about one of them, in double, in an order that does not depend on the threads: results
// are the same from run to run and for any number of threads.

#include "lanes.h"

#include <algorithm>
#include <vector>

namespace normkit {
namespace NK_NAMESPACE {
namespace {

constexpr int64_t kTaskBytes = 512 * 1024;       // what a task may touch and still find in cache the second time
constexpr int64_t kStreamBytes = 8 * 1024 * 1024;  // from this size on, an output is not worth a place in cache
constexpr int64_t kLongRun = 4096;                 // bytes
constexpr int64_t kSegment = 64 * 1024;          // elements per task, where there are too few channels to share out
constexpr int64_t kFewChannels = 8;

template <class F> void run(ParallelFor parallel_for, int64_t tasks, F f) {
  parallel_for(tasks, [](int64_t begin, int64_t end, void* context) {
    F& body = *static_cast<F*>(context);
    for (int64_t i = begin; i < end; ++i) body(i);
    Lanes::fence();
  }, &f);
}

// ---- what happens to one value -------------------------------------------------------------------------------------

// The affine map of a channel, or of several side by side.
template <class V> struct Map { V mean, scale, bias; };

template <Activation A, class V> V activate(V z) {
  if constexpr (A == Activation::relu) return unless_positive(z, V::all(0.0), z);
  if constexpr (A == Activation::leaky_relu) return unless_positive(z, z * V::all(kLeakySlope), z);
  return z;
}

template <Activation A, class V> V gate(V sign, V dy) {
  if constexpr (A == Activation::relu) return unless_positive(sign, V::all(0.0), dy);
  if constexpr (A == Activation::leaky_relu) return unless_positive(sign, dy * V::all(kLeakySlope), dy);
  return dy;
}

template <class V, class T, Activation A, bool R> struct Element {
  static V forward(const T* x, const T* residual, int64_t i, const Map<V>& m) {
    V z = fma(V::load(x + i) - m.mean, m.scale, m.bias);
    if constexpr (R) z = z + V::load(residual + i);
    return activate<A>(z);
  }
  // The gradient that enters the normalisation, and x about its mean. With a residual the output's sign is the sum's.
  static V gradient(const T* dy, const T* y, int64_t i, const Map<V>& m, V centred) {
    if constexpr (A == Activation::none) return V::load(dy + i);
    if constexpr (R) return gate<A>(V::load(y + i), V::load(dy + i));
    return gate<A>(fma(centred, m.scale, m.bias), V::load(dy + i));
  }
};

// ---- one run of contiguous values of one channel -------------------------------------------------------------------

struct Sums { double first = 0, second = 0; };

// Two sums in the making: vectors that are added up once, at the end, and the tails of the runs.
struct Pending {
  Lanes first = Lanes::all(0), second = Lanes::all(0);
  Sums tail;
  Sums total() const { return {first.sum() + tail.first, second.sum() + tail.second}; }
};

template <class T> void sum_run(const T* x, int64_t n, double shift, Pending& sums) {
  using V = Lanes;
  const V about = V::all(shift);
  V a = sums.first, b = sums.second, c = V::all(0), d = c;
  int64_t i = 0;
  for (; i + 2 * V::width <= n; i += 2 * V::width) {
    const V u = V::load(x + i) - about, w = V::load(x + i + V::width) - about;
    a = a + u; b = fma(u, u, b);
    c = c + w; d = fma(w, w, d);
  }
  sums.first = a + c; sums.second = b + d;
  for (; i < n; ++i) {
    const double u = widen(x[i]) - shift;
    sums.tail.first += u; sums.tail.second += u * u;
  }
}

template <class T, Activation A, bool R>
void forward_run(const T* x, const T* residual, T* y, int64_t n, Map<double> m, bool stream) {
  using V = Lanes;
  using E = Element<V, T, A, R>;
  using E1 = Element<One, T, A, R>;
  const Map<V> map{V::all(m.mean), V::all(m.scale), V::all(m.bias)};
  const Map<One> one{{m.mean}, {m.scale}, {m.bias}};
  int64_t i = 0;
  constexpr int64_t line = V::width * int64_t(sizeof(T));
  if (stream) {
    for (; i < n && reinterpret_cast<uintptr_t>(y + i) % line; ++i) E1::forward(x, residual, i, one).store(y + i);
    for (; i + 2 * V::width <= n; i += 2 * V::width) {
      const V a = E::forward(x, residual, i, map), b = E::forward(x, residual, i + V::width, map);
      a.stream(y + i);
      b.stream(y + i + V::width);
    }
  }
  for (; i + V::width <= n; i += V::width) E::forward(x, residual, i, map).store(y + i);
  for (; i < n; ++i) E1::forward(x, residual, i, one).store(y + i);
}

template <class T, Activation A, bool R>
void backward_sum_run(const T* dy, const T* x, const T* y, int64_t n, Map<double> m, Pending& sums) {
  using V = Lanes;
  using E = Element<V, T, A, R>;
  const Map<V> map{V::all(m.mean), V::all(m.scale), V::all(m.bias)};
  V a = sums.first, b = sums.second, c = V::all(0), d = c;
  int64_t i = 0;
  for (; i + 2 * V::width <= n; i += 2 * V::width) {
    const V u = V::load(x + i) - map.mean, w = V::load(x + i + V::width) - map.mean;
    const V g = E::gradient(dy, y, i, map, u);
    const V h = E::gradient(dy, y, i + V::width, map, w);
    a = a + g; b = fma(g, u, b);
    c = c + h; d = fma(h, w, d);
  }
  sums.first = a + c; sums.second = b + d;
  const Map<One> one{{m.mean}, {m.scale}, {m.bias}};
  for (; i < n; ++i) {
    const One centred = One::load(x + i) - one.mean;
    const One g = Element<One, T, A, R>::gradient(dy, y, i, one, centred);
    sums.tail.first += g.v; sums.tail.second += g.v * centred.v;
  }
}

// dx = scale * (g - mean(g) - centred * k)
template <class V, class T, Activation A, bool R>
void backward_element(const T* dy, const T* x, const T* y, T* dx, T* dresidual, int64_t i, const Map<V>& m, V mean_g,
                      V k, bool stream) {
  const V centred = V::load(x + i) - m.mean;
  const V g = Element<V, T, A, R>::gradient(dy, y, i, m, centred);
  const V d = m.scale * (g - mean_g - centred * k);
  if (stream) d.stream(dx + i); else d.store(dx + i);
  if (dresidual) g.store(dresidual + i);
}

template <class T, Activation A, bool R>
void backward_run(const T* dy, const T* x, const T* y, T* dx, T* dr, int64_t n, Map<double> m, double mean_g, double k,
                  bool stream) {
  using V = Lanes;
  const Map<V> map{V::all(m.mean), V::all(m.scale), V::all(m.bias)};
  const Map<One> one{{m.mean}, {m.scale}, {m.bias}};
  const V vg = V::all(mean_g), vk = V::all(k);
  const auto single = [&](int64_t i) {
    backward_element<One, T, A, R>(dy, x, y, dx, dr, i, one, {mean_g}, {k}, false);
  };
  int64_t i = 0;
  constexpr int64_t line = V::width * int64_t(sizeof(T));
  if (stream) for (; i < n && reinterpret_cast<uintptr_t>(dx + i) % line; ++i) single(i);
  for (; i + V::width <= n; i += V::width) {
    backward_element<V, T, A, R>(dy, x, y, dx, dr, i, map, vg, vk, stream);
  }
  for (; i < n; ++i) single(i);
}

// ---- per channel ---------------------------------------------------------------------------------------------------

struct Channels {
  const Job& job;
  double count() const { return double(job.n) * double(job.s); }
  Map<double> map(int64_t c) const {
    const double scale = (job.weight ? job.weight[c] : 1.0) / std::sqrt(job.var[c] + job.eps);
    return {job.mean[c], scale, job.bias ? job.bias[c] : 0.0};
  }
  void set_moments(int64_t c, double shift, Sums s) const {
    const double gap = s.first / count();
    job.mean[c] = shift + gap;
    const double var = s.second / count() - gap * gap;
    job.var[c] = var < 0 ? 0.0 : var;  // a NaN stays
  }
  // What the backward needs of its two sums; writes the parameters' gradients.
  std::pair<double, double> settle(int64_t c, Sums s) const {
    const double inverse_var = 1.0 / (job.var[c] + job.eps);
    job.dbias[c] = s.first;
    job.dweight[c] = s.second * std::sqrt(inverse_var);
    return {s.first / count(), s.second / count() * inverse_var};
  }
};

template <class T> double shift_of(T first) {
  const double v = widen(first);
  return std::isfinite(v) ? v : 0.0;
}

// ---- planes: (n, c, s) ---------------------------------------------------------------------------------------------

template <class T, Activation A, bool R> struct Planes {
  const Job& job;
  Channels channels{job};
  const T* x = static_cast<const T*>(job.x);
  const T* residual = static_cast<const T*>(job.residual);
  T* y = static_cast<T*>(job.y);
  const T* dy = static_cast<const T*>(job.dy);
  T* dx = static_cast<T*>(job.dx);
  T* dr = static_cast<T*>(job.dresidual);
  // Short runs would leave half-written lines at both of their ends.
  bool stream = job.n * job.c * job.s * int64_t(sizeof(T)) >= kStreamBytes && job.s * int64_t(sizeof(T)) >= kLongRun;

  template <class P> static P* from(P* memory, int64_t i) { return memory ? memory + i : nullptr; }
  int64_t at(int64_t n, int64_t c) const { return (n * job.c + c) * job.s; }
  bool few() const { return job.c < kFewChannels && job.n * job.s > kSegment; }

  // Blocks of channels that fit the cache with `arrays` arrays of input.
  template <class F> void blocks(ParallelFor parallel_for, int64_t arrays, F f) const {
    const int64_t bytes = job.n * job.s * int64_t(sizeof(T)) * arrays;
    const int64_t even = (job.c + 15) / 16;  // enough tasks for 16 threads, whatever the machine has
    const int64_t size = std::max<int64_t>(1, std::min(kTaskBytes / std::max<int64_t>(bytes, 1), even));
    run(parallel_for, (job.c + size - 1) / size, [&](int64_t b) { f(b * size, std::min(job.c, (b + 1) * size)); });
  }

  // Segments of one channel's values, in a fixed order: f(channel, segment, example, first, size).
  int64_t segments_per_run() const { return (job.s + kSegment - 1) / kSegment; }
  template <class F> void segments(ParallelFor parallel_for, F f) const {
    const int64_t per = segments_per_run();
    run(parallel_for, job.c * job.n * per, [&](int64_t i) {
      const int64_t part = i % per, n = i / per % job.n, c = i / per / job.n, first = part * kSegment;
      f(c, n * per + part, n, first, std::min(kSegment, job.s - first));
    });
  }

  void sum(int64_t c0, int64_t c1) const {
    std::vector<Pending> sums(c1 - c0);
    for (int64_t n = 0; n < job.n; ++n) {
      for (int64_t c = c0; c < c1; ++c) sum_run(x + at(n, c), job.s, shift_of(x[at(0, c)]), sums[c - c0]);
    }
    for (int64_t c = c0; c < c1; ++c) channels.set_moments(c, shift_of(x[at(0, c)]), sums[c - c0].total());
  }

  void sum_few(ParallelFor parallel_for) const {
    const int64_t per = segments_per_run() * job.n;
    std::vector<Sums> parts(job.c * per);
    segments(parallel_for, [&](int64_t c, int64_t i, int64_t n, int64_t first, int64_t size) {
      Pending sums;
      sum_run(x + at(n, c) + first, size, shift_of(x[at(0, c)]), sums);
      parts[c * per + i] = sums.total();
    });
    for (int64_t c = 0; c < job.c; ++c) channels.set_moments(c, shift_of(x[at(0, c)]), total(parts, c, per));
  }

  static Sums total(const std::vector<Sums>& parts, int64_t c, int64_t per) {
    Sums all;
    for (int64_t i = 0; i < per; ++i) {
      all.first += parts[c * per + i].first; all.second += parts[c * per + i].second;
    }
    return all;
  }

  void apply(int64_t c, int64_t n, int64_t first, int64_t size, const Map<double>& map) const {
    const int64_t i = at(n, c) + first;
    forward_run<T, A, R>(x + i, from(residual, i), y + i, size, map, stream);
  }

  std::vector<Map<double>> maps(int64_t c0, int64_t c1) const {
    std::vector<Map<double>> out(c1 - c0);
    for (int64_t c = c0; c < c1; ++c) out[c - c0] = channels.map(c);
    return out;
  }

  void moments(ParallelFor parallel_for) const {
    if (few()) return sum_few(parallel_for);
    blocks(parallel_for, 1, [&](int64_t c0, int64_t c1) { sum(c0, c1); });
  }

  void forward(ParallelFor parallel_for) const {
    if (few()) {
      sum_few(parallel_for);
      return evaluate(parallel_for);
    }
    blocks(parallel_for, 1, [&](int64_t c0, int64_t c1) {
      sum(c0, c1);
      const auto map = maps(c0, c1);
      // Back to front: what was read last is still in cache.
      for (int64_t n = job.n - 1; n >= 0; --n) {
        for (int64_t c = c0; c < c1; ++c) apply(c, n, 0, job.s, map[c - c0]);
      }
    });
  }

  void evaluate(ParallelFor parallel_for) const {
    const auto map = maps(0, job.c);
    if (job.s >= kSegment || job.n * job.c < 16) {
      return segments(parallel_for, [&](int64_t c, int64_t, int64_t n, int64_t first, int64_t size) {
        apply(c, n, first, size, map[c]);
      });
    }
    // In memory's order, some runs at a time.
    const int64_t runs = std::max<int64_t>(1, kSegment / job.s), all = job.n * job.c;
    run(parallel_for, (all + runs - 1) / runs, [&](int64_t b) {
      for (int64_t i = b * runs; i < std::min(all, (b + 1) * runs); ++i) {
        apply(i % job.c, i / job.c, 0, job.s, map[i % job.c]);
      }
    });
  }

  void backward_sum(int64_t c, int64_t n, int64_t first, int64_t size, Map<double> map, Pending& sums) const {
    const int64_t i = at(n, c) + first;
    backward_sum_run<T, A, R>(dy + i, x + i, from(y, i), size, map, sums);
  }

  void backward_apply(int64_t c, int64_t n, int64_t first, int64_t size, Map<double> map,
                      std::pair<double, double> k) const {
    const int64_t i = at(n, c) + first;
    backward_run<T, A, R>(dy + i, x + i, from(y, i), dx + i, from(dr, i), size, map, k.first, k.second, stream);
  }

  void backward(ParallelFor parallel_for) const {
    if (few()) return backward_few(parallel_for);
    blocks(parallel_for, R ? 3 : 2, [&](int64_t c0, int64_t c1) {
      std::vector<Pending> sums(c1 - c0);
      const auto map = maps(c0, c1);
      for (int64_t n = 0; n < job.n; ++n) {
        for (int64_t c = c0; c < c1; ++c) backward_sum(c, n, 0, job.s, map[c - c0], sums[c - c0]);
      }
      std::vector<std::pair<double, double>> settled(c1 - c0);
      for (int64_t c = c0; c < c1; ++c) settled[c - c0] = channels.settle(c, sums[c - c0].total());
      for (int64_t n = job.n - 1; n >= 0; --n) {
        for (int64_t c = c0; c < c1; ++c) backward_apply(c, n, 0, job.s, map[c - c0], settled[c - c0]);
      }
    });
  }

  void backward_few(ParallelFor parallel_for) const {
    const int64_t per = segments_per_run() * job.n;
    std::vector<Sums> parts(job.c * per);
    segments(parallel_for, [&](int64_t c, int64_t i, int64_t n, int64_t first, int64_t size) {
      Pending sums;
      backward_sum(c, n, first, size, channels.map(c), sums);
      parts[c * per + i] = sums.total();
    });
    std::vector<std::pair<double, double>> settled(job.c);
    for (int64_t c = 0; c < job.c; ++c) settled[c] = channels.settle(c, total(parts, c, per));
    segments(parallel_for, [&](int64_t c, int64_t, int64_t n, int64_t first, int64_t size) {
      backward_apply(c, n, first, size, channels.map(c), settled[c]);
    });
  }
};

// ---- rows: (n, c) --------------------------------------------------------------------------------------------------

template <class T, Activation A, bool R> struct Rows {
  const Job& job;
  Channels channels{job};
  const T* x = static_cast<const T*>(job.x);
  const T* residual = static_cast<const T*>(job.residual);
  T* y = static_cast<T*>(job.y);
  const T* dy = static_cast<const T*>(job.dy);
  T* dx = static_cast<T*>(job.dx);
  T* dr = static_cast<T*>(job.dresidual);
  int64_t row_bytes = job.c * int64_t(sizeof(T));
  bool stream = job.n * row_bytes >= kStreamBytes;
  int64_t height = std::max<int64_t>(16, kTaskBytes / 2 / std::max<int64_t>(row_bytes, 1));  // rows per task
  int64_t tasks = (job.n + height - 1) / height;

  // Everything a column needs, as arrays that vectors are loaded from.
  struct Columns {
    std::vector<double> mean, scale, bias, mean_g, k;
  };

  Columns columns() const {
    Columns out;
    for (auto* v : {&out.mean, &out.scale, &out.bias}) v->resize(job.c);
    for (int64_t c = 0; c < job.c; ++c) {
      const Map<double> m = channels.map(c);
      out.mean[c] = m.mean; out.scale[c] = m.scale; out.bias[c] = m.bias;
    }
    return out;
  }

  template <class V> static Map<V> map(const Columns& k, int64_t c) {
    return {V::load(&k.mean[c]), V::load(&k.scale[c]), V::load(&k.bias[c])};
  }

  // Several rows at a time: what a column needs is loaded once for all of them, and memory is read in its order.
  template <class F> void sweep(int64_t begin, int64_t end, F f) const {
    int64_t r = begin;
    for (; r + 4 <= end; r += 4) columns_of<4>(r, f);
    for (; r < end; ++r) columns_of<1>(r, f);
  }
  template <int K, class F> void columns_of(int64_t row, F& f) const {
    int64_t c = 0;
    for (; c + Lanes::width <= job.c; c += Lanes::width) f.template operator()<Lanes, K>(row, c);
    for (; c < job.c; ++c) f.template operator()<One, K>(row, c);
  }

  // The two sums of a task's rows, column by column: first sums, then second sums.
  template <class F> std::vector<double> sums(ParallelFor parallel_for, F add_rows) const {
    std::vector<double> parts(tasks * 2 * job.c);
    run(parallel_for, tasks, [&](int64_t t) {
      add_rows(t * height, std::min(job.n, (t + 1) * height), &parts[t * 2 * job.c]);
    });
    std::vector<double> all(2 * job.c);
    for (int64_t t = 0; t < tasks; ++t) for (int64_t i = 0; i < 2 * job.c; ++i) all[i] += parts[t * 2 * job.c + i];
    return all;
  }

  void moments(ParallelFor parallel_for) const {
    std::vector<double> shift(job.c);
    for (int64_t c = 0; c < job.c; ++c) shift[c] = shift_of(x[c]);
    const auto all = sums(parallel_for, [&](int64_t begin, int64_t end, double* out) {
      sweep(begin, end, [&]<class V, int K>(int64_t row, int64_t c) {
        const V about = V::load(&shift[c]);
        V a = V::load(out + c), b = V::load(out + job.c + c);
        for (int k = 0; k < K; ++k) {
          const V d = V::load(x + (row + k) * job.c + c) - about;
          a = a + d; b = fma(d, d, b);
        }
        a.store(out + c); b.store(out + job.c + c);
      });
    });
    for (int64_t c = 0; c < job.c; ++c) channels.set_moments(c, shift[c], {all[c], all[job.c + c]});
  }

  void forward(ParallelFor parallel_for) const {
    moments(parallel_for);
    evaluate(parallel_for);
  }

  void evaluate(ParallelFor parallel_for) const {
    const Columns k = columns();
    const bool aligned = reinterpret_cast<uintptr_t>(y) % 64 == 0 && row_bytes % 64 == 0;
    const bool streaming = stream && aligned;
    run(parallel_for, tasks, [&](int64_t t) {
      const int64_t task = tasks - 1 - t;
      sweep(task * height, std::min(job.n, (task + 1) * height), [&]<class V, int K>(int64_t row, int64_t c) {
        const Map<V> m = map<V>(k, c);
        for (int j = 0; j < K; ++j) {
          const int64_t i = (row + j) * job.c + c;
          const V out = Element<V, T, A, R>::forward(x, residual, i, m);
          if (streaming) out.stream(y + i); else out.store(y + i);
        }
      });
    });
  }

  void backward(ParallelFor parallel_for) const {
    Columns k = columns();
    const auto all = sums(parallel_for, [&](int64_t begin, int64_t end, double* out) {
      sweep(begin, end, [&]<class V, int K>(int64_t row, int64_t c) {
        const Map<V> m = map<V>(k, c);
        V a = V::load(out + c), b = V::load(out + job.c + c);
        for (int j = 0; j < K; ++j) {
          const int64_t i = (row + j) * job.c + c;
          const V centred = V::load(x + i) - m.mean;
          const V g = Element<V, T, A, R>::gradient(dy, y, i, m, centred);
          a = a + g; b = fma(g, centred, b);
        }
        a.store(out + c); b.store(out + job.c + c);
      });
    });
    k.mean_g.resize(job.c); k.k.resize(job.c);
    for (int64_t c = 0; c < job.c; ++c) {
      const auto settled = channels.settle(c, {all[c], all[job.c + c]});
      k.mean_g[c] = settled.first; k.k[c] = settled.second;
    }
    const bool aligned = reinterpret_cast<uintptr_t>(dx) % 64 == 0 && row_bytes % 64 == 0;
    const bool streaming = stream && aligned;
    run(parallel_for, tasks, [&](int64_t t) {
      const int64_t task = tasks - 1 - t;
      sweep(task * height, std::min(job.n, (task + 1) * height), [&]<class V, int K>(int64_t row, int64_t c) {
        const Map<V> m = map<V>(k, c);
        const V mean_g = V::load(&k.mean_g[c]), kk = V::load(&k.k[c]);
        for (int j = 0; j < K; ++j) {
          const int64_t i = (row + j) * job.c + c;
          backward_element<V, T, A, R>(dy, x, y, dx, dr, i, m, mean_g, kk, streaming);
        }
      });
    });
  }
};

// ---- from what is asked to the loop that does it -------------------------------------------------------------------

enum class Op { moments, forward, evaluate, backward };

template <Op op, class Loops> void call(const Loops& loops, ParallelFor parallel_for) {
  if constexpr (op == Op::moments) loops.moments(parallel_for);
  if constexpr (op == Op::forward) loops.forward(parallel_for);
  if constexpr (op == Op::evaluate) loops.evaluate(parallel_for);
  if constexpr (op == Op::backward) loops.backward(parallel_for);
}

template <Op op, class T, Activation A, bool R> void by_layout(const Job& job, ParallelFor parallel_for) {
  if (job.rows) call<op>(Rows<T, A, R>{job}, parallel_for);
  else call<op>(Planes<T, A, R>{job}, parallel_for);
}

template <Op op, class T, Activation A> void by_residual(const Job& job, ParallelFor parallel_for) {
  if constexpr (op != Op::moments) {
    if (job.residual) return by_layout<op, T, A, true>(job, parallel_for);
  }
  by_layout<op, T, A, false>(job, parallel_for);
}

template <Op op, class T> void by_activation(const Job& job, ParallelFor parallel_for) {
  if constexpr (op != Op::moments) {
    if (job.activation == Activation::relu) return by_residual<op, T, Activation::relu>(job, parallel_for);
    if (job.activation == Activation::leaky_relu) return by_residual<op, T, Activation::leaky_relu>(job, parallel_for);
  }
  by_residual<op, T, Activation::none>(job, parallel_for);
}

template <Op op> void by_type(const Job& job, ParallelFor parallel_for) {
  switch (job.type) {
    case Type::f32: return by_activation<op, float>(job, parallel_for);
    case Type::bf16: return by_activation<op, bf16>(job, parallel_for);
    case Type::f16: return by_activation<op, f16>(job, parallel_for);
    case Type::f64: return;  // refused at the door: the reference sums float64 with more care
  }
}

}  // namespace
}  // namespace NK_NAMESPACE

extern const Kernels NK_TABLE;
const Kernels NK_TABLE{NK_NAME, NK_NAMESPACE::by_type<NK_NAMESPACE::Op::moments>,
                       NK_NAMESPACE::by_type<NK_NAMESPACE::Op::forward>,
                       NK_NAMESPACE::by_type<NK_NAMESPACE::Op::evaluate>,
                       NK_NAMESPACE::by_type<NK_NAMESPACE::Op::backward>};

}  // namespace normkit
