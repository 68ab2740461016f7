// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/memory/factor_cache-inl.h"
#include "kvkeep/memory/far_store-inl.h"
