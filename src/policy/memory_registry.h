#pragma once
/// Folded spans in policies: the policy that folds by surprisal, and the parts that other folding policies share.

#include "fields.h"
#include "kvkeep/policy/sekv.h"

namespace kvkeep {

inline constexpr const char* kSekv = "sekv";
inline constexpr const char* kSekvWhat =
    "spans of low surprisal fold into one coarse entry and low-rank factors, and open again when a query asks for them";
inline constexpr const char* kSekvSource = "SeKV (AmirAbaskohi/SeKV)";
inline constexpr const char* kSekvNeeds = "queries and values, surprisal of every token";

[[nodiscard]] SekvOptions describe_sekv(Fields& f);

/// Options of the current sub-object: how spans are kept and read.
void describe_memory(Fields& f, MemoryOptions& o);

}  // namespace kvkeep
