// Streams and launch checks; the functions are libtorch's own (libc10_cuda, libtorch_cuda).
#pragma once
#include <cuda_runtime_api.h>
#include <kbrl/tensor.h>

namespace c10 {
namespace cuda {
class CUDAStream {
 public:
  enum Unchecked { UNCHECKED };
  explicit CUDAStream(Stream stream) : stream_(stream) {}
  operator cudaStream_t() const { return stream(); }
  operator Stream() const { return stream_; }
  Stream unwrap() const { return stream_; }
  DeviceIndex device_index() const { return stream_.device_index(); }
  Device device() const { return stream_.device(); }
  StreamId id() const { return stream_.id(); }
  bool query() const;
  void synchronize() const;
  cudaStream_t stream() const;
  bool operator==(const CUDAStream& other) const { return stream_.id() == other.stream_.id(); }
  bool operator!=(const CUDAStream& other) const { return !(*this == other); }

 private:
  Stream stream_;
};
CUDAStream getStreamFromPool(const bool isHighPriority = false, DeviceIndex device = -1);
CUDAStream getDefaultCUDAStream(DeviceIndex device_index = -1);
CUDAStream getCurrentCUDAStream(DeviceIndex device_index = -1);
void setCurrentCUDAStream(CUDAStream stream);
DeviceIndex current_device();
DeviceIndex device_count() noexcept;
void set_device(DeviceIndex device, bool force);
inline void set_device(DeviceIndex device) { set_device(device, false); }
void device_synchronize();
void c10_cuda_check_implementation(
    const int32_t err, const char* filename, const char* function_name, const uint32_t line, const bool assertions);

}  // namespace cuda
}  // namespace c10

#define C10_CUDA_CHECK(EXPR)                                                                                      \
  do {                                                                                                            \
    const cudaError_t __err = EXPR;                                                                               \
    c10::cuda::c10_cuda_check_implementation(                                                                     \
        static_cast<int32_t>(__err), __FILE__, __func__, static_cast<uint32_t>(__LINE__), true);                  \
  } while (0)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_CHECK(cudaGetLastError())
#define C10_CUDA_ERROR_HANDLED(EXPR) EXPR
