// A layer's noise as one node of autograd, as `layer` and `own` have it in Python.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool2d_backward.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <typeindex>
#include <unordered_map>

#include "row.h"

// What lets go of a chain of nodes without recursion; where nodes count themselves, it is neither there nor asked for.
namespace torch::autograd {
TORCH_API void deleteNode(Node* function);
}

namespace undrift {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
// The standard library's pointer in PyTorch 2.11, PyTorch's own in 2.13.
using NodePtr = std::decay_t<decltype(std::declval<Tensor>().grad_fn())>;

template <class Made>
auto make_node(std::shared_ptr<Node>*) {
  return std::shared_ptr<Made>(new Made(), torch::autograd::deleteNode);
}
template <class Made, class Pointer>
auto make_node(Pointer*) {
  return c10::make_intrusive<Made>();
}

struct Plan {
  static constexpr const char* name = "undrift.Plan";

  Call joined, summed, filtered, add;  // forward: energy and noise at once, or after each other, filtered or not
  Call sums, log_var, both, added;     // backward: sums; log_var's gradient; x's, alone or with the layer's own …
  Call finish, spread;                 // … or, where there are groups or large windows, step by step
  Like energy, plane, scratch;
  Tensor like;                         // the energy's sizes, for the gradient of a box filter that is not its own
  std::vector<int64_t> pool;           // window, stride and padding, each down and across; of a filter by PyTorch
  double extra = 0;                    // a constant energy that no kernel adds
  std::vector<int64_t> strides;        // of y
  bool last = false;                   // channels are the last dimension, and all others one of a matrix
  PyObject* asked = nullptr;           // own.asked
  ~Plan() { drop(asked); }

  bool folded() const { return static_cast<bool>(both); }

  // Returns y with its noise, and the plane.
  std::pair<Tensor, Tensor> forward(const Tensor& x, const Tensor& y, const Tensor& var, const Tensor& key) {
    Tensor out = empty_as(y), under = energy.empty();
    if (joined) {
      joined({x, y, var, key, out, under});
      return {out, under};
    }
    summed({x, under});
    if (filtered) {
      Tensor windows = plane.empty();
      filtered({y, under, var, key, out, windows});
      return {out, windows};
    }
    if (extra != 0) under.add_(extra);
    if (!pool.empty()) under = box(under);
    add({y, under, var, key, out});
    return {out, under};
  }

  // Returns the gradients of x, where it is given, and of log_var, of a layer that is not folded.
  std::pair<Tensor, Tensor> gradients(const Tensor& grad, const Tensor& x, const Tensor& under, const Tensor& var,
                                      const Tensor& key) {
    const Tensor parts = scratch.empty();
    Tensor grad_plane = empty_as(under), grad_var, grad_x;
    if (finish) {
      grad_var = empty_as(var);
      sums({grad, under, var, key, parts});
      finish({parts, under, grad_plane, grad_var});
    } else {
      sums({grad, under, var, key, grad_plane, parts});
      grad_var = at::sum(parts, 0).to(var.scalar_type());
    }
    if (!x.defined()) return {grad_x, grad_var};
    if (like.defined()) {
      grad_plane = at::avg_pool2d_backward(grad_plane, like, part(0), part(1), part(2), false, true, 1);
    } else if (!pool.empty()) {
      grad_plane = box(grad_plane);  // its own transpose
    }
    grad_x = empty_as(x);
    spread({x, grad_plane, grad_x});
    return {grad_x, grad_var};
  }

