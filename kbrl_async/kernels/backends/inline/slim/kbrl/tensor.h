// at::Tensor: libtorch's one-pointer object, with the methods that this candidate names.
//
// Everything that computes is libtorch's own code: `kbrl_ops.h`, written beside the candidate, declares the operators
// (`at::_ops::…::call`), functions and methods that its text mentions, taken from the installed torch's own headers.
#pragma once
#include <kbrl/accessor.h>
#include <kbrl/options.h>

namespace at {
class Tensor;
class TensorBase;
}  // namespace at

extern "C" {
int32_t aoti_torch_get_sizes(const void* tensor, int64_t** result);
int32_t aoti_torch_get_strides(const void* tensor, int64_t** result);
int32_t aoti_torch_get_dim(const void* tensor, int64_t* result);
int32_t aoti_torch_get_numel(const void* tensor, int64_t* result);
int32_t aoti_torch_get_dtype(const void* tensor, int32_t* result);
int32_t aoti_torch_get_layout(const void* tensor, int32_t* result);
int32_t aoti_torch_get_device_type(const void* tensor, int32_t* result);
int32_t aoti_torch_get_device_index(const void* tensor, int32_t* result);
int32_t aoti_torch_get_storage_offset(const void* tensor, int64_t* result);
int32_t aoti_torch_get_data_ptr(const void* tensor, void** result);
int32_t aoti_torch_is_contiguous(const void* tensor, bool* result);
int32_t aoti_torch_new_tensor_handle(const void* tensor, void** result);
int32_t aoti_torch_delete_tensor_object(void* tensor);
}

namespace c10 {
struct TensorImpl {};
struct UndefinedTensorImpl final : TensorImpl {
  static constexpr TensorImpl* singleton() { return &_singleton; }

 private:
  static UndefinedTensorImpl _singleton;
};
// What at::Tensor is: one pointer, counted. libtorch itself counts, in whatever way this version of it does: it is asked
// for another handle, or to end one, and here is only taken out of the handle's box and put into one.
class TensorPointer {
 public:
  TensorPointer() = default;
  TensorPointer(const TensorPointer& other) {
    void* box = nullptr;
    if (!other) return;
    TORCH_CHECK(aoti_torch_new_tensor_handle(&other, &box) == 0, "libtorch could not hold this tensor once more");
    impl_ = *static_cast<TensorImpl**>(box);
    ::operator delete(box);
  }
  TensorPointer(TensorPointer&& other) noexcept : impl_(std::exchange(other.impl_, UndefinedTensorImpl::singleton())) {}
  TensorPointer& operator=(TensorPointer other) noexcept {
    std::swap(impl_, other.impl_);
    return *this;
  }
  ~TensorPointer() {
    if (!*this) return;
    auto** box = static_cast<TensorImpl**>(::operator new(sizeof(TensorImpl*)));
    *box = impl_;
    aoti_torch_delete_tensor_object(box);
  }
  explicit operator bool() const { return impl_ != UndefinedTensorImpl::singleton(); }
  bool operator==(const TensorPointer& other) const { return impl_ == other.impl_; }

 private:
  TensorImpl* impl_ = UndefinedTensorImpl::singleton();
};
enum class IListRefTag { Unboxed, Boxed, Materialized, None };
// A list of tensors as `cat` takes it.
template <class T>
class IListRef {
 public:
  IListRef(ArrayRef<T> list) : list_(list), tag_(IListRefTag::Unboxed) {}
  IListRef(const std::initializer_list<T>& list) : list_(ArrayRef<T>(list)), tag_(IListRefTag::Unboxed) {}
  IListRef(const std::vector<T>& list) : list_(ArrayRef<T>(list)), tag_(IListRefTag::Unboxed) {}

 private:
  union {
    const void* boxed_;
    ArrayRef<T> list_;
  };
  IListRefTag tag_;
};
}  // namespace c10

namespace at {
using TensorList = c10::ArrayRef<Tensor>;
using ITensorListRef = c10::IListRef<Tensor>;
using c10::IntArrayRef;
using OptionalIntArrayRef = c10::OptionalArrayRef<int64_t>;
struct Generator {  // only ever left out here: who has one is built with the full headers
  Generator() = delete;
  Generator(const Generator&) {}
  ~Generator() {}

 private:
  void* impl_ = nullptr;
};

class DeprecatedTypeProperties {  // what `type()` returns: of it, what needs no name of a backend
 public:
  DeprecatedTypeProperties(DeviceType device, ScalarType type) : device_(device), type_(type) {}
  DeviceType device_type() const { return device_; }
  bool is_cuda() const { return device_ == DeviceType::CUDA; }
  ScalarType scalarType() const { return type_; }
  caffe2::TypeMeta typeMeta() const { return type_; }

 private:
  DeviceType device_;
  ScalarType type_;
};

class TensorBase {
 public:
  TensorBase() = default;
  TensorBase(const TensorBase&) = default;
  TensorBase(TensorBase&&) noexcept = default;
  TensorBase& operator=(const TensorBase&) & = default;
  TensorBase& operator=(TensorBase&&) & noexcept = default;

