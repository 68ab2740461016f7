// SPDX-License-Identifier: Apache-2.0
// Vectorised for the machine it runs on: compiled once per instruction set, chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "memory_lanes.cpp"
// The sums of several queries are arrays of vectors, which need a size known at compile time.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif
#include <hwy/foreach_target.h>  // must come before highway.h

#include "kvkeep/simd/memory_lanes-inl.h"
