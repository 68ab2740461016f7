#pragma once
/// Two ways to use the library: link kvkeep::kvkeep, or kvkeep::header_only, which defines KVKEEP_HEADER_ONLY. Headers
/// then include their bodies (x-inl.h), which src/ compiles otherwise.

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/core/strict_math.h"
#define KVKEEP_INLINE inline
#else
#define KVKEEP_INLINE
#endif
