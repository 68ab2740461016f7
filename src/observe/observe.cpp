// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/observe/query_ring-inl.h"
