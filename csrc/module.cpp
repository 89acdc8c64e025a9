// The extension module normkit._core: what the C++ core offers to Python.
// Nothing here knows torch; arguments are checked here and not again in the loops.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#define NK_NAMESPACE door  // the loops have their own, one for each instruction set
#include "job.h"
#include "update.h"

namespace {

using namespace normkit;
using namespace normkit::NK_NAMESPACE;

// The best loops that this machine can run; chosen once, when the module is loaded.
const Kernels& choose() {
#if defined(NK_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return kAvx2;
#endif
  return kBaseline;
}

const Kernels* kernels = &choose();

// ---- threads: never our own, but those that torch runs on. Python finds the entries, once torch is loaded.

using TorchParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);
TorchParallelFor torch_parallel_for = nullptr;  // exported since torch 2.10

// Before that, the OpenMP runtime that torch is linked with, by the entries that compilers call: GCC's, which LLVM's
// runtime has too on Linux, or LLVM's own. How many threads there are is torch's to say: a runtime keeps a number for
// each calling thread, which torch sets only when it is asked.
struct OpenMP {
  struct Place {  // LLVM's ident_t: where in the source a loop is; flags 2: called as its own compiler calls
    int32_t reserved = 0, flags = 2, more[2] = {};
    const char* source = ";normkit;loops;0;0;;";
  };
  using Microtask = void (*)(int32_t* thread, int32_t* bound, void* share);

  int (*torch_threads)() = nullptr;        // at::get_num_threads
  bool (*in_parallel_region)() = nullptr;  // at::in_parallel_region
  int (*thread)() = nullptr;               // omp_get_thread_num
  int (*team_size)() = nullptr;            // omp_get_num_threads
  void (*gomp_parallel)(void (*work)(void*), void* share, unsigned threads, unsigned flags) = nullptr;
  void (*kmpc_fork)(Place*, int32_t arguments, Microtask, ...) = nullptr;
  int32_t (*kmpc_thread)(Place*) = nullptr;
  void (*kmpc_threads)(Place*, int32_t thread, int32_t threads) = nullptr;

  bool found() const { return gomp_parallel || kmpc_fork; }
} openmp;

void on_this_thread(int64_t tasks, Body body, void* context) { body(0, tasks, context); }

void on_torchs_threads(int64_t tasks, Body body, void* context) {
  if (tasks == 1 || torch_parallel_for(0, tasks, 1, body, context) != 0) body(0, tasks, context);
}

// One thread's part of a loop, in the order of the tasks. Nothing thrown may leave it: it is called by the runtime.
struct Share {
  int64_t tasks;
  Body body;
  void* context;
  std::atomic<bool> failed{false};

  static void work(void* share) noexcept {
    auto& [tasks, body, context, failed] = *static_cast<Share*>(share);
    const int64_t team = openmp.team_size(), each = (tasks + team - 1) / team, begin = openmp.thread() * each;
    try {
      if (begin < tasks) body(begin, std::min(tasks, begin + each), context);
    } catch (...) {
      failed = true;
    }
  }
};

void on_openmp_threads(int64_t tasks, Body body, void* context) {
  const bool alone = tasks == 1 || openmp.in_parallel_region();
  const int64_t threads = alone ? 1 : std::min<int64_t>(tasks, openmp.torch_threads());
  Share share{tasks, body, context};
  if (threads > 1 && openmp.gomp_parallel) {
    openmp.gomp_parallel(Share::work, &share, unsigned(threads), 0);
  } else if (threads > 1) {
    OpenMP::Place here;
    openmp.kmpc_threads(&here, openmp.kmpc_thread(&here), int32_t(threads));
    openmp.kmpc_fork(&here, 1, [](int32_t*, int32_t*, void* share) { Share::work(share); }, &share);
  }
  if (threads <= 1 || share.failed) body(0, tasks, context);  // what was thrown is thrown again, to the caller
}

ParallelFor shared() {
  if (torch_parallel_for) return on_torchs_threads;
  return openmp.found() ? on_openmp_threads : on_this_thread;
}

ParallelFor threads_for(int64_t values) {
  constexpr int64_t worth_sharing = 32 * 1024;
  return values > worth_sharing ? shared() : on_this_thread;
}

