#pragma once
/// Folded spans in policies: the one that folds by surprisal, and what the others that fold share.

#include "fields.h"
#include "kvkeep/policy/sekv.h"

namespace kvkeep {

inline constexpr const char* kSekv = "sekv";
inline constexpr const char* kSekvWhat =
    "spans of low surprisal fold into one coarse entry and low-rank factors, and open again where a query asks";
inline constexpr const char* kSekvSource = "SeKV (AmirAbaskohi/SeKV)";
inline constexpr const char* kSekvNeeds = "queries and values, surprisal of every token";

[[nodiscard]] SekvOptions describe_sekv(Fields& f);

/// Options of the sub-object at hand: how spans are kept and read.
void describe_memory(Fields& f, MemoryOptions& o);

}  // namespace kvkeep
