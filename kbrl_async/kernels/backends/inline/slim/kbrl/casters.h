// Values across the border between Python and C++, against Python's stable C interface: `Caster` takes, `give` gives.
#pragma once
#include <exception>
#include <tuple>
#include <vector>

#include <kbrl/tensor.h>

#ifndef Py_PYTHON_H  // a candidate that includes Python.h itself is built with the full headers
struct _object;
struct _typeobject;
typedef struct _object PyObject;
typedef PyObject* (*PyCFunction)(PyObject*, PyObject*);
struct PyMethodDef {
  const char* ml_name;
  PyCFunction ml_meth;
  int ml_flags;
  const char* ml_doc;
};
extern "C" {
extern PyObject _Py_NoneStruct, _Py_TrueStruct, _Py_FalseStruct;
extern _typeobject PyFloat_Type, PyLong_Type, PyTuple_Type;
extern PyObject *PyExc_TypeError, *PyExc_RuntimeError, *PyExc_IndexError, *PyExc_ValueError, *PyExc_NotImplementedError;
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
int PyType_IsSubtype(_typeobject*, _typeobject*);
int PyObject_IsInstance(PyObject*, PyObject*);
PyObject* PyObject_Repr(PyObject*);
PyObject* PyObject_GetAttrString(PyObject*, const char*);
const char* PyUnicode_AsUTF8AndSize(PyObject*, ssize_t*);
PyObject* PyUnicode_FromStringAndSize(const char*, ssize_t);
PyObject* PyNumber_Long(PyObject*);
PyObject* PyNumber_Float(PyObject*);
PyObject* PyNumber_Index(PyObject*);
int PyNumber_Check(PyObject*);
int PyObject_IsTrue(PyObject*);
long long PyLong_AsLongLong(PyObject*);
PyObject* PyLong_FromLongLong(long long);
PyObject* PyLong_FromUnsignedLongLong(unsigned long long);
double PyFloat_AsDouble(PyObject*);
PyObject* PyFloat_FromDouble(double);
int PySequence_Check(PyObject*);
ssize_t PySequence_Size(PyObject*);
PyObject* PySequence_GetItem(PyObject*, ssize_t);
PyObject* PyTuple_New(ssize_t);
int PyTuple_SetItem(PyObject*, ssize_t, PyObject*);
PyObject* PyTuple_GetItem(PyObject*, ssize_t);
ssize_t PyTuple_Size(PyObject*);
PyObject* PyList_New(ssize_t);
int PyList_SetItem(PyObject*, ssize_t, PyObject*);
PyObject* PyDict_GetItemString(PyObject*, const char*);
ssize_t PyDict_Size(PyObject*);
PyObject* PyErr_Occurred();
void PyErr_Clear();
void PyErr_SetString(PyObject*, const char*);
PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
void* PyCapsule_GetPointer(PyObject*, const char*);
PyObject* PyCMethod_New(PyMethodDef*, PyObject*, PyObject*, _typeobject*);
int PyObject_SetAttrString(PyObject*, const char*, PyObject*);
}
#endif
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
extern PyObject* THPVariableClass;
namespace torch {
bool translate_exception_to_python(const std::exception_ptr&);
}

namespace kbrl {
// An owned reference.
class Object {
 public:
  Object() = default;
  explicit Object(PyObject* owned) : pointer_(owned) {}
  Object(Object&& other) noexcept : pointer_(other.release()) {}
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  ~Object() {
    if (pointer_) Py_DecRef(pointer_);
  }
  PyObject* get() const { return pointer_; }
  PyObject* release() { return std::exchange(pointer_, nullptr); }
  explicit operator bool() const { return pointer_ != nullptr; }

