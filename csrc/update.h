// Running statistics that move along with a forward.
#pragma once

#include <cmath>
#include <vector>

#include "half.h"
#include "job.h"

namespace normkit {
namespace NK_NAMESPACE {

// stored <- (1 - momentum) * stored + momentum * batch, with the unbiased variance of the batch; of several populations
// one after the other, each as a batch of its own. In batch renormalization the root of var + eps is what is averaged.
// No mean: no update.
struct Update {
  enum class NonFinite : int { propagate = 0, raise = 1, skip = 2 };

  void *mean, *var;
  int64_t* batches;  // null: not counted
  Type type;         // of mean and var
  double momentum;   // negative: that of a plain average over all batches
  NonFinite non_finite;

  // Returns whether it was done: not if statistics that are not finite are to be raised for.
  bool operator()(const Job& job) const {
    if (!mean) return true;
    switch (type) {
      case Type::bf16: return move<bf16>(job);
      case Type::f16: return move<f16>(job);
      case Type::f64: return move<double>(job);
      default: return move<float>(job);
    }
  }

 private:
  template <class T> bool move(const Job& job) const {
    const int64_t n = job.groups;
    T *means = static_cast<T*>(mean), *vars = static_cast<T*>(var);
    if (non_finite == NonFinite::raise && !(are_finite(job.mean, job.populations * n) &&
                                            are_finite(job.var, job.populations * n))) {
      return false;
    }
    std::vector<T> new_means(n), new_vars(n);
    for (int64_t p = 0; p < job.populations; ++p) {
      const double count = job.counted(p), bessel = count / (count - 1);
      const double share = momentum < 0 ? 1.0 / double((batches ? *batches : 0) + 1) : momentum;
      for (int64_t c = 0; c < n; ++c) {
        narrow((1 - share) * widen(means[c]) + share * job.mean[p * n + c], new_means[c]);
        narrow(job.renorm.r ? averaged_by_root(widen(vars[c]), job.var[p * n + c], share, job.eps)
                            : (1 - share) * widen(vars[c]) + share * job.var[p * n + c] * bessel, new_vars[c]);
      }
      if (non_finite == NonFinite::skip && !(are_finite(new_means.data(), n) && are_finite(new_vars.data(), n))) continue;
      std::copy(new_means.begin(), new_means.end(), means);
      std::copy(new_vars.begin(), new_vars.end(), vars);
      if (batches) ++*batches;
    }
    return true;
  }
  static double averaged_by_root(double stored, double batch, double share, double eps) {
    const double root = (1 - share) * std::sqrt(stored + eps) + share * std::sqrt(batch + eps);
    return root * root - eps;
  }
  template <class T> static bool are_finite(const T* values, int64_t n) {
    for (int64_t i = 0; i < n; ++i) if (!std::isfinite(widen(values[i]))) return false;
    return true;
  }
};

}  // namespace NK_NAMESPACE
}  // namespace normkit
