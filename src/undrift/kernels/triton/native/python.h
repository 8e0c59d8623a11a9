// Python's lock, errors and objects, as the other files need them.

#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <vector>

namespace undrift {

using at::Tensor;

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

inline void drop(PyObject* object) {
  if (object == nullptr || !Py_IsInitialized()) return;
  Gil gil;
  Py_DECREF(object);
}

[[noreturn]] inline void raise_python() {
  python_error error;
  error.persist();
  throw std::move(error);
}

// What Python holds of these is a capsule with a pointer that nodes share, so that none has to ask for Python's lock.
template <class Kind>
PyObject* capsule(std::shared_ptr<Kind> made) {
  return PyCapsule_New(new std::shared_ptr<Kind>(std::move(made)), Kind::name, [](PyObject* self) {
    delete static_cast<std::shared_ptr<Kind>*>(PyCapsule_GetPointer(self, Kind::name));
  });
}

template <class Kind>
const std::shared_ptr<Kind>& held(PyObject* given) {
  auto found = static_cast<std::shared_ptr<Kind>*>(PyCapsule_GetPointer(given, Kind::name));
  if (found == nullptr) raise_python();
  return *found;
}

inline const Tensor& tensor(PyObject* object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), "a tensor is needed, got a ", Py_TYPE(object)->tp_name);
  return THPVariable_Unpack(object);
}

inline std::vector<int64_t> integers(PyObject* tuple) {
  std::vector<int64_t> found;
  for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); ++i) found.push_back(PyLong_AsLongLong(PyTuple_GetItem(tuple, i)));
  if (PyErr_Occurred()) raise_python();
  return found;
}

}  // namespace undrift
