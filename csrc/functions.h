// Smooth activations in float lanes: values and slopes within a few units in the last place of the largest.
//
// Polynomials are minimax fits; what a fit leaves is below a tenth of a unit in the last place, in gelu's a third.
// Comparisons and choices take as long as multiplications, so that outputs, which an evaluation waits for, do without.
#pragma once

#include "lanes.h"

namespace normkit {
namespace NK_NAMESPACE {

template <class V> V polynomial(V, float constant) { return V::all(constant); }
template <class V, class... Rest> V polynomial(V x, float constant, Rest... rest) {
  return fma(x, polynomial(x, rest...), V::all(constant));
}

// -z, held between -most and most. A NaN stays one.
template <class V> V minus_within(float most, V z) {
  return larger(V::all(-most), V::all(0) - larger(V::all(-most), z));
}

// e^x for -87 <= x <= 87, where neither it nor its inverse is subnormal. Of a NaN anything.
constexpr float kFar = 87;
template <class V> V exp_within_range(V x) {
  const V t = fma(x, V::all(1.44269504f), V::all(V::kRound)), n = t - V::all(V::kRound);
  // log(2) in two parts, of which n times the first is exact.
  const V r = fma(n, V::all(2.12194440e-4f), fma(n, V::all(-0.693359375f), x));
  const V q = polynomial(r, 0.5f, 0.16666513681411743f, 0.0416661873459816f, 0.008369590155780315f,
                         0.0013951703440397978f);
  return times_two_to(fma(r * r, q, r) + V::all(1), t);
}

// The logistic function of z and of -z: neither is a difference.
template <class V> struct Logistic {
  V minus, of, of_minus;  // minus: -z, not too far from zero
  explicit Logistic(V z) : minus(minus_within(kFar, z)) {
    const V e = exp_within_range(minus);
    of = V::all(1) / (V::all(1) + e);
    of_minus = e * of;
  }
};

// As torch's, silu and gelu of minus infinity, and their slopes at infinities, are no numbers: zero times infinity.
template <class V> V silu(V z) {
  constexpr float least = 1.65e-38f;  // more than the logistic function of -87, so that nothing is left of it far below
  return z * larger(V::all(0), Logistic<V>(z).of - V::all(least));
}
template <class V> V silu_slope(V z) {
  const Logistic<V> s(z);
  return fma(V::all(0) - s.minus * s.of, s.of_minus, s.of) + (z - z);
}

// z times the standard normal distribution's probability, 1/2 + z p(z^2) / q(z^2). At the ends of the fit rounding makes
// that 0 and 1, with fused multiplications and without. As of torch's, the error is one of a probability's last place, not
// of the small values far below zero.
template <class V> V gelu(V z) {
  constexpr float end = 5.320003509521484f;
  const V minus = minus_within(end, z), square = minus * minus;
  const V p = polynomial(square, 0.3989420533180237f, 0.03571590036153793f, 0.004498140886425972f,
                         0.0001695498067419976f, 3.288765356046497e-06f, -2.2837809865450254e-08f,
                         1.1793198362308743e-10f);
  const V q = polynomial(square, 1.0f, 0.2561899423599243f, 0.028978999704122543f, 0.0018218490295112133f,
                         6.258014764171094e-05f);
  return z * (V::all(0.5f) - minus * (p / q));
}
template <class V> V gelu_slope(V z) {
  const V minus = minus_within(13.0f, z), a = magnitude(minus);
  const V density = exp_within_range(a * a * V::all(-0.5f)) * V::all(0.3989422804f);
  // The tail over the density is smooth: a polynomial of 1 / (1 + 0.27 a) gives it with a small relative error.
  const V u = V::all(1) / fma(a, V::all(0.27f), V::all(1));
  const V ratio = u * polynomial(u, 0.2700144648551941f, 0.2695890963077545f, 0.25507259368896484f,
                                 0.18107877671718597f, 0.2692122459411621f, -0.17200979590415955f,
                                 0.4243527352809906f, -0.3164760172367096f, 0.07248003780841827f);
  const V tail = density * ratio;
  const V probability = where(below(minus, V::all(0)), V::all(1) - tail, tail);
  return probability - minus * density + (z - z);
}

// (1 - e) / (1 + e) with e = exp(-2 z); about zero, where that cancels, a series.
template <class V> V hyperbolic_tangent(V z) {
  const V e = exp_within_range(minus_within(kFar, z + z)), square = z * z;
  const V far = (V::all(1) - e) / (V::all(1) + e);
  const V series = polynomial(square, -0.3333328366279602f, 0.13331490755081177f, -0.05374349281191826f,
                              0.020650574937462807f, -0.005717032589018345f);
  const V near = fma(z * square, series, z);
  return where(below(magnitude(z), V::all(0.625f)), near, far);
}

// Where z is a factor of the result, a NaN needs no care.
template <class V> V smooth(Activation kind, V z) {
  switch (kind) {
    case Activation::silu: return silu(z);
    case Activation::gelu: return gelu(z);
    case Activation::sigmoid: return where(is_nan(z), z, Logistic<V>(z).of);
    default: return where(is_nan(z), z, hyperbolic_tangent(z));
  }
}

template <class V> V smooth_slope(Activation kind, V z) {
  switch (kind) {
    case Activation::silu: return silu_slope(z);
    case Activation::gelu: return gelu_slope(z);
    case Activation::sigmoid: {
      const Logistic<V> s(z);
      return where(is_nan(z), z, s.of * s.of_minus);
    }
    default: {
      const Logistic<V> s(z + z);  // tanh(z) = 2 s(2 z) - 1
      return where(is_nan(z), z, V::all(4) * s.of * s.of_minus);
    }
  }
}

}  // namespace NK_NAMESPACE
}  // namespace normkit
