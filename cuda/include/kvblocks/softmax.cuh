// Online softmax in float32: running maximum, sum of weights, and their rescaling.
//
// Owns the constants and the functions that treat logits of -infinity alike. Includes device_compat.cuh only.
// Invariant: a weight is exp(logit - base), where base is the running maximum, or 0 while that is -infinity;
// so nothing ever subtracts -infinity from itself, and what has no weight gives 0 and a log-sum-exp of
// -infinity.
#pragma once

#include "device_compat.cuh"

namespace kvb {

constexpr float minus_infinity = __builtin_bit_cast(float, 0xFF800000u);
constexpr float log2_e = 1.4426950408889634f;

KVB_DEVICE float base_of(float highest) {
    return highest == minus_infinity ? 0.0f : highest;
}

// exp(x - base)
KVB_DEVICE float weight_of(float x, float base) {
    return exp2_approx((x - base) * log2_e);
}

// log of a sum of weights against a base; -infinity for an empty sum.
KVB_DEVICE float log_sum(float base, float sum) {
    return sum == 0.0f ? minus_infinity : base + log_f32(sum);
}

} // namespace kvb
