// Running statistics that move along with a forward.
#pragma once

#include "job.h"

namespace normkit {

// stored <- (1 - momentum) * stored + momentum * batch, with the unbiased variance of the batch. No mean: no update.
struct Update {
  void *mean, *var;
  int64_t* batches;  // null: not counted
  bool wide;         // mean and var are double, not float
  double momentum;

  void operator()(const Job& job) const {
    if (!mean) return;
    if (wide) move<double>(job); else move<float>(job);
    if (batches) ++*batches;
  }

 private:
  template <class T> void move(const Job& job) const {
    const double bessel = job.count / (job.count - 1);
    for (int64_t c = 0; c < job.populations * job.groups; ++c) {
      towards(static_cast<T*>(mean)[c], job.mean[c]);
      towards(static_cast<T*>(var)[c], job.var[c] * bessel);
    }
  }
  template <class T> void towards(T& stored, double batch) const {
    stored = T((1 - momentum) * double(stored) + momentum * batch);
  }
};

}  // namespace normkit
