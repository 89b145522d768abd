// The two TF32 parts of an FP32 number, of which "3xtf32" multiplies a product as accurate as FP32:
// a * b = high(a) * high(b) + high(a) * low(b) + low(a) * high(b), and what is left out is at most
// 2^-22 of it. Host and device.
#pragma once

#include <cstdint>

#include "device/fast_divisor.hpp"  // TGEMM_HOST_DEVICE

namespace tgemm {

// Low parts are this many times as large as what they stand for, lest those of small numbers get
// lost among the denormals. Still no product with one is larger than half of the whole product.
inline constexpr float kLowPartScale = 1024.0f;

// High and low parts of this many k alternate in a line of a packed operand: as many as are 128
// bytes.
inline constexpr int kPartsK = 32;

// Bit patterns of FP32 numbers whose lower 13 bits are zero, as TF32 has them.
struct Tf32Parts {
  uint32_t high, low;
};

// Both parts are rounded to nearest, ties to even, unless that could make more than the largest
// FP32 number of them.
//
// The low part of an infinity is what it is, and the high part is 1 (of its sign). In the three
// products it then meets the high part of a finite number, once, which is its sign or zero, and
// never a low part, whose sign may be another: the sum is as IEEE 754 has it. (But for numbers
// below 2^-136, which TF32 does not have: they count as zero.)
TGEMM_HOST_DEVICE inline Tf32Parts tf32_parts(float value) {
  constexpr uint32_t kTf32 = 0xFFFFE000u, kSign = 0x80000000u, kInfinity = 0x7F800000u,
                     kRoundsToInfinity = 0x7F7FF000u, kLastBinade = 0x7F000000u, kOne = 0x3F800000u,
                     kNan = 0x7FC00000u;
  union Bits {
    float value;
    uint32_t bits;
  };
  const auto rounded = [](uint32_t bits) { return (bits + 0xFFFu + (bits >> 13 & 1u)) & kTf32; };
  const uint32_t bits = Bits{.value = value}.bits;
  const uint32_t magnitude = bits & ~kSign;
  const uint32_t high = magnitude >= kRoundsToInfinity ? bits & kTf32 : rounded(bits);
  const float rest = (value - Bits{.bits = high}.value) * kLowPartScale;  // both exact
  const uint32_t rest_bits = Bits{.value = rest}.bits;
  const uint32_t low = magnitude >= kLastBinade ? rest_bits & kTf32 : rounded(rest_bits);
  const bool nan = magnitude > kInfinity, infinite = magnitude == kInfinity;
  return {nan ? kNan : infinite ? (bits & kSign) | kOne : high, nan ? kNan : infinite ? bits : low};
}

}  // namespace tgemm
