// The extension module normkit._core: what the C++ core offers to Python.
// Nothing here knows torch; arguments are checked at this door and nowhere behind it.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace {

// The best instruction set that this machine can run, by the names the loops are compiled for.
const char* instruction_set() {
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return "avx512";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
  return "baseline";
}

PyObject* py_instruction_set(PyObject*, PyObject*) {
  return PyUnicode_FromString(instruction_set());
}

PyMethodDef methods[] = {
    {"instruction_set", py_instruction_set, METH_NOARGS,
     "instruction_set() -> str: 'avx512', 'avx2' or 'baseline', whichever this machine runs best."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_core", "normkit's C++ core.", -1, methods,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__core() { return PyModule_Create(&module); }
