// The binding half: what PYBIND11_MODULE and m.def mean here.
//
//     PyObject* args ──▶ Caster<A>::load ──▶ fn(a…) ──▶ give(result) ──▶ PyObject*
//                             └ no overload fits: TypeError in pybind11's words      exceptions: torch's own translator
//
// A module made here looks like one of pybind11's: same arguments accepted, same errors, about the same cost of a call.
#pragma once
#include <kbrl/casters.h>

namespace pybind11 {
struct arg;
template <class T>
struct arg_v;
}  // namespace pybind11

namespace kbrl {
// ---- One C++ function behind a Python name.
struct Argument {
  Text name;
  PyObject* fallback;  // kept for the life of the process, as the module is
};
struct Function {
  Text name, doc;
  std::vector<Argument> arguments;
  PyMethodDef method;
  Function* next = nullptr;  // another overload
  virtual Text signature() const = 0;
  // Null without an error: these arguments do not fit.
  virtual PyObject* call(PyObject* args, PyObject* kwargs) = 0;
  virtual ~Function() = default;

  // What is given for parameter `place`; borrowed, null where nothing is.
  PyObject* given(PyObject* args, PyObject* kwargs, size_t place, size_t& used) const {
    if (static_cast<ssize_t>(place) < PyTuple_Size(args)) return PyTuple_GetItem(args, static_cast<ssize_t>(place));
    if (place >= arguments.size()) return nullptr;
    PyObject* named = kwargs ? PyDict_GetItemString(kwargs, arguments[place].name.c_str()) : nullptr;
    used += named != nullptr;
    return named ? named : arguments[place].fallback;
  }
};

template <class R, class... A>
struct Bound final : Function {
  R (*function)(A...);
  explicit Bound(R (*target)(A...)) : function(target) {}

  PyObject* call(PyObject* args, PyObject* kwargs) override {
    return invoke(args, kwargs, std::index_sequence_for<A...>());
  }
  template <size_t... I>
  PyObject* invoke(PyObject* args, PyObject* kwargs, std::index_sequence<I...>) {
    [[maybe_unused]] std::tuple<Caster<std::decay_t<A>>...> casters;
    size_t used = 0;
    bool fits = PyTuple_Size(args) <= static_cast<ssize_t>(sizeof...(A));
    [[maybe_unused]] auto load = [&](auto& caster, size_t place) {
      PyObject* object = given(args, kwargs, place, used);
      return object != nullptr && caster.load(object);
    };
    ((fits = fits && load(std::get<I>(casters), I)), ...);
    if (!fits || (kwargs && static_cast<ssize_t>(used) != PyDict_Size(kwargs))) return nullptr;
    if constexpr (std::is_void_v<R>) {
      function(taken<A>(std::get<I>(casters))...);
      return borrowed(&_Py_NoneStruct);
    } else {
      PyObject* result = give<std::decay_t<R>>(function(taken<A>(std::get<I>(casters))...));
      if (result == nullptr) throw Raised();
      return result;
    }
  }
  Text signature() const override {
    Text text("(");
    size_t place = 0;
    ((text << (place ? ", " : "") << named(place) << ": " << Caster<std::decay_t<A>>::name(), place++), ...);
    return text << ")";
  }
  Text named(size_t place) const {
    return place < arguments.size() ? arguments[place].name : Text("arg") << place;
  }
};

inline Text repr(PyObject* object) {
  Object text(PyObject_Repr(object));
  const char* words = text ? PyUnicode_AsUTF8AndSize(text.get(), nullptr) : nullptr;
  PyErr_Clear();
  return words ? words : "<repr raised Error>";
}

inline void complain(const Function* first, PyObject* args) {
  Text text = first->name;
  text << "(): incompatible function arguments. The following argument types are supported:\n";
  int number = 1;
  for (const Function* each = first; each; each = each->next) {
    text << "    " << number++ << ". " << each->signature() << "\n";
  }
  text << "\nInvoked with: ";
  for (ssize_t i = 0; i < PyTuple_Size(args); i++) text << (i ? ", " : "") << repr(PyTuple_GetItem(args, i));
  PyErr_SetString(PyExc_TypeError, text.c_str());
}

inline PyObject* kind_of(Kind kind) {
  switch (kind) {
    case Kind::Index:
      return PyExc_IndexError;
    case Kind::Value:
      return PyExc_ValueError;
    case Kind::Type:
      return PyExc_TypeError;
    case Kind::Runtime:
      return PyExc_RuntimeError;
    default:
      return PyExc_NotImplementedError;
  }
}

inline PyObject* dispatch(PyObject* self, PyObject* args, PyObject* kwargs) {
  auto* first = static_cast<Function*>(PyCapsule_GetPointer(self, nullptr));
  try {
    for (Function* each = first; each; each = each->next) {
      PyObject* result = each->call(args, kwargs);
      if (result) return result;
    }
    complain(first, args);
  } catch (const Raised&) {
  } catch (const Error& error) {
    PyErr_SetString(kind_of(error.kind), error.what());
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}
}  // namespace kbrl

namespace pybind11 {
struct arg {
  const char* name;
  explicit constexpr arg(const char* which) : name(which) {}
  template <class T>
  arg_v<std::decay_t<T>> operator=(T&& value) const;
  arg& noconvert() = delete;
};
template <class T>
struct arg_v {
  const char* name;
  T value;
};
template <class T>
arg_v<std::decay_t<T>> arg::operator=(T&& value) const {
  return arg_v<std::decay_t<T>>{name, std::forward<T>(value)};
}
struct none {};
namespace literals {
constexpr arg operator"" _a(const char* name, size_t) { return arg(name); }
}  // namespace literals

class module_ {
 public:
  explicit module_(PyObject* module) : module_object_(module) {}
  template <class R, class... A, class... Extra>
  module_& def(const char* name, R (*function)(A...), const Extra&... extra) {
    auto* made = new kbrl::Bound<R, A...>(function);
    made->name = name;
    (note(*made, extra), ...);
    PyObject* before = PyObject_GetAttrString(module_object_, name);
    if (before) {  // an overload: asked after those that were defined earlier
      kbrl::Function* last = nullptr;
      for (auto& entry : functions()) {
        if (entry->name == name) last = entry;
      }
      Py_DecRef(before);
      functions().push_back(made);
      last->next = made;
      return *this;
    }
    PyErr_Clear();
    functions().push_back(made);
    auto call = reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&kbrl::dispatch));
    made->method = PyMethodDef{made->name.c_str(), call, 1 | 2, made->doc.c_str()};  // METH_VARARGS | METH_KEYWORDS
    kbrl::Object capsule(PyCapsule_New(static_cast<kbrl::Function*>(made), nullptr, nullptr));
    kbrl::Object callable(PyCMethod_New(&made->method, capsule.get(), nullptr, nullptr));
    PyObject_SetAttrString(module_object_, name, callable.get());
    return *this;
  }
  template <class F, class... Extra, class = decltype(+std::declval<F>())>
  module_& def(const char* name, const F& lambda, const Extra&... extra) {
    return def(name, +lambda, extra...);
  }
  const char*& doc() { return doc_; }

