// SPDX-License-Identifier: Apache-2.0
// Not part of the interface. Highway, for loops that src/simd compiles once per instruction set. Under
// KVKEEP_HEADER_ONLY they are compiled once, for the instruction set of the file that includes them.

#include "kvkeep/core/header_only.h"

#ifdef KVKEEP_HEADER_ONLY
#ifndef HWY_DISABLED_TARGETS  // some loops need vectors whose size the compiler knows
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif
#ifndef HWY_WANT_AVX3_DL  // Highway 1.0.3 does not compile without it where -march=native means such a machine
#define HWY_WANT_AVX3_DL
#endif
#ifndef HWY_DISABLE_PCLMUL_AES  // unused, and -march=haswell does not name them: loops would be those of SSSE3
#define HWY_DISABLE_PCLMUL_AES
#endif
#ifndef HWY_IS_DEBUG_BUILD  // only its checks call Highway's library
#define HWY_IS_DEBUG_BUILD 0
#endif
#define KVKEEP_DISPATCH HWY_STATIC_DISPATCH
#else
#define KVKEEP_DISPATCH HWY_DYNAMIC_DISPATCH
#endif

#include <hwy/highway.h>
