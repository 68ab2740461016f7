// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Two ways to use the library: link kvkeep::kvkeep, or kvkeep::header_only, which defines KVKEEP_HEADER_ONLY. Headers
/// then include their bodies (x-inl.h), which src/ compiles otherwise.

#include "kvkeep/core/hd.h"

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/core/strict_math.h"
#define KVKEEP_INLINE inline
#else
#define KVKEEP_INLINE
#endif

// Which parts of the library there are: 1, or 0 in a build that leaves one out (docs/start/linking.md).

#ifndef KVKEEP_FOLDING
#define KVKEEP_FOLDING 1  ///< folded spans: the policy sekv, and rest=fold
#endif

#ifndef KVKEEP_FILES
#ifdef KVKEEP_HEADER_ONLY
#define KVKEEP_FILES 0
#else
#define KVKEEP_FILES 1  ///< saved state, traces, models, calibration, policies in JSON
#endif
#endif
