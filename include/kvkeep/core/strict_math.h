// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Included by headers whose bodies compute. kvkeep.h, torch.h, llama.h and what these include compute nothing where
/// the library is linked.

#include "kvkeep/core/hd.h"

#ifdef KVKEEP_FAST_MATH
static_assert(false, KVKEEP_FAST_MATH);
#endif
