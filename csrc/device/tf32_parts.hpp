// The two TF32 parts of an FP32 number, of which "3xtf32" multiplies a product as accurate as FP32:
// a * b = high(a) * high(b) + high(a) * low(b) + low(a) * high(b), and what is left out is below
// 2^-20 of it. Host and device.
#pragma once

#include <cstdint>

#include "device/fast_divisor.hpp"  // TGEMM_HOST_DEVICE

namespace tgemm {

// Low parts are this many times as large as what they stand for, lest those of small numbers get
// lost among the denormals. A larger scale could make products of low parts overflow where the
// whole product does not.
inline constexpr float kLowPartScale = 512.0f;

// High and low parts of this many k alternate in a line of a packed operand: as many as are 128
// bytes.
inline constexpr int kPartsK = 32;

// Bit patterns of FP32 numbers whose lower 13 bits are zero, as TF32 has them.
struct Tf32Parts {
  uint32_t high, low;
};

// The high part is truncated, so that it never overflows, and both have the sign of the number: if
// one product overflows, the others go the same way. The low part is rounded to nearest, ties to
// even.
//
// The low part of an infinity or NaN is what it is, and the high part is 1 (of its sign). In the
// three products it then meets the high part of a finite number once, which is its sign or zero,
// and never a low part, which may be zero where the number is not: all is as IEEE 754 has it. (But
// for numbers below 2^-136, less than any in TF32: they count as zero.)
TGEMM_HOST_DEVICE inline Tf32Parts tf32_parts(float value) {
  constexpr uint32_t kTf32 = 0xFFFFE000u, kSign = 0x80000000u, kInfinity = 0x7F800000u,
                     kLastBinade = 0x7F000000u, kOne = 0x3F800000u;
  union Bits {
    float value;
    uint32_t bits;
  };
  const uint32_t bits = Bits{.value = value}.bits;
  const uint32_t magnitude = bits & ~kSign;
  if (magnitude >= kInfinity) {
    // A NaN may have no bits that TF32 keeps.
    const uint32_t quiet = magnitude > kInfinity ? 0x00400000u : 0u;
    return {(bits & kSign) | kOne, (bits & kTf32) | quiet};
  }
  const uint32_t high = bits & kTf32;
  const float rest = (value - Bits{.bits = high}.value) * kLowPartScale;  // both exact
  const uint32_t rest_bits = Bits{.value = rest}.bits;
  // Rounded up, the largest numbers would become infinite.
  const uint32_t round = magnitude >= kLastBinade ? 0u : 0xFFFu + (rest_bits >> 13 & 1u);
  return {high, (rest_bits + round) & kTf32};
}

}  // namespace tgemm
