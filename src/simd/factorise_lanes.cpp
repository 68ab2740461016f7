// SPDX-License-Identifier: Apache-2.0
// Vectorised for the machine it runs on: compiled once per instruction set, chosen at run time. Arrays of vectors need
// a size, so targets whose vector size is known only at run time are left out.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "factorise_lanes.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h

#include "kvkeep/simd/factorise_lanes-inl.h"
