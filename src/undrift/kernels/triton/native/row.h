// What layers have written in a backward pass, until the row's node takes it (`undrift._row`).

#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include <map>
#include <mutex>
#include <optional>

#include "kernel.h"

namespace undrift {

// Keeps the pass of a network: as long as it may be differentiated, the KL asks for its row.
struct Alive {
  PyObject* pass;
  explicit Alive(PyObject* given) : pass(Py_NewRef(given)) {}
  Alive(const Alive&) = delete;
  ~Alive() { drop(pass); }
};

struct Row {
  Tensor row;
  std::vector<int64_t> places;
};

struct Written {
  static constexpr const char* name = "undrift.Written";

  Like like;
  std::vector<int64_t> starts, sizes;
  std::mutex one_at_a_time;  // a backward pass may run in several threads; nothing under it asks for Python's lock
  std::map<int, Row> found;  // by backward pass
  std::weak_ptr<Alive> alive;

  // Where a layer is to write in this backward pass.
  Tensor of(int64_t place) {
    const int task = torch::autograd::get_current_graph_task_id();
    Tensor row = noted(task, place);
    if (!row.defined()) {
      Tensor made = like.empty();  // not under the lock: whoever watches allocations may be Python
      {
        std::lock_guard<std::mutex> guard(one_at_a_time);
        found.emplace(task, Row{std::move(made), {}});
      }
      row = noted(task, place);
    }
    return row.narrow(0, starts.at(place), sizes.at(place));
  }

  std::optional<Row> take() {
    std::lock_guard<std::mutex> guard(one_at_a_time);
    auto node = found.extract(torch::autograd::get_current_graph_task_id());
    return node.empty() ? std::nullopt : std::make_optional(std::move(node.mapped()));
  }

 private:
  Tensor noted(int task, int64_t place) {
    std::lock_guard<std::mutex> guard(one_at_a_time);
    const auto there = found.find(task);
    if (there == found.end()) return Tensor();
    there->second.places.push_back(place);
    return there->second.row;
  }
};

}  // namespace undrift
