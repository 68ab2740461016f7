#pragma once
/// The policy that folds spans, by name.

#include "fields.h"
#include "kvkeep/policy/sekv.h"

namespace kvkeep {

inline constexpr const char* kSekv = "sekv";
inline constexpr const char* kSekvWhat = "spans of low surprisal fold into one coarse entry and low-rank factors, and open again where a query asks (replays traces of kind span)";
inline constexpr const char* kSekvSource = "SeKV (AmirAbaskohi/SeKV)";
inline constexpr const char* kSekvNeeds = "the newest query, values, surprisal of the prompt";

[[nodiscard]] SekvOptions describe_sekv(Fields& f);

}  // namespace kvkeep