// The arguments of a call, one after the other; the first that does not fit ends it with a Python error.
class Arguments {
 public:
  Arguments(PyObject* const* values, Py_ssize_t count) : values_(values), count_(count) {}
  bool ok() const { return !PyErr_Occurred(); }
  int64_t integer() {
    PyObject* v = next();
    return v ? PyLong_AsLongLong(v) : 0;
  }
  double real() {
    PyObject* v = next();
    return v ? PyFloat_AsDouble(v) : 0;
  }
  void bytes(void* to, Py_ssize_t size) {
    PyObject* v = next();
    char* from = nullptr;
    Py_ssize_t found = 0;
    if (!v || PyBytes_AsStringAndSize(v, &from, &found) != 0) return;
    if (found == size) std::memcpy(to, from, size_t(size));
    else PyErr_Format(PyExc_ValueError, "a header has %zd bytes; got %zd", size, found);
  }
  template <class T> T* pointer() { return reinterpret_cast<T*>(integer()); }
  // Numbers, at an address or in a bytearray, whose size `fits` then checks.
  double* numbers() {
    PyObject* v = next();
    if (!v || !PyByteArray_Check(v)) return v ? reinterpret_cast<double*>(PyLong_AsLongLong(v)) : nullptr;
    room_ = PyByteArray_Size(v);
    return reinterpret_cast<double*>(PyByteArray_AsString(v));
  }
  bool fits(int64_t numbers) const { return room_ < 0 || room_ == numbers * Py_ssize_t(sizeof(double)); }
  bool done() {
    if (ok() && used_ != count_) PyErr_Format(PyExc_TypeError, "needs %zd arguments; got %zd", used_, count_);
    return ok();
  }

 private:
  PyObject* next() {
    if (used_ >= count_) {
      if (ok()) PyErr_Format(PyExc_TypeError, "needs more than %zd arguments", count_);
      return nullptr;
    }
    return values_[used_++];
  }
  PyObject* const* values_;
  Py_ssize_t count_, used_ = 0, room_ = -1;
};

// What every call of a kind of layer has in common, packed once by Python: ten integers and eps.
struct Header {
  int64_t type, activation, channels_last, centred, populations, examples, groups, channels, positions, sets;
  double eps;
};

// The arguments that every kernel begins with: (header, x, weight, bias, means and after them variances).
Job begin(Arguments& in) {
  Job job{};
  Header h{};
  in.bytes(&h, sizeof(h));
  job.x = in.pointer<void>();
  job.weight = in.pointer<void>();
  job.bias = in.pointer<void>();
  job.mean = in.numbers();
  if (!in.ok()) return job;
  for (int64_t size : {h.populations, h.examples, h.groups, h.channels, h.positions}) {
    if (size < 0) PyErr_SetString(PyExc_ValueError, "sizes must not be negative");
  }
  if (h.type < 0 || h.type > int(Type::f64) || h.activation < 0 || h.activation > int(Activation::tanh)) {
    PyErr_SetString(PyExc_ValueError, "a type or activation that the core does not have");
  }
  if (h.sets < 1 || h.populations % h.sets) {
    PyErr_SetString(PyExc_ValueError, "sets of parameters must be one, or as many as share the populations out evenly");
  }
  if (!job.mean || !in.fits(2 * h.populations * h.groups)) {
    PyErr_SetString(PyExc_ValueError, "statistics need memory: a double for each mean and each variance");
  }
  job.type = Type(h.type);
  job.activation = Activation(h.activation);
  job.channels_last = h.channels_last != 0;
  job.centred = h.centred != 0;
  job.populations = h.populations;
  job.examples = h.examples;
  job.groups = h.groups;
  job.channels = h.channels;
  job.positions = h.positions;
  job.sets = h.sets;
  job.eps = h.eps;
  job.var = job.mean + job.populations * job.groups;
  if (job.type == Type::f64 && job.activation >= Activation::silu) {
    PyErr_SetString(PyExc_ValueError, "the core has smooth activations in float lanes only");
  }
  return job;
}

// Whether a job is one of lines (see by_layout in loops.cpp), with a parameter for each of their values.
bool is_of_lines(const Job& job) {
  const bool alone = !job.renorm.r && !job.merge.mean && job.others == 0;
  return job.examples == 1 && job.positions == 1 && !job.mask && !job.inverted && alone && !job.sum_g && !job.mean_g;
}

