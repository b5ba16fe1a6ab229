// Guards that choose a device or a stream for a scope.
#pragma once
#include <kbrl/cuda.h>

namespace c10 {
namespace cuda {
class CUDAGuard {
 public:
  explicit CUDAGuard(DeviceIndex index) : before_(current_device()) { set_index(index); }
  explicit CUDAGuard(Device device) : CUDAGuard(device.index()) {}
  CUDAGuard(const CUDAGuard&) = delete;
  CUDAGuard& operator=(const CUDAGuard&) = delete;
  ~CUDAGuard() { set_device(before_); }
  void set_device_(Device device) { set_index(device.index()); }
  void set_index(DeviceIndex index) {
    if (index >= 0) set_device(index);
  }

 private:
  DeviceIndex before_;
};
class OptionalCUDAGuard {
 public:
  OptionalCUDAGuard() = default;
  explicit OptionalCUDAGuard(std::optional<Device> device) {
    if (device) guard_.emplace(*device);
  }
  explicit OptionalCUDAGuard(std::optional<DeviceIndex> index) {
    if (index) guard_.emplace(*index);
  }
  OptionalCUDAGuard(const OptionalCUDAGuard&) = delete;
  OptionalCUDAGuard& operator=(const OptionalCUDAGuard&) = delete;

 private:
  std::optional<CUDAGuard> guard_;
};
class CUDAStreamGuard {
 public:
  explicit CUDAStreamGuard(CUDAStream stream)
      : guard_(stream.device_index()), before_(getCurrentCUDAStream(stream.device_index())) {
    setCurrentCUDAStream(stream);
  }
  CUDAStreamGuard(const CUDAStreamGuard&) = delete;
  CUDAStreamGuard& operator=(const CUDAStreamGuard&) = delete;
  ~CUDAStreamGuard() { setCurrentCUDAStream(before_); }

 private:
  CUDAGuard guard_;
  CUDAStream before_;
};
}  // namespace cuda
}  // namespace c10
