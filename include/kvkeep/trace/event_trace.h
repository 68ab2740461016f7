#pragma once
/// Event traces: what an engine saw at one compression event, replayed without the model. The file format is
/// docs/reference/trace-format.md.

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/core/compiled_only.h"
#include "kvkeep/io/safetensors.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep::trace {

/// Named tensors and strings, as in one safetensors file.
struct Result {
  std::vector<std::pair<std::string, Tensor>> tensors;
  std::map<std::string, std::string> metadata;
};

/// Value of `kind` in a trace. Throws InvalidArgument if the file is not a trace, or has another format version.
[[nodiscard]] std::string kind_of(const io::SafetensorsFile& file);

/// Runs one event of `policy` on a trace of kind `event`. Returns slots, scores, the allotment if the policy makes one,
/// and the compacted rows. A sequence that holds at most its budget keeps everything. Throws InvalidArgument, naming
/// the tensor or metadata, for a trace that does not fit the format.
[[nodiscard]] Result replay_event(const io::SafetensorsFile& file, const KVPolicy& policy);

}  // namespace kvkeep::trace