// Runs a kernel that has all it needs; false with a Python error if it does not.
bool ran(Arguments& in, const Job& job, void (*kernel)(const Job&, ParallelFor),
         std::initializer_list<const void*> needed) {
  if (!in.done()) return false;
  if ((job.sets > 1 || job.addends[0] || job.dx_beside) && !is_of_lines(job)) {
    PyErr_SetString(PyExc_ValueError, "sums, and several sets of parameters, are for lines, one per example, without a mask");
    return false;
  }
  if (job.size() == 0) return true;
  for (const void* memory : needed) {
    if (memory) continue;
    PyErr_SetString(PyExc_ValueError, "a tensor has no memory: was its storage freed, or resized to nothing?");
    return false;
  }
  Py_BEGIN_ALLOW_THREADS
  kernel(job, threads_for(job.size()));
  Py_END_ALLOW_THREADS
  return true;
}
PyObject* finish(Arguments& in, const Job& job, void (*kernel)(const Job&, ParallelFor),
                 std::initializer_list<const void*> needed) {
  if (!ran(in, job, kernel, needed)) return nullptr;
  Py_RETURN_NONE;
}

Type type_from(Arguments& in) {
  const int64_t type = in.integer();
  if (in.ok() && (type < 0 || type > int(Type::f64))) PyErr_SetString(PyExc_ValueError, "a type that the core does not have");
  return Type(type);
}

PyObject* py_moments(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  Job job = begin(in);
  job.mask = in.pointer<uint8_t>();
  return finish(in, job, kernels->moments, {job.x});
}

// (mean, variance, number of batches, type of mean and variance, weight of the batch or -1 for a plain average, what to do
// with numbers that are not finite)
Update update_from(Arguments& in) {
  Update update{};
  update.mean = in.pointer<void>();
  update.var = in.pointer<void>();
  update.batches = in.pointer<int64_t>();
  update.type = type_from(in);
  update.momentum = in.real();
  update.non_finite = Update::NonFinite(in.integer());
  return update;
}

// What a forward returns: it is done; or a value outside of the mask is not finite, so that its output may be wrong; or
// the batch is not finite, which is an error. Only what is done moves running statistics.
enum Outcome : long { kDone = 0, kOddPadding = 1, kNonFinite = 2 };

// Whether what reads an output of some megabytes next finds it in the cache; else it is written faster past it. That
// depends on how much of the cache that cores share is left to this process, which a virtual machine does not tell: an
// evaluation is tried both ways, once, in some ten milliseconds.
bool finds_medium_outputs_near() {
  static const bool found = [] {
    std::vector<double> mean(64, 0.0), var(64, 1.0);
    Job job{};
    job.populations = job.channels = 1;
    job.examples = 8;
    job.groups = int64_t(mean.size());
    job.positions = 2 * kStreamBytes / int64_t(sizeof(float)) / job.examples / job.groups;
    std::vector<float> x(job.size(), 1.0f), y(job.size());
    job.x = x.data();
    job.y = y.data();
    job.mean = mean.data();
    job.var = var.data();
    using Clock = std::chrono::steady_clock;
    Clock::duration fastest[2] = {Clock::duration::max(), Clock::duration::max()};
    for (bool near : {false, true}) {  // not by turns: what is written past the cache is gone from it
      job.stays_near = near;
      for (int turn = 0; turn < 3; ++turn) {
        const auto start = Clock::now();
        kernels->evaluate(job, shared());
        fastest[near] = std::min(fastest[near], Clock::now() - start);
      }
    }
    return fastest[1] <= fastest[0];
  }();
  return found;
}
bool stays_near(const Job& job, bool no_backward) {
  const bool is_small = job.size() * int64_t(sizeof(double)) < kStreamBytes;
  return no_backward && (is_small || finds_medium_outputs_near());
}

// (..., residual, y, mask, an update, no_backward)
Update begin_forward(Arguments& in, Job& job) {
  job = begin(in);
  job.residual = in.pointer<void>();
  job.y = in.pointer<void>();
  job.mask = in.pointer<uint8_t>();
  const Update update = update_from(in);
  job.stays_near = stays_near(job, in.integer() != 0);
  return update;
}
PyObject* finish_forward(Arguments& in, Job& job, const Update& update) {
  uint8_t odd_padding = 0;
  job.odd_padding = &odd_padding;
  if (!ran(in, job, kernels->forward, {job.x, job.y})) return nullptr;
  if (odd_padding) return PyLong_FromLong(kOddPadding);
  return PyLong_FromLong(update(job) ? kDone : kNonFinite);
}

PyObject* py_forward(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  Job job;
  const Update update = begin_forward(in, job);
  return finish_forward(in, job, update);
}

