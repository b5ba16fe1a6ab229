// The small value types of c10 and ATen: same names, same size, same calling convention as in libtorch.
//
// What crosses into libtorch keeps its layout: ScalarType, Device, Layout, MemoryFormat, ArrayRef, SymInt, Scalar, Stream.
#pragma once
#include <array>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef KBRL_STRING
#include <string>
#endif
#if defined(KBRL_STRING) || defined(KBRL_VIEW)
#include <string_view>
#endif

#include <kbrl/check.h>
#include <kbrl/half.h>

#define KBRL_SCALAR_TYPES(_)      \
  _(uint8_t, Byte, 0)             \
  _(int8_t, Char, 1)              \
  _(int16_t, Short, 2)            \
  _(int, Int, 3)                  \
  _(int64_t, Long, 4)             \
  _(c10::Half, Half, 5)           \
  _(float, Float, 6)              \
  _(double, Double, 7)            \
  _(bool, Bool, 11)               \
  _(c10::BFloat16, BFloat16, 15)  \
  _(uint16_t, UInt16, 27)         \
  _(uint32_t, UInt32, 28)         \
  _(uint64_t, UInt64, 29)

namespace c10 {
using DeviceIndex = int8_t;
using StreamId = int64_t;
#if defined(KBRL_STRING) || defined(KBRL_VIEW)
using string_view = std::string_view;
#endif
using std::make_optional;
using std::nullopt;
using std::nullopt_t;
using std::optional;

enum class ScalarType : int8_t {
#define KBRL_ENUM(_, name, value) name = value,
  KBRL_SCALAR_TYPES(KBRL_ENUM)
#undef KBRL_ENUM
  ComplexHalf = 8,
  ComplexFloat = 9,
  ComplexDouble = 10,
  Float8_e5m2 = 23,
  Float8_e4m3fn = 24,
};
#define KBRL_CONSTANT(_, name, value) constexpr ScalarType k##name = ScalarType::name;
KBRL_SCALAR_TYPES(KBRL_CONSTANT)
#undef KBRL_CONSTANT

inline const char* toString(ScalarType type) {
  switch (type) {
#define KBRL_NAME(_, name, value) \
  case ScalarType::name:          \
    return #name;
    KBRL_SCALAR_TYPES(KBRL_NAME)
#undef KBRL_NAME
    case ScalarType::ComplexHalf:
      return "ComplexHalf";
    case ScalarType::ComplexFloat:
      return "ComplexFloat";
    case ScalarType::ComplexDouble:
      return "ComplexDouble";
    case ScalarType::Float8_e5m2:
      return "Float8_e5m2";
    case ScalarType::Float8_e4m3fn:
      return "Float8_e4m3fn";
    default:
      return "UNKNOWN_SCALAR";
  }
}
KBRL_PRINTED(ScalarType, toString(value))
inline bool isIntegralType(ScalarType type, bool includeBool) {
  return type <= ScalarType::Long || (type >= ScalarType::UInt16 && type <= ScalarType::UInt64) ||
      (includeBool && type == ScalarType::Bool);
}
inline bool isFloatingType(ScalarType type) {
  return type == kHalf || type == kFloat || type == kDouble || type == kBFloat16 || type == ScalarType::Float8_e5m2 ||
      type == ScalarType::Float8_e4m3fn;
}
template <class T>
struct CppTypeToScalarType;
#define KBRL_TRAIT(type, name, number)                             \
  template <>                                                      \
  struct CppTypeToScalarType<type> {                               \
    static constexpr ScalarType value = ScalarType::name;          \
  };
KBRL_SCALAR_TYPES(KBRL_TRAIT)
#undef KBRL_TRAIT
namespace impl {
template <ScalarType N>
struct ScalarTypeToCPPType;
#define KBRL_TRAIT(ctype, name, number)      \
  template <>                                \
  struct ScalarTypeToCPPType<ScalarType::name> { \
    using type = ctype;                      \
  };
KBRL_SCALAR_TYPES(KBRL_TRAIT)
#undef KBRL_TRAIT
template <ScalarType N>
using ScalarTypeToCPPTypeT = typename ScalarTypeToCPPType<N>::type;
}  // namespace impl

enum class DeviceType : int8_t { CPU = 0, CUDA = 1, Meta = 14 };
constexpr DeviceType kCPU = DeviceType::CPU;
constexpr DeviceType kCUDA = DeviceType::CUDA;
#ifdef KBRL_STREAMS
std::ostream& operator<<(std::ostream& stream, DeviceType type);
#else
inline kbrl::Text& operator<<(kbrl::Text& out, DeviceType type) {
  return out << (type == kCPU ? "cpu" : type == kCUDA ? "cuda" : "meta");
}
#endif

struct Device final {
  using Type = DeviceType;
  Device(DeviceType type, DeviceIndex index = -1) : type_(type), index_(index) {}
#ifdef KBRL_STRING
  Device(const std::string& device_string);
  std::string str() const;
#endif
  bool operator==(const Device& other) const noexcept { return type_ == other.type_ && index_ == other.index_; }
  bool operator!=(const Device& other) const noexcept { return !(*this == other); }
  DeviceType type() const noexcept { return type_; }
  DeviceIndex index() const noexcept { return index_; }
  bool has_index() const noexcept { return index_ != -1; }
  bool is_cuda() const noexcept { return type_ == DeviceType::CUDA; }
  bool is_cpu() const noexcept { return type_ == DeviceType::CPU; }

