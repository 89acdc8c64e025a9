// Smooth activations in float lanes: each value within a few units in the last place, each slope likewise.
//
// All go back to the exponential of a number that is not positive, which cannot overflow. Polynomials are minimax fits;
// what a fit leaves is below a tenth of a unit in the last place.
#pragma once

#include "lanes.h"

namespace normkit {
namespace NK_NAMESPACE {

template <class V> V polynomial(V, float constant) { return V::all(constant); }
template <class V, class... Rest> V polynomial(V x, float constant, Rest... rest) {
  return fma(x, polynomial(x, rest...), V::all(constant));
}

// e^x for x <= 0; zero from -86 on, before the result would be subnormal.
template <class V> V exp_of_negative(V x) {
  const V clamped = larger(V::all(-86.0f), x);
  const V t = fma(clamped, V::all(1.44269504f), V::all(V::kRound)), n = t - V::all(V::kRound);
  // log(2) in two parts, of which n times the first is exact.
  const V r = fma(n, V::all(2.12194440e-4f), fma(n, V::all(-0.693359375f), clamped));
  const V q = polynomial(r, 0.5f, 0.16666513681411743f, 0.0416661873459816f, 0.008369590155780315f,
                         0.0013951703440397978f);
  const V p = fma(r * r, q, r) + V::all(1);
  return where(below(x, V::all(-86.0f)), V::all(0), times_two_to(p, t));
}

// The logistic function of z and of -z: neither is a difference.
template <class V> struct Logistic {
  V of, of_minus;
  explicit Logistic(V z) {
    const V e = exp_of_negative(V::all(0) - magnitude(z)), large = V::all(1) / (V::all(1) + e), small = e * large;
    const auto negative = below(z, V::all(0));
    of = where(negative, small, large);
    of_minus = where(negative, large, small);
  }
};

// The standard normal distribution's cumulative probability and density at z.
template <class V> struct Normal {
  V probability, density;
  explicit Normal(V z) {
    const V a = magnitude(z);
    density = exp_of_negative(a * a * V::all(-0.5f)) * V::all(0.3989422804f);
    // The tail over the density is smooth: a polynomial of 1 / (1 + 0.27 a) gives it with a small relative error.
    const V u = V::all(1) / fma(a, V::all(0.27f), V::all(1));
    const V ratio = u * polynomial(u, 0.2700144648551941f, 0.2695890963077545f, 0.25507259368896484f,
                                   0.18107877671718597f, 0.2692122459411621f, -0.17200979590415955f,
                                   0.4243527352809906f, -0.3164760172367096f, 0.07248003780841827f);
    const V tail = density * ratio;
    probability = where(below(z, V::all(0)), tail, V::all(1) - tail);
  }
};

// (1 - e) / (1 + e) with e = exp(-2 |z|); about zero, where that cancels, a series.
template <class V> V hyperbolic_tangent(V z) {
  const V e = exp_of_negative(magnitude(z) * V::all(-2)), square = z * z;
  const V far = (V::all(1) - e) / (V::all(1) + e);
  const V series = polynomial(square, -0.3333328366279602f, 0.13331490755081177f, -0.05374349281191826f,
                              0.020650574937462807f, -0.005717032589018345f);
  const V near = fma(z * square, series, z);
  const V signed_far = where(below(z, V::all(0)), V::all(0) - far, far);
  return where(below(magnitude(z), V::all(0.625f)), near, signed_far);
}

template <class V> V smooth(Activation kind, V z) {
  V y = z;
  switch (kind) {
    case Activation::silu: y = z * Logistic<V>(z).of; break;
    case Activation::gelu: y = z * Normal<V>(z).probability; break;
    case Activation::sigmoid: y = Logistic<V>(z).of; break;
    default: y = hyperbolic_tangent(z); break;
  }
  return where(is_nan(z), z, y);
}

template <class V> V smooth_slope(Activation kind, V z) {
  V slope = z;
  switch (kind) {
    case Activation::silu: {
      const Logistic<V> s(z);
      slope = s.of * fma(z, s.of_minus, V::all(1));
      break;
    }
    case Activation::gelu: {
      const Normal<V> normal(z);
      slope = fma(z, normal.density, normal.probability);
      break;
    }
    case Activation::sigmoid: {
      const Logistic<V> s(z);
      slope = s.of * s.of_minus;
      break;
    }
    default: {
      const Logistic<V> s(z + z);  // tanh(z) = 2 s(2 z) - 1
      slope = V::all(4) * s.of * s.of_minus;
      break;
    }
  }
  return where(is_nan(z), z, slope);
}

}  // namespace NK_NAMESPACE
}  // namespace normkit
