// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/core/cache_layout-inl.h"
#include "kvkeep/core/columns-inl.h"
#include "kvkeep/core/row-inl.h"