 private:
  DeviceType type_;
  DeviceIndex index_;
};
#ifdef KBRL_STREAMS
std::ostream& operator<<(std::ostream& stream, const Device& device);
#else
inline kbrl::Text& operator<<(kbrl::Text& out, const Device& device) {
  out << device.type();
  return device.has_index() ? out << ':' << static_cast<int>(device.index()) : out;
}
#endif

enum class Layout : int8_t { Strided, Sparse };
constexpr Layout kStrided = Layout::Strided;
enum class MemoryFormat : int8_t { Contiguous, Preserve, ChannelsLast, ChannelsLast3d };

class Stream final {
 public:
  enum Unsafe { UNSAFE };
  Stream(Unsafe, Device device, StreamId id) : device_(device), id_(id) {}
  Device device() const noexcept { return device_; }
  DeviceType device_type() const noexcept { return device_.type(); }
  DeviceIndex device_index() const noexcept { return device_.index(); }
  StreamId id() const noexcept { return id_; }

 private:
  Device device_;
  StreamId id_;
};

template <class T>
class ArrayRef {
 public:
  using value_type = T;
  using iterator = const T*;
  using const_iterator = const T*;
  constexpr ArrayRef() = default;
  constexpr ArrayRef(const T& one) : data_(&one), size_(1) {}
  constexpr ArrayRef(const T* data, size_t size) : data_(data), size_(size) {}
  constexpr ArrayRef(const T* begin, const T* end) : data_(begin), size_(end - begin) {}
  template <class A>
  ArrayRef(const std::vector<T, A>& vector) : data_(vector.data()), size_(vector.size()) {
    static_assert(!std::is_same_v<T, bool>, "ArrayRef<bool> cannot be made from std::vector<bool>");
  }
  template <size_t N>
  constexpr ArrayRef(const std::array<T, N>& array) : data_(array.data()), size_(N) {}
  template <size_t N>
  constexpr ArrayRef(const T (&array)[N]) : data_(array), size_(N) {}
  constexpr ArrayRef(const std::initializer_list<T>& list)
      : data_(list.begin() == list.end() ? nullptr : list.begin()), size_(list.size()) {}
  constexpr iterator begin() const { return data_; }
  constexpr iterator end() const { return data_ + size_; }
  constexpr bool empty() const { return size_ == 0; }
  constexpr const T* data() const { return data_; }
  constexpr size_t size() const { return size_; }
  const T& front() const { return at(0); }
  const T& back() const { return at(size_ - 1); }
  constexpr const T& operator[](size_t index) const { return data_[index]; }
  const T& at(size_t index) const {
    TORCH_CHECK(index < size_, "ArrayRef: invalid index Index = ", index, "; Length = ", size_);
    return data_[index];
  }
  bool equals(ArrayRef other) const {
    if (size_ != other.size_) return false;
    for (size_t i = 0; i < size_; i++) {
      if (!(data_[i] == other.data_[i])) return false;
    }
    return true;
  }
  ArrayRef slice(size_t from, size_t count) const { return ArrayRef(data_ + from, count); }
  ArrayRef slice(size_t from) const { return slice(from, size_ - from); }
  std::vector<T> vec() const { return std::vector<T>(begin(), end()); }

