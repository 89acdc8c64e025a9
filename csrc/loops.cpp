// The loops, compiled once per instruction set. Nothing is checked here.
//
// Values are summed about a few of them, in an order that does not depend on the threads: results are the same from run
// to run and for any number of threads.

#include "gate.h"
#include "lines.h"
#include "planes.h"
#include "rows.h"
#include "turn.h"

namespace normkit {
namespace NK_NAMESPACE {
namespace {

constexpr int64_t kShortRun = 16;  // positions: shorter runs cost too much apart from their values

enum class Op { moments, forward, evaluate, backward, backward_sums, backward_apply };

template <Op op, class Layout> void call(const Layout& loops, ParallelFor parallel_for) {
  if constexpr (op != Op::moments && op != Op::forward) loops.statistics.ready();
  if constexpr (op == Op::moments) loops.moments(parallel_for);
  if constexpr (op == Op::forward) loops.forward(parallel_for);
  if constexpr (op == Op::evaluate) loops.evaluate(parallel_for);
  if constexpr (op == Op::backward) loops.backward(parallel_for);
  if constexpr (op == Op::backward_sums) loops.backward_sums(parallel_for);
  if constexpr (op == Op::backward_apply) loops.backward_apply(parallel_for);
}

template <Op op, class T> void by_layout(const Job& job, ParallelFor parallel_for) {
  const bool contiguous = !job.channels_last || job.positions == 1, short_runs = job.positions < kShortRun;
  // Lines neither share their sums nor recover their input, and their statistics are their own.
  const bool alone = !job.renorm.r && !job.merge.mean && job.others == 0;
  const bool whole = op != Op::backward_sums && op != Op::backward_apply && !job.inverted && !job.mask && alone;
  if (contiguous && short_runs && job.examples == 1 && whole) return call<op>(Lines<T>{job}, parallel_for);
  Job own = job;
  std::vector<double> sums;
  if (op == Op::backward) {  // both of its halves run here, and share nothing with other calls
    const int64_t n = job.populations * job.all_channels();
    sums.resize(2 * n);
    own.sum_g = sums.data();
    own.sum_gx = sums.data() + n;
  }
  // A mask has one value for a row of all channels; where a row is several positions of each, runs are shorter instead.
  const bool rows = job.channels_last || job.positions == 1 || (short_runs && !job.mask);
  if (rows) call<op>(Rows<T>{own}, parallel_for);
  else call<op>(Planes<T>{own}, parallel_for);
}

template <Op op> void by_type(const Job& job, ParallelFor parallel_for) {
  switch (job.type) {
    case Type::f32: return by_layout<op, float>(job, parallel_for);
    case Type::bf16: return by_layout<op, bf16>(job, parallel_for);
    case Type::f16: return by_layout<op, f16>(job, parallel_for);
    case Type::f64: return by_layout<op, double>(job, parallel_for);
  }
}

void gate(const GateJob& job, ParallelFor parallel_for) {
  switch (job.type) {
    case Type::bf16: return Gate<bf16>{job}(parallel_for);
    case Type::f16: return Gate<f16>{job}(parallel_for);
    default: return Gate<float>{job}(parallel_for);
  }
}

void copy(const char* from, char* to, int64_t lines, ParallelFor parallel_for) {
  constexpr int64_t size = 4096;
  run(parallel_for, ceil_div(lines, size), [&](int64_t task) {
    for (int64_t i = task * size; i < std::min(lines, (task + 1) * size); ++i) stream_line(from + i * 64, to + i * 64);
  });
}

}  // namespace
}  // namespace NK_NAMESPACE

extern const Kernels NK_TABLE;
const Kernels NK_TABLE{NK_NAME,
                       NK_NAMESPACE::by_type<NK_NAMESPACE::Op::moments>,
                       NK_NAMESPACE::by_type<NK_NAMESPACE::Op::forward>,
                       NK_NAMESPACE::by_type<NK_NAMESPACE::Op::evaluate>,
                       NK_NAMESPACE::by_type<NK_NAMESPACE::Op::backward>,
                       NK_NAMESPACE::by_type<NK_NAMESPACE::Op::backward_sums>,
                       NK_NAMESPACE::by_type<NK_NAMESPACE::Op::backward_apply>,
                       NK_NAMESPACE::gate,
                       NK_NAMESPACE::copy,
                       NK_NAMESPACE::turn_over};

}  // namespace normkit
