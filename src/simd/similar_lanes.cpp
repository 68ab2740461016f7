// SPDX-License-Identifier: Apache-2.0
// Vectorised for the machine it runs on: compiled once per instruction set, chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "similar_lanes.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h

#include "kvkeep/simd/similar_lanes-inl.h"