  bool defined() const { return static_cast<bool>(impl_); }
  void reset() { impl_ = c10::TensorPointer(); }
  bool is_same(const TensorBase& other) const noexcept { return impl_ == other.impl_; }
  int64_t dim() const { return ask<int64_t>(aoti_torch_get_dim); }
  int64_t ndimension() const { return dim(); }
  int64_t numel() const { return ask<int64_t>(aoti_torch_get_numel); }
  int64_t storage_offset() const { return ask<int64_t>(aoti_torch_get_storage_offset); }
  IntArrayRef sizes() const { return IntArrayRef(ask<int64_t*>(aoti_torch_get_sizes), dim()); }
  IntArrayRef strides() const { return IntArrayRef(ask<int64_t*>(aoti_torch_get_strides), dim()); }
  int64_t size(int64_t which) const { return sizes()[wrap(which)]; }
  int64_t stride(int64_t which) const { return strides()[wrap(which)]; }
  bool is_contiguous() const { return ask<bool>(aoti_torch_is_contiguous); }
  ScalarType scalar_type() const { return static_cast<ScalarType>(ask<int32_t>(aoti_torch_get_dtype)); }
  caffe2::TypeMeta dtype() const { return scalar_type(); }
  size_t itemsize() const { return elementSize(scalar_type()); }
  int64_t element_size() const { return static_cast<int64_t>(itemsize()); }
  size_t nbytes() const { return numel() * itemsize(); }
  Layout layout() const { return static_cast<Layout>(ask<int32_t>(aoti_torch_get_layout)); }
  Device device() const {
    const auto type = static_cast<DeviceType>(ask<int32_t>(aoti_torch_get_device_type));
    return Device(type, static_cast<DeviceIndex>(ask<int32_t>(aoti_torch_get_device_index)));
  }
  DeviceIndex get_device() const { return device().index(); }
  bool is_cpu() const { return device().is_cpu(); }
  bool is_cuda() const { return device().is_cuda(); }
  bool is_floating_point() const { return isFloatingType(scalar_type()); }
  TensorOptions options() const { return TensorOptions().dtype(dtype()).device(device()).layout(layout()); }
#ifdef KBRL_STRING
  std::string toString() const;
#endif

  void* data_ptr() const { return ask<void*>(aoti_torch_get_data_ptr); }
  void* mutable_data_ptr() const { return data_ptr(); }
  const void* const_data_ptr() const { return data_ptr(); }
  // libtorch's own: they check the element type, and complain in its words.
  template <class T>
  T* data_ptr() const;
  template <class T>
  T* mutable_data_ptr() const;
  template <class T>
  const T* const_data_ptr() const;

  template <class T, size_t N>
  TensorAccessor<T, N> accessor() const& {
    TORCH_CHECK(dim() == N, "TensorAccessor expected ", N, " dims but tensor has ", dim());
    return TensorAccessor<T, N>(data_ptr<T>(), sizes().data(), strides().data());
  }
  template <class T, size_t N, template <class U> class PtrTraits = DefaultPtrTraits, class index_t = int64_t>
  GenericPackedTensorAccessor<T, N, PtrTraits, index_t> generic_packed_accessor() const& {
    TORCH_CHECK(dim() == N, "TensorAccessor expected ", N, " dims but tensor has ", dim());
    return GenericPackedTensorAccessor<T, N, PtrTraits, index_t>(data_ptr<T>(), sizes().data(), strides().data());
  }
  template <class T, size_t N, template <class U> class PtrTraits = DefaultPtrTraits>
  PackedTensorAccessor32<T, N, PtrTraits> packed_accessor32() const& {
    TORCH_CHECK(
        numel() <= static_cast<int64_t>(std::numeric_limits<int32_t>::max()),
        "numel needs to be smaller than int32_t max; otherwise, please use packed_accessor64");
    return generic_packed_accessor<T, N, PtrTraits, int32_t>();
  }
  template <class T, size_t N, template <class U> class PtrTraits = DefaultPtrTraits>
  PackedTensorAccessor64<T, N, PtrTraits> packed_accessor64() const& {
    return generic_packed_accessor<T, N, PtrTraits, int64_t>();
  }

 protected:
  TensorBase __dispatch_contiguous(c10::MemoryFormat) const;
  c10::TensorPointer impl_;

