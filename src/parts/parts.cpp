// Bodies of this room, compiled once for the library.

#include "kvkeep/parts/given-inl.h"
#include "kvkeep/parts/pins-inl.h"