 private:
  at::IntArrayRef part(size_t which) const { return {pool.data() + 2 * which, 2}; }
  // Sizes are rounded down, padding counts, and the sum is divided by 1.
  Tensor box(const Tensor& t) const { return at::avg_pool2d(t, part(0), part(1), part(2), false, true, 1); }
};

constexpr int view = -1, other = -2;

// Which input of a node is its layer's: a bias comes before it. A linear layer makes a matrix of its vectors first, and
// vectors of the product.
inline int place_of(const Node& node) {
  static std::unordered_map<std::type_index, int> places;  // names are made anew each time
  const std::type_index kind(typeid(node));
  const auto known = places.find(kind);
  if (known != places.end()) return known->second;
  const std::string called = node.name();
  int place = other;
  if (called == "ConvolutionBackward0" || called == "MmBackward0") place = 0;
  if (called == "AddmmBackward0") place = 1;
  if (called == "ViewBackward0" || called == "UnsafeViewBackward0") place = view;
  return places[kind] = place;
}

// Somebody who waits for a gradient of y itself would never hear of it.
inline bool hooked(Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() || !node.pre_hooks().empty() ||
      !node.post_hooks().empty();
}

// The node of a layer's product y, and where its input is; nothing where y is something else.
inline std::pair<NodePtr, int> own_of(const Tensor& y) {
  NodePtr node = y.grad_fn();
  if (!node || hooked(*node)) return {};
  int place = place_of(*node);
  if (place == view) {
    node = node->next_edge(0).function;
    if (!node || hooked(*node)) return {};
    place = place_of(*node);
  }
  return place < 0 ? std::pair<NodePtr, int>{} : std::make_pair(node, place);
}

struct NoisyBackward : public Node {
  std::shared_ptr<Plan> plan;
  SavedVariable x, var;
  Tensor plane, key;
  NodePtr own;
  int own_place = 0;
  std::shared_ptr<Written> into;
  std::shared_ptr<Alive> alive;
  int64_t place = 0;

  std::string name() const override { return "NoisyBackward"; }

  void release_variables() override {
    NodePtr node;  // let go after the lock: these may ask for Python's
    std::shared_ptr<Alive> pass;
    std::lock_guard<std::mutex> guard(mutex_);
    x.reset_data();
    var.reset_data();
    plane.reset();
    std::swap(node, own);
    std::swap(pass, alive);
  }

  variable_list apply(variable_list&& grads) override {
    const Tensor grad = grads[0].defined() ? grads[0] : input_metadata(0).zeros_like();
    const bool twice = at::GradMode::is_enabled() && grad.requires_grad();
    at::AutoGradMode mode(false);
    variable_list found = once(grad);
    if (!twice) return found;
    // A second derivative is asked for, and there is none.
    for (Tensor& each : found) {
      if (!each.defined()) continue;
      variable_list given{each.detach().set_requires_grad(true)};
      at::AutoGradMode on(true);
      torch::autograd::DelayedError error(
          "trying to differentiate twice a function that was marked with @once_differentiable", 1);
      each = error.apply(std::move(given))[0];
    }
    return found;
  }

  variable_list once(Tensor grad) {
    Tensor log_var, given, under, mine, grad_x;
    NodePtr own;
    {
      std::lock_guard<std::mutex> guard(mutex_);  // another thread may let go of them
      log_var = var.unpack();
      given = x.unpack();
      under = plane;
      own = this->own;
    }
    if (grad.strides() != at::IntArrayRef(plan->strides)) {  // once, for us and for the layer
      grad = at::empty_strided(grad.sizes(), plan->strides, grad.options()).copy_(grad);
    }
    const bool owned = static_cast<bool>(own);
    if (owned) {
      mine = own_gradient(own, grad, given);
      if (!mine.defined()) {
        given = Tensor();  // this backward pass asks for nothing before this layer
      } else if (mine.strides() != given.strides() || mine.scalar_type() != grad.scalar_type()) {
        mine = at::empty_strided(given.sizes(), given.strides(), grad.options()).copy_(mine);
      }
    }
    at::AutoDispatchBelowADInplaceOrView below;
    if (!plan->folded()) {
      auto [grad_given, grad_var] = plan->gradients(grad, given, under, log_var, key);
      return {grad_given, grad, grad_var};
    }
    const Tensor scratch = plan->scratch.empty();
    const Tensor grad_var = into && taken() ? into->of(place) : empty_as(log_var);
    plan->sums({grad, under, log_var, key, scratch});
    if (!given.defined()) {
      plan->log_var({scratch, grad_var});
    } else if (!mine.defined()) {
      grad_x = empty_as(given);
      plan->both({given, scratch, given, grad_x, grad_var});
    } else {
      grad_x = plan->added.tried() && mine.scalar_type() == given.scalar_type() ? mine : empty_as(given);
      plan->added({given, scratch, mine, grad_x, grad_var});
    }
    return {grad_x, owned ? Tensor() : grad, into ? Tensor() : grad_var};
  }

