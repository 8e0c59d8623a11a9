// A layer as it was met last, as `known` has it in Python: whatever has changed since is for Python to look up.

#pragma once

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/sub.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "node.h"

namespace undrift {

// A name that attributes are looked up by.
struct Name {
  PyObject* text;
  explicit Name(const char* given) : text(PyUnicode_InternFromString(given)) {}
};

// An object that is let go at the end.
struct Ref {
  PyObject* object;
  explicit Ref(PyObject* given) : object(given) {
    if (given == nullptr) raise_python();
  }
  Ref(PyObject* of, const Name& name) : Ref(PyObject_GetAttr(of, name.text)) {}
  Ref(Ref&& other) noexcept : object(std::exchange(other.object, nullptr)) {}
  Ref(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object); }
  operator PyObject*() const { return object; }
};

// What compiled code is guarded by: class, kind, sizes, strides, gradients, and by which keys PyTorch dispatches it here.
struct Seen {
  PyTypeObject* type;
  uint64_t keys;
  at::ScalarType dtype;
  c10::Device device;
  bool graded;
  std::vector<int64_t> sizes, strides;

  static uint64_t keys_of(const Tensor& t) {
    const auto here = c10::impl::tls_local_dispatch_key_set();
    return ((t.key_set() | here.included_) - here.excluded_).raw_repr();
  }

  static bool graded_of(const Tensor& t) { return at::GradMode::is_enabled() && t.requires_grad(); }

  Seen(PyObject* object, const Tensor& t)
      : type(Py_TYPE(object)), keys(keys_of(t)), dtype(t.scalar_type()), device(t.device()), graded(graded_of(t)),
        sizes(t.sizes().vec()), strides(t.strides().vec()) {}

  bool again(PyObject* object) const {
    if (Py_TYPE(object) != type) return false;
    const Tensor& t = THPVariable_Unpack(object);
    return keys_of(t) == keys && t.scalar_type() == dtype && t.device() == device && graded_of(t) == graded &&
        t.sizes() == at::IntArrayRef(sizes) && t.strides() == at::IntArrayRef(strides) &&
        !t._fw_grad(0).defined();  // the longer way says that there is none
  }
};

// Whether nobody has hooked what autograd saves; PyTorch tells since 2.8, and before it may be so.
template <class Hooks>
bool unhooked() {
  if constexpr (requires { Hooks::get_hooks(true); }) {
    return !Hooks::get_hooks(true).has_value();
  } else {
    return false;
  }
}

struct Met {
  static constexpr const char* name = "undrift.Met";

  std::shared_ptr<Plan> plan;
  Ref number;
  long place, rank;
  Seen x, y, log_var;
  bool owns;                                       // x wants a gradient that the layer's own can be added to
  PyTypeObject* type;                              // of the layer
  std::vector<std::pair<Ref, Ref>> settings;       // names and values of all that its plan follows from
  Ref forced_by, forced, hooks_of_all, alone;      // dispatch._forced, what it said; all modules' hooks; own.alone
  std::vector<int64_t> centred;                    // positions over which x has its mean taken off
  bool copied;                                     // x is a part of something else, and copied first

