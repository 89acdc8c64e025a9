// What a kernel is asked to do: plain pointers and sizes, checked before they come here.
#pragma once

#include <cstdint>

namespace normkit {

enum class Type : int { f32 = 0, bf16 = 1, f16 = 2, f64 = 3 };
enum class Activation : int { none = 0, relu = 1, leaky_relu = 2, silu = 3, gelu = 4, sigmoid = 5, tanh = 6 };

constexpr double kLeakySlope = 0.01;
constexpr int64_t kStreamBytes = 4 * 1024 * 1024;  // from this size on, an output is not worth a place in cache

// Batch renormalization (Ioffe 2017): xhat * r + d takes the place of xhat. By statistic; null: 1 and 0.
struct Renorm {
  double *r, *d;
  const double *running_mean, *running_std;  // that a forward sets r and d from; null: they are given
  double r_max, d_max;
};

// Statistics of other values, that those of x are merged with: one of each per statistic. Null: none.
struct Merge {
  const double *mean, *var;
  double count;            // of other values in each
  double *own_mean, *own_var;  // where those of x alone are kept
};

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
  // Of lines (see lines.h), x may be room for the sum of two others, which a forward writes before it reads it. Null: x is
  // there.
  const void* addends[2];
  const void* residual;  // null: none
  void* y;               // output of a forward; a backward reads it where `residual` is set: see `beside`
  bool stays_near;       // forward: what reads the output next finds it in the cache, unless it is large
  // A byte for each example and position: whether it enters the statistics. Null: all do.
  const uint8_t* mask;
  uint8_t* odd_padding;  // set to one by a forward where the mask leaves out a value that is not finite

  // Parameters are double for f64, else float: one per group and channel. Of lines there may be several sets, one after
  // the other, for as many runs of populations.
  int64_t sets;
  const void* weight;  // null: ones
  const void* bias;    // null: zeros
  double* mean;        // one per population and group: written by a training forward, read by everything else
  double* var;
  Renorm renorm;
  Merge merge;  // forward

  const void* dy;
  const void* dx_beside;  // of lines: what dx is more than the gradient through the norm. Null: nothing
  void* dx;
  void* dresidual;  // null: not wanted
  void* dweight;    // null: not wanted
  void* dbias;

  // Sums of the gradient, and of its product with the normalized value: one per population, group and channel.
  double* sum_g;
  double* sum_gx;
  // Means of the same, times the weight, over everything that shares a statistic: one per population and group. Null: from
  // the sums.
  const double* mean_g;
  const double* mean_gx;
  bool stored;    // backward: the statistics were given, no gradient flows through them
  double others;  // backward: how many values beside those of x every statistic is made of
  bool inverted;  // backward: x holds the output, which the activation and the affine map are undone on

  int64_t all_channels() const { return groups * channels; }
  int64_t example_size() const { return all_channels() * positions; }
  int64_t group_size() const { return examples * channels * positions; }
  int64_t size() const { return populations * examples * example_size(); }
  // Values per statistic of a population.
  double counted(int64_t p) const {
    if (!mask) return double(group_size());
    int64_t found = 0;
    for (int64_t i = p * examples * positions; i < (p + 1) * examples * positions; ++i) found += mask[i] != 0;
    return double(found * channels);
  }
};

// A function of runs of values, with coefficients for each: see gate.h.
enum class GateKind : int { sigmoid = 0, largest = 1, cut_off = 2 };
// v or floor, weight, bias, deviation (of the group, the batch or the instance), deviation of the instance, and for a
// backward what is added to the gradient of every value, alone and times its distance from a mean, and that mean
constexpr int kGateCoefficients = 8;
// Of the gradient; times u; and what v or the floor and the deviations need.
constexpr int kGateSums = 5;

struct GateJob {
  Type type;
  GateKind kind;
  int64_t runs, length;
  const void *x, *dy;  // dy: only of a backward
  void* out;           // y, or dx
  double* sums;        // null: the output is wanted, not the sums of a backward
  const double* coefficients;
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
  void (*gate)(const GateJob&, ParallelFor);
  void (*copy)(const char* from, char* to, int64_t lines, ParallelFor);  // lines of 64 bytes: what memory alone takes
  // From (matrices, rows, columns) to (matrices, columns, rows).
  void (*turn_over)(const float* from, float* to, int64_t matrices, int64_t rows, int64_t columns, ParallelFor);
};

extern const Kernels kBaseline;
#if defined(NK_X86)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

}  // namespace normkit
