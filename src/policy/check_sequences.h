#pragma once
/// Whose tokens a step brings, checked before anything is looked up by them.

#include "kvkeep/core/error.h"
#include "kvkeep/observe/observation.h"

namespace kvkeep {

/// Throws InvalidArgument, in the name of `operation`, unless indptr has a range for every sequence and no sequence stands twice.
inline void check_sequences(const char* operation, const Observation& o) {
  require(o.indptr.size() == o.sequences.size() + 1 && o.indptr.front() == 0, operation, ": indptr has ", o.indptr.size(), " entries for ", o.sequences.size(),
          " sequences; allowed one more than sequences, the first 0");
  for (std::size_t i = 0; i < o.sequences.size(); ++i) {
    require(o.indptr[i] <= o.indptr[i + 1], operation, ": indptr falls from ", o.indptr[i], " to ", o.indptr[i + 1], " at sequence ", o.sequences[i], "; allowed ascending");
    for (std::size_t e = 0; e < i; ++e) require(o.sequences[e] != o.sequences[i], operation, ": sequence ", o.sequences[i], " stands twice in one step; allowed once");
  }
}

}  // namespace kvkeep
