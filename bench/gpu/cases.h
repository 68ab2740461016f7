// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The GPU benches' list of cases. Each writes one line of JSON when it begins and one when it ends, so that a stopped
/// run keeps all it has.

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace kvkeep::cuda {

/// What one case found.
struct Result {
  std::vector<std::pair<std::string, double>> numbers;
  std::string error;  ///< empty: every row that was checked agrees with its reference

  void set(const char* what, double number) { numbers.emplace_back(what, number); }
  void fail(std::string why) {
    if (error.empty()) error = std::move(why);
  }
};

struct BenchOptions {
  bool toy = false;    ///< small sizes of every kernel and policy, for the execution model and the sanitizers
  bool once = false;   ///< checks, then launches once: for profilers
  double seconds = 0;  ///< no case begins after that; 0: no limit
  std::string filter;  ///< a regular expression; empty: all
  std::string out;     ///< where the lines go; empty: nowhere
};
[[nodiscard]] const BenchOptions& options();

struct Shape {
  const char* name;
  std::int32_t layers, kv_heads, dim, group;  ///< group: query heads per KV head
  [[nodiscard]] std::int32_t query_heads() const { return kv_heads * group; }
};
/// The models whose shapes are measured.
[[nodiscard]] std::vector<Shape> shapes();

struct Size {
  std::int32_t batch, length, budget;
  std::int32_t page = 0;
};

using Body = void (*)(Result&, Shape, Size);

void add(std::string name, std::function<void(Result&)> body);
/// <kernel>/<model>/batch:<B>/<slots before>-><slots after>, for every shape and size.
void add(const char* kernel, Body body, std::initializer_list<Size> sizes,
         std::initializer_list<Size> toy = {{1, 96, 64}, {2, 200, 128}});

void add_ceilings();
void add_events();
void add_keeping();
void add_scorers();
void add_prefill();
void add_memory();
void add_eigensolver();

}  // namespace kvkeep::cuda