 private:
  PyObject* pointer_ = nullptr;
};
struct Raised {};  // a Python error is set

inline PyObject* borrowed(PyObject* object) {
  Py_IncRef(object);
  return object;
}
inline _typeobject* type_of(PyObject* object) {
  return *reinterpret_cast<_typeobject**>(reinterpret_cast<char*>(object) + sizeof(ssize_t));
}
inline bool is_a(PyObject* object, _typeobject& type) {
  return type_of(object) == &type || PyType_IsSubtype(type_of(object), &type);
}

// ---- Python to C++: load() says whether the object fits.
template <class T, class = void>
struct Caster;

template <>
struct Caster<at::Tensor> {
  static Text name() { return "torch.Tensor"; }
  const at::Tensor* held = nullptr;
  at::Tensor value;  // of who may change it, or wants to keep it: Python's own stays as it is
  bool load(PyObject* object) {
    if (!PyObject_IsInstance(object, THPVariableClass)) return false;
    // The layout of THPVariable: the object's head, then the tensor.
    held = reinterpret_cast<const at::Tensor*>(reinterpret_cast<char*>(object) + 2 * sizeof(void*));
    return true;
  }
};
struct ReadOnly {};  // of what pybind11 lends to nobody who may change it
// What a parameter of type A is given. A tensor that is only read is Python's own, which the call outlives.
template <class A, class C>
A taken(C& caster) {
  static_assert(
      !std::is_base_of_v<ReadOnly, C> || !std::is_lvalue_reference_v<A> || std::is_const_v<std::remove_reference_t<A>>,
      "a parameter that only pybind11 can refuse");
  return static_cast<A>(caster.value);
}
template <class A>
A taken(Caster<at::Tensor>& caster) {
  if constexpr (std::is_same_v<A, at::Tensor> || std::is_same_v<A, const at::Tensor&>) {
    return *caster.held;
  } else {
    caster.value = *caster.held;
    return static_cast<A>(caster.value);
  }
}
template <>
struct Caster<bool> {
  static Text name() { return "bool"; }
  bool value = false;
  bool load(PyObject* object) {
    if (object == &_Py_TrueStruct || object == &_Py_FalseStruct) {
      value = object == &_Py_TrueStruct;
      return true;
    }
    if (object != &_Py_NoneStruct && !PyNumber_Check(object)) return false;
    const int answer = PyObject_IsTrue(object);
    if (answer < 0) PyErr_Clear();
    value = answer == 1;
    return answer >= 0;
  }
};
template <class T>
struct Caster<T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool> && !std::is_same_v<T, char>>> {
  static Text name() { return "int"; }
  T value = 0;
  bool load(PyObject* object) {
    if (is_a(object, PyFloat_Type)) return false;
    Object number(is_a(object, PyLong_Type) ? borrowed(object) : PyNumber_Index(object));
    if (!number) {
      PyErr_Clear();
      if (!PyNumber_Check(object)) return false;
      number.~Object();
      new (&number) Object(PyNumber_Long(object));
    }
    const long long wide = number ? PyLong_AsLongLong(number.get()) : -1;
    if (wide == -1 && PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
    value = static_cast<T>(wide);
    return static_cast<long long>(value) == wide && (!std::is_unsigned_v<T> || wide >= 0);
  }
};
template <class T>
struct Caster<T, std::enable_if_t<std::is_floating_point_v<T>>> {
  static Text name() { return "float"; }
  T value = 0;
  bool load(PyObject* object) {
    double wide = PyFloat_AsDouble(object);
    if (wide == -1 && PyErr_Occurred()) {
      PyErr_Clear();
      if (!PyNumber_Check(object)) return false;
      Object number(PyNumber_Float(object));
      wide = number ? PyFloat_AsDouble(number.get()) : -1;
      if (wide == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
      }
    }
    value = static_cast<T>(wide);
    return true;
  }
};
#ifdef KBRL_STRING
template <>
struct Caster<std::string> {
  static Text name() { return "str"; }
  std::string value;
  bool load(PyObject* object) {
    ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr) {
      PyErr_Clear();
      return false;
    }
    value.assign(text, size);
    return true;
  }
};
#endif
template <>
struct Caster<at::Scalar> {
  static Text name() { return "torch.Scalar"; }
  at::Scalar value;
  bool load(PyObject* object) {
    if (object == &_Py_TrueStruct || object == &_Py_FalseStruct) {
      value = at::Scalar(object == &_Py_TrueStruct);
      return true;
    }
    if (is_a(object, PyLong_Type)) {
      Caster<int64_t> whole;
      if (!whole.load(object)) return false;
      value = at::Scalar(whole.value);
      return true;
    }
    if (!is_a(object, PyFloat_Type)) return false;
    value = at::Scalar(PyFloat_AsDouble(object));
    return true;
  }
};
template <class T>
struct Caster<std::optional<T>> {
  static Text name() { return Text("Optional[") << Caster<T>::name() << "]"; }
  Caster<T> inner;  // a list that is only looked at lies in here
  std::optional<T> value;
  bool load(PyObject* object) {
    value.reset();
    if (object == &_Py_NoneStruct) return true;
    if (!inner.load(object)) return false;
    value = taken<T>(inner);
    return true;
  }
};
template <class T>
constexpr bool is_lent = false;
template <class T>
constexpr bool is_lent<c10::ArrayRef<T>> = true;
template <class T>
struct Caster<std::vector<T>> {
  static_assert(!is_lent<T>, "lists that are only looked at, in a list: what they lie in is gone by then");
  static Text name() { return Text("list[") << Caster<T>::name() << "]"; }
  std::vector<T> value;
  bool load(PyObject* object) {
    ssize_t ignored = 0;
    if (!PySequence_Check(object)) return false;
    if (PyUnicode_AsUTF8AndSize(object, &ignored)) return false;
    PyErr_Clear();
    const ssize_t size = PySequence_Size(object);
    value.clear();
    for (ssize_t i = 0; i < size; i++) {
      Object item(PySequence_GetItem(object, i));
      Caster<T> inner;
      if (!item || !inner.load(item.get())) {
        PyErr_Clear();
        return false;
      }
      value.push_back(taken<T>(inner));
    }
    return true;
  }
};
// Of any sequence that has as many items, as pybind11 takes it.
template <class Whole, class... T>
struct SequenceCaster : ReadOnly {
  std::tuple<Caster<T>...> items;  // a list that is only looked at lies in here
  Whole value;
  bool load(PyObject* object) {
    if (!PySequence_Check(object)) return false;
    if (PySequence_Size(object) != static_cast<ssize_t>(sizeof...(T))) {
      PyErr_Clear();
      return false;
    }
    return fill(object, std::index_sequence_for<T...>());
  }

