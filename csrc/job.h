// What a kernel is asked to do: plain pointers and sizes, checked before they come here.
#pragma once

#include <cstdint>

namespace normkit {

enum class Type : int { f32 = 0, bf16 = 1, f16 = 2 };
enum class Activation : int { none = 0, relu = 1, leaky_relu = 2 };

constexpr double kLeakySlope = 0.01;

// One shape covers the family. Values share statistics when they lie in the same population of examples and in the same
// group of channels: batch norm is one population and groups of one channel; layer, instance and group norm are
// populations of one example. Memory is (population, example, channel, position), or with channels_last
// (population, example, position, channel).
struct Job {
  Type type;
  Activation activation;
  bool channels_last;
  bool centred;  // else about zero: the mean is zero and the variance is the mean square
  int64_t populations, examples, groups, channels, positions;  // channels: of one group
  double eps;

  const void* x;
  const void* residual;  // null: none
  void* y;               // output of a forward; with a residual, read by the backward for its sign

  const float* weight;  // null: ones. One per group and channel, as is the bias
  const float* bias;    // null: zeros
  double* mean;         // one per population and group: written by a training forward, read by everything else
  double* var;

  const void* dy;
  void* dx;
  void* dresidual;  // null: not wanted
  float* dweight;   // null: not wanted. One per group and channel, as is dbias
  float* dbias;

  // Sums of the gradient, and of its product with the normalized value: one per population, group and channel.
  double* sum_g;
  double* sum_gx;
  double count;     // values per statistic; more than are here when ranks share a batch
  bool stored;      // backward: the statistics were given, no gradient flows through them
  bool inverted;    // backward: x holds the output, which the activation and the affine map are undone on

  int64_t all_channels() const { return groups * channels; }
  int64_t example_size() const { return all_channels() * positions; }
  int64_t group_size() const { return examples * channels * positions; }
  int64_t size() const { return populations * examples * example_size(); }
};

// Calls body(begin, end, context) over [0, tasks), on torch's threads where they were found.
using Body = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = void (*)(int64_t tasks, Body body, void* context);

struct Kernels {
  const char* name;
  void (*moments)(const Job&, ParallelFor);
  void (*forward)(const Job&, ParallelFor);         // moments, then normalize
  void (*evaluate)(const Job&, ParallelFor);        // normalize with the moments given
  void (*backward)(const Job&, ParallelFor);
  void (*backward_sums)(const Job&, ParallelFor);   // the first half of the backward of batch statistics, ...
  void (*backward_apply)(const Job&, ParallelFor);  // ... and the second
  void (*copy)(const char* from, char* to, int64_t lines, ParallelFor);  // lines of 64 bytes: what memory alone takes
};

extern const Kernels kBaseline;
#if defined(NK_X86)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

}  // namespace normkit