template <class T> void append(std::vector<double>& to, const void* from, int64_t n) {
  for (const T *values = static_cast<const T*>(from), *end = values + n; values < end; ++values) {
    to.push_back(widen(*values));
  }
}
void append(std::vector<double>& to, const void* from, int64_t n, Type type) {
  switch (type) {
    case Type::bf16: return append<bf16>(to, from, n);
    case Type::f16: return append<f16>(to, from, n);
    case Type::f64: return append<double>(to, from, n);
    default: return append<float>(to, from, n);
  }
}

// (header, x, weight, bias, means, residual, y, variances, the type of those and of the means, no_backward)
PyObject* py_evaluate(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  Job job = begin(in);
  job.residual = in.pointer<void>();
  job.y = in.pointer<void>();
  const void* var = in.pointer<void>();
  const Type type = type_from(in);
  job.stays_near = stays_near(job, in.integer() != 0);
  std::vector<double> both;  // as the loops read them
  if (in.ok() && var) {
    const int64_t count = job.populations * job.groups;
    both.reserve(2 * count);
    for (const void* values : {static_cast<const void*>(job.mean), var}) append(both, values, count, type);
    job.mean = both.data();
    job.var = both.data() + count;
  }
  return finish(in, job, kernels->evaluate, {job.x, job.y, var});
}

// r for each statistic, and after them d; 0 for neither
Renorm correction_from(Arguments& in, const Job& job) {
  Renorm out{};
  out.r = in.pointer<double>();
  if (out.r) out.d = out.r + job.populations * job.groups;
  return out;
}

// (..., r and d, running means, running variances, their type, largest r, largest d); r and d are given where the running
// statistics are 0
PyObject* py_renormalize(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  Job job;
  const Update update = begin_forward(in, job);
  job.renorm = correction_from(in, job);
  const void *mean = in.pointer<void>(), *var = in.pointer<void>();
  const Type type = type_from(in);
  job.renorm.r_max = in.real();
  job.renorm.d_max = in.real();
  std::vector<double> running;  // means, and roots of variances
  if (in.ok() && mean && var) {
    append(running, mean, job.groups, type);
    append(running, var, job.groups, type);
    for (int64_t i = job.groups; i < 2 * job.groups; ++i) running[i] = std::sqrt(running[i] + job.eps);
    job.renorm.running_mean = running.data();
    job.renorm.running_std = running.data() + job.groups;
  }
  if (in.ok() && (!job.renorm.r || job.populations != 1 || job.channels != 1)) {
    PyErr_SetString(PyExc_ValueError, "r and d need memory, and statistics of a batch's channels");
  }
  return finish_forward(in, job, update);
}

// (..., other means and after them variances, how many values each is made of, room for those of x alone)
PyObject* py_merge(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  Job job;
  const Update update = begin_forward(in, job);
  const int64_t statistics = job.populations * job.groups;
  Merge& merge = job.merge;
  merge.mean = in.pointer<double>();
  merge.var = merge.mean + statistics;
  merge.count = in.real();
  merge.own_mean = in.pointer<double>();
  merge.own_var = merge.own_mean + statistics;
  if (in.ok() && (!merge.mean || !merge.own_mean || job.mask)) {
    PyErr_SetString(PyExc_ValueError, "statistics to merge need memory, and no mask");
  }
  return finish_forward(in, job, update);
}

// (..., one and another tensor, whose sum goes to x)
PyObject* py_forward_sum(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  Job job;
  const Update update = begin_forward(in, job);
  for (const void*& addend : job.addends) addend = in.pointer<void>();
  if (in.ok() && !(job.addends[0] && job.addends[1])) PyErr_SetString(PyExc_ValueError, "a sum needs two tensors");
  return finish_forward(in, job, update);
}

// What lies beside x with a residual (the output, if its sign is that of what entered the activation, else the residual),
// and dy.
Job begin_backward(Arguments& in) {
  Job job = begin(in);
  job.y = in.pointer<void>();
  job.residual = job.y;
  job.dy = in.pointer<void>();
  return job;
}

