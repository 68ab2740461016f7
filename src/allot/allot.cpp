// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/allot/adaptive_heads-inl.h"
#include "kvkeep/allot/allocator-inl.h"
#include "kvkeep/allot/chunks-inl.h"
#include "kvkeep/allot/critical-inl.h"
#include "kvkeep/allot/mass_segmented-inl.h"
#include "kvkeep/allot/pyramid-inl.h"
