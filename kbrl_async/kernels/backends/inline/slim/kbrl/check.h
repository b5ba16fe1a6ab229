// Checks and errors, with the names and the messages that torch gives them.
//
// TORCH_CHECK ends in libc10's own `torchCheckFail`, so what Python sees is the same exception. Kinds that Python tells
// apart (index, value, type, not implemented) travel as the types below; `python.h` turns them into those errors.
#pragma once
#include <c10/macros/Macros.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <utility>
#ifdef KBRL_STREAMS
#include <sstream>
#endif

namespace kbrl {
// Words of an error. <string> and <sstream> cost every compilation half of its time; a source that names them gets them
// through KBRL_STRING and KBRL_STREAMS, and what only a stream can print is built with the full headers.
class Text {
 public:
  Text() = default;
  Text(const char* words) { add(words, std::strlen(words)); }
  Text(const Text& other) { add(other.c_str(), other.size_); }
  Text(Text&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Text& operator=(Text other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Text() { std::free(data_); }
  const char* c_str() const { return data_ ? data_ : ""; }
  size_t size() const { return size_; }
  bool operator==(const char* words) const { return std::strcmp(c_str(), words) == 0; }
  void add(const char* words, size_t size) {
    if (!(data_ = static_cast<char*>(std::realloc(data_, size_ + size + 1)))) std::terminate();
    std::memcpy(data_ + size_, words, size);
    data_[size_ += size] = 0;
  }

  // As a stream prints it.
  Text& operator<<(const char* words) { return words ? (add(words, std::strlen(words)), *this) : *this; }
  Text& operator<<(const Text& other) { return add(other.c_str(), other.size_), *this; }
  Text& operator<<(char letter) { return add(&letter, 1), *this; }
  Text& operator<<(signed char letter) { return *this << static_cast<char>(letter); }
  Text& operator<<(unsigned char letter) { return *this << static_cast<char>(letter); }
  Text& operator<<(bool value) { return print("%d", static_cast<int>(value)); }
  Text& operator<<(short value) { return print("%d", static_cast<int>(value)); }
  Text& operator<<(unsigned short value) { return print("%u", static_cast<unsigned>(value)); }
  Text& operator<<(int value) { return print("%d", value); }
  Text& operator<<(unsigned value) { return print("%u", value); }
  Text& operator<<(long value) { return print("%ld", value); }
  Text& operator<<(unsigned long value) { return print("%lu", value); }
  Text& operator<<(long long value) { return print("%lld", value); }
  Text& operator<<(unsigned long long value) { return print("%llu", value); }
  Text& operator<<(float value) { return print("%g", static_cast<double>(value)); }
  Text& operator<<(double value) { return print("%g", value); }
  Text& operator<<(const void* address) { return print(address ? "%p" : "0", address); }

 private:
  template <class T>
  Text& print(const char* format, T value) {
    char words[40];
    add(words, static_cast<size_t>(std::snprintf(words, sizeof(words), format, value)));
    return *this;
  }
  char* data_ = nullptr;
  size_t size_ = 0;
};
// `std::string` and `std::string_view`, where the source has them.
template <class T>
auto operator<<(Text& out, const T& words) -> decltype(words.find_last_not_of('x'), out) {
  return out.add(words.data(), words.size()), out;
}

enum class Kind { Index, Value, Type, NotImplemented, Runtime };
struct Error : std::exception {
  Kind kind;
  Text text;
  Error(Kind which, const char* words) : kind(which), text(words) {}
  const char* what() const noexcept override { return text.c_str(); }
};
#ifdef KBRL_STREAMS
using Words = std::string;
#else
using Words = Text;
#endif
}  // namespace kbrl

namespace c10 {
namespace detail {
[[noreturn]] void torchCheckFail(const char* func, const char* file, uint32_t line, const char* msg);
[[noreturn]] void torchInternalAssertFail(
    const char* func, const char* file, uint32_t line, const char* condition, const char* msg);

template <class... Args>
kbrl::Words join(const Args&... args) {
#ifdef KBRL_STREAMS
  std::ostringstream out;
  (out << ... << args);
  return out.str();
#else
  kbrl::Text out;
  (void)(out << ... << args);
  return out;
#endif
}
inline kbrl::Words message(const char* otherwise) {
  return join(
      otherwise, "  (Could this error message be improved?  If so, please report an enhancement request to PyTorch.)");
}
template <class... Args>
kbrl::Words message(const char*, const Args&... args) {
  return join(args...);
}
}  // namespace detail
#ifdef KBRL_STREAMS
template <class... Args>
std::string str(const Args&... args) {
  return detail::join(args...);
}
#endif
}  // namespace c10

// `value` of this type is printed as `what`.
#ifdef KBRL_STREAMS
#define KBRL_PRINTED(type, what) \
  inline std::ostream& operator<<(std::ostream& out, type value) { return out << what; }
#else
#define KBRL_PRINTED(type, what) \
  inline kbrl::Text& operator<<(kbrl::Text& out, type value) { return out << what; }
#endif
#define KBRL_MESSAGE(cond, ...) ::c10::detail::message("Expected " #cond " to be true, but got false.", ##__VA_ARGS__)
#define TORCH_CHECK(cond, ...)                                                                        \
  if (C10_UNLIKELY(!(cond))) {                                                                        \
    ::c10::detail::torchCheckFail(                                                                    \
        __func__, __FILE__, static_cast<uint32_t>(__LINE__), KBRL_MESSAGE(cond, ##__VA_ARGS__).c_str()); \
  }
#define KBRL_CHECK_KIND(which, cond, ...)                                         \
  if (C10_UNLIKELY(!(cond))) {                                                    \
    throw ::kbrl::Error(::kbrl::Kind::which, KBRL_MESSAGE(cond, ##__VA_ARGS__).c_str()); \
  }
#define TORCH_CHECK_INDEX(cond, ...) KBRL_CHECK_KIND(Index, cond, ##__VA_ARGS__)
#define TORCH_CHECK_VALUE(cond, ...) KBRL_CHECK_KIND(Value, cond, ##__VA_ARGS__)
#define TORCH_CHECK_TYPE(cond, ...) KBRL_CHECK_KIND(Type, cond, ##__VA_ARGS__)
#define TORCH_CHECK_NOT_IMPLEMENTED(cond, ...) KBRL_CHECK_KIND(NotImplemented, cond, ##__VA_ARGS__)
#define TORCH_INTERNAL_ASSERT(cond, ...)                                                                          \
  if (C10_UNLIKELY(!(cond))) {                                                                                    \
    ::c10::detail::torchInternalAssertFail(                                                                       \
        __func__, __FILE__, static_cast<uint32_t>(__LINE__),                                                      \
        #cond " INTERNAL ASSERT FAILED at \"" __FILE__ "\":" C10_STRINGIZE(__LINE__) ", please report a bug to "  \
        "PyTorch. ", ::c10::detail::join("", ##__VA_ARGS__).c_str());                                                     \
  }
#define TORCH_INTERNAL_ASSERT_DEBUG_ONLY(...) \
  while (false)                               \
  TORCH_INTERNAL_ASSERT(__VA_ARGS__)
#define AT_ASSERT(...)                \
  do {                                \
    TORCH_INTERNAL_ASSERT(__VA_ARGS__); \
  } while (false)
#define AT_ASSERTM(cond, ...)                   \
  do {                                          \
    TORCH_INTERNAL_ASSERT(cond, ##__VA_ARGS__); \
  } while (false)
#define AT_ERROR(...) \
  ::c10::detail::torchCheckFail(__func__, __FILE__, static_cast<uint32_t>(__LINE__), ::c10::detail::join(__VA_ARGS__).c_str())
