#pragma once
// What kvkeep plan was asked, and its answer where the text decides.

#include <cstdint>
#include <string>

#include "bounds.h"
#include "kvkeep/cli/options.h"
#include "kvkeep/cli/program.h"

namespace kvkeep::cli {

struct PlanOptions {
  std::string model, shape, policy, dtype = "bf16";
  std::int32_t batch = 1, length = 32768, prompt = 0, page_size = 16;
  OutputOptions output;
};

// One sequence between bounds.
struct PlannedBounds {
  const ModelSpec& spec;
  const KVPolicy& policy;
  BoundedForecast sequence;
  OwnBytes own;
  bool ragged = false;    // the policy that decides after the prompt spreads its budget by the data
  std::int64_t fits = 0;  // sequences at the most, in the memory of the batch's full caches
};

const char* kind_text(LayerKind kind);
// "4", or "4-9".
std::string slots_text(std::int64_t least, std::int64_t most);
nlohmann::ordered_json own_json(const OwnBytes& own);
// Adds kvkeep's own bytes of a sequence, a row for each part that is not 0. `add(what, bytes)`.
void each_own(const OwnBytes& own, const std::function<void(const char* what, std::int64_t bytes)>& add);

std::string bounds_text(const PlanOptions& options, const PlannedBounds& planned);

}  // namespace kvkeep::cli
