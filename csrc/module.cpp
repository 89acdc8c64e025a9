// The extension module normkit._core: what the C++ core offers to Python.
// Nothing here knows torch; arguments are checked at this door and nowhere behind it.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string>
#include <vector>

#include "job.h"

namespace {

using namespace normkit;

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

// Torch's own threads: the address of its torch_parallel_for, given by Python once torch is loaded.
using TorchParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);
TorchParallelFor torch_parallel_for = nullptr;

void on_this_thread(int64_t tasks, Body body, void* context) { body(0, tasks, context); }
void on_torchs_threads(int64_t tasks, Body body, void* context) {
  if (tasks == 1 || torch_parallel_for(0, tasks, 1, body, context) != 0) body(0, tasks, context);
}

ParallelFor threads_for(const Job& job) {
  constexpr int64_t worth_sharing = 32 * 1024;
  return torch_parallel_for && job.n * job.c * job.s > worth_sharing ? on_torchs_threads : on_this_thread;
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
  template <class T> T* pointer() { return reinterpret_cast<T*>(integer()); }
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
  Py_ssize_t count_, used_ = 0;
};

// Gamma and beta in double, whatever type they have; empty where there are none.
std::vector<double> parameters(const void* values, Type type, int64_t n) {
  std::vector<double> out;
  if (!values) return out;
  out.resize(n);
  if (type == Type::f64) for (int64_t i = 0; i < n; ++i) out[i] = static_cast<const double*>(values)[i];
  else for (int64_t i = 0; i < n; ++i) out[i] = static_cast<const float*>(values)[i];
  return out;
}

struct Call {
  Job job{};
  std::vector<double> weight, bias;

  // (type, activation, rows, n, c, s, eps, x, weight, bias, type of both, mean, var)
  explicit Call(Arguments& in) {
    job.type = Type(in.integer());
    job.activation = Activation(in.integer());
    job.rows = in.integer() != 0;
    job.n = in.integer();
    job.c = in.integer();
    job.s = in.integer();
    job.eps = in.real();
    job.x = in.pointer<void>();
    const void* w = in.pointer<void>();
    const void* b = in.pointer<void>();
    const Type parameter = Type(in.integer());
    job.mean = in.pointer<double>();
    job.var = in.pointer<double>();
    if (!in.ok()) return;
    if (job.n < 0 || job.c < 0 || job.s < 0 || (job.rows && job.s != 1) || !job.mean || !job.var) {
      PyErr_SetString(PyExc_ValueError, "sizes must not be negative, rows have s = 1, and statistics need memory");
      return;
    }
    if (int(job.type) < 0 || int(job.type) > 2 || int(job.activation) < 0 || int(job.activation) > 2 ||
        (parameter != Type::f32 && parameter != Type::f64)) {
      PyErr_SetString(PyExc_ValueError, "a type or activation that the core does not have");
      return;
    }
    weight = parameters(w, parameter, job.c);
    bias = parameters(b, parameter, job.c);
    job.weight = weight.empty() ? nullptr : weight.data();
    job.bias = bias.empty() ? nullptr : bias.data();
  }
};

PyObject* finish(Arguments& in, const Job& job, void (*kernel)(const Job&, ParallelFor)) {
  if (!in.done()) return nullptr;
  if (job.n * job.c * job.s > 0) {
    Py_BEGIN_ALLOW_THREADS
    kernel(job, threads_for(job));
    Py_END_ALLOW_THREADS
  }
  Py_RETURN_NONE;
}

PyObject* py_moments(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  Call call(in);
  return in.ok() ? finish(in, call.job, kernels->moments) : nullptr;
}

template <bool training> PyObject* py_forward(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  Call call(in);
  if (!in.ok()) return nullptr;
  call.job.residual = in.pointer<void>();
  call.job.y = in.pointer<void>();
  return finish(in, call.job, training ? kernels->forward : kernels->evaluate);
}

PyObject* py_backward(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  Call call(in);
  if (!in.ok()) return nullptr;
  call.job.y = in.pointer<void>();  // null: no residual
  call.job.residual = call.job.y;
  call.job.dy = in.pointer<void>();
  call.job.dx = in.pointer<void>();
  call.job.dresidual = in.pointer<void>();
  call.job.dweight = in.pointer<double>();
  call.job.dbias = in.pointer<double>();
  return finish(in, call.job, kernels->backward);
}

template <class T> void move(T* stored, const double* batch, int64_t c, double momentum, double factor) {
  for (int64_t i = 0; i < c; ++i) stored[i] = T((1 - momentum) * double(stored[i]) + momentum * (batch[i] * factor));
}

// (c, count, momentum, mean, var, running mean, running var, type of both, number of batches)
PyObject* py_update(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Arguments in(args, n);
  const int64_t c = in.integer();
  const double count = in.real(), momentum = in.real();
  const double* mean = in.pointer<double>();
  const double* var = in.pointer<double>();
  void* running_mean = in.pointer<void>();
  void* running_var = in.pointer<void>();
  const Type type = Type(in.integer());
  int64_t* batches = in.pointer<int64_t>();
  if (!in.done()) return nullptr;
  const double bessel = count / (count - 1);
  if (type == Type::f64) {
    move(static_cast<double*>(running_mean), mean, c, momentum, 1.0);
    move(static_cast<double*>(running_var), var, c, momentum, bessel);
  } else if (type == Type::f32) {
    move(static_cast<float*>(running_mean), mean, c, momentum, 1.0);
    move(static_cast<float*>(running_var), var, c, momentum, bessel);
  } else {
    PyErr_SetString(PyExc_ValueError, "running statistics must be float32 or float64");
    return nullptr;
  }
  if (batches) ++*batches;
  Py_RETURN_NONE;
}

PyObject* py_use_threads(PyObject*, PyObject* address) {
  void* pointer = PyLong_AsVoidPtr(address);
  if (PyErr_Occurred()) return nullptr;
  torch_parallel_for = reinterpret_cast<TorchParallelFor>(pointer);
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
    {"forward", reinterpret_cast<PyCFunction>(py_forward<true>), METH_FASTCALL, "Moments, and x normalised with them."},
    {"evaluate", reinterpret_cast<PyCFunction>(py_forward<false>), METH_FASTCALL, "x normalised with the moments given."},
    {"backward", reinterpret_cast<PyCFunction>(py_backward), METH_FASTCALL, "Gradients of a training forward."},
    {"update", reinterpret_cast<PyCFunction>(py_update), METH_FASTCALL, "Move running statistics towards a batch's."},
    {"use_threads", py_use_threads, METH_O, "Use torch's threads: the address of its torch_parallel_for."},
    {"instruction_set", py_instruction_set, METH_NOARGS, "The instruction set of the loops in use."},
    {"use_instruction_set", py_use_instruction_set, METH_O, "Use the loops for this one, for tests."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_core", "normkit's C++ core.", -1, methods,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__core() { return PyModule_Create(&module); }
