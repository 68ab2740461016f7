// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Span traces: keys, values, surprisal and decode queries of one layer, replayed without the model. The file format is
/// docs/reference/trace-format.md.

#include "kvkeep/core/compiled_only.h"
#include "kvkeep/trace/trace.h"

namespace kvkeep::trace {

/// Folds the prompt of a trace of kind `span` as `policy`, which must be a Sekv, says, and answers its queries from the
/// memory. docs/reference/trace-format.md lists the tensors of the result. Throws InvalidArgument, naming the tensor or
/// metadata, for a trace that does not fit the format or lacks the router or gates that the policy reads, and for any
/// other policy.
[[nodiscard]] Result replay_span(const io::SafetensorsFile& file, const KVPolicy& policy);

}  // namespace kvkeep::trace
