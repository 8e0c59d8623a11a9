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
  static constexpr size_t most = 4;  // backward passes at once; one for some tensors only may leave its own behind

  Like like;
  std::vector<int64_t> starts, sizes;
  std::mutex one_at_a_time;  // backward passes may run in threads of their own
  std::map<int, Row> found;  // by pass: the least number is the oldest
  std::weak_ptr<Alive> alive;

  Tensor of(int64_t place) {
    std::lock_guard<std::mutex> guard(one_at_a_time);
    const int task = torch::autograd::get_current_graph_task_id();
    auto there = found.find(task);
    if (there == found.end()) {
      there = found.emplace(task, Row{like.empty(), {}}).first;
      if (found.size() > most) found.erase(found.begin());
    }
    there->second.places.push_back(place);
    return there->second.row.narrow(0, starts.at(place), sizes.at(place));
  }

  std::optional<Row> take() {
    std::lock_guard<std::mutex> guard(one_at_a_time);
    auto node = found.extract(torch::autograd::get_current_graph_task_id());
    return node.empty() ? std::nullopt : std::make_optional(std::move(node.mapped()));
  }
};

}  // namespace undrift
