// 16-bit floats, usable in host and device code. Device code converts with one instruction and without cuda_fp16.h,
// which costs every compilation a third of a second; a source that names `__half` gets it through KBRL_FP16.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include <kbrl/check.h>
#ifdef KBRL_FP16
#include <cuda_fp16.h>
#endif
#ifdef KBRL_BF16
#include <cuda_bf16.h>
#endif

namespace c10 {
namespace detail {
template <class To, class From>
C10_HOST_DEVICE inline To bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

C10_HOST_DEVICE inline float half_to_float(uint16_t h) {
#ifdef __CUDA_ARCH__
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(h));
  return result;
#else
  const uint32_t sign = uint32_t(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
  if (exponent == 0x1fu) return bits<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return bits<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -magnitude : magnitude;
#endif
}

C10_HOST_DEVICE inline uint16_t float_to_half(float value) {
#ifdef __CUDA_ARCH__
  uint16_t result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
#else
  const uint32_t f = bits<uint32_t>(value), sign = (f >> 16) & 0x8000u, magnitude = f & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;      // NaN
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;     // rounds to infinity
  if (magnitude < 0x38800000u) {                           // subnormal: the sum aligns and rounds to even
    const float shifted = bits<float>(magnitude) + 0.5f;
    return sign | (bits<uint32_t>(shifted) - 0x3f000000u);
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | ((rounded - 0x38000000u) >> 13);
#endif
}

C10_HOST_DEVICE inline float bfloat_to_float(uint16_t b) {
  return bits<float>(uint32_t(b) << 16);
}

C10_HOST_DEVICE inline uint16_t float_to_bfloat(float value) {
  const uint32_t f = bits<uint32_t>(value);
  if ((f & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return static_cast<uint16_t>((f + 0x7fffu + ((f >> 16) & 1u)) >> 16);
}
}  // namespace detail

struct alignas(2) Half {
  unsigned short x;
  struct from_bits_t {};
  static constexpr C10_HOST_DEVICE from_bits_t from_bits() { return from_bits_t(); }
  Half() = default;
  constexpr C10_HOST_DEVICE Half(unsigned short bits, from_bits_t) : x(bits) {}
  C10_HOST_DEVICE Half(float value) : x(detail::float_to_half(value)) {}
  C10_HOST_DEVICE operator float() const { return detail::half_to_float(x); }
#ifdef KBRL_FP16
  C10_HOST_DEVICE Half(const __half& value) : x(detail::bits<unsigned short>(value)) {}
  C10_HOST_DEVICE operator __half() const { return detail::bits<__half>(x); }
#endif
};

struct alignas(2) BFloat16 {
  unsigned short x;
  struct from_bits_t {};
  static constexpr C10_HOST_DEVICE from_bits_t from_bits() { return from_bits_t(); }
  BFloat16() = default;
  constexpr C10_HOST_DEVICE BFloat16(unsigned short bits, from_bits_t) : x(bits) {}
  C10_HOST_DEVICE BFloat16(float value) : x(detail::float_to_bfloat(value)) {}
  C10_HOST_DEVICE operator float() const { return detail::bfloat_to_float(x); }
#ifdef KBRL_BF16
  C10_HOST_DEVICE BFloat16(const __nv_bfloat16& value) : x(detail::bits<unsigned short>(value)) {}
  explicit C10_HOST_DEVICE operator __nv_bfloat16() const { return detail::bits<__nv_bfloat16>(x); }
#endif
};

#define KBRL_BINARY(T, op)                                                                          \
  C10_HOST_DEVICE inline T operator op(const T& a, const T& b) {                                    \
    return T(static_cast<float>(a) op static_cast<float>(b));                                       \
  }                                                                                                 \
  C10_HOST_DEVICE inline T& operator op##=(T& a, const T& b) { return a = a op b; }                 \
  C10_HOST_DEVICE inline float operator op(T a, float b) { return static_cast<float>(a) op b; }     \
  C10_HOST_DEVICE inline float operator op(float a, T b) { return a op static_cast<float>(b); }     \
  C10_HOST_DEVICE inline float& operator op##=(float& a, const T& b) {                              \
    return a = a op static_cast<float>(b);                                                          \
  }                                                                                                 \
  C10_HOST_DEVICE inline double operator op(T a, double b) { return static_cast<float>(a) op b; }   \
  C10_HOST_DEVICE inline double operator op(double a, T b) { return a op static_cast<float>(b); }   \
  C10_HOST_DEVICE inline T operator op(T a, int b) { return a op static_cast<T>(b); }               \
  C10_HOST_DEVICE inline T operator op(int a, T b) { return static_cast<T>(a) op b; }               \
  C10_HOST_DEVICE inline T operator op(T a, int64_t b) { return a op static_cast<T>(b); }           \
  C10_HOST_DEVICE inline T operator op(int64_t a, T b) { return static_cast<T>(a) op b; }
#define KBRL_ARITHMETIC(T) \
  KBRL_BINARY(T, +)        \
  KBRL_BINARY(T, -)        \
  KBRL_BINARY(T, *)        \
  KBRL_BINARY(T, /)        \
  C10_HOST_DEVICE inline T operator-(const T& a) { return T(-static_cast<float>(a)); }
KBRL_ARITHMETIC(Half)
KBRL_ARITHMETIC(BFloat16)
#undef KBRL_ARITHMETIC
#undef KBRL_BINARY
C10_HOST_DEVICE inline bool operator<(BFloat16& a, BFloat16& b) { return float(a) < float(b); }
C10_HOST_DEVICE inline bool operator>(BFloat16& a, BFloat16& b) { return float(a) > float(b); }

#ifdef __CUDACC__
// Through the read-only cache, as those of plain types.
inline __device__ Half __ldg(const Half* place) {
  return Half(::__ldg(reinterpret_cast<const unsigned short*>(place)), Half::from_bits());
}
inline __device__ BFloat16 __ldg(const BFloat16* place) {
  return BFloat16(::__ldg(reinterpret_cast<const unsigned short*>(place)), BFloat16::from_bits());
}
#endif

KBRL_PRINTED(const Half&, static_cast<float>(value))
KBRL_PRINTED(const BFloat16&, static_cast<float>(value))
}  // namespace c10

namespace std {
template <>
class numeric_limits<c10::Half> {
 public:
  static constexpr bool is_specialized = true, is_signed = true, is_integer = false, is_exact = false;
  static constexpr bool has_infinity = true, has_quiet_NaN = true;
  static constexpr int digits = 11, radix = 2;
  static constexpr c10::Half min() { return c10::Half(0x0400, c10::Half::from_bits()); }
  static constexpr c10::Half lowest() { return c10::Half(0xFBFF, c10::Half::from_bits()); }
  static constexpr c10::Half max() { return c10::Half(0x7BFF, c10::Half::from_bits()); }
  static constexpr c10::Half epsilon() { return c10::Half(0x1400, c10::Half::from_bits()); }
  static constexpr c10::Half infinity() { return c10::Half(0x7C00, c10::Half::from_bits()); }
  static constexpr c10::Half quiet_NaN() { return c10::Half(0x7E00, c10::Half::from_bits()); }
};
template <>
class numeric_limits<c10::BFloat16> {
 public:
  static constexpr bool is_specialized = true, is_signed = true, is_integer = false, is_exact = false;
  static constexpr bool has_infinity = true, has_quiet_NaN = true;
  static constexpr int digits = 8, radix = 2;
  static constexpr c10::BFloat16 min() { return c10::BFloat16(0x0080, c10::BFloat16::from_bits()); }
  static constexpr c10::BFloat16 lowest() { return c10::BFloat16(0xFF7F, c10::BFloat16::from_bits()); }
  static constexpr c10::BFloat16 max() { return c10::BFloat16(0x7F7F, c10::BFloat16::from_bits()); }
  static constexpr c10::BFloat16 epsilon() { return c10::BFloat16(0x3C00, c10::BFloat16::from_bits()); }
  static constexpr c10::BFloat16 infinity() { return c10::BFloat16(0x7F80, c10::BFloat16::from_bits()); }
  static constexpr c10::BFloat16 quiet_NaN() { return c10::BFloat16(0x7FC0, c10::BFloat16::from_bits()); }
};
}  // namespace std
