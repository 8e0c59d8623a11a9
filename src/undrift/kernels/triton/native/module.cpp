// What Python calls (`undrift.fused.native`): a layer's noise for steps that would wait for Python.
//
//     kernel, launch         a kernel that Triton compiled, by CUDA's driver itself
//     plan, met, again       forward, the noise and its node; backward, the layer's own gradient and the noise's
//     written, place, take   where the layers of a backward pass leave their log-variances' gradients (`undrift._row`)
//
// What is not ready here is asked of Python: a kernel that was not tried yet, a backward pass for some tensors only.

#include "met.h"

namespace {

using namespace undrift;

void expect(Py_ssize_t count, Py_ssize_t needed) {
  TORCH_CHECK_TYPE(count == needed, needed, " arguments are needed, got ", count);
}

// bind(address of cuLaunchKernel, address of aoti_torch_get_current_cuda_stream)
PyObject* bind(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 2);
  launch_kernel = reinterpret_cast<decltype(launch_kernel)>(PyLong_AsVoidPtr(given[0]));
  current_stream = reinterpret_cast<decltype(current_stream)>(PyLong_AsVoidPtr(given[1]));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// kernel((function, across, down, threads, shared, device), numbers after the tensors, each as 64 bits)
PyObject* kernel(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 2);
  const auto a = integers(given[0]), numbers = integers(given[1]);
  auto size = [&](int i) { return static_cast<unsigned>(a.at(i)); };
  return capsule(std::make_shared<Kernel>(Kernel{
      reinterpret_cast<void*>(a.at(0)), size(1), size(2), size(3), size(4), static_cast<int>(a.at(5)),
      std::vector<uint64_t>(numbers.begin(), numbers.end())}));
  END_HANDLE_TH_ERRORS
}

// launch(kernel, *tensors) -> whether it was: tensors elsewhere in memory, or on another GPU, are not for it
PyObject* launch(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const Kernel& asked = *held<Kernel>(given[0]);
  void* addresses[Kernel::most];
  if (count - 1 > static_cast<Py_ssize_t>(Kernel::most)) Py_RETURN_FALSE;
  for (Py_ssize_t i = 1; i < count; ++i) addresses[i - 1] = tensor(given[i]).data_ptr();
  return PyBool_FromLong(asked.launch({addresses, static_cast<size_t>(count - 1)}));
  END_HANDLE_TH_ERRORS
}

// plan(ten calls or None, energy, plane, scratch, energy for a box filter's gradient or None, the filter's six numbers or
// (), extra, strides, last, own.asked)
PyObject* plan(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 19);
  auto made = std::make_shared<Plan>();
  Plan& p = *made;
  Call* calls[] = {&p.joined, &p.summed, &p.filtered, &p.add, &p.sums, &p.log_var, &p.both, &p.added, &p.finish, &p.spread};
  for (Call* call : calls) call->take(*given++);
  Like* likes[] = {&p.energy, &p.plane, &p.scratch};
  for (Like* like : likes) *like = Like(tensor(*given++));
  if (given[0] != Py_None) p.like = tensor(given[0]);
  p.pool = integers(given[1]);
  p.extra = PyFloat_AsDouble(given[2]);
  p.strides = integers(given[3]);
  p.last = given[4] == Py_True;
  p.asked = Py_NewRef(given[5]);
  return capsule(std::move(made));
  END_HANDLE_TH_ERRORS
}

// written(a row, sizes of its pieces)
PyObject* written(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 2);
  auto made = std::make_shared<Written>();
  made->like = Like(tensor(given[0]));
  made->sizes = integers(given[1]);
  int64_t start = 0;
  for (int64_t size : made->sizes) {
    made->starts.push_back(start);
    start += size;
  }
  return capsule(std::move(made));
  END_HANDLE_TH_ERRORS
}

// place(written, number of a layer) -> where it is to write in this backward pass
PyObject* place(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 2);
  return THPVariable_Wrap(held<Written>(given[0])->of(PyLong_AsLongLong(given[1])));
  END_HANDLE_TH_ERRORS
}

// take(written) -> the row and the numbers of the layers that have written, or None
PyObject* take(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 1);
  auto found = held<Written>(given[0])->take();
  if (!found) Py_RETURN_NONE;
  PyObject* places = PySet_New(nullptr);
  for (int64_t each : found->places) {
    PyObject* number = PyLong_FromLongLong(each);
    PySet_Add(places, number);
    Py_DECREF(number);
  }
  return Py_BuildValue("(NN)", THPVariable_Wrap(found->row), places);
  END_HANDLE_TH_ERRORS
}

// met(plan, number, rank, x, y, log_var, whether its own gradient is x's too, layer, names of its settings,
// dispatch._forced, all modules' hooks, own.alone, positions that x is centred over or (), whether x is copied first)
PyObject* met(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 14);
  auto ref = [](PyObject* object) { return Ref(Py_XNewRef(object)); };
  std::vector<std::pair<Ref, Ref>> settings;
  for (Py_ssize_t i = 0; i < PyTuple_Size(given[8]); ++i) {
    PyObject* name = PyTuple_GetItem(given[8], i);
    settings.emplace_back(ref(name), Ref(PyObject_GetAttr(given[7], name)));
  }
  auto seen = [&](int i) { return Seen(given[i], tensor(given[i])); };
  return capsule(std::make_shared<Met>(Met{
      held<Plan>(given[0]), ref(given[1]), PyLong_AsLong(given[1]), PyLong_AsLong(given[2]), seen(3), seen(4), seen(5),
      given[6] == Py_True, Py_TYPE(given[7]), std::move(settings), ref(given[9]),
      ref(PyList_GetItem(given[9], PyList_Size(given[9]) - 1)), ref(given[10]), ref(given[11]),
      integers(given[12]), given[13] == Py_True}));
  END_HANDLE_TH_ERRORS
}

// again(met, pass, layer, noise, x, y) -> y with its noise, or None: something is not as it was
PyObject* again(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 6);
  return held<Met>(given[0])->again(given[1], given[2], given[3], given[4], given[5]);
  END_HANDLE_TH_ERRORS
}

template <PyObject* (*called)(PyObject*, PyObject* const*, Py_ssize_t)>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(called)), METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {
    method<again>("again"), method<bind>("bind"), method<kernel>("kernel"), method<launch>("launch"),
    method<met>("met"), method<place>("place"), method<plan>("plan"), method<take>("take"),
    method<written>("written"),
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "undrift_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_undrift_native() { return PyModule_Create(&module); }