// (..., beside, dy, dx, dresidual, dweight, dbias, mask, stored, inverted, others, r and d)
Job whole_backward(Arguments& in) {
  Job job = begin_backward(in);
  job.dx = in.pointer<void>();
  job.dresidual = in.pointer<void>();
  job.dweight = in.pointer<void>();
  job.dbias = in.pointer<void>();
  job.mask = in.pointer<uint8_t>();
  job.stored = in.integer() != 0;
  job.inverted = in.integer() != 0;
  job.others = in.real();
  job.renorm = correction_from(in, job);
  return job;
}
PyObject* py_backward(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  const Job job = whole_backward(in);
  return finish(in, job, kernels->backward, {job.x, job.dy, job.dx});
}

// (..., what is added to dx)
PyObject* py_backward_sum(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  Job job = whole_backward(in);
  job.dx_beside = in.pointer<void>();
  return finish(in, job, kernels->backward, {job.x, job.dy, job.dx, job.dx_beside});
}

// (..., beside, dy, sum of gradients, sum of gradients times normalized values)
PyObject* py_backward_sums(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  Job job = begin_backward(in);
  job.sum_g = in.pointer<double>();
  job.sum_gx = in.pointer<double>();
  return finish(in, job, kernels->backward_sums, {job.x, job.dy, job.sum_g, job.sum_gx});
}

// (..., beside, dy, dx, dresidual, means of the gradient and of its product with normalized values, mask)
PyObject* py_backward_apply(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  Job job = begin_backward(in);
  job.dx = in.pointer<void>();
  job.dresidual = in.pointer<void>();
  job.mean_g = in.pointer<double>();
  job.mean_gx = in.pointer<double>();
  job.mask = in.pointer<uint8_t>();
  return finish(in, job, kernels->backward_apply, {job.x, job.dy, job.dx, job.mean_g, job.mean_gx});
}

