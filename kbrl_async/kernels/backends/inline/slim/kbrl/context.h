// What <ATen/cuda/CUDAContext.h> adds to streams: device properties and the cuBLAS handle of this thread.
#pragma once
#include <kbrl/cuda.h>
#if defined(KBRL_CUBLAS)
#include <cublas_v2.h>
#endif

struct cublasContext;

namespace at {
namespace cuda {
cudaDeviceProp* getCurrentDeviceProperties();
cudaDeviceProp* getDeviceProperties(c10::DeviceIndex device);
int warp_size();
#ifdef KBRL_BLAS_SETUP
cublasContext* getCurrentCUDABlasHandle(bool setup = true);
#else
cublasContext* getCurrentCUDABlasHandle();
#endif
template <class T>
constexpr T ATenCeilDiv(T a, T b) {
  return (a + b - 1) / b;
}
}  // namespace cuda
}  // namespace at

#define AT_CUDA_CHECK(EXPR) C10_CUDA_CHECK(EXPR)
#define TORCH_CUDABLAS_CHECK(EXPR)                                                             \
  do {                                                                                         \
    const auto __err = EXPR;                                                                   \
    TORCH_CHECK(__err == 0, "CUDA error: cuBLAS status ", int(__err), " when calling `" #EXPR "`"); \
  } while (0)
