// Kernels that Triton compiled, launched by CUDA's driver itself; until one was tried, by Python.

#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

#include "python.h"

namespace undrift {

// The functions of CUDA's driver and of PyTorch that launch a kernel; `bind` is given them.
inline int (*launch_kernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
inline int (*current_stream)(int32_t, void**);

struct Kernel {
  static constexpr const char* name = "undrift.Kernel";
  static constexpr size_t most = 40;

  void* function;
  unsigned across, down, threads, shared;
  int device;
  std::vector<uint64_t> numbers;  // after the tensors; the last ones are scratch memory, of which there is none

  bool launch(at::ArrayRef<void*> tensors) const {
    uintptr_t all = 0;
    for (void* address : tensors) all |= reinterpret_cast<uintptr_t>(address);
    if (all & 15 || tensors.size() + numbers.size() > most) return false;
    if (device >= 0 && c10::impl::getDeviceGuardImpl(c10::kCUDA)->getDevice().index() != device) return false;
    void* stream = nullptr;
    if (current_stream(device, &stream) != 0) return false;
    void* arguments[most];
    size_t count = 0;
    for (void* const& address : tensors) arguments[count++] = const_cast<void**>(&address);
    for (const uint64_t& number : numbers) arguments[count++] = const_cast<uint64_t*>(&number);
    return launch_kernel(function, across, down, 1, threads, 1, 1, shared, stream, arguments, nullptr) == 0;
  }
};

// A `calls.Call`. Until it has a kernel that was seen to write what Triton's own launch writes, it is called itself.
struct Call {
  PyObject* call = nullptr;
  std::shared_ptr<Kernel> kept;
  std::atomic<const Kernel*> kernel{nullptr};  // the same, for whoever has not Python's lock

  ~Call() { drop(call); }
  explicit operator bool() const { return call != nullptr; }

  void take(PyObject* given) {
    if (given != Py_None) call = Py_NewRef(given);
  }

  const Kernel* known() {
    if (const Kernel* found = kernel) return found;
    Gil gil;
    PyObject* native = PyObject_GetAttrString(call, "native");
    if (native == nullptr) raise_python();
    if (native != Py_None && !kept) kept = held<Kernel>(native);
    Py_DECREF(native);
    kernel = kept.get();
    return kernel;
  }

  // Whether the kernel may write over what it reads: one that is still to be tried is launched twice.
  bool tried() {
    if (known() != nullptr) return true;
    Gil gil;
    PyObject* tried = PyObject_GetAttrString(call, "tried");
    if (tried == nullptr) raise_python();
    const bool found = PyObject_IsTrue(tried);
    Py_DECREF(tried);
    return found;
  }

  void operator()(at::ArrayRef<Tensor> tensors) {
    if (const Kernel* found = known()) {
      void* addresses[Kernel::most];
      for (size_t i = 0; i < tensors.size(); ++i) addresses[i] = tensors[i].data_ptr();
      if (found->launch({addresses, tensors.size()})) return;
    }
    Gil gil;
    PyObject* given = PyTuple_New(static_cast<Py_ssize_t>(tensors.size()));
    for (size_t i = 0; i < tensors.size(); ++i) PyTuple_SET_ITEM(given, i, THPVariable_Wrap(tensors[i]));
    PyObject* done = PyObject_CallObject(call, given);
    Py_DECREF(given);
    if (done == nullptr) raise_python();
    Py_DECREF(done);
  }
};

// Sizes and kind of a tensor that is made over and over.
struct Like {
  std::vector<int64_t> sizes;
  at::TensorOptions options;

  Like() = default;
  explicit Like(const Tensor& t) : sizes(t.sizes().vec()), options(t.options()) {}
  Tensor empty() const { return at::empty(sizes, options); }
};

inline Tensor empty_as(const Tensor& t) { return at::empty_strided(t.sizes(), t.strides(), t.options()); }

}  // namespace undrift
