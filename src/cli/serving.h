// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a GPU gives a policy, on paper: a roofline of one step of an engine, and the course of one request. Nothing is
// run; what was measured of events is in gpu_times.h.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "forecast.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep::cli {

// What a GPU reaches.
struct GpuLimits {
  std::string name;
  double memory = 0, bandwidth = 0, products = 0;  // bytes, bytes read a second, bf16 operations a second
};

std::vector<std::string> names_of_gpus();

// Bandwidth and operations are the nominal ones, times the share that an H100 reached of its own. Throws
// InvalidArgument, with the names, for another one.
GpuLimits gpu_called(const std::string& name);

// How long an event of one sequence takes. Events of several sequences in one step add up: 32 at once took 1.08 times
// as long a sequence as one, launched one by one (ams-tova, llama8b).
class EventPrice {
 public:
  // Between the sizes at which events of the policy were measured it is a straight line over the bytes that must move;
  // below, the time of the smallest; above, the bytes at the rate of the largest. Another GPU takes longer or shorter
  // as it reads. Throws Unsupported for a policy that was not measured, for one that reads more or fewer queries than
  // the one that was, and for a dtype of other than two bytes.
  EventPrice(const ModelSpec& spec, const KVPolicy& policy, Dtype dtype, const GpuLimits& gpu);
  // The same for every event.
  explicit EventPrice(double seconds) : points_{{1, seconds}}, said_("as given") {}

  // `before`, `after`: slots of all rows of the sequence.
  [[nodiscard]] double seconds(std::int64_t before, std::int64_t after) const;
  // How it is known.
  [[nodiscard]] const std::string& said() const { return said_; }

 private:
  struct Point {
    double bytes, seconds;
  };
  std::vector<Point> points_;              // by bytes
  double key_bytes_ = 0, slot_bytes_ = 0;  // of a slot; 0: every event is below the first point
  std::string said_;
};

// One request as a policy holds it, by the tokens that are in the cache, from 0 to the last but one of its answer:
// nobody needs the keys of the last.
struct Course {
  std::int32_t prompt = 0, length = 0, piece = 0;
  std::vector<std::int64_t> held;  // bytes at most while the step runs: pages of K and V, and kvkeep's own
  std::vector<std::int64_t> read;  // bytes of K and V that are there for the newest token
  std::vector<double> event;       // seconds of the event that follows; 0: none
  std::int64_t scratch = 0;        // bytes of one event, once for the whole engine
  std::int64_t slot_bytes = 0;     // K and V of one slot of one row
  std::int64_t token_bytes = 0;    // and of a token in all full layers
  std::int64_t rows = 0;           // of full layers
  std::int64_t sliding = 0;        // of `read`, in layers that slide, at the end
  bool shows_queries = false;      // to the policy

  [[nodiscard]] std::int32_t answer() const { return length - prompt; }
  // Steps after the first token, which the prompt's last step writes.
  [[nodiscard]] std::int32_t decode_steps() const { return answer() - 1; }
  // A piece of a prompt after the first `seen` tokens.
  [[nodiscard]] std::int32_t piece_after(std::int32_t seen) const { return std::min(piece, prompt - seen); }
  [[nodiscard]] std::int64_t most_held(std::int32_t from) const;
  // Once its first token has run, which may cut the prompt.
  [[nodiscard]] std::int64_t most_after_prompt() const { return most_held(prompt + 2); }
  [[nodiscard]] double mean_read() const;   // over the steps after the first token
  [[nodiscard]] double mean_event() const;  // seconds a step
};

// `price` is asked at each event; none is needed for a policy that never cuts. plan.piece: tokens of the engine's
// steps.
Course course_of(const ModelSpec& spec, const KVPolicy& policy, const SequencePlan& plan,
                 const std::optional<EventPrice>& price);

// One step of an engine: each kind of work takes the longer of its bytes and its operations, and kinds follow each
// other. Weights are read once; every request that decodes reads its own cache.
struct Roofline {
  double bandwidth = 0, products = 0;        // bytes and operations a second, of what the model reaches
  double parameters = 0;                     // numbers of two bytes
  double gaps = 0;                           // seconds between the kernels of a step
  double slot_operations = 0;                // of attention: of all query heads of a row, for one token and slot
  double showing_one = 0, showing_more = 0;  // seconds: queries of one request, of each further one

  struct Work {
    std::int64_t decoding = 0;       // requests, a token each
    double read = 0;                 // bytes of their caches
    std::int64_t prompt_tokens = 0;  // of all pieces of prompts
    double prompt_seconds = 0;       // of their attention
    std::int64_t shown = 0;          // requests whose queries kvkeep sees
  };
  [[nodiscard]] double seconds(const Work& work) const;

  // Causal attention of a piece of a prompt that ends with token `end`.
  [[nodiscard]] double attention(const Course& course, std::int32_t tokens, std::int32_t end) const;
  // Showing the queries of so many requests in every layer.
  [[nodiscard]] double showing(std::int64_t requests) const;
  // All of a prompt in steps of its own, its events with it.
  [[nodiscard]] double prompt(const Course& course) const;
  // A step of n requests that decode, at the mean of their courses, without events.
  [[nodiscard]] double decode(const Course& course, std::int64_t n) const;
};

// `share`: of the products that the GPU reaches, what the model's reach.
Roofline roofline_of(const ModelSpec& spec, double parameters, const GpuLimits& gpu, double share);

// Requests of one course that `room` bytes hold, each at its most after its prompt, while one more prompt comes in.
std::int64_t requests_that_fit(const Course& course, std::int64_t room);

// Tokens that a full cache holds where a step over it is as fast as one under `course` with its events, n at a time.
double break_even(const Roofline& roofline, const Course& course, std::int64_t n);

}  // namespace kvkeep::cli