 private:
  static std::vector<kbrl::Function*>& functions() {
    static std::vector<kbrl::Function*> all;
    return all;
  }
  void note(kbrl::Function& function, const char* doc) { function.doc = doc; }
  void note(kbrl::Function& function, const arg& argument) {
    function.arguments.push_back({argument.name, nullptr});
  }
  void note(kbrl::Function& function, const arg_v<none>& argument) {
    function.arguments.push_back({argument.name, kbrl::borrowed(&_Py_NoneStruct)});
  }
  void note(kbrl::Function& function, const arg_v<std::nullopt_t>& argument) {
    function.arguments.push_back({argument.name, kbrl::borrowed(&_Py_NoneStruct)});
  }
  void note(kbrl::Function& function, const arg_v<const char*>& argument) {
    function.arguments.push_back({argument.name, PyUnicode_FromStringAndSize(argument.value, static_cast<ssize_t>(std::strlen(argument.value)))});
  }
  template <class T>
  void note(kbrl::Function& function, const arg_v<T>& argument) {
    function.arguments.push_back({argument.name, kbrl::give<T>(argument.value)});
  }
  PyObject* module_object_;
  const char* doc_ = nullptr;
};
using module = module_;
}  // namespace pybind11
namespace py = pybind11;

namespace torch {
namespace py = pybind11;
template <class F>
F wrap_pybind_function(F&& function) {
  return std::forward<F>(function);
}
template <class R, class... A>
auto wrap_pybind_function(R (&function)(A...)) {
  return &function;
}
}  // namespace torch

extern "C" {
struct PyModuleDef {
  ssize_t refcount_or_flags;
  void* type;
  PyObject* (*m_init)(void);
  ssize_t m_index;
  PyObject* m_copy;
  const char* m_name;
  const char* m_doc;
  ssize_t m_size;
  PyMethodDef* m_methods;
  void* m_slots;
  void *m_traverse, *m_clear, *m_free;
};
PyObject* PyModule_Create2(PyModuleDef*, int);
}

#define PYBIND11_MODULE(name, variable)                                                                  \
  static void KBRL_PASTE(kbrl_define_, name)(pybind11::module_&);                                        \
  extern "C" __attribute__((visibility("default"))) PyObject* KBRL_PASTE(PyInit_, name)() {              \
    static PyModuleDef definition{1, nullptr, nullptr, 0, nullptr, KBRL_STRING(name), nullptr, -1};      \
    PyObject* module = PyModule_Create2(&definition, 1013);                                              \
    if (module == nullptr) return nullptr;                                                               \
    pybind11::module_ wrapped(module);                                                                   \
    try {                                                                                                \
      KBRL_PASTE(kbrl_define_, name)(wrapped);                                                           \
    } catch (...) {                                                                                      \
      torch::translate_exception_to_python(std::current_exception());                                    \
      return nullptr;                                                                                    \
    }                                                                                                    \
    return module;                                                                                       \
  }                                                                                                      \
  static void KBRL_PASTE(kbrl_define_, name)(pybind11::module_ & variable)
#define KBRL_PASTE_(a, b) a##b
#define KBRL_PASTE(a, b) KBRL_PASTE_(a, b)
#define KBRL_STRING_(a) #a
#define KBRL_STRING(a) KBRL_STRING_(a)
