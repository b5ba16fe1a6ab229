// Checks and errors, with the names and the messages that torch gives them.
//
// TORCH_CHECK ends in libc10's own `torchCheckFail`, so what Python sees is the same exception. Kinds that Python tells
// apart (index, value, type, not implemented) travel as the types below; `python.h` turns them into those errors.
#pragma once
#include <c10/macros/Macros.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace kbrl {
enum class Kind { Index, Value, Type, NotImplemented };
struct Error : std::runtime_error {
  Kind kind;
  Error(Kind which, const std::string& text) : std::runtime_error(text), kind(which) {}
};
}  // namespace kbrl

namespace c10 {
namespace detail {
[[noreturn]] void torchCheckFail(const char* func, const char* file, uint32_t line, const std::string& msg);
[[noreturn]] void torchInternalAssertFail(
    const char* func, const char* file, uint32_t line, const char* condition, const std::string& msg);

template <class... Args>
std::string join(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}
inline std::string message(const char* otherwise) {
  return std::string(otherwise) +
      "  (Could this error message be improved?  If so, please report an enhancement request to PyTorch.)";
}
template <class... Args>
std::string message(const char*, const Args&... args) {
  return join(args...);
}
}  // namespace detail

template <class... Args>
std::string str(const Args&... args) {
  return detail::join(args...);
}
}  // namespace c10

#define KBRL_MESSAGE(cond, ...) ::c10::detail::message("Expected " #cond " to be true, but got false.", ##__VA_ARGS__)
#define TORCH_CHECK(cond, ...)                                                                        \
  if (C10_UNLIKELY(!(cond))) {                                                                        \
    ::c10::detail::torchCheckFail(                                                                    \
        __func__, __FILE__, static_cast<uint32_t>(__LINE__), KBRL_MESSAGE(cond, ##__VA_ARGS__));      \
  }
#define KBRL_CHECK_KIND(which, cond, ...)                                         \
  if (C10_UNLIKELY(!(cond))) {                                                    \
    throw ::kbrl::Error(::kbrl::Kind::which, KBRL_MESSAGE(cond, ##__VA_ARGS__));  \
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
        "PyTorch. ", ::c10::detail::join("", ##__VA_ARGS__));                                                     \
  }
#define TORCH_INTERNAL_ASSERT_DEBUG_ONLY(...) \
  while (false)                               \
  TORCH_INTERNAL_ASSERT(__VA_ARGS__)
#define AT_ERROR(...) \
  ::c10::detail::torchCheckFail(__func__, __FILE__, static_cast<uint32_t>(__LINE__), ::c10::str(__VA_ARGS__))
