// What a kernel is asked to do: plain pointers and sizes, checked before they come here.
#pragma once

#include <cstdint>

namespace normkit {

enum class Type : int { f32 = 0, bf16 = 1, f16 = 2, f64 = 3 };
enum class Activation : int { none = 0, relu = 1, leaky_relu = 2 };

constexpr double kLeakySlope = 0.01;

// Two layouts cover everything: planes (n, c, s), and rows (n, c), where s is 1.
struct Job {
  Type type;
  Activation activation;
  bool rows;
  int64_t n, c, s;
  double eps;

  const void* x;
  const void* residual;  // null: none
  void* y;               // output of a forward; with a residual, read by the backward for its sign

  const double* weight;  // null: ones
  const double* bias;    // null: zeros
  double* mean;          // written by a training forward, read by everything else
  double* var;

  const void* dy;
  void* dx;
  void* dresidual;  // null: not wanted
  double* dweight;  // sum of g * xhat, per channel
  double* dbias;    // sum of g, per channel
};

// Calls body(begin, end, context) over [0, tasks), on torch's threads where they were found.
using Body = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = void (*)(int64_t tasks, Body body, void* context);

struct Kernels {
  const char* name;
  void (*moments)(const Job&, ParallelFor);
  void (*forward)(const Job&, ParallelFor);   // moments, then normalise
  void (*evaluate)(const Job&, ParallelFor);  // normalise with the moments given
  void (*backward)(const Job&, ParallelFor);
};

extern const Kernels kBaseline;
#if defined(NK_X86)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

}  // namespace normkit