 private:
  const T* data_ = nullptr;
  size_t size_ = 0;
};
template <class T>
bool operator==(ArrayRef<T> a, ArrayRef<T> b) { return a.equals(b); }
template <class T>
bool operator!=(ArrayRef<T> a, ArrayRef<T> b) { return !a.equals(b); }
template <class T>
bool operator==(const std::vector<T>& a, ArrayRef<T> b) { return ArrayRef<T>(a).equals(b); }
template <class T>
bool operator==(ArrayRef<T> a, const std::vector<T>& b) { return a.equals(ArrayRef<T>(b)); }
#ifdef KBRL_STREAMS
using Printed = std::ostream;
#else
using Printed = kbrl::Text;
#endif
template <class T>
Printed& operator<<(Printed& out, ArrayRef<T> list) {
  out << '[';
  for (size_t i = 0; i < list.size(); i++) out << (i ? ", " : "") << list[i];
  return out << ']';
}
using IntArrayRef = ArrayRef<int64_t>;

template <class T>
class OptionalArrayRef final {
 public:
  constexpr OptionalArrayRef() = default;
  constexpr OptionalArrayRef(std::nullopt_t) {}
  constexpr OptionalArrayRef(const T& one) : list_(one) {}
  constexpr OptionalArrayRef(const std::initializer_list<T>& list) : list_(ArrayRef<T>(list)) {}
  // Not for what converts to one element: a list of it would outlive the element.
  template <
      class U,
      std::enable_if_t<std::is_convertible_v<U&&, ArrayRef<T>> && !std::is_convertible_v<U&&, T>, int> = 0>
  constexpr OptionalArrayRef(U&& list) : list_(ArrayRef<T>(std::forward<U>(list))) {}
  constexpr OptionalArrayRef(const std::optional<ArrayRef<T>>& list) : list_(list) {}
  constexpr bool has_value() const { return list_.has_value(); }
  constexpr ArrayRef<T> operator*() const { return *list_; }
  constexpr ArrayRef<T> value() const { return *list_; }
  constexpr std::optional<ArrayRef<T>> wrapped() const { return list_; }

 private:
  std::optional<ArrayRef<T>> list_;
};

// A size, as libtorch passes it. It never holds a symbol here: what candidates compute with are numbers.
class SymInt {
 public:
  SymInt() = default;
  SymInt(int64_t value) : value_(value) {}
  SymInt(const SymInt& other) : value_(other.value_) {}
  SymInt& operator=(const SymInt& other) = default;
  ~SymInt() {}  // not trivial in libtorch either, which decides how it is passed

 private:
  int64_t value_ = 0;
};
using SymIntArrayRef = ArrayRef<SymInt>;
using OptionalSymIntArrayRef = OptionalArrayRef<SymInt>;
inline SymIntArrayRef fromIntArrayRefSlow(IntArrayRef list) {
  for (int64_t value : list) {
    TORCH_CHECK(
        value > -(int64_t(1) << 62), "IntArrayRef contains an int that cannot be represented as a SymInt: ", value);
  }
  return SymIntArrayRef(reinterpret_cast<const SymInt*>(list.data()), list.size());
}
inline SymIntArrayRef fromIntArrayRefKnownNonNegative(IntArrayRef list) {
  return SymIntArrayRef(reinterpret_cast<const SymInt*>(list.data()), list.size());
}

class Scalar {
  enum class Tag { Double, Int, Unsigned, Complex, Bool, SymDouble, SymInt, SymBool };
  Tag tag_ = Tag::Int;
  union alignas(16) Value {
    double d;
    int64_t i;
    uint64_t u;
    struct { double real, imaginary; } z;
    Value() : z{0, 0} {}
  } v_;

 public:
  Scalar() : Scalar(int64_t(0)) {}
  Scalar(double value) : tag_(Tag::Double) { v_.d = value; }
  Scalar(float value) : Scalar(static_cast<double>(value)) {}
  Scalar(Half value) : Scalar(static_cast<double>(static_cast<float>(value))) {}
  Scalar(BFloat16 value) : Scalar(static_cast<double>(static_cast<float>(value))) {}
  template <class T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool>, int> = 0>
  Scalar(T value) : tag_(Tag::Int) {
    v_.i = static_cast<int64_t>(value);
    if constexpr (std::is_same_v<std::make_unsigned_t<T>, T> && sizeof(T) == 8) {
      if (v_.i < 0) tag_ = Tag::Unsigned;
    }
  }
  template <class T, std::enable_if_t<std::is_same_v<T, bool>, int> = 0>
  Scalar(T value) : tag_(Tag::Bool) { v_.i = value; }
  Scalar(const Scalar& other) : tag_(other.tag_), v_(other.v_) {}
  Scalar& operator=(const Scalar& other) {
    tag_ = other.tag_;
    v_ = other.v_;
    return *this;
  }
  ~Scalar() {}

  bool isFloatingPoint() const { return tag_ == Tag::Double; }
  bool isIntegral(bool includeBool) const {
    return tag_ == Tag::Int || tag_ == Tag::Unsigned || (includeBool && isBoolean());
  }
  bool isBoolean() const { return tag_ == Tag::Bool; }
  template <class T>
  T to() const {
    switch (tag_) {
      case Tag::Double:
        return static_cast<T>(v_.d);
      case Tag::Int:
      case Tag::Bool:
        return static_cast<T>(v_.i);
      case Tag::Unsigned:
        return static_cast<T>(v_.u);
      default:
        TORCH_CHECK(false, "a complex or symbolic scalar");
    }
    return T();
  }
  double toDouble() const { return to<double>(); }
  float toFloat() const { return to<float>(); }
  int toInt() const { return to<int>(); }
  int64_t toLong() const { return to<int64_t>(); }
  bool toBool() const { return to<double>() != 0; }
};

}  // namespace c10