  // `Known.add`; None where something is not as it was: nothing has been done then.
  PyObject* again(PyObject* now, PyObject* layer, PyObject* noise, PyObject* given, PyObject* made) const {
    static const Name parameters("_parameters"), log_var_("log_var"), calls_("calls"), keys_("keys"), row_("row"),
        graded_("graded"), rank_("rank"), handle_("handle"), log_vars_("log_vars"), gradients_("gradients"),
        native_("native");
    const Ref own(noise, parameters), calls(now, calls_), keys(now, keys_), row(now, row_), graded(now, graded_);
    PyObject* var = PyDict_GetItemWithError(own, log_var_.text);
    const bool on = at::GradMode::is_enabled();
    if (var == nullptr || !x.again(given) || !y.again(made) || !log_var.again(var) || on != (graded == Py_True) ||
        torch::autograd::get_current_graph_task_id() != -1 || (on && !unhooked<at::SavedTensorDefaultHooks>()) ||
        c10::impl::TorchDispatchModeTLS::stack_len() > 0 || PyDict_Contains(calls, number) != 0 ||
        PyList_GET_ITEM(forced_by.object, PyList_GET_SIZE(forced_by.object) - 1) != forced.object ||
        PyLong_AsLong(Ref(now, rank_)) != rank || Py_TYPE(layer) != type) {
      return unknown();
    }
    for (const auto& [name, value] : settings) {
      if (Ref(PyObject_GetAttr(layer, name)).object != value.object) return unknown();
    }
    if (2 * place >= PyTuple_GET_SIZE(keys.object)) return unknown();
    const Tensor key = THPVariable_Unpack(PyTuple_GET_ITEM(keys.object, 2 * place));
    if (key.device() != x.device) return unknown();
    const Tensor variances = THPVariable_Unpack(var);  // held: Python may put another in its place meanwhile
    if (row == Py_None || !plan->folded()) {
      return added(calls, layer, noise, given, made, variances, key, variances, nullptr, now);
    }
    const Ref rows(row, log_vars_), gradients(row, gradients_), handle(row, handle_), native(gradients, native_);
    if (place >= PyList_GET_SIZE(rows.object) || PyList_GET_ITEM(rows.object, place) != var) {
      return added(calls, layer, noise, given, made, variances, key, variances, nullptr, now);
    }
    if (native == Py_None) return unknown();  // begun in Python
    return added(calls, layer, noise, given, made, variances, key, tensor(handle), held<Written>(native), now);
  }

 private:
  static PyObject* unknown() {
    if (PyErr_Occurred()) raise_python();
    Py_RETURN_NONE;
  }

  PyObject* added(PyObject* calls, PyObject* layer, PyObject* noise, PyObject* given, PyObject* made, const Tensor& var,
                  const Tensor& key, const Tensor& edge, std::shared_ptr<Written> into, PyObject* now) const {
    static PyObject* zero = PyLong_FromLong(0);
    if (PyDict_SetItem(calls, number, zero) != 0) raise_python();
    const bool whole = owns && at::GradMode::is_enabled() && is_alone(layer, noise);
    const Tensor images = THPVariable_Unpack(given), product = THPVariable_Unpack(made);
    const Tensor x = !centred.empty() ? less_mean(images) : copied ? images.contiguous() : images;
    return THPVariable_Wrap(noisy(plan, x, product, var, key, edge, std::move(into), place, now, whole));
  }

  // `noise.centred`, of what wants no gradient.
  Tensor less_mean(const Tensor& images) const {
    at::AutoDispatchBelowADInplaceOrView below;
    const Tensor full = images.to(at::kFloat);
    return at::sub(full, at::mean(full, centred, /*keepdim=*/true));
  }

  // `own.alone`, for a layer with one hook; others are Python's to look at.
  bool is_alone(PyObject* layer, PyObject* noise) const {
    static const Name parameters("_parameters"), hooks_("_forward_hooks"), weight_("weight"), bias_("bias");
    const Ref own(layer, parameters), hooks(layer, hooks_);
    PyObject *weight = PyDict_GetItemWithError(own, weight_.text), *bias = PyDict_GetItemWithError(own, bias_.text);
    PyObject *id = nullptr, *hook = nullptr;
    Py_ssize_t at = 0;
    if (PyDict_Size(hooks) != 1 || weight == nullptr || bias == nullptr || PyDict_Size(hooks_of_all) != 0 ||
        !PyDict_Next(hooks, &at, &id, &hook) || !PyMethod_Check(hook) || PyMethod_GET_SELF(hook) != noise) {
      const Ref answer(PyObject_CallFunctionObjArgs(alone, layer, noise, nullptr));
      return answer == Py_True;
    }
    static const Name forward("forward");
    const Ref all(PyObject_GenericGetDict(layer, nullptr));
    auto frozen = [](PyObject* t) { return t == Py_None || !tensor(t).requires_grad(); };
    return PyDict_Contains(all, forward.text) == 0 && weight != Py_None && frozen(weight) && frozen(bias);
  }
};

}  // namespace undrift