 private:
  template <class T>
  T ask(int32_t (*question)(const void*, T*)) const {
    T answer;
    TORCH_CHECK(question(this, &answer) == 0, "libtorch could not answer for this tensor");
    return answer;
  }
  int64_t wrap(int64_t which) const {
    const int64_t dims = dim();
    TORCH_CHECK(dims != 0, "Dimension specified as ", which, " but tensor has no dimensions");
    TORCH_CHECK_INDEX(
        -dims <= which && which < dims, "Dimension out of range (expected to be in range of [", -dims, ", ", dims - 1,
        "], but got ", which, ")");
    return which < 0 ? which + dims : which;
  }
};

namespace _ops {
#define KBRL_OPS 1
#include "kbrl_ops.h"
#undef KBRL_OPS
}  // namespace _ops

namespace indexing {
struct Place {  // an integer among indices; with slices, truths, tensors or none the full headers come
  template <class T, class = std::enable_if_t<std::is_same_v<T, int> || std::is_same_v<T, int64_t>>>
  Place(T place) : at(place) {}
  int64_t at;
};
}  // namespace indexing

class Tensor : public TensorBase {
 public:
  Tensor() = default;
  Tensor(const Tensor&) = default;
  Tensor(Tensor&&) noexcept = default;
  explicit Tensor(const TensorBase& base) : TensorBase(base) {}
  Tensor(TensorBase&& base) : TensorBase(std::move(base)) {}
  Tensor& operator=(const Tensor& other) & noexcept {
    impl_ = other.impl_;
    return *this;
  }
  Tensor& operator=(Tensor&& other) & noexcept {
    impl_ = std::move(other.impl_);
    return *this;
  }
  Tensor& operator=(const Scalar& value) && { return fill_(value); }
  Tensor& operator=(const Tensor& other) && { return copy_(other); }
  Tensor& operator=(Tensor&& other) && { return copy_(other); }

  Tensor contiguous(MemoryFormat format = MemoryFormat::Contiguous) const {
    if (format == MemoryFormat::Contiguous && is_contiguous()) return *this;
    return __dispatch_contiguous(format);
  }
  DeprecatedTypeProperties type() const { return {device().type(), scalar_type()}; }
  Tensor toType(ScalarType type) const { return to(options().dtype(type), false, false); }
  Tensor cpu() const { return to(options().device(DeviceType::CPU), false, false); }
  Tensor cuda() const { return to(options().device(DeviceType::CUDA), false, false); }
  template <class T>
  T item() const;
  template <class T>
  T* data() const {
    return data_ptr<T>();
  }

  Tensor operator-() const { return neg(); }
  Tensor& operator+=(const Tensor& other) { return add_(other); }
  Tensor& operator+=(const Scalar& other) { return add_(other); }
  Tensor& operator-=(const Tensor& other) { return sub_(other); }
  Tensor& operator-=(const Scalar& other) { return sub_(other); }
  Tensor& operator*=(const Tensor& other) { return mul_(other); }
  Tensor& operator*=(const Scalar& other) { return mul_(other); }
  Tensor& operator/=(const Tensor& other) { return div_(other); }
  Tensor& operator/=(const Scalar& other) { return div_(other); }
  Tensor operator[](int64_t index) const { return select(0, index); }
  Tensor index(std::initializer_list<indexing::Place> places) const {
    TORCH_CHECK_INDEX(places.size(), "Passing an empty index list to Tensor::index() is not valid syntax");
    Tensor found = *this;
    for (const auto& place : places) found = found.select(0, place.at);
    return found;
  }
#define KBRL_METHODS 1
#include "kbrl_ops.h"
#undef KBRL_METHODS
};
#define KBRL_BODIES 1
#include "kbrl_ops.h"
#undef KBRL_BODIES

#define KBRL_OPERATOR(op, body, reversed)                                         \
  inline Tensor operator op(const Tensor& x, const Tensor& y) { return body; }    \
  inline Tensor operator op(const Tensor& x, const Scalar& y) { return body; }    \
  inline Tensor operator op(const Scalar& x, const Tensor& y) { return reversed; }
KBRL_OPERATOR(+, x.add(y), y.add(x))
KBRL_OPERATOR(*, x.mul(y), y.mul(x))
KBRL_OPERATOR(-, x.sub(y), ::at::empty_like(y, {}, MemoryFormat::Preserve).fill_(x).sub_(y))
KBRL_OPERATOR(/, x.div(y), ::at::empty_like(y, {}, MemoryFormat::Preserve).fill_(x).div_(y))
KBRL_OPERATOR(<, x.lt(y), y.gt(x))
KBRL_OPERATOR(<=, x.le(y), y.ge(x))
KBRL_OPERATOR(>, x.gt(y), y.lt(x))
KBRL_OPERATOR(>=, x.ge(y), y.le(x))
KBRL_OPERATOR(==, x.eq(y), y.eq(x))
KBRL_OPERATOR(!=, x.ne(y), y.ne(x))
#undef KBRL_OPERATOR

#ifdef KBRL_STREAMS
std::ostream& print(std::ostream& stream, const Tensor& tensor, int64_t linesize);
inline std::ostream& operator<<(std::ostream& out, const Tensor& tensor) { return print(out, tensor, 80); }
#endif
inline std::optional<Device> device_of(const Tensor& tensor) {
  return tensor.defined() ? std::make_optional(tensor.device()) : std::nullopt;
}
}  // namespace at

namespace torch {
using namespace at;
using std::nullopt;
using std::optional;
using Dtype = at::ScalarType;
constexpr auto kUInt8 = at::kByte;
constexpr auto kInt8 = at::kChar;
constexpr auto kInt16 = at::kShort;
constexpr auto kInt32 = at::kInt;
constexpr auto kInt64 = at::kLong;
constexpr auto kFloat16 = at::kHalf;
constexpr auto kFloat32 = at::kFloat;
constexpr auto kFloat64 = at::kDouble;
}  // namespace torch
