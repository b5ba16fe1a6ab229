// Atomic additions of all element types, by the same instructions as torch's: `gpuAtomicAdd`, and `atomicAdd` for those
// that CUDA has none for.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <kbrl/half.h>

#ifdef __CUDACC__
namespace kbrl {
// Of one or two bytes within a word, where there is no instruction for them. Returns what was there before.
template <class T>
__device__ inline T add_in_word(T* place, T value) {
  static_assert(sizeof(T) <= 2, "larger ones have an instruction");
  const size_t address = reinterpret_cast<size_t>(place);
  auto* word = reinterpret_cast<unsigned*>(address & ~size_t(3));
  const unsigned shift = 8 * (address & 3), mask = (sizeof(T) == 1 ? 0xffu : 0xffffu) << shift;
  unsigned seen = *word, before;
  T old;
  do {
    before = seen;
    const auto bits = static_cast<unsigned short>((before & mask) >> shift);
    memcpy(&old, &bits, sizeof(T));
    const T sum = static_cast<T>(old + value);
    unsigned short made = 0;
    memcpy(&made, &sum, sizeof(T));
    seen = atomicCAS(word, before, (before & ~mask) | (static_cast<unsigned>(made) << shift));
  } while (seen != before);
  return old;
}
}  // namespace kbrl

static inline __device__ at::Half atomicAdd(at::Half* place, at::Half value) {
  const __half old = atomicAdd(reinterpret_cast<__half*>(place), at::detail::bits<__half>(value.x));
  return at::Half(at::detail::bits<unsigned short>(old), at::Half::from_bits());
}
static inline __device__ at::BFloat16 atomicAdd(at::BFloat16* place, at::BFloat16 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return kbrl::add_in_word(place, value);
#else
  const __nv_bfloat16 old = atomicAdd(reinterpret_cast<__nv_bfloat16*>(place), at::detail::bits<__nv_bfloat16>(value.x));
  return at::BFloat16(at::detail::bits<unsigned short>(old), at::BFloat16::from_bits());
#endif
}
static inline __device__ void atomicAdd(uint8_t* place, uint8_t value) { kbrl::add_in_word(place, value); }
static inline __device__ void atomicAdd(int8_t* place, int8_t value) { kbrl::add_in_word(place, value); }
static inline __device__ void atomicAdd(int16_t* place, int16_t value) { kbrl::add_in_word(place, value); }
static inline __device__ void atomicAdd(int64_t* place, int64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(place), static_cast<unsigned long long>(value));
}

template <class T>
static inline __device__ auto gpuAtomicAdd(T* place, T value) -> decltype(atomicAdd(place, value)) {
  return atomicAdd(place, value);
}
template <class T>
static inline __device__ void gpuAtomicAddNoReturn(T* place, T value) {
  atomicAdd(place, value);
}
#endif