 private:
  template <size_t... I>
  bool fill(PyObject* object, std::index_sequence<I...>) {
    return (place(std::get<I>(value), std::get<I>(items), PySequence_GetItem(object, I)) && ...);
  }
  template <class One>
  static bool place(One& to, Caster<One>& caster, PyObject* found) {
    Object item(found);
    if (!item || !caster.load(item.get())) {
      PyErr_Clear();
      return false;
    }
    to = taken<One>(caster);
    return true;
  }
};
template <class... T>
struct Caster<std::tuple<T...>> : SequenceCaster<std::tuple<T...>, T...> {
  static Text name() {
    Text text("tuple[");
    size_t place = 0;
    ((text << (place++ ? ", " : "") << Caster<T>::name()), ...);
    return text << "]";
  }
};
template <class A, class B>
struct Caster<std::pair<A, B>> : SequenceCaster<std::pair<A, B>, A, B> {
  static Text name() { return Caster<std::tuple<A, B>>::name(); }
};
template <class T>
struct Caster<c10::ArrayRef<T>> {
  static Text name() { return Text("list[") << Caster<T>::name() << "]"; }
  Caster<std::vector<T>> list;
  c10::ArrayRef<T> value;
  bool load(PyObject* object) {
    const bool fits = list.load(object);
    value = c10::ArrayRef<T>(list.value);
    return fits;
  }
};

}  // namespace kbrl

