#pragma once
/// Span traces: keys, values, surprisal and decode queries of one layer, replayed without the model. The file format is
/// docs/trace-format.md.

#include "kvkeep/trace/event_trace.h"

namespace kvkeep::trace {

/// Folds the prompt of a trace of kind `span` as `policy`, a Sekv, says, and answers its queries from the memory. The
/// tensors of the result are those of docs/trace-format.md. Throws InvalidArgument, naming tensor or metadata, for a
/// trace that does not fit the format or lacks the router or gates that the policy reads, and for any other policy.
[[nodiscard]] Result replay_span(const io::SafetensorsFile& file, const KVPolicy& policy);

/// Losses and gradients of one training step on a trace of kind `span_train`, all f64; the tensors of the result are
/// those of docs/trace-format.md. Throws as replay_span().
[[nodiscard]] Result replay_span_train(const io::SafetensorsFile& file, const KVPolicy& policy);

}  // namespace kvkeep::trace