// (type, kind, runs, values of a run, x, dy, output, sums, coefficients)
PyObject* py_gate(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  GateJob job{};
  const int64_t type = in.integer(), kind = in.integer();
  job.type = Type(type);
  job.kind = GateKind(kind);
  job.runs = in.integer();
  job.length = in.integer();
  job.x = in.pointer<void>();
  job.dy = in.pointer<void>();
  job.out = in.pointer<void>();
  job.sums = in.pointer<double>();
  job.coefficients = in.pointer<double>();
  if (!in.done()) return nullptr;
  if (type < 0 || type > int(Type::f16) || kind < 0 || kind > int(GateKind::cut_off) || job.runs < 1 || job.length < 1) {
    PyErr_SetString(PyExc_ValueError, "a type, kind or size that the core does not have");
    return nullptr;
  }
  if (!job.x || !job.coefficients || !(job.out || job.sums) || (job.sums && !job.dy)) {
    PyErr_SetString(PyExc_ValueError, "a tensor has no memory: was its storage freed, or resized to nothing?");
    return nullptr;
  }
  Py_BEGIN_ALLOW_THREADS
  kernels->gate(job, threads_for(job.runs * job.length));
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

// (from, to, bytes): whole lines, to aligned memory
PyObject* py_copy(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  const char* from = in.pointer<char>();
  char* to = in.pointer<char>();
  const int64_t bytes = in.integer();
  if (!in.done()) return nullptr;
  if (bytes < 0 || bytes % 64 || reinterpret_cast<uintptr_t>(to) % 64) {
    PyErr_SetString(PyExc_ValueError, "copies whole lines of 64 bytes to aligned memory");
    return nullptr;
  }
  Py_BEGIN_ALLOW_THREADS
  kernels->copy(from, to, bytes / 64, shared());
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

// (from, to, matrices, rows, columns): floats
PyObject* py_turn_over(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  const float* from = in.pointer<float>();
  float* to = in.pointer<float>();
  const int64_t matrices = in.integer(), rows = in.integer(), columns = in.integer();
  if (!in.done()) return nullptr;
  if (!from || !to || matrices < 0 || rows < 1 || columns < 1) {
    PyErr_SetString(PyExc_ValueError, "turning matrices over needs memory for both, and at least one row and one column");
    return nullptr;
  }
  Py_BEGIN_ALLOW_THREADS
  kernels->turn_over(from, to, matrices, rows, columns, threads_for(matrices * rows * columns));
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject* py_use_threads(PyObject*, PyObject* address) {
  void* pointer = PyLong_AsVoidPtr(address);
  if (PyErr_Occurred()) return nullptr;
  torch_parallel_for = reinterpret_cast<TorchParallelFor>(pointer);
  openmp = {};
  Py_RETURN_NONE;
}

template <class F> void take(F& entry, Arguments& in) { entry = reinterpret_cast<F>(in.pointer<void>()); }

// The entries of OpenMP, in their order; zero for those of the compiler, GCC or LLVM, whose way is not taken.
PyObject* py_use_openmp_threads(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  OpenMP given;
  take(given.torch_threads, in);
  take(given.in_parallel_region, in);
  take(given.thread, in);
  take(given.team_size, in);
  take(given.gomp_parallel, in);
  take(given.kmpc_fork, in);
  take(given.kmpc_thread, in);
  take(given.kmpc_threads, in);
  if (!in.done()) return nullptr;
  const bool common = given.torch_threads && given.in_parallel_region && given.thread && given.team_size;
  if (!common || !(given.gomp_parallel || (given.kmpc_fork && given.kmpc_thread && given.kmpc_threads))) {
    PyErr_SetString(PyExc_ValueError, "an entry of the OpenMP runtime is missing");
    return nullptr;
  }
  openmp = given;
  torch_parallel_for = nullptr;
  Py_RETURN_NONE;
}

PyObject* py_instruction_set(PyObject*, PyObject*) { return PyUnicode_FromString(kernels->name); }

PyObject* py_use_instruction_set(PyObject*, PyObject* name) {
  PyObject* bytes = PyUnicode_AsUTF8String(name);
  if (!bytes) return nullptr;
  const std::string wanted = PyBytes_AsString(bytes);
  Py_DECREF(bytes);
  const Kernels* best = &choose();
  std::vector<const Kernels*> runnable{&kBaseline};
#if defined(NK_X86)
  if (best != &kBaseline) runnable.push_back(&kAvx2);
  if (best == &kAvx512) runnable.push_back(&kAvx512);
#endif
  for (const Kernels* k : runnable) {
    if (wanted == k->name) { kernels = k; Py_RETURN_NONE; }
  }
  PyErr_Format(PyExc_ValueError, "this machine does not run %s", wanted.c_str());
  return nullptr;
}

PyMethodDef methods[] = {
    {"moments", reinterpret_cast<PyCFunction>(py_moments), METH_FASTCALL, "Mean and variance of each channel."},
    {"forward", reinterpret_cast<PyCFunction>(py_forward), METH_FASTCALL, "Moments, and x normalized with them."},
    {"renormalize", reinterpret_cast<PyCFunction>(py_renormalize), METH_FASTCALL, "A forward corrected by r and d."},
    {"merge", reinterpret_cast<PyCFunction>(py_merge), METH_FASTCALL, "A forward with other statistics merged in."},
    {"evaluate", reinterpret_cast<PyCFunction>(py_evaluate), METH_FASTCALL, "x normalized with the moments given."},
    {"backward", reinterpret_cast<PyCFunction>(py_backward), METH_FASTCALL, "Gradients of a forward or an evaluation."},
    {"forward_sum", reinterpret_cast<PyCFunction>(py_forward_sum), METH_FASTCALL, "A forward of the sum of two tensors."},
    {"backward_sum", reinterpret_cast<PyCFunction>(py_backward_sum), METH_FASTCALL, "Gradients, with the sum's own."},
    {"backward_sums", reinterpret_cast<PyCFunction>(py_backward_sums), METH_FASTCALL, "What ranks share of gradients."},
    {"backward_apply", reinterpret_cast<PyCFunction>(py_backward_apply), METH_FASTCALL, "A gradient from shared sums."},
    {"gate", reinterpret_cast<PyCFunction>(py_gate), METH_FASTCALL, "A function of each run, its gradient, or sums for it."},
    {"copy", reinterpret_cast<PyCFunction>(py_copy), METH_FASTCALL, "Copy past the cache: what memory alone takes."},
    {"turn_over", reinterpret_cast<PyCFunction>(py_turn_over), METH_FASTCALL, "Copy matrices, columns as rows."},
    {"use_threads", py_use_threads, METH_O, "Use torch's threads: the address of its torch_parallel_for; 0 for none."},
    {"use_openmp_threads", reinterpret_cast<PyCFunction>(py_use_openmp_threads), METH_FASTCALL,
     "Use the threads of an OpenMP runtime: the addresses of its entries."},
    {"instruction_set", py_instruction_set, METH_NOARGS, "The instruction set of the loops in use."},
    {"use_instruction_set", py_use_instruction_set, METH_O, "Use the loops for this one, for tests."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_core", "normkit's C++ core.", -1, methods,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__core() { return PyModule_Create(&module); }