namespace pybind11 {
// A tuple that is read, and what is in it.
class item {
 public:
  explicit item(PyObject* held) : held_(held) {}
  template <class T>
  T cast() const {
    kbrl::Caster<std::decay_t<T>> caster;
    if (!caster.load(held_)) throw kbrl::Error(kbrl::Kind::Runtime, "Unable to cast Python instance to C++ type");
    return kbrl::taken<T>(caster);
  }

 private:
  PyObject* held_;  // its tuple's
};
class tuple {
 public:
  tuple() : held_(PyTuple_New(0)) {}
  explicit tuple(PyObject* held) : held_(kbrl::borrowed(held)) {}
  tuple(const tuple& other) : tuple(other.held_.get()) {}
  tuple& operator=(tuple&&) = delete;
  size_t size() const { return static_cast<size_t>(PyTuple_Size(held_.get())); }
  bool empty() const { return size() == 0; }
  item operator[](size_t place) const {
    PyObject* found = PyTuple_GetItem(held_.get(), static_cast<ssize_t>(place));
    if (found == nullptr) throw kbrl::Raised();
    return item(found);
  }

 private:
  kbrl::Object held_;
};
}  // namespace pybind11

namespace kbrl {
template <>
struct Caster<pybind11::tuple> {
  static Text name() { return "tuple"; }
  PyObject* held = nullptr;
  bool load(PyObject* object) {
    held = object;
    return is_a(object, PyTuple_Type);
  }
};
template <class A>
pybind11::tuple taken(Caster<pybind11::tuple>& caster) {
  return pybind11::tuple(caster.held);
}

// ---- C++ to Python: a new reference, or null with an error set.
template <class T>
struct Giver;
template <class T>
PyObject* give(const T& value) {
  return Giver<T>::give(value);
}
template <class T>
struct Giver {
  static PyObject* give(const T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      return borrowed(value ? &_Py_TrueStruct : &_Py_FalseStruct);
    } else if constexpr (std::is_integral_v<T>) {
      if constexpr (std::is_unsigned_v<T>) return PyLong_FromUnsignedLongLong(value);
      return PyLong_FromLongLong(value);
    } else {
      static_assert(std::is_floating_point_v<T>, "a result that only pybind11 can convert");
      return PyFloat_FromDouble(value);
    }
  }
};
template <>
struct Giver<at::Tensor> {
  static PyObject* give(const at::Tensor& value) { return THPVariable_Wrap(value); }
};
#ifdef KBRL_STRING
template <>
struct Giver<std::string> {
  static PyObject* give(const std::string& value) {
    return PyUnicode_FromStringAndSize(value.data(), static_cast<ssize_t>(value.size()));
  }
};
#endif
template <class T>
struct Giver<std::optional<T>> {
  static PyObject* give(const std::optional<T>& value) {
    return value ? kbrl::give(*value) : borrowed(&_Py_NoneStruct);
  }
};
template <class T>
struct Giver<std::vector<T>> {
  static PyObject* give(const std::vector<T>& values) {
    Object list(PyList_New(static_cast<ssize_t>(values.size())));
    for (size_t i = 0; i < values.size(); i++) {
      PyObject* item = kbrl::give<T>(values[i]);
      if (item == nullptr) return nullptr;
      PyList_SetItem(list.get(), static_cast<ssize_t>(i), item);
    }
    return list.release();
  }
};
template <class... T>
struct Giver<std::tuple<T...>> {
  static PyObject* give(const std::tuple<T...>& values) {
    Object tuple(PyTuple_New(sizeof...(T)));
    ssize_t place = 0;
    bool whole = true;
    std::apply(
        [&](const T&... value) {
          ((whole = whole && PyTuple_SetItem(tuple.get(), place++, kbrl::give(value)) == 0), ...);
        },
        values);
    return whole && !PyErr_Occurred() ? tuple.release() : nullptr;
  }
};
template <class A, class B>
struct Giver<std::pair<A, B>> {
  static PyObject* give(const std::pair<A, B>& pair) { return kbrl::give(std::make_tuple(pair.first, pair.second)); }
};

}  // namespace kbrl
