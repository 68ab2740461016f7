// SPDX-License-Identifier: Apache-2.0
#pragma once
// Requests that arrive at random at an engine whose steps take what a roofline says: how long they wait, how many run
// at once. Nothing is run.

#include <array>
#include <cstdint>

#include "serving.h"

namespace kvkeep::cli {

struct Load {
  std::int64_t requests = 1;
  double rate = 0;  // arrivals a second (Poisson); 0: all have come at the start
  std::uint32_t seed = 1;
};

// The times that half, nine tenths and 99 of 100 do not exceed, seconds.
using Percentiles = std::array<double, 3>;

struct Served {
  std::int64_t finished = 0, tokens = 0, steps = 0, events = 0;
  std::int64_t most_at_once = 0, most_bytes = 0;
  std::int64_t away = 0;     // times that a request left for the host's memory
  double seconds = 0;        // until the last token
  double in_flight = 0;      // requests with a cache, mean over the time
  Percentiles first = {};    // from a request's arrival to its first token
  Percentiles between = {};  // two tokens of one request, within 0.1 %
  [[nodiscard]] double tokens_per_second() const { return static_cast<double>(tokens) / seconds; }
};

// Requests of one course, in the order of their arrival. A step runs a token of every request that decodes, and pieces
// of prompts, one piece's tokens in all. A request comes in when its whole prompt fits, and a page for each of the
// others; when the next step does not fit, the newest leaves for the memory of the host, and comes back before any
// other comes in. `room`: bytes. Throws InvalidArgument if one request alone does not fit.
// Cost: O(tokens of all answers).
Served serve(const Course& course, const Roofline& roofline, std::int64_t room, const Load& load);

}  // namespace kvkeep::cli
