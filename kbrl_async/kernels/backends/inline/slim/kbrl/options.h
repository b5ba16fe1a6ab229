// Element types as `tensor.dtype()` gives them, and TensorOptions: how a new tensor is to be. Inline code alone.
#pragma once
#include <kbrl/types.h>

namespace caffe2 {
// What `tensor.dtype()` gives; compares with a ScalarType.
class TypeMeta {
 public:
  TypeMeta(c10::ScalarType type) : type_(type) {}
  c10::ScalarType toScalarType() const { return type_; }
  size_t itemsize() const;
#ifdef KBRL_STRING
  std::string_view name() const;
#endif
  friend bool operator==(const TypeMeta& a, const TypeMeta& b) { return a.type_ == b.type_; }
  friend bool operator!=(const TypeMeta& a, const TypeMeta& b) { return a.type_ != b.type_; }

 private:
  c10::ScalarType type_;
};
}  // namespace caffe2

extern "C" size_t aoti_torch_dtype_element_size(int32_t dtype);

namespace c10 {
using caffe2::TypeMeta;
inline size_t elementSize(ScalarType type) { return aoti_torch_dtype_element_size(static_cast<int32_t>(type)); }
inline ScalarType typeMetaToScalarType(caffe2::TypeMeta type) { return type.toScalarType(); }
inline std::optional<ScalarType> optTypeMetaToScalarType(std::optional<caffe2::TypeMeta> type) {
  return type ? std::make_optional(type->toScalarType()) : std::nullopt;
}

struct TensorOptions {
  TensorOptions() = default;
  TensorOptions(Layout layout) : layout_(layout) {}
  TensorOptions(Device device) : device_(device) {}
  TensorOptions(DeviceType type) : device_(Device(type)) {}
#ifdef KBRL_STRING
  TensorOptions(const std::string& device) : device_(Device(device)) {}
  TensorOptions(const char* device) : device_(Device(std::string(device))) {}
  TensorOptions device(const char* name) const { return device(Device(std::string(name))); }
#endif
  TensorOptions(caffe2::TypeMeta dtype) : dtype_(dtype) {}
  TensorOptions(ScalarType dtype) : dtype_(dtype) {}
  TensorOptions(MemoryFormat format) : format_(format) {}
  TensorOptions device(std::optional<Device> device) const {
    auto changed = *this;
    changed.device_ = device;
    return changed;
  }
  TensorOptions device(DeviceType type, DeviceIndex index = -1) const { return device(Device(type, index)); }
  TensorOptions device_index(DeviceIndex index) const { return device(kCUDA, index); }
  TensorOptions dtype(std::optional<caffe2::TypeMeta> dtype) const {
    auto changed = *this;
    changed.dtype_ = dtype;
    return changed;
  }
  TensorOptions dtype(std::optional<ScalarType> type) const {
    return dtype(type ? std::make_optional(caffe2::TypeMeta(*type)) : std::nullopt);
  }
  TensorOptions dtype(ScalarType type) const { return dtype(std::make_optional(caffe2::TypeMeta(type))); }
  TensorOptions dtype(caffe2::TypeMeta type) const { return dtype(std::make_optional(type)); }
  template <class T>
  TensorOptions dtype() const { return dtype(CppTypeToScalarType<T>::value); }
  TensorOptions layout(std::optional<Layout> layout) const {
    auto changed = *this;
    changed.layout_ = layout;
    return changed;
  }
  TensorOptions pinned_memory(std::optional<bool> pinned) const {
    auto changed = *this;
    changed.pinned_ = pinned;
    return changed;
  }
  TensorOptions memory_format(std::optional<MemoryFormat> format) const {
    auto changed = *this;
    changed.format_ = format;
    return changed;
  }
  // Only ever `false` here: a source that asks for anything else is built with the full headers.
  TensorOptions requires_grad(bool) const { return *this; }
  Device device() const { return device_.value_or(Device(kCPU)); }
  std::optional<Device> device_opt() const { return device_; }
  std::optional<caffe2::TypeMeta> dtype_opt() const { return dtype_; }
  std::optional<Layout> layout_opt() const { return layout_; }
  std::optional<bool> pinned_memory_opt() const { return pinned_; }
  std::optional<MemoryFormat> memory_format_opt() const { return format_; }
  std::optional<bool> requires_grad_opt() const { return std::nullopt; }
  bool has_device() const { return device_.has_value(); }
  bool has_dtype() const { return dtype_.has_value(); }

 private:
  std::optional<Device> device_;
  std::optional<caffe2::TypeMeta> dtype_;
  std::optional<Layout> layout_;
  std::optional<MemoryFormat> format_;
  std::optional<bool> pinned_;
};
inline TensorOptions dtype(ScalarType type) { return TensorOptions().dtype(type); }
inline TensorOptions dtype(caffe2::TypeMeta type) { return TensorOptions().dtype(type); }
inline TensorOptions device(Device device) { return TensorOptions().device(device); }
inline TensorOptions layout(Layout layout) { return TensorOptions().layout(layout); }
inline TensorOptions device_index(DeviceIndex index) { return TensorOptions().device_index(index); }

namespace impl {
inline std::optional<MemoryFormat> check_tensor_options_and_extract_memory_format(
    const TensorOptions& options, std::optional<MemoryFormat> format) {
  TORCH_CHECK(
      !(options.memory_format_opt() && format),
      "Cannot set memory_format both in TensorOptions and explicit argument; please delete the redundant setter.");
  return format ? format : options.memory_format_opt();
}
}  // namespace impl
}  // namespace c10

namespace caffe2 {
inline size_t TypeMeta::itemsize() const { return c10::elementSize(type_); }
inline const char* name_of(c10::ScalarType type) {
  switch (type) {
#define KBRL_NAME(type, label, value) \
  case c10::ScalarType::label:        \
    return #type;
    KBRL_SCALAR_TYPES(KBRL_NAME)
#undef KBRL_NAME
    default:
      return "complex";
  }
}
#ifdef KBRL_STRING
inline std::string_view TypeMeta::name() const { return name_of(type_); }
#endif
KBRL_PRINTED(TypeMeta, name_of(value.toScalarType()))
}  // namespace caffe2
