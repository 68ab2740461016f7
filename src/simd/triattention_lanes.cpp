// SPDX-License-Identifier: Apache-2.0
// Vectorised for the machine it runs on: compiled once per instruction set, chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "triattention_lanes.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h

#include "kvkeep/simd/triattention_lanes-inl.h"
