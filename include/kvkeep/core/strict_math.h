#pragma once
/// Included by headers whose bodies compute. Those of a Keeper, a view and policies by name (keeper/keeper.h,
/// core/cache_view.h, policy/policy.h, policy/registry.h, torch.h, llama.h) compute nothing where the library is
/// linked.

#include "kvkeep/core/hd.h"

#ifdef KVKEEP_FAST_MATH
static_assert(false, KVKEEP_FAST_MATH);
#endif
