// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/core/columns-inl.h"
#include "kvkeep/core/row-inl.h"