  // Whether this backward pass comes to the row's node: one for other tensors leaves nothing there.
  bool taken() const {
    const auto* info = torch::autograd::get_current_graph_task_exec_info();
    if (info == nullptr || info->empty()) return true;
    const auto there = info->find(next_edge(2).function.get());
    return there != info->end() && there->second.should_execute();
  }

  Tensor own_gradient(const NodePtr& own, Tensor grad, const Tensor& given) const {
    const bool rows = plan->last && given.dim() != 2;
    auto viewed = [](const Tensor& t, at::IntArrayRef sizes) {
      at::AutoDispatchBelowADInplaceOrView below;  // nobody differentiates these
      return t.view(sizes);
    };
    if (rows) grad = viewed(grad, {-1, grad.size(-1)});
    Tensor found = (*own)({grad})[own_place];
    if (found.defined()) return rows ? viewed(found, given.sizes()) : found;
    // A pass for some tensors only: Python knows whether x is on the way to them.
    Gil gil;
    PyObject* node = torch::autograd::functionToPyObject(own);
    PyObject* g = THPVariable_Wrap(grad);
    PyObject* v = THPVariable_Wrap(given);
    PyObject* answer = PyObject_CallFunctionObjArgs(plan->asked, node, g, v, nullptr);
    Py_DECREF(node);
    Py_DECREF(g);
    Py_DECREF(v);
    if (answer == nullptr) raise_python();
    if (answer != Py_None) found = tensor(answer);
    Py_DECREF(answer);
    return found;
  }
};

// Returns y with its noise.
//
//   edge     what log_var's gradient goes to
//   into     where it is written instead, at a place; pass: whose row that is
//   whole    y is the layer's product and nothing else
inline Tensor noisy(const std::shared_ptr<Plan>& plan, const Tensor& x, const Tensor& y, const Tensor& log_var,
                    const Tensor& key, const Tensor& edge, std::shared_ptr<Written> into, int64_t place, PyObject* pass,
                    bool whole) {
  Tensor out, plane;
  {
    WithoutGil others;  // CUDA may have them wait
    at::AutoDispatchBelowADInplaceOrView below;
    std::tie(out, plane) = plan->forward(x, y, log_var, key);
  }
  if (!at::GradMode::is_enabled()) return out;
  NodePtr own;
  int own_place = 0;
  if (whole && plan->folded()) std::tie(own, own_place) = own_of(y);
  auto wants = [](const Tensor& t, bool asked = true) {
    return asked && t.requires_grad() ? torch::autograd::impl::gradient_edge(t) : Edge();
  };
  torch::autograd::edge_list edges{wants(x), wants(y, !own), wants(edge)};
  if (!edges[0].is_valid() && !edges[1].is_valid() && !edges[2].is_valid()) return out;
  auto node = make_node<NoisyBackward>(static_cast<NodePtr*>(nullptr));
  node->plan = plan;
  if (x.requires_grad()) node->x = SavedVariable(x, false);
  node->var = SavedVariable(log_var, false);
  node->plane = std::move(plane);
  node->key = key;
  node->own = std::move(own);
  node->own_place = own_place;
  if (into) {
    node->place = place;
    node->alive = into->alive.lock();
    if (!node->alive) into->alive = node->alive = std::make_shared<Alive>(pass);
    node->into = std::move(into);
  }
  node->set_next_edges(std::move(edges));
  torch::autograd::set_history(out, node);
  return out;
}

}  // namespace undrift
